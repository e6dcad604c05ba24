//! `hone bench interference`: the effect of rollouts and training on the latency of clients.
//!
//! A daemon on loopback serves the embedded model, or another one. It alternates between serving only
//! (idle), sampling and training at full speed (busy) and, if requested, changes of the active version
//! (changing), so that other processes affect all of them. The clients' requests are alike, but those of one
//! condition are not repeated in another, because the prefix cache would answer them sooner.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use serde_json::json;
use tokio::time::{sleep, sleep_until};

use hone_core::memory::{peak_resident, resident};
use hone_core::types::PolicyVersion;
use hone_dataset::DatasetConfig;
use hone_engine::EngineBackend;
use hone_model::weights::Quantize;
use hone_reward::kinds::{Length, LengthUnit, RewardKind};
use hone_reward::routes::RewardConfig;
use hone_rollout::{RolloutConfig, SamplerKind};
use hone_train::config::{PeakRate, ScheduleKind, TrainConfig};

use super::Folder;
use crate::config::{Config, LogConfig};
use crate::demo::client::{Client, Scrape, UserRequest};
use crate::demo::config::{GROUP_SIZE, TASK_ASKED, TASK_HELD_OUT, serve_with};
use crate::demo::tally::percentile;
use crate::demo::task::{MAX_TOKENS, QuestionKind, QuestionSplit, Questions};
use crate::demo::{DaemonHandle, RewardsMode};

/// Longest wait for the daemon to be ready, or for rollouts and training to end.
const PATIENCE: Duration = Duration::from_secs(300);
/// Versions that are activated in turn.
const VERSIONS: usize = 8;

/// Runs the benchmark on a daemon that `start` starts.
///
/// # Errors
/// If the daemon does not start or its status cannot be read. Failed requests of clients are counted.
pub async fn run(
    options: &InterferenceOptions,
    start: impl AsyncFnOnce(Config) -> anyhow::Result<DaemonHandle>,
) -> anyhow::Result<InterferenceReport> {
    let dir = Folder::temporary()?;
    let before = super::machine_load();
    let daemon = start(config(options, &dir.0)?).await?;
    let measured = measure(options, &Client::new(daemon.url())?).await;
    daemon.shut_down().await?;
    let mut report = measured?;
    report.load = [before, super::machine_load()];
    Ok(report)
}

/// The samples of one condition, over all rounds.
#[derive(Default)]
struct ConditionSamples {
    first: Vec<f64>,
    gaps: Vec<f64>,
    failures: Vec<String>,
    requests: usize,
    processor: f64,
    seconds: f64,
}

async fn measure(
    options: &InterferenceOptions,
    client: &Client,
) -> anyhow::Result<InterferenceReport> {
    client.wait_ready(PATIENCE).await?;
    let (mut idle, mut busy) = (ConditionSamples::default(), ConditionSamples::default());
    let (mut steps, mut tokens, mut rollouts) = (0, 0.0, 0.0);
    let mut changing = ConditionSamples::default();
    let (mut changes, mut versions, mut memory) = (0, 0, Vec::new());
    let rounds = options.rounds.max(1);
    let counter = |scrape: &Scrape, name: &str| scrape.value(name).unwrap_or(0.0);
    let samples = |scrape: &Scrape| counter(scrape, "hone_rollout_samples_total");
    let trained = |scrape: &Scrape| counter(scrape, "hone_train_tokens_total");
    for round in 0..u64::from(rounds) {
        client.pause().await?;
        settle(client).await?;
        idle.watch(options, client, 3 * round).await;
        client.resume().await?;
        let (step, before) = (client.trainer().await?.step, client.metrics().await?);
        busy.watch(options, client, 3 * round + 1).await;
        steps += client.trainer().await?.step.saturating_sub(step);
        let after = client.metrics().await?;
        tokens += trained(&after) - trained(&before);
        rollouts += samples(&after) - samples(&before);
        if options.changes > 0 {
            client.pause().await?;
            settle(client).await?;
            let chosen = last_promoted(client).await?;
            let count = options.changes.div_ceil(rounds);
            let before = MemoryReading::now(&client.metrics().await?);
            let (failures, ()) = tokio::join!(
                change_versions(options, client, &chosen, count),
                changing.watch(options, client, 3 * round + 2)
            );
            changing.failures.extend(failures);
            changes += count as usize;
            versions = versions.max(chosen.len());
            memory.push([before, MemoryReading::now(&client.metrics().await?)]);
        }
    }
    client.pause().await?;
    let planned = MemoryStats::now(&client.metrics().await?);
    let changing = memory.first().zip(memory.last()).map(|([_, first], [_, last])| ChangingStats {
        changes,
        versions,
        resident_mib: [first.resident, last.resident],
        cache_mib: [first.cache, last.cache],
        growth_mib: memory.iter().map(|[before, after]| after.outside() - before.outside()).sum(),
        clients: changing.stats(),
    });
    let seconds = busy.seconds.max(1e-9);
    Ok(InterferenceReport {
        model: options.model.clone(),
        backend: options.backend,
        sampler: options.sampler,
        users: options.users,
        seconds: options.seconds * f64::from(rounds),
        steps,
        trained_tokens_per_second: tokens / seconds,
        rollouts_per_second: rollouts / seconds,
        cores: [idle.processor / idle.seconds.max(1e-9), busy.processor / seconds],
        idle: idle.stats(),
        busy: busy.stats(),
        changing,
        memory: planned,
        load: [0.0; 2],
    })
}

