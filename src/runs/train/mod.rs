//! `hone train`: a run on a dataset, without HTTP.
//!
//! The trainer is held at each step that is evaluated, so an evaluation is of exactly that step's
//! policy. Everything that a resumed run needs lies in the data directory: the ledger and the
//! checkpoints, and beside them `run/state.json` with what this module remembers.

mod samples;
mod state;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use state::{Logs, RunState};

use hone_core::types::{StepRecord, now_ms};
use hone_dataset::Dataset;
use hone_train::TrainState;
use hone_train::monitoring::metric_names;
use hone_train::monitoring::warnings::HealthMonitor;

use super::early_stop::StopDecision;
use super::evaluate::{EvalSet, Evaluation};
use super::progress::{RunProgress, RunView, warning_text};
use super::report::{Ending, RunReport};
use super::{compare, table};
use crate::app::Core;
use crate::config::Config;

/// How often the ledger is looked at for further steps.
const LOOK: Duration = Duration::from_millis(50);
/// Restarts of the trainer after which the run gives up.
const RESTARTS: u64 = 3;
/// Sample pairs in the report.
const PAIRS: usize = 6;

/// What `hone train` was told beside the configuration.
#[derive(Clone, Debug, Default)]
pub struct TrainOptions {
    /// Where the report goes; `run/report` in the data directory where absent.
    pub report: Option<PathBuf>,
    /// Whether progress is a bar on a terminal.
    pub terminal: bool,
    /// Columns of tables.
    pub width: usize,
}

/// How a run went.
#[derive(Clone, Debug)]
pub struct TrainOutcome {
    /// Everything that the report tells.
    pub report: RunReport,
    /// Where it is.
    pub file: PathBuf,
}

/// Trains until `train.max_steps`, an early stop, or `interrupt`.
///
/// # Errors
/// If there is no dataset or no step to take, or a part fails; the message names the key or the
/// part. What was trained until then stays and can be resumed.
pub async fn run(
    config: Config,
    options: TrainOptions,
    interrupt: impl Future<Output = ()>,
) -> anyhow::Result<TrainOutcome> {
    let dataset = config.dataset_in_use();
    let dataset = dataset.context("dataset.path is missing: it must name a file of prompts")?;
    ensure!(config.train.max_steps > 0, "train.max_steps is 0: it must be at least 1 (--steps N)");
    ensure!(config.train.enabled, "train.enabled is false: it must be true");
    ensure!(config.rollout.enabled, "rollout.enabled is false: it must be true");
    let held_out = Dataset::open(&dataset)?.held_out;
    let core = Core::start_offline(&config, Some(0)).await?;
    let route = core.routes.require("rollout.dataset_route", &config.rollout.dataset_route)?;
    let most = match config.run.eval_prompts {
        0 => held_out.len(),
        most => most.min(held_out.len()),
    };
    let exam = EvalSet {
        prompts: held_out.into_iter().take(most).collect(),
        route: Arc::clone(route),
        samples: config.run.eval_samples,
        temperature: config.run.eval_temperature,
        max_tokens: config.rollout.max_tokens,
        seed: config.train.seed,
    };
    let folder = config.data.dir.join("run");
    std::fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    let mut run = Run::new(config, options, core, exam, &folder)?;
    let ending = run.go(interrupt).await;
    run.finish(ending).await
}

struct Run {
    config: Config,
    options: TrainOptions,
    core: Core,
    exam: EvalSet,
    folder: PathBuf,
    state: RunState,
    monitor: HealthMonitor,
    logs: Logs,
    progress: RunProgress,
    view: RunView,
    began: Instant,
}

impl Run {
    fn new(
        config: Config,
        options: TrainOptions,
        core: Core,
        exam: EvalSet,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let first = core.store.last_step()?.map_or(0, |last| last.step);
        let state = RunState::load(&folder.join("state.json"), first)?;
        let logs = Logs::open(folder, first, config.run.tensorboard)?;
        let steps = config.train.max_steps;
        let progress = RunProgress::new(options.terminal, steps, (steps / 40).max(1));
        let view = RunView { step: first, steps, first, ..RunView::default() };
        let folder = folder.to_owned();
        let began = Instant::now();
        let monitor = config.health_monitor(state.watch.clone());
        Ok(Self {
            config,
            options,
            core,
            exam,
            folder,
            state,
            monitor,
            logs,
            progress,
            view,
            began,
        })
    }

    /// From evaluation to evaluation; how it ended.
    async fn go(&mut self, interrupt: impl Future<Output = ()>) -> Ending {
        tokio::pin!(interrupt);
        tokio::select! {
            biased;
            () = &mut interrupt => Ending::Interrupted,
            ending = self.steps() => ending.unwrap_or_else(|e| Ending::Failed(format!("{e:#}"))),
        }
    }

