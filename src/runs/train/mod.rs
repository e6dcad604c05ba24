//! `hone train`: a run on a dataset, without HTTP.
//!
//! The trainer pauses at each step that is evaluated, so an evaluation measures exactly that step's
//! policy. A resumed run continues from the ledger and the checkpoints in the data directory, and
//! from this module's state in `run/state.json`.

pub(super) mod state;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use hone_core::files::replace_dir;
use hone_core::types::{Reward, StepRecord, now_ms};
use hone_dataset::Dataset;
use hone_reward::{Route, Routes};
use hone_rollout::RolloutError;
use hone_store::{Store, StoreError};
use hone_train::TrainState;
use hone_train::config::TrainConfig;
use hone_train::monitoring::metric_names;
use hone_train::monitoring::warnings::HealthMonitor;

use super::eval_set::{EvalSet, Evaluation};
use super::report::{self, Ending, RunReport};
use super::warning_text;
use super::{NO_DATASET, NO_LENGTH, StopDecision, data_check, table};
use crate::app::Core;
use crate::app::adapters::copy_files;
use crate::config::Config;
use crate::runs::table::ScoredSample;
use crate::tracker::Tracker;
use crate::{app, config, usage};
use state::{RunFolder, RunState, SavedConfig};

/// How often the ledger is read for new steps.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Restarts of the trainer after which the run fails.
const MAX_RESTARTS: u64 = 3;
/// Pairs of completions in the report.
const REPORT_SAMPLES: usize = 6;

/// The options of `hone train` that are not in the configuration.
#[derive(Clone, Debug, Default)]
pub struct TrainOptions {
    /// Directory of the report; `run/report` in the data directory if absent.
    pub report: Option<PathBuf>,
    pub terminal: bool,
}

/// Trains until `train.max_steps`, the end of `train.epochs`, an early stop, or `interrupt`. Returns the report
/// and its file.
///
/// # Errors
/// If the configuration permits no step (the message names the key), if no prompt can be trained on
/// or no part can score one (the message names each part and what it lacks), or if a component
/// fails. The steps that were taken stay, and the run can be resumed.
pub async fn run(
    mut config: Config,
    options: TrainOptions,
    interrupt: impl Future<Output = ()>,
) -> anyhow::Result<(RunReport, PathBuf)> {
    app::fetch_dataset(&mut config).await?;
    let dataset = config.dataset_in_use();
    let dataset = dataset.context(NO_DATASET).map_err(usage)?;
    check(&config).map_err(usage)?;
    let dataset = Dataset::open(dataset).map_err(usage)?;
    let saved_config = SavedConfig::new(&config)?;
    let epochs = Epochs::new(&config, dataset.train.len());
    let note = epochs.resolve(&mut config.train);
    config::validate(&config).map_err(usage)?;
    let core = Core::start_offline(&config, Some(0)).await;
    let core =
        core.map_err(|error| if error.is::<RolloutError>() { usage(error) } else { error })?;
    let (codec, context) = (core.engine.codec(), core.engine.info().context);
    let checked = data_check::before_training(&config, &dataset, &core.routes, codec, context);
    let notes = match checked.await {
        Ok(notes) => notes,
        Err(error) => {
            core.shutdown(app::RUN_GRACE).await?;
            return Err(usage(error));
        }
    };
    let route = core.routes.require("rollout.dataset_route", &config.rollout.dataset_route)?;
    let eval_set = EvalSet::new(&config, dataset.held_out, route);
    let mut run = Run::new(config, options, core, (eval_set, epochs, saved_config))?;
    if let Some(note) = note {
        run.folder.progress.note(&note);
    }
    notes.iter().for_each(|note| run.folder.progress.note(note));
    let ending = run.run_until(interrupt).await;
    run.finish(ending).await
}

/// Checks what a run requires and the daemon does not.
fn check(config: &Config) -> anyhow::Result<()> {
    ensure!(config.train.max_steps > 0 || config.train.epochs > 0.0, NO_LENGTH);
    ensure!(config.train.enabled, "train.enabled is false: it must be true");
    ensure!(config.rollout.enabled, "rollout.enabled is false: it must be true");
    Ok(())
}

struct Run {
    config: Config,
    options: TrainOptions,
    core: Core,
    tracker: Option<Tracker>,
    eval_set: EvalSet,
    epochs: Epochs,
    folder: RunFolder,
    state: RunState,
    monitor: HealthMonitor,
}