/// The last promoted versions, at most [`VERSIONS`], oldest first.
async fn last_promoted(client: &Client) -> anyhow::Result<Vec<PolicyVersion>> {
    let records = client.policies().await?;
    let promoted = records.iter().filter(|record| record.state.was_promoted());
    let versions: Vec<PolicyVersion> = promoted.map(|record| record.version).collect();
    let chosen = versions[versions.len().saturating_sub(VERSIONS)..].to_vec();
    anyhow::ensure!(
        chosen.len() > 1,
        "no step was published while busy: there is one version only"
    );
    Ok(chosen)
}

/// Activates the versions in turn, `count` times within the duration of the condition. Returns the messages
/// of the failures.
async fn change_versions(
    options: &InterferenceOptions,
    client: &Client,
    versions: &[PolicyVersion],
    count: u32,
) -> Vec<String> {
    let began = tokio::time::Instant::now();
    let mut failures = Vec::new();
    for (i, version) in (0..count).zip(versions.iter().cycle()) {
        let share = f64::from(i) / f64::from(count);
        sleep_until(began + Duration::from_secs_f64(share * options.seconds)).await;
        if let Err(error) = client.activate(*version).await {
            failures.push(error.to_string());
        }
    }
    failures
}

/// Waits until the trainer is paused and no rollouts are sampled.
async fn settle(client: &Client) -> anyhow::Result<()> {
    const POLL_INTERVAL: Duration = Duration::from_millis(200);
    let until = Instant::now() + PATIENCE;
    let mut before = -1.0;
    loop {
        let trainer = client.trainer().await?;
        let samples = client.metrics().await?.value("hone_rollout_samples_total").unwrap_or(0.0);
        // A group counts its samples at its end. Groups are started until the trainer's backlog is full.
        let is_sampling = trainer.in_flight_groups > 0 || samples != before;
        if trainer.settled() && !is_sampling {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < until,
            "still busy after {PATIENCE:?}: the trainer is {} at step {}, {samples} rollouts were sampled",
            trainer.state,
            trainer.step
        );
        before = samples;
        sleep(POLL_INTERVAL).await;
    }
}

impl ConditionSamples {
    /// Runs the clients for the duration of the condition. Their requests depend on `turn`.
    async fn watch(&mut self, options: &InterferenceOptions, client: &Client, turn: u64) {
        let (began, processor) = (Instant::now(), super::processor_seconds());
        let until = began + Duration::from_secs_f64(options.seconds);
        let users = (0..options.users.max(1)).map(|user| {
            let seed = turn << 16 | user as u64;
            ask_until(client, seed, options.pause_ms, until)
        });
        for seen in futures::future::join_all(users).await {
            self.first.extend(seen.first);
            self.gaps.extend(seen.gaps);
            self.failures.extend(seen.failures);
            self.requests += seen.requests;
        }
        self.processor += super::processor_seconds() - processor;
        self.seconds += began.elapsed().as_secs_f64();
    }