    async fn steps(&mut self) -> anyhow::Result<Ending> {
        let total = self.config.train.max_steps;
        if self.exam.prompts.is_empty() {
            let advice = "dataset.held_out = 0.1 or dataset.eval_path gives some";
            self.progress.note(&format!("no held-out prompts, so nothing is evaluated: {advice}"));
        }
        if self.state.before.is_none() && self.view.first == 0 {
            let before = self.evaluate(0).await?;
            self.state.before = before;
        }
        while self.view.step < total {
            let every = match self.config.run.eval_every {
                0 => total,
                every => every,
            };
            let next = (self.view.step / every + 1).saturating_mul(every).min(total);
            self.core.trainer().set_step_limit(Some(next))?;
            self.reach(next).await?;
            let evaluation = self.evaluate(next).await?;
            let stop = self.judge(next, evaluation.as_ref())?;
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

    /// Follows the trainer until it has taken and published `step` steps.
    async fn reach(&mut self, step: u64) -> anyhow::Result<()> {
        loop {
            for record in self.core.store.steps(self.view.step + 1, 64)? {
                self.took(&record)?;
            }
            let status = self.core.trainer().status();
            let resting = matches!(status.state, TrainState::Paused | TrainState::Finished);
            if self.view.step >= step && resting {
                return Ok(());
            }
            if status.state == TrainState::Failed && status.restarts >= RESTARTS {
                let why = status.last_error.unwrap_or_default();
                anyhow::bail!("the trainer failed {RESTARTS} times: {why}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// One step is taken: logs, warnings, progress, samples.
    fn took(&mut self, record: &StepRecord) -> anyhow::Result<()> {
        self.view.take(record, self.began.elapsed());
        self.logs.step(record)?;
        let raised = self.monitor.observe(record, &self.core.metrics);
        self.state.watch = self.monitor.state().clone();
        for warning in raised {
            self.progress.note(&warning_text(&warning));
            self.state.warnings.push(warning);
        }
        self.progress.update(&self.view);
        let every = self.config.run.samples_every;
        if every > 0 && record.step.is_multiple_of(every) && self.config.run.samples_shown > 0 {
            let most = self.config.run.samples_shown;
            let shown = samples::of_step(&self.core.store, &self.core.routes, record, most)?;
            let title = format!("samples of step {}", record.step);
            self.progress.note(&format!("{title}\n{}", table::render(&shown, self.options.width)));
        }
        Ok(())
    }

    /// The held-out prompts under the policy of `step`; `None` where there are none.
    async fn evaluate(&mut self, step: u64) -> anyhow::Result<Option<Evaluation>> {
        if self.exam.prompts.is_empty() {
            return Ok(None);
        }
        let evaluation = self.exam.run(&self.core.engine).await?;
        let reward = evaluation.reward(self.exam.seed).map(|estimate| estimate.mean);
        if let Some(reward) = reward {
            self.state.held_out.retain(|(at, _)| *at < step);
            self.state.held_out.push((step, reward));
            self.view.held_out = Some(reward);
            let record = StepRecord {
                step,
                groups: Vec::new(),
                metrics: [(metric_names::HELD_OUT.to_owned(), reward)].into(),
                created: now_ms(),
            };
            self.logs.evaluation(&record)?;
            self.progress.note(&format!("step {step}: held-out reward {reward:.3}"));
        }
        Ok(Some(evaluation))
    }

    /// Keeps the adapter of the best step; whether patience is over.
    fn judge(&mut self, step: u64, evaluation: Option<&Evaluation>) -> anyhow::Result<bool> {
        let estimate = evaluation.and_then(|evaluation| evaluation.reward(self.exam.seed));
        let Some(reward) = estimate.map(|estimate| estimate.mean) else { return Ok(false) };
        let verdict = self.state.best.observe(&self.config.run.early_stop, step, reward);
        if verdict == StopDecision::Improved
            && let Some(adapter) = self.core.policies.active_adapter()?
        {
            let best = self.folder.join("best");
            state::replace_dir(&adapter, &best).with_context(|| format!("{}", best.display()))?;
            self.state.best_adapter = Some(best.display().to_string());
        }
        Ok(verdict == StopDecision::Stop)
    }

    fn save(&self) -> anyhow::Result<()> {
        self.state.save(&self.folder.join("state.json"))
    }

    /// Takes the loop apart, writes the report.
    async fn finish(self, ending: Ending) -> anyhow::Result<TrainOutcome> {
        self.progress.finish();
        self.save()?;
        let Self { config, options, core, exam, folder, state, .. } = self;
        let after = state.after.as_ref();
        let (comparisons, samples) = match (&state.before, after) {
            (Some(before), Some(after)) => (
                compare::comparisons(before, after, exam.seed),
                compare::samples(before, after, PAIRS),
            ),
            _ => (Vec::new(), Vec::new()),
        };
        let report = RunReport {
            name: config
                .dataset_in_use()
                .map_or_else(String::new, |d| d.path.display().to_string()),
            model: core.engine.info().name.clone(),
            started: state.started,
            ended: now_ms(),
            ending,
            configuration: state::summary(&config),
            steps: core.store.steps(1, usize::MAX)?,
            held_out: state.held_out.clone(),
            comparisons,
            samples,
            warnings: state.warnings.clone(),
            best: state.best.best(),
            best_checkpoint: state.best_adapter.clone(),
        };
        core.shutdown().await?;
        let file = report.write(&options.report.unwrap_or_else(|| folder.join("report")))?;
        Ok(TrainOutcome { report, file })
    }
}
