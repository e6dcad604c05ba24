//! `hone-bench interference`: the effect of rollouts and training on the latency of clients.
//!
//! A daemon on loopback serves the embedded model, or another one. It alternates between serving only
//! (idle), sampling and training at full speed (busy) and, if requested, changes of the active version
//! (changing), so that other processes affect all of them. The clients' requests are alike, but those of one
//! condition are not repeated in another, because the prefix cache would answer them sooner.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
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

use hone_config::flags::{count, engine_backend, quantize, sampler_kind, seconds};
use hone_config::{Config, LogConfig};
use hone_demo::RewardsMode;
use hone_demo::client::{Client, Scrape, UserRequest};
use hone_demo::config::{GROUP_SIZE, TASK_ASKED, TASK_HELD_OUT, serve_with};
use hone_demo::task::{MAX_TOKENS, QuestionKind, QuestionSplit, Questions};
use hone_demo::users::percentile;

/// Longest wait for the daemon to be ready, or for rollouts and training to end.
const PATIENCE: Duration = Duration::from_secs(300);
/// Versions that are activated in turn.
const VERSIONS: usize = 8;

/// Runs the benchmark. Failed requests of clients are counted; other failures end it.
pub async fn run(options: &InterferenceOptions) -> anyhow::Result<InterferenceReport> {
    let dir = tempfile::tempdir()?;
    let before = super::measure::machine_load();
    let daemon = super::measure::start(config(options, dir.path())?).await?;
    let measured = async { measure(options, &Client::new(&daemon.url())?).await }.await;
    daemon.shutdown().await?;
    let mut report = measured?;
    report.load = [before, super::measure::machine_load()];
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
    let rounds = options.rounds;
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
    let seconds = busy.seconds.max(1e-9);
    let cores = [idle.processor / idle.seconds.max(1e-9), busy.processor / seconds];
    let (idle, busy, clients) = (idle.stats(), busy.stats(), changing.stats());
    let changing = memory.first().zip(memory.last()).map(|([_, first], [_, last])| ChangingStats {
        changes,
        versions,
        resident_mib: [first.resident, last.resident],
        cache_mib: [first.cache, last.cache],
        growth_mib: memory.iter().map(|[before, after]| after.outside() - before.outside()).sum(),
        ratios: LatencyRatios::new(&idle, &clients),
        clients,
    });
    Ok(InterferenceReport {
        model: options.model.clone(),
        backend: options.backend,
        sampler: options.sampler,
        users: options.users,
        seconds: options.seconds * f64::from(rounds),
        steps,
        trained_tokens_per_second: tokens / seconds,
        rollouts_per_second: rollouts / seconds,
        cores,
        ratios: LatencyRatios::new(&idle, &busy),
        idle,
        busy,
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
        let (began, processor) = (Instant::now(), super::measure::processor_seconds());
        let until = began + Duration::from_secs_f64(options.seconds);
        let users = (0..options.users).map(|user| {
            let seed = turn << 16 | user as u64;
            ask_until(client, seed, f64::from(options.pause), until)
        });
        for seen in futures::future::join_all(users).await {
            self.first.extend(seen.first);
            self.gaps.extend(seen.gaps);
            self.failures.extend(seen.failures);
            self.requests += seen.requests;
        }
        self.processor += super::measure::processor_seconds() - processor;
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
    /// The largest resident memory over the peak of the plan.
    pub of_planned: f64,
    /// The same over the base, the caches and the activations together.
    pub of_parts: f64,
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
        let resident_peak_mib = peak_resident() as f64 / MIB;
        let planned_peak_mib = scrape.value("hone_memory_planned_peak_bytes").unwrap_or(0.0) / MIB;
        let [base_mib, caches_mib, activations_mib] =
            [&["base weights"][..], &CACHES, &ACTIVATIONS].map(|parts| planned(scrape, parts));
        Self {
            resident_peak_mib,
            planned_peak_mib,
            of_planned: resident_peak_mib / planned_peak_mib,
            of_parts: resident_peak_mib / (base_mib + caches_mib + activations_mib),
            base_mib,
            caches_mib,
            activations_mib,
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

// The options, and the daemon's configuration.

/// Prompts of the rollouts.
const PROMPTS: usize = 512;

/// Samples of a step of another model than the embedded one: two groups. Such a step ends within a round
/// although clients leave it a fraction of the time, and the trainer begins the next one at once.
const SAMPLES_OF_LARGER: usize = 2 * GROUP_SIZE;

/// `train.max_tokens` of such a model, so that the memory plan counts no longer samples. A question and its
/// answer take about a hundred tokens; a step of wide models computes up to so many at once.
const MAX_TOKENS_OF_LARGER: usize = 1024;

/// `hone-bench interference`.
#[derive(Debug, Args)]
pub struct InterferenceOptions {
    /// Rounds, each with an idle and a busy phase
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Duration of each phase in seconds
    #[arg(long, value_name = "S", default_value_t = 10.0, value_parser = seconds)]
    pub seconds: f64,
    /// Number of clients, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = count(1..=1 << 16))]
    pub users: usize,
    /// Mean pause of a client between requests, in milliseconds; pauses are uniform up to twice as much
    #[arg(long, value_name = "MS", default_value_t = 50)]
    pub pause: u32,
    /// Model: a Hugging Face directory or hub id [default: the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Engine that answers the clients
    #[arg(long, value_name = "BACKEND", default_value = "mistralrs", value_parser = engine_backend())]
    pub backend: EngineBackend,
    /// Sampler of the rollouts
    #[arg(long, value_name = "SAMPLER", default_value = "auto", value_parser = sampler_kind())]
    pub sampler: SamplerKind,
    /// Changes of the active version in all rounds together, during a third phase of each round; 0 leaves
    /// out the phase
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub changes: u32,
    /// Format that the frozen weights are converted to [default: as they are stored]
    #[arg(long, value_name = "FORMAT", value_parser = quantize(), default_value = "none")]
    pub quantize: Quantize,
    /// Time that training gets while the native engine serves [default: train.serving_share]
    #[arg(long, value_name = "SHARE")]
    pub serving_share: Option<f64>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
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
    let mut demo = hone_demo::config::build(RewardsMode::Graded, 1, 1, &dir.join("data"), cores);
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

/// The clients' times in a condition, relative to those while idle.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencyRatios {
    /// Of the time to the first token: the median and the 99th percentile.
    pub first_token: [f64; 2],
    /// Of the time per token.
    pub per_token: [f64; 2],
}

impl LatencyRatios {
    fn new(idle: &ClientStats, busy: &ClientStats) -> Self {
        let ratios = |of: fn(&ClientStats) -> [f64; 2]| [0, 1].map(|i| of(busy)[i] / of(idle)[i]);
        Self { first_token: ratios(|s| s.first_token_ms), per_token: ratios(|s| s.per_token_ms) }
    }
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
    /// Their times over those while idle.
    pub ratios: LatencyRatios,
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
    /// Times while busy over those while idle.
    pub ratios: LatencyRatios,
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
}

#[cfg(test)]
mod tests {
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
        let (idle, busy) = (seen(1.0).stats(), failed.stats());
        assert_eq!((idle.first_token_ms, idle.per_token_ms), ([50.0, 99.0], [1.0; 2]));
        assert_eq!((busy.failed, busy.failure.as_deref()), (1, Some("no answer")));
        let ratios = LatencyRatios::new(&idle, &busy);
        assert_eq!((ratios.first_token, ratios.per_token), ([2.0; 2], [2.0; 2]));
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
                let mut options: InterferenceOptions = crate::measure::tests::options(&[
                    "--sampler",
                    "engine",
                    "--serving-share",
                    "0.25",
                ]);
                (options.model, options.backend) = (model, backend);
                let config = config(&options, dir.path()).unwrap();
                hone_config::validate(&config).unwrap();
                assert_eq!(hone_config::parse(&toml::to_string(&config).unwrap()).unwrap(), config);
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