    fn stats(self) -> ClientStats {
        let quantiles = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            [0.5, 0.99].map(|q| percentile(&values, q).unwrap_or(f64::NAN))
        };
        ClientStats {
            requests: self.requests,
            failed: self.failures.len(),
            failure: self.failures.into_iter().next(),
            first_token_ms: quantiles(self.first),
            per_token_ms: quantiles(self.gaps),
        }
    }
}

/// Runs one client.
async fn ask_until(client: &Client, seed: u64, pause_ms: f64, until: Instant) -> ConditionSamples {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut seen = ConditionSamples::default();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    for question in Questions::new(seed, QuestionSplit::HeldOut(QuestionKind::Asked)) {
        sleep(Duration::from_secs_f64(rng.random_range(0.0..=2.0) * pause_ms / 1e3)).await;
        if Instant::now() >= until {
            break;
        }
        let request = UserRequest {
            text: question.text(),
            // A route without rewards, so that nothing is trained on.
            metadata: [("task".to_owned(), TASK_HELD_OUT.to_owned())].into(),
            temperature: 1.0,
            seed: rng.random::<u32>().into(),
            max_tokens: MAX_TOKENS,
            store: true,
        };
        seen.requests += 1;
        match client.ask(&request).await {
            Ok(answer) => {
                seen.first.push(ms(answer.first_token));
                seen.gaps.extend(answer.gaps.into_iter().map(ms));
            }
            Err(error) => seen.failures.push(error.to_string()),
        }
    }
    seen
}

// Resident memory, the cache's part of it, and the plan that the daemon printed at its start.

const MIB: f64 = (1 << 20) as f64;

/// Parts of the plan that are caches.
const CACHES: [&str; 4] = ["ledger cache", "kept adapters", "sampler cache", "conversations"];

/// Parts of the plan that are activations: of passes of the native engine, and of a step.
const ACTIVATIONS: [&str; 4] =
    ["sampler buffers", "layer inputs", "kept activations", "one layer or logits"];

/// Resident memory at one moment, in MiB.
#[derive(Clone, Copy, Debug)]
struct MemoryReading {
    /// Of the whole process.
    pub resident: f64,
    /// Of the pages of the native engine's cache that sequences use or that are kept.
    pub cache: f64,
}

impl MemoryReading {
    pub fn now(scrape: &Scrape) -> Self {
        let pages = scrape.value("hone_engine_cache_pages").unwrap_or(0.0);
        let capacity = scrape.value("hone_engine_cache_capacity_pages").unwrap_or(0.0).max(1.0);
        let planned = planned(scrape, &["sampler cache"]);
        Self { resident: resident() as f64 / MIB, cache: planned * pages / capacity }
    }

    /// Resident memory without the cache's pages.
    pub fn outside(&self) -> f64 {
        self.resident - self.cache
    }
}

/// The process's memory, its clients and their threads included, in MiB.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryStats {
    /// Largest resident memory since the start of the process.
    pub resident_peak_mib: f64,
    /// The peak of the plan.
    pub planned_peak_mib: f64,
    /// The weights as they are stored.
    pub base_mib: f64,
    /// The planned caches.
    pub caches_mib: f64,
    /// The planned activations.
    pub activations_mib: f64,
    /// The planned cache of keys and values of the native engine, and its pages in use or kept at the end.
    /// The plan counts all of it.
    pub sampler_cache_mib: [f64; 2],
}

impl MemoryStats {
    fn now(scrape: &Scrape) -> Self {
        Self {
            resident_peak_mib: peak_resident() as f64 / MIB,
            planned_peak_mib: scrape.value("hone_memory_planned_peak_bytes").unwrap_or(0.0) / MIB,
            base_mib: planned(scrape, &["base weights"]),
            caches_mib: planned(scrape, &CACHES),
            activations_mib: planned(scrape, &ACTIVATIONS),
            sampler_cache_mib: [
                planned(scrape, &["sampler cache"]),
                MemoryReading::now(scrape).cache,
            ],
        }
    }
}

