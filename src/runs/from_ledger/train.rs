//! The run: read, split, train, compare, write.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::ensure;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use hone_core::metrics::Metrics;
use hone_core::types::{SampleId, now_ms};
use hone_store::{Ledger, Store, StoreConfig, StoreError};
use hone_train::{OfflineSetup, OfflineTrainer, RecordedGroup, RecordedSample};

use super::RecordReport;
use super::estimate::{PolicyEstimate, ScoredRecord};
use super::filter::LedgerFilter;
use super::{Split, UsableGroup, read_records, split};
use crate::app::LEDGER;
use crate::config::Config;
use crate::runs::NO_LENGTH;
use crate::runs::report::{Ending, RunReport};
use crate::runs::train::state::{RunFolder, SavedConfig};
use crate::tracker::Tracker;
use crate::{app, config, usage};

/// The options of a run that are not in the configuration.
#[derive(Clone, Debug)]
pub struct FromLedgerOptions {
    /// The data directory of a stopped daemon, or its ledger's file. It is never changed.
    pub source: PathBuf,
    pub filter: LedgerFilter,
    /// Share of the prompts to hold out, between 0 and 1.
    pub holdout: f64,
    /// Directory of the report; `run/report` in the run's data directory if absent.
    pub report: Option<PathBuf>,
    pub terminal: bool,
}

/// The configuration that `hone train` keeps in a data directory; `None` if there is none.
pub fn saved_configuration(source: &Path) -> Option<PathBuf> {
    let file = source.join("run/config.toml");
    file.is_file().then_some(file)
}

/// Trains on the records of a ledger until `train.max_steps`, the end of `train.epochs`, or `interrupt`,
/// and writes the adapter, a checkpoint, logs and a report to the data directory, which must not have a
/// ledger yet. Returns the report and its file.
///
/// # Errors
/// If the configuration permits no step, the ledger cannot be read or is in use, its tokens are of
/// another model, an option selects no record, one side of the split would be empty, or a file cannot be
/// written. A step that fails ends the run; the steps before it are kept.
pub async fn run(
    mut config: Config,
    options: FromLedgerOptions,
    interrupt: impl Future<Output = ()>,
) -> anyhow::Result<(RunReport, PathBuf)> {
    let file = ledger_file(&options.source);
    check(&config, &options, &file).map_err(usage)?;
    let started = now_ms();
    let metrics = Arc::new(Metrics::new()?);
    let ledger = open(&file)?;
    let source = file.parent().unwrap_or(Path::new("."));
    let model = app::model_of_records(&config, source).await?;
    let longest_sample = app::longest_recorded_sample(&config, &model)?;
    let rewards = app::reward_tools(&config, metrics.clone()).await?;
    let routes = Arc::new(rewards.routes(&config).await?);
    let records = read_records(&ledger, &routes, &options.filter, longest_sample);
    let (records, counts) = records.map_err(usage)?;
    drop(ledger);
    let Split { train, held_out } = split(records, options.holdout).map_err(usage)?;
    let sides = [train, held_out];
    let prompts =
        |side: &Vec<UsableGroup>| side.iter().map(|r| r.prompt).collect::<BTreeSet<_>>().len();
    let [train_prompts, held_out_prompts] = sides.each_ref().map(prompts);
    let groups = |side: Vec<UsableGroup>| side.into_iter().map(|r| r.group).collect::<Vec<_>>();
    let [train, held_out] = sides.map(groups);

    let sizes: Vec<usize> = train.iter().map(RecordedGroup::len).collect();
    let (max_steps, epochs) = (config.train.max_steps, config.train.epochs);
    let samples_per_step = config.train.samples_per_step;
    let plan = steps(&sizes, (epochs, max_steps), samples_per_step, config.train.seed);
    (config.train.max_steps, config.train.epochs) = (plan.len() as u64, 0.0);
    config::validate(&config).map_err(usage)?;
    let trainer = OfflineTrainer::new(OfflineSetup {
        config: config.train.clone(),
        max_completion_tokens: config.rollout.max_tokens as usize,
        model: model.clone(),
        load: config.load_options(),
        longest_sample,
        device: app::device(&config, &model, &config.data.dir)?,
        routes,
        metrics: metrics.clone(),
    })?;
    let folder = RunFolder::open(&config, SavedConfig::new(&config)?, 0, options.terminal)?;
    let tracker = Tracker::start(&config, ("hone train", &model.name), None, &metrics)?;
    let mut run = LedgerRun { trainer, groups: train, folder };
    let skipped = counts.skipped_text();
    let others = if skipped.is_empty() { skipped } else { format!("; not used: {skipped}") };
    run.folder.progress.note(&format!(
        "{} of {} records: {train_prompts} prompts to train on, {held_out_prompts} held out{others}",
        counts.used, counts.found
    ));
    let before = run.evaluate(0, &held_out)?;
    let ending = run.steps(&plan, interrupt).await;
    let after = match run.folder.view.step {
        0 => before,
        step => run.evaluate(step, &held_out)?,
    };
    run.folder.progress.finish();
    if let Some(tracker) = tracker {
        tracker.finish(ending.status()).await;
    }
    if run.folder.view.step > 0 {
        let store = Store::open(&config.data.dir.join(LEDGER), &StoreConfig::default(), metrics)?;
        run.trainer.save(&config.data.dir, &store)?;
        store.close().await?;
    }
    let held_out = merged(&held_out);
    let recorded = RecordReport {
        ledger: file.display().to_string(),
        records: counts,
        train_prompts,
        train_records: sizes.iter().sum(),
        held_out_prompts,
        held_out_records: held_out.len(),
        left_out: run.trainer.left_out,
        skipped_batches: run.folder.view.skipped,
        mean_reward: held_out.iter().map(reward).sum::<f64>() / held_out.len() as f64,
        before,
        after,
    };
    let LedgerRun { trainer, folder, .. } = run;
    let report = RunReport {
        name: recorded.ledger.clone(),
        model: model.name,
        started,
        ending,
        steps: trainer.records.to_vec(),
        recorded: Some(recorded),
        ..RunReport::default()
    };
    folder.write_report(report, options.report)
}