impl Run {
    fn new(
        config: Config,
        options: TrainOptions,
        core: Core,
        (eval_set, epochs, saved_config): (EvalSet, Epochs, SavedConfig),
    ) -> anyhow::Result<Self> {
        let first = core.store.last_step()?.map_or(0, |last| last.step);
        // Before the folder is opened, which drops logged records of later steps.
        let state = RunState::load(&config.data.dir.join("run").join("state.json"), first)?;
        let folder = RunFolder::open(&config, saved_config, first, options.terminal)?;
        let monitor = config.health_monitor(state.watch.clone());
        let model = &core.engine.info().name;
        let tracker =
            Tracker::start(&config, ("hone train", model), Some(&core.store), &core.metrics)?;
        Ok(Self { config, options, core, tracker, eval_set, epochs, folder, state, monitor })
    }

    async fn run_until(&mut self, interrupt: impl Future<Output = ()>) -> Ending {
        tokio::pin!(interrupt);
        tokio::select! {
            biased;
            () = &mut interrupt => Ending::Interrupted,
            ending = self.steps() => ending.unwrap_or_else(|e| Ending::Failed(format!("{e:#}"))),
        }
    }

    /// Alternates between training and evaluation.
    async fn steps(&mut self) -> anyhow::Result<Ending> {
        let total = self.config.train.max_steps;
        if self.eval_set.prompts.is_empty() {
            let advice = "dataset.held_out = 0.1 or dataset.eval_path gives some";
            self.folder
                .progress
                .note(&format!("no held-out prompts, so nothing is evaluated: {advice}"));
        }
        if self.state.before.is_none() && self.folder.view.step == 0 {
            self.state.before = self.evaluate(0).await?;
        }
        while self.folder.view.step < total {
            let every = match self.config.run.eval_every {
                0 => total,
                every => every,
            };
            let next = (self.folder.view.step / every + 1).saturating_mul(every).min(total);
            self.core.trainer().set_step_limit(Some(next))?;
            self.follow_until(next).await?;
            let evaluation = self.evaluate(next).await?;
            let stop = self.track_best(next, evaluation.as_ref())?;
            if next == total || stop {
                self.state.after = evaluation;
            }
            self.save()?;
            if stop {
                return Ok(Ending::EarlyStop);
            }
        }
        Ok(Ending::Finished)
    }