/// Planned parts together, in MiB.
fn planned(scrape: &Scrape, parts: &[&str]) -> f64 {
    parts.iter().map(|part| scrape.labelled("hone_memory_planned_bytes", part)).sum::<f64>() / MIB
}

impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resident_peak_mib, planned_peak_mib, .. } = self;
        let Self { base_mib, caches_mib, activations_mib, .. } = self;
        let [cache, filled] = self.sampler_cache_mib;
        writeln!(
            f,
            "memory               {resident_peak_mib:.0} MiB at most, {:.2} of {planned_peak_mib:.0} planned; \
             {:.2} times base {base_mib:.0}, caches {caches_mib:.0} and activations {activations_mib:.0}",
            resident_peak_mib / planned_peak_mib,
            resident_peak_mib / (base_mib + caches_mib + activations_mib)
        )?;
        write!(f, "  sampler cache      {filled:.0} of {cache:.0} planned MiB hold something")
    }
}

// The options, and the daemon's configuration.

/// Prompts of the rollouts.
const PROMPTS: usize = 512;

/// Samples of a step of another model than the embedded one: two groups. Such a step ends within a round
/// although clients leave it a fraction of the time, and the trainer begins the next one at once.
const SAMPLES_OF_LARGER: usize = 2 * GROUP_SIZE;

/// `train.max_tokens` of such a model, so that the memory plan counts no longer samples. A question and its
/// answer take about a hundred tokens; a step of wide models computes up to so many at once.
const MAX_TOKENS_OF_LARGER: usize = 1024;

/// The options of `hone bench interference`.
#[derive(Clone, Debug)]
pub struct InterferenceOptions {
    /// Rounds of idle and busy.
    pub rounds: u32,
    /// Seconds of each condition in a round.
    pub seconds: f64,
    /// Clients, each with one request at a time.
    pub users: usize,
    /// Mean pause of a client between requests in milliseconds. Pauses are uniform from 0 to twice as
    /// much.
    pub pause_ms: f64,
    /// A Hugging Face directory or a hub id; `None` for the embedded model.
    pub model: Option<String>,
    /// The engine of the clients.
    pub backend: EngineBackend,
    /// The sampler of the rollouts.
    pub sampler: SamplerKind,
    /// Changes of the active version in all rounds together; 0 leaves out this condition.
    pub changes: u32,
    /// `model.quantize`
    pub quantize: Quantize,
    /// `train.serving_share`; `None` is the default.
    pub serving_share: Option<f64>,
}

/// The daemon's configuration: endless rollouts from a dataset, with a tiny learning rate, because a
/// model that learned the task would leave nothing to train on.
fn config(options: &InterferenceOptions, dir: &Path) -> anyhow::Result<Config> {
    let dataset = dir.join("prompts.jsonl");
    let rows = Questions::new(1, QuestionSplit::Asked).take(PROMPTS).map(|question| {
        json!({"prompt": question.text(), "answer": question.answer().to_string()}).to_string()
            + "\n"
    });
    std::fs::write(&dataset, rows.collect::<String>()).context("cannot write the prompts")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut demo = crate::demo::config::build(RewardsMode::Graded, 1, 1, &dir.join("data"), cores);
    serve_with(&mut demo, options.backend);
    demo.model.quantize = options.quantize;
    if let Some(share) = options.serving_share {
        demo.train.serving_share = share;
    }
    if let Some(model) = &options.model {
        demo.model.path.clone_from(model);
        demo.train.samples_per_step = SAMPLES_OF_LARGER;
        demo.train.max_tokens = MAX_TOKENS_OF_LARGER;
        // Another model may answer every question of a group equally well or badly, which leaves nothing
        // to train on. The lengths of its answers differ.
        let (ideal, unit) = (120, LengthUnit::Characters);
        let length = Length { ideal, spread: 2 * ideal, unit, shape: Default::default() };
        let length = RewardConfig::new("length", 0.5, RewardKind::Length(length));
        for route in demo.routes.0.iter_mut().filter(|route| !route.rewards.is_empty()) {
            route.rewards.push(length.clone());
        }
    }
    // The time from token to token is that of the engine.
    demo.server.stream_interval_ms = 0;
    Ok(Config {
        dataset: DatasetConfig { path: dataset, ..DatasetConfig::default() },
        // Warnings that nothing is learned are expected.
        log: LogConfig { level: "error".to_owned(), ..LogConfig::default() },
        rollout: RolloutConfig {
            sampler: options.sampler,
            dataset_route: TASK_ASKED.to_owned(),
            group_size: GROUP_SIZE,
            ..demo.rollout.clone()
        },
        train: TrainConfig {
            max_steps: 0,
            total_steps: 0,
            learning_rate: PeakRate::Fixed(1e-7),
            min_learning_rate: 0.0,
            schedule: ScheduleKind::Constant,
            ..demo.train.clone()
        },
        ..demo
    })
}