fn ledger_file(source: &Path) -> PathBuf {
    if source.is_file() { source.to_owned() } else { source.join(LEDGER) }
}

fn check(config: &Config, options: &FromLedgerOptions, file: &Path) -> anyhow::Result<()> {
    let (train, source) = (&config.train, options.source.display());
    ensure!(train.max_steps > 0 || train.epochs > 0.0, NO_LENGTH);
    ensure!(train.enabled, "train.enabled is false: it must be true");
    ensure!(
        options.holdout > 0.0 && options.holdout < 1.0,
        "--holdout is {}: it must be between 0 and 1",
        options.holdout
    );
    ensure!(file.is_file(), "--from-ledger is {source}: {} does not exist", file.display());
    let (data, own) = (config.data.dir.display(), config.data.dir.join(LEDGER));
    let same = own.canonicalize().is_ok_and(|own| file.canonicalize().is_ok_and(|f| f == own));
    ensure!(
        !same,
        "--from-ledger is {source}, which is also the data directory of the run: the records are \
         never changed; choose another directory with --data"
    );
    ensure!(
        !own.exists(),
        "data.dir {data} has a ledger already: a run on records begins in a directory without one; \
         choose it with --data"
    );
    Ok(())
}

fn open(file: &Path) -> anyhow::Result<Ledger> {
    Ledger::open_read_only(file).map_err(|error| {
        let advice = match &error {
            StoreError::InUse(_) => "; stop its daemon, or use a snapshot of its directory",
            _ => "",
        };
        anyhow::anyhow!("--from-ledger: {error}{advice}")
    })
}

/// Every completion of the groups once, with the rewards of all groups that have it.
fn merged(groups: &[RecordedGroup]) -> Vec<RecordedSample<'_>> {
    let mut samples: BTreeMap<SampleId, RecordedSample<'_>> = BTreeMap::new();
    for sample in groups.iter().flat_map(RecordedGroup::samples) {
        match samples.get_mut(&sample.id) {
            Some(known) => known.rewards.extend(sample.rewards),
            None => _ = samples.insert(sample.id, sample),
        }
    }
    samples.into_values().collect()
}

/// The weighted sum of a completion's rewards.
fn reward(sample: &RecordedSample<'_>) -> f64 {
    sample.rewards.values().sum()
}

struct LedgerRun {
    trainer: OfflineTrainer,
    groups: Vec<RecordedGroup>,
    folder: RunFolder,
}

impl LedgerRun {
    /// Takes the steps of a plan, until one fails or the run is interrupted.
    async fn steps(&mut self, plan: &[Vec<usize>], interrupt: impl Future<Output = ()>) -> Ending {
        tokio::pin!(interrupt);
        let (mut trained, mut skipped) = (0_usize, None);
        for groups in plan {
            let is_interrupted = tokio::select! {
                biased;
                () = &mut interrupt => true,
                () = tokio::task::yield_now() => false,
            };
            if is_interrupted {
                return Ending::Interrupted;
            }
            trained += groups.len();
            let epoch = trained as f64 / self.groups.len() as f64;
            match self.step(groups, epoch) {
                Ok(None) => {}
                Ok(Some(reason)) => skipped = Some(reason),
                Err(error) => return Ending::Failed(format!("{error:#}")),
            }
        }
        match skipped {
            Some(reason) if self.folder.view.step == 0 => {
                Ending::Failed(format!("no step was taken: {reason}"))
            }
            _ => Ending::Finished,
        }
    }