    /// Reads the trainer's steps until it has taken and published step `step`.
    async fn follow_until(&mut self, step: u64) -> anyhow::Result<()> {
        loop {
            for record in self.core.store.steps(self.folder.view.step + 1, 64)? {
                self.add_step(&record)?;
            }
            let status = self.core.trainer().status();
            if status.skipped_batches != self.folder.view.skipped {
                self.folder.view.skipped = status.skipped_batches;
                self.folder.progress.update_skipped(&mut self.folder.view);
            }
            let resting = matches!(status.state, TrainState::Paused | TrainState::Finished);
            if self.folder.view.step >= step && resting {
                return Ok(());
            }
            data_check::ensure_scored(&self.core.rollout.progress(), &self.config)?;
            if status.state == TrainState::Failed && status.restarts >= MAX_RESTARTS {
                let error = status.last_error.unwrap_or_default();
                anyhow::bail!("the trainer failed {MAX_RESTARTS} times: {error}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Adds a step to the logs, the warnings and the progress; shows samples if they are due.
    fn add_step(&mut self, record: &StepRecord) -> anyhow::Result<()> {
        self.folder.view.add_step(record, self.folder.began.elapsed());
        let mut logged = record.metrics.clone();
        logged.insert("epoch".to_owned(), self.epochs.at(record.step));
        self.folder.steps.append(record.step, record.created, &logged)?;
        let raised = self.monitor.check(record, &self.core.metrics);
        self.state.watch = self.monitor.state().clone();
        for warning in raised {
            self.folder.progress.note(&warning_text(&warning));
            self.state.warnings.push(warning);
        }
        self.folder.progress.update(&mut self.folder.view);
        let every = self.config.run.samples_every;
        let most = self.config.run.samples_shown;
        if every > 0 && record.step.is_multiple_of(every) && most > 0 {
            let shown = of_step(&self.core.store, &self.core.routes, record, most)?;
            let title = format!("samples of step {}", record.step);
            self.folder.progress.note(&format!("{title}\n{}", table::render(&shown)));
        }
        Ok(())
    }

    /// Evaluates the policy of `step`; `None` without held-out prompts.
    async fn evaluate(&mut self, step: u64) -> anyhow::Result<Option<Evaluation>> {
        if self.eval_set.prompts.is_empty() {
            return Ok(None);
        }
        let began = Instant::now();
        let evaluation = self.eval_set.run(&self.core.engine).await?;
        let reward = evaluation.reward(self.eval_set.seed).map(|estimate| estimate.mean);
        self.folder.view.add_evaluation(reward, began.elapsed());
        if let Some(reward) = reward {
            self.state.held_out.retain(|(at, _)| *at < step);
            self.state.held_out.push((step, reward));
            let parts = evaluation.part_means();
            let (mut metrics, mut shown) = (BTreeMap::new(), Vec::new());
            metrics.insert(metric_names::HELD_OUT.to_owned(), reward);
            for (part, mean) in parts {
                shown.push(format!("{part} {mean:.3}"));
                metrics.insert(format!("{}{part}", metric_names::HELD_OUT_PART), mean);
            }
            self.folder.evaluations.append(step, now_ms(), &metrics)?;
            let shown = shown.join(", ");
            self.folder
                .progress
                .note(&format!("step {step}: held-out reward {reward:.3} ({shown})"));
            self.folder.progress.redraw(&mut self.folder.view);
        }
        Ok(Some(evaluation))
    }

    /// Copies the adapter if `step` is the best; returns whether to stop early.
    fn track_best(&mut self, step: u64, evaluation: Option<&Evaluation>) -> anyhow::Result<bool> {
        let estimate = evaluation.and_then(|evaluation| evaluation.reward(self.eval_set.seed));
        let Some(reward) = estimate.map(|estimate| estimate.mean) else { return Ok(false) };
        let decision = self.state.best.observe(&self.config.run.early_stop, step, reward);
        if decision == StopDecision::Improved
            && let Some(adapter) = self.core.policies.active_adapter()?
        {
            let best = self.folder.path.join("best");
            replace_dir(&best, |new| copy_files(&adapter, new))?;
            self.state.best_adapter = Some(best.display().to_string());
        }
        Ok(decision == StopDecision::Stop)
    }

    fn save(&self) -> anyhow::Result<()> {
        self.state.save(&self.folder.path.join("state.json"))
    }

    async fn finish(mut self, ending: Ending) -> anyhow::Result<(RunReport, PathBuf)> {
        self.folder.progress.finish();
        self.save()?;
        let Self { config, options, core, tracker, eval_set, folder, state, .. } = self;
        if let Some(tracker) = tracker {
            tracker.finish(ending.status()).await;
        }
        let (comparisons, samples) = match (&state.before, &state.after) {
            (Some(before), Some(after)) => (
                report::comparisons(before, after, eval_set.seed),
                report::samples(before, after, REPORT_SAMPLES),
            ),
            _ => (Vec::new(), Vec::new()),
        };
        let report = RunReport {
            name: config
                .dataset_in_use()
                .map_or_else(String::new, |d| d.path.display().to_string()),
            model: core.engine.info().name.clone(),
            started: state.started,
            ending,
            steps: core.store.steps(1, usize::MAX)?,
            held_out: state.held_out,
            comparisons,
            samples,
            warnings: state.warnings,
            best: state.best.best(),
            best_checkpoint: state.best_adapter,
            ..RunReport::default()
        };
        core.shutdown(app::RUN_GRACE).await?;
        folder.write_report(report, options.report)
    }
}

// `train.epochs`: the length of a run in passes over its prompts.

/// The relation between optimizer steps and passes over the prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Epochs {
    prompts: usize,
    group_size: usize,
    samples_per_step: usize,
}

impl Epochs {
    fn new(config: &Config, prompts: usize) -> Self {
        let (group_size, samples_per_step) =
            (config.rollout.group_size, config.train.samples_per_step);
        Self { prompts, group_size, samples_per_step }
    }

    fn steps_per_pass(self) -> f64 {
        (self.prompts * self.group_size) as f64 / self.samples_per_step as f64
    }

    /// The passes at the end of step `step`, if every completion is trained on once. As in TRL, it
    /// counts steps: groups that are dropped or prompts that are left out for their length do not
    /// change it.
    fn at(self, step: u64) -> f64 {
        step as f64 / self.steps_per_pass()
    }

    /// The steps of `epochs` passes, at least 1. A last incomplete batch counts as a step, so that
    /// each prompt is drawn; TRL leaves it out.
    fn steps(self, epochs: f64) -> u64 {
        let exact = epochs * self.steps_per_pass();
        // 0.07 passes of 100 steps are 7 steps, although their product is above 7 in f64.
        let rounded = exact.round();
        let steps = if (exact - rounded).abs() < 1e-9 * exact { rounded } else { exact.ceil() };
        steps.max(1.0) as u64
    }

    /// Replaces `train.epochs` by `train.max_steps`, and returns a line about it; `None` if
    /// `train.epochs` is 0.
    fn resolve(self, train: &mut TrainConfig) -> Option<String> {
        let epochs = std::mem::take(&mut train.epochs);
        if epochs <= 0.0 {
            return None;
        }
        train.max_steps = self.steps(epochs);
        let Self { prompts, samples_per_step, .. } = self;
        let (plural, steps) = (if epochs == 1.0 { "" } else { "s" }, train.max_steps);
        Some(format!(
            "{epochs} epoch{plural} of {prompts} prompts: {steps} steps of {samples_per_step} \
             completions"
        ))
    }
}

// Completions that a step was trained on, and their rewards.

/// At most `most` completions of a step's groups, the first of each group first.
fn of_step(
    store: &Store,
    routes: &Routes,
    record: &StepRecord,
    most: usize,
) -> Result<Vec<ScoredSample>, StoreError> {
    let mut shown = Vec::new();
    for (index, id) in record.groups.iter().enumerate() {
        if shown.len() >= most {
            break;
        }
        let Some(group) = store.group(*id)? else { continue };
        // At least two of each group, to show that its members differ.
        let each = most.div_ceil(record.groups.len() - index).max(2).min(most - shown.len());
        let interaction = store.interaction(group.interaction)?;
        let prompt = interaction.and_then(|i| i.messages.last().map(|m| m.content.clone()));
        let prompt = prompt.unwrap_or_default();
        let route = routes.get(&group.route);
        for member in group.members.iter().take(each) {
            let Some(sample) = store.sample(*member)? else { continue };
            let rewards = store.rewards_of(*member)?;
            let total = weighted_sum(route, &rewards);
            shown.push(ScoredSample {
                prompt: prompt.clone(),
                completion: sample.text,
                parts: rewards.into_iter().map(|reward| (reward.name, reward.value)).collect(),
                total,
                extracted: BTreeMap::new(),
            });
        }
    }
    Ok(shown)
}

/// The weighted sum of a completion's rewards without the missing ones; `None` if all are missing.
fn weighted_sum(route: Option<&Arc<Route>>, rewards: &[Reward]) -> Option<f64> {
    let weighted = |reward: &Reward| Some(route?.weight(&reward.name)? * reward.value?);
    rewards.iter().filter_map(weighted).reduce(|sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCHS: Epochs = Epochs { prompts: 6725, group_size: 8, samples_per_step: 80 };

    #[test]
    fn steps_of_whole_and_partial_passes() {
        assert_eq!(EPOCHS.steps(1.0), 673, "672.5 steps");
        assert_eq!(EPOCHS.steps(2.0), 1345, "exactly 1345 steps");
        assert_eq!(EPOCHS.steps(1e-6), 1);
        let even = Epochs { prompts: 100, group_size: 8, samples_per_step: 8 };
        assert_eq!((even.steps(0.07), even.steps(0.071)), (7, 8));
        let one = Epochs { prompts: 1, group_size: 4, samples_per_step: 64 };
        assert_eq!((one.steps(1.0), one.steps(17.0)), (1, 2));
        assert_eq!((even.at(0), even.at(50), even.at(100)), (0.0, 0.5, 1.0));
    }

    #[test]
    fn the_steps_replace_the_epochs() {
        let mut train = TrainConfig { epochs: 0.5, ..TrainConfig::default() };
        let note = EPOCHS.resolve(&mut train).unwrap();
        insta::assert_snapshot!(note, @"0.5 epochs of 6725 prompts: 337 steps of 80 completions");
        assert_eq!((train.epochs, train.max_steps, train.schedule_steps()), (0.0, 337, 337));
        let mut steps = TrainConfig { max_steps: 5, ..TrainConfig::default() };
        assert_eq!((EPOCHS.resolve(&mut steps), steps.max_steps), (None, 5));
    }
}