// The measurements and their table.

/// The clients' latencies in one condition.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClientStats {
    /// Requests.
    pub requests: usize,
    /// Failed requests.
    pub failed: usize,
    /// The message of the first failure.
    pub failure: Option<String>,
    /// Time to the first token in ms: the median and the 99th percentile (nearest rank).
    pub first_token_ms: [f64; 2],
    /// Time between the texts of consecutive tokens in ms, likewise.
    pub per_token_ms: [f64; 2],
}

/// The measurements while the active version changes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChangingStats {
    /// Changes of the active version.
    pub changes: usize,
    /// Versions that were activated in turn.
    pub versions: usize,
    /// The clients' latencies. Failed changes count as failed requests.
    pub clients: ClientStats,
    /// Resident memory in MiB after the first round's changes, and after the last round's.
    pub resident_mib: [f64; 2],
    /// What the pages of the engine's cache take of it.
    pub cache_mib: [f64; 2],
    /// By how much resident memory without these pages grew during the changes, in all rounds together, in MiB.
    pub growth_mib: f64,
}

/// The measurements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InterferenceReport {
    /// The model; `None` is the embedded one.
    pub model: Option<String>,
    /// The engine of the clients.
    pub backend: EngineBackend,
    /// The sampler of the rollouts.
    pub sampler: SamplerKind,
    /// Clients.
    pub users: usize,
    /// Seconds of each condition.
    pub seconds: f64,
    /// Without rollouts and training.
    pub idle: ClientStats,
    /// During rollouts and training.
    pub busy: ClientStats,
    /// During changes of the active version, if there were any.
    pub changing: Option<ChangingStats>,
    /// Optimizer steps that began and ended while busy.
    pub steps: u64,
    /// Completion tokens of these steps per second while busy.
    pub trained_tokens_per_second: f64,
    /// Completions sampled for the trainer per second while busy.
    pub rollouts_per_second: f64,
    /// The process's memory, and the plan of it.
    pub memory: MemoryStats,
    /// Cores used by the process, idle and busy.
    pub cores: [f64; 2],
    /// Load average before and after.
    pub load: [f64; 2],
}

impl InterferenceReport {
    /// Failed requests in all conditions.
    pub fn failed(&self) -> usize {
        let changing = self.changing.as_ref().map_or(0, |changing| changing.clients.failed);
        self.idle.failed + self.busy.failed + changing
    }

    /// The 99th percentile of the time to the first token, busy over idle.
    pub fn first_token_ratio(&self) -> f64 {
        self.busy.first_token_ms[1] / self.idle.first_token_ms[1]
    }
}