    /// Takes one step; returns why there was none.
    fn step(&mut self, groups: &[usize], epoch: f64) -> anyhow::Result<Option<String>> {
        let groups: Vec<&RecordedGroup> = groups.iter().map(|group| &self.groups[*group]).collect();
        match self.trainer.step(&groups)? {
            Ok(record) => {
                self.folder.view.add_step(&record, self.folder.began.elapsed());
                let mut logged = record.metrics;
                logged.insert("epoch".to_owned(), epoch);
                self.folder.steps.append(record.step, record.created, &logged)?;
                self.folder.progress.update(&mut self.folder.view);
                Ok(None)
            }
            Err(reason) => {
                self.folder.view.skipped += 1;
                self.folder.progress.update_skipped(&mut self.folder.view);
                Ok(Some(reason))
            }
        }
    }

    /// What the held-out records say about the current policy.
    fn evaluate(
        &mut self,
        step: u64,
        held_out: &[RecordedGroup],
    ) -> anyhow::Result<PolicyEstimate> {
        let samples = merged(held_out);
        let scored = self.trainer.score(&samples)?;
        let record = |(sample, scored): (&RecordedSample<'_>, &Vec<f32>)| {
            let own = &sample.sample;
            let (recorded, scored) = (own.unmasked(&own.logprobs), own.unmasked(scored));
            ScoredRecord::new(sample.route, reward(sample), &recorded, &scored)
        };
        let records: Vec<ScoredRecord> = samples.iter().zip(&scored).map(record).collect();
        let estimate = PolicyEstimate::of(&records);
        self.folder.evaluations.append(step, now_ms(), &estimate.metrics())?;
        Ok(estimate)
    }
}

// The order in which a run trains on groups.

/// The groups of every step, as indices into `sizes`, which has the number of samples of each group. A
/// step takes groups until it has `samples_per_step` samples; the last one of a run of epochs may have
/// fewer. Every pass has an order of its own, which depends on `seed`. The run ends after `epochs` passes, or
/// after `max_steps` steps if that is 0.
fn steps(
    sizes: &[usize],
    (epochs, max_steps): (f64, u64),
    samples_per_step: usize,
    seed: u64,
) -> Vec<Vec<usize>> {
    let passes = (0_u64..).flat_map(|pass| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(pass);
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.shuffle(&mut random);
        order
    });
    let (groups, most) = match epochs > 0.0 {
        true => ((epochs * sizes.len() as f64).round().max(1.0) as usize, usize::MAX),
        false => (usize::MAX, usize::try_from(max_steps).unwrap_or(usize::MAX)),
    };
    let mut all = Vec::new();
    let (mut step, mut samples) = (Vec::new(), 0);
    if sizes.is_empty() {
        return all;
    }
    for group in passes.take(groups) {
        if all.len() == most {
            return all;
        }
        step.push(group);
        samples += sizes[group];
        if samples >= samples_per_step {
            all.push(std::mem::take(&mut step));
            samples = 0;
        }
    }
    if !step.is_empty() {
        all.push(step);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn an_epoch_takes_every_group_once() {
        let sizes = [4, 1, 4, 4, 2, 1];
        let all = steps(&sizes, (1.0, 0), 6, 3);
        let mut groups: Vec<usize> = all.iter().flatten().copied().collect();
        for step in &all[..all.len() - 1] {
            assert!(step.iter().map(|group| sizes[*group]).sum::<usize>() >= 6, "{all:?}");
        }
        groups.sort_unstable();
        assert_eq!(groups, [0, 1, 2, 3, 4, 5]);
        assert_eq!(all, steps(&sizes, (1.0, 0), 6, 3), "the order is repeatable");
        let half = steps(&sizes, (0.5, 0), 1, 3);
        assert_eq!(half.concat().len(), 3);
        assert_eq!(steps(&sizes, (1e-9, 0), 1, 3).len(), 1);
    }

    #[test]
    fn steps_repeat_the_groups_in_another_order() {
        let sizes = [1; 16];
        let all = steps(&sizes, (0.0, 8), 4, 0);
        assert_eq!(all.len(), 8);
        let pass = |steps: &[Vec<usize>]| steps.concat();
        let (first, second) = (pass(&all[..4]), pass(&all[4..]));
        let set = |groups: &[usize]| groups.iter().copied().collect::<BTreeSet<_>>();
        assert_eq!((set(&first).len(), set(&second).len()), (16, 16));
        assert_ne!(first, second);
        assert!(steps(&[], (0.0, 8), 4, 0).is_empty());
    }
}