impl fmt::Display for InterferenceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { users, seconds, idle, busy, .. } = self;
        writeln!(
            f,
            "{users} client(s), {seconds:.0} s of each in turns, model: {}, backend: {:?}, sampler: {:?}",
            self.model.as_deref().unwrap_or("embedded"),
            self.backend,
            self.sampler
        )?;
        writeln!(f, "                          idle        busy       ratio")?;
        let mut line = |label: &str, idle: f64, busy: f64, unit: &str| {
            writeln!(
                f,
                "{label:<20} {idle:>7.2} {unit:<3} {busy:>7.2} {unit:<3} {:>7.2}",
                busy / idle
            )
        };
        for (i, name) in ["p50", "p99"].into_iter().enumerate() {
            let label = format!("first token {name}");
            line(&label, idle.first_token_ms[i], busy.first_token_ms[i], "ms")?;
        }
        for (i, name) in ["p50", "p99"].into_iter().enumerate() {
            let label = format!("per token {name}");
            line(&label, idle.per_token_ms[i], busy.per_token_ms[i], "ms")?;
        }
        line("cores used", self.cores[0], self.cores[1], "")?;
        writeln!(
            f,
            "requests             {} idle, {} busy; {} and {} failed",
            idle.requests, busy.requests, idle.failed, busy.failed
        )?;
        let changing =
            self.changing.as_ref().and_then(|changing| changing.clients.failure.as_ref());
        if let Some(failure) = idle.failure.as_ref().or(busy.failure.as_ref()).or(changing) {
            writeln!(f, "first failure        {failure}")?;
        }
        writeln!(
            f,
            "meanwhile            {} optimizer steps: {:.1} trained tokens a second; {:.1} rollouts a second",
            self.steps, self.trained_tokens_per_second, self.rollouts_per_second
        )?;
        if let Some(changing) = &self.changing {
            let ChangingStats { changes, versions, clients, .. } = changing;
            writeln!(f, "version changes      {changes} between {versions} versions")?;
            for (i, name) in ["p50", "p99"].into_iter().enumerate() {
                for (label, idle, found) in [
                    ("first token", idle.first_token_ms, clients.first_token_ms),
                    ("per token", idle.per_token_ms, clients.per_token_ms),
                ] {
                    let label = format!("  {label} {name}");
                    let (found, ratio) = (found[i], found[i] / idle[i]);
                    writeln!(f, "{label:<20} {found:>18.2} ms  {ratio:>7.2}")?;
                }
            }
            let [[first, last], [cached, at_end]] = [changing.resident_mib, changing.cache_mib];
            writeln!(f, "  requests           {}; {} failed", clients.requests, clients.failed)?;
            writeln!(f, "  resident           {first:.0} MiB, {last:.0} MiB in the last round")?;
            writeln!(f, "  cached pages       {cached:.0} MiB, {at_end:.0} MiB in the last round")?;
            let growth = changing.growth_mib;
            writeln!(f, "  growth             {growth:.1} MiB without them, during all changes")?;
        }
        writeln!(f, "{}", self.memory)?;
        write!(f, "load                 {:.2} before, {:.2} after", self.load[0], self.load[1])
    }
}

#[cfg(test)]
mod tests {
    use hone_engine::EngineBackend;
    use hone_rollout::SamplerKind;

    use super::*;

    #[test]
    fn quantiles_and_failures_are_reported_by_condition() {
        let seen = |scale: f64| ConditionSamples {
            first: (1..=100).map(|i| f64::from(i) * scale).collect(),
            gaps: vec![scale],
            requests: 100,
            ..ConditionSamples::default()
        };
        let mut failed = seen(2.0);
        failed.failures.push("no answer".to_owned());
        let report = InterferenceReport {
            model: None,
            backend: EngineBackend::Mistralrs,
            sampler: SamplerKind::Native,
            users: 2,
            seconds: 30.0,
            idle: seen(1.0).stats(),
            busy: failed.stats(),
            changing: Some(ChangingStats {
                changes: 2000,
                versions: 8,
                clients: seen(1.1).stats(),
                resident_mib: [250.0, 251.0],
                cache_mib: [20.0, 20.5],
                growth_mib: 0.25,
            }),
            memory: MemoryStats {
                resident_peak_mib: 450.0,
                planned_peak_mib: 500.0,
                base_mib: 100.0,
                caches_mib: 150.0,
                activations_mib: 50.0,
                sampler_cache_mib: [100.0, 90.0],
            },
            steps: 150,
            trained_tokens_per_second: 3200.0,
            rollouts_per_second: 320.0,
            cores: [0.5, 2.0],
            load: [0.1, 1.9],
        };
        assert_eq!(report.idle.first_token_ms, [50.0, 99.0]);
        assert_eq!(report.first_token_ratio(), 2.0);
        insta::assert_snapshot!(report, @r"
        2 client(s), 30 s of each in turns, model: embedded, backend: Mistralrs, sampler: Native
                                  idle        busy       ratio
        first token p50        50.00 ms   100.00 ms     2.00
        first token p99        99.00 ms   198.00 ms     2.00
        per token p50           1.00 ms     2.00 ms     2.00
        per token p99           1.00 ms     2.00 ms     2.00
        cores used              0.50        2.00        4.00
        requests             100 idle, 100 busy; 0 and 1 failed
        first failure        no answer
        meanwhile            150 optimizer steps: 3200.0 trained tokens a second; 320.0 rollouts a second
        version changes      2000 between 8 versions
          first token p50                 55.00 ms     1.10
          per token p50                    1.10 ms     1.10
          first token p99                108.90 ms     1.10
          per token p99                    1.10 ms     1.10
          requests           100; 0 failed
          resident           250 MiB, 251 MiB in the last round
          cached pages       20 MiB, 20 MiB in the last round
          growth             0.2 MiB without them, during all changes
        memory               450 MiB at most, 0.90 of 500 planned; 1.50 times base 100, caches 150 and activations 50
          sampler cache      90 of 100 planned MiB hold something
        load                 0.10 before, 1.90 after
        ");
    }

    mod memory {
        use hone_core::metrics::Metrics;

        use super::super::*;

        #[test]
        fn the_plan_and_the_cache_are_read_from_the_metrics() {
            let metrics = Metrics::new().unwrap();
            let parts = [("base weights", 100), ("sampler cache", 64), ("ledger cache", 8)];
            for (part, mib) in
                parts.into_iter().chain([("one layer or logits", 3), ("gradients", 7)])
            {
                metrics.memory_planned.with_label_values(&[part]).set(mib << 20);
            }
            metrics.memory_planned_peak.set(200 << 20);
            metrics.engine_cache_capacity.set(64);
            metrics.engine_cache_pages.with_label_values(&["used"]).set(3);
            metrics.engine_cache_pages.with_label_values(&["cached"]).set(13);
            let scrape = Scrape::new(metrics.encode().unwrap());
            let stats = MemoryStats::now(&scrape);
            assert_eq!(
                [stats.planned_peak_mib, stats.base_mib, stats.caches_mib, stats.activations_mib],
                [200.0, 100.0, 72.0, 3.0]
            );
            assert_eq!(stats.sampler_cache_mib, [64.0, 16.0]);
            let reading = MemoryReading::now(&scrape);
            assert_eq!(reading.cache, 16.0);
            assert_eq!(reading.outside(), reading.resident - 16.0);
        }
    }

    mod setup {
        use super::super::*;

        #[test]
        fn the_configuration_is_valid_as_a_file() {
            for (backend, model, parts) in [
                (EngineBackend::Mistralrs, None, 2),
                (EngineBackend::Native, Some("models/embedded".to_owned()), 3),
            ] {
                let dir = tempfile::tempdir().unwrap();
                let options = InterferenceOptions {
                    rounds: 1,
                    seconds: 1.0,
                    users: 1,
                    pause_ms: 10.0,
                    model,
                    backend,
                    sampler: SamplerKind::Engine,
                    changes: 0,
                    quantize: Quantize::None,
                    serving_share: Some(0.25),
                };
                let config = config(&options, dir.path()).unwrap();
                crate::config::validate(&config).unwrap();
                assert_eq!(
                    crate::config::parse(&toml::to_string(&config).unwrap()).unwrap(),
                    config
                );
                assert_eq!(config.train.serving_share, 0.25);
                let samples = if options.model.is_some() { 16 } else { 64 };
                assert_eq!(config.train.samples_per_step, samples);
                assert_eq!(config.model.path, options.model.unwrap_or_default());
                let trained =
                    config.routes.0.iter().find(|route| route.name == TASK_ASKED).unwrap();
                assert_eq!(trained.rewards.len(), parts);
                let rows = std::fs::read_to_string(&config.dataset_in_use().unwrap().path).unwrap();
                assert_eq!(rows.lines().count(), PROMPTS);
            }
        }
    }
}
