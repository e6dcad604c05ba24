//! `hone-bench interference`: the effect of rollouts and training on the latency of clients, whose requests are
//! alike in both conditions, but not the same: the prefix cache would answer a repeated one sooner.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use futures::future::join_all;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tokio::time::sleep;

use hone_core::memory::peak_resident;
use hone_dataset::DatasetConfig;
use hone_engine::EngineBackend;
use hone_model::weights::Quantize;
use hone_reward::kinds::{Length, LengthUnit, RewardKind};
use hone_reward::routes::RewardConfig;
use hone_rollout::{RolloutConfig, SamplerKind};
use hone_train::config::{PeakRate, Schedule, TrainConfig};

use hone_config::flags::{count, engine_backend, quantize, sampler_kind, seconds};
use hone_config::{Config, LogConfig};
use hone_demo::RewardsMode;
use hone_demo::client::{Client, UserRequest};
use hone_demo::config::{GROUP_SIZE, TASK_ASKED, TASK_HELD_OUT, serve_with};
use hone_demo::task::{QuestionKind, QuestionSplit, Questions};

use super::measure::{BenchOutcome, cores, measured, processor_seconds, quantiles};

/// Longest wait for the daemon to be ready, or for rollouts and training to end.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs the benchmark. Failed requests of clients are counted; other failures end it.
pub(crate) async fn run(options: &InterferenceOptions) -> anyhow::Result<BenchOutcome> {
    let config = |dir: &Path| config(options, dir);
    measured(config, async |daemon| measure(options, &Client::new(&daemon.url())?).await).await
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

/// The measurements, and whether requests failed.
async fn measure(
    options: &InterferenceOptions,
    client: &Client,
) -> anyhow::Result<(Value, Option<String>)> {
    client.wait_ready(PATIENCE).await?;
    let (mut idle, mut busy) = (ConditionSamples::default(), ConditionSamples::default());
    let mut learned = [0.0; 3];
    for round in 0..u64::from(options.rounds) {
        client.pause().await?;
        settle(client).await?;
        idle.watch(options, client, 2 * round).await;
        client.resume().await?;
        let before = learning(client).await?;
        busy.watch(options, client, 2 * round + 1).await;
        let after = learning(client).await?;
        learned = [0, 1, 2].map(|i| learned[i] + after[i] - before[i]);
    }
    client.pause().await?;
    let planned = client.metrics().await?.value("hone_memory_planned_peak_bytes");
    let [planned, resident] =
        [planned.unwrap_or(0.0), peak_resident() as f64].map(|bytes| bytes / f64::from(1 << 20));
    let [steps, tokens, rollouts] = learned;
    let seconds = busy.seconds.max(1e-9);
    let cores = [idle.processor / idle.seconds.max(1e-9), busy.processor / seconds];
    let failed = idle.failures.len() + busy.failures.len();
    let (idle, busy) = (idle.stats(), busy.stats());
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let ratios = |name: &str| [0, 1].map(|i| number(&busy[name][i]) / number(&idle[name][i]));
    let report = json!({
        "model": options.model,
        "backend": options.backend,
        "sampler": options.sampler,
        "users": options.users,
        "seconds": options.seconds * f64::from(options.rounds),
        "idle": idle,
        "busy": busy,
        "ratios": {"first_token": ratios("first_token_ms"), "per_token": ratios("per_token_ms")},
        // Steps that began and ended while busy.
        "steps": steps as u64,
        "trained_tokens_per_second": tokens / seconds,
        "rollouts_per_second": rollouts / seconds,
        "memory": {
            "resident_peak_mib": resident,
            "planned_peak_mib": planned,
            "of_planned": resident / planned,
        },
        "cores": cores,
    });
    Ok((report, (failed > 0).then(|| format!("{failed} requests failed"))))
}

/// Optimizer steps, completion tokens that they trained on, and rollouts so far.
async fn learning(client: &Client) -> anyhow::Result<[f64; 3]> {
    let (metrics, step) = (client.metrics().await?, client.trainer().await?.step);
    let value = |name: &str| metrics.value(name).unwrap_or(0.0);
    Ok([step as f64, value("hone_train_tokens_total"), value("hone_rollout_samples_total")])
}

/// Waits until the trainer is paused and no rollouts are sampled.
async fn settle(client: &Client) -> anyhow::Result<()> {
    const POLL_INTERVAL: Duration = Duration::from_millis(200);
    let until = Instant::now() + PATIENCE;
    let mut before = -1.0;
    loop {
        let trainer = client.trainer().await?;
        let [step, _, samples] = learning(client).await?;
        // A group counts its samples at its end. Groups are started until the trainer's backlog is full.
        if trainer.settled() && trainer.in_flight_groups == 0 && samples == before {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < until,
            "still busy after {PATIENCE:?}: the trainer is {} at step {step}, {samples} rollouts were sampled",
            trainer.state,
        );
        before = samples;
        sleep(POLL_INTERVAL).await;
    }
}

impl ConditionSamples {
    /// Runs the clients for the duration of the condition. Their requests depend on `turn`.
    async fn watch(&mut self, options: &InterferenceOptions, client: &Client, turn: u64) {
        let (began, processor) = (Instant::now(), processor_seconds());
        let until = began + Duration::from_secs_f64(options.seconds);
        let users = (0..options.users).map(|user| {
            let seed = turn << 16 | user as u64;
            ask_until(client, seed, f64::from(options.pause), until)
        });
        for seen in join_all(users).await {
            self.first.extend(seen.first);
            self.gaps.extend(seen.gaps);
            self.failures.extend(seen.failures);
            self.requests += seen.requests;
        }
        self.processor += processor_seconds() - processor;
        self.seconds += began.elapsed().as_secs_f64();
    }

    /// Times are in ms, the median and the 99th percentile, and the failure is the first one.
    fn stats(self) -> Value {
        json!({
            "requests": self.requests,
            "failed": self.failures.len(),
            "failure": self.failures.first(),
            "first_token_ms": quantiles(self.first),
            "per_token_ms": quantiles(self.gaps),
        })
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
        // A route without rewards, so that nothing is trained on.
        let metadata = [("task".to_owned(), TASK_HELD_OUT.to_owned())].into();
        let request = UserRequest::sampled(&question, metadata, rng.random::<u32>().into());
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

// The options, and the daemon's configuration.

/// Prompts of the rollouts.
const PROMPTS: usize = 512;

/// Samples of a step of another model than the embedded one: two groups, so that it ends within a round.
const SAMPLES_OF_LARGER: usize = 2 * GROUP_SIZE;

/// `train.max_tokens` of such a model, so that the memory plan counts no longer samples.
const MAX_TOKENS_OF_LARGER: usize = 1024;

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
    /// Format that the frozen weights are converted to [default: as they are stored]
    #[arg(long, value_name = "FORMAT", value_parser = quantize(), default_value = "none")]
    pub quantize: Quantize,
    /// Share of the time that training gets while the native engine serves [default: that of train.min_share]
    #[arg(long, value_name = "SHARE")]
    pub min_share: Option<f64>,
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
    let mut demo = hone_demo::config::build(RewardsMode::Graded, 1, 1, &dir.join("data"), cores());
    serve_with(&mut demo, options.backend);
    demo.model.quantize = options.quantize;
    if let Some(share) = options.min_share {
        demo.train.min_share = share;
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
            learning_rate: PeakRate::Fixed(1e-7),
            schedule: Schedule::default(),
            ..demo.train.clone()
        },
        ..demo
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_failures_are_reported() {
        let failures = vec!["no answer".to_owned(), "HTTP 500".to_owned()];
        let first = (1..=100).map(f64::from).collect();
        let seen = ConditionSamples { first, gaps: vec![2.0], failures, ..Default::default() };
        let stats = seen.stats();
        assert_eq!(stats["first_token_ms"], json!([50.0, 99.0]));
        assert_eq!(stats["per_token_ms"], json!([2.0, 2.0]));
        assert_eq!((&stats["failed"], &stats["failure"]), (&json!(2), &json!("no answer")));
    }

    #[test]
    fn the_configuration_is_valid_as_a_file() {
        for (backend, model, parts) in [
            (EngineBackend::Mistralrs, None, 2),
            (EngineBackend::Native, Some("models/embedded".to_owned()), 3),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut options: InterferenceOptions =
                crate::measure::tests::options(&["--sampler", "engine", "--min-share", "0.25"]);
            (options.model, options.backend) = (model, backend);
            let config = config(&options, dir.path()).unwrap();
            hone_config::validate(&config).unwrap();
            let mut file = hone_config::parse(&toml::to_string(&config).unwrap()).unwrap();
            // A constant of the daemon.
            file.server.stream_interval_ms = 0;
            file.data.min_free_bytes = 0;
            assert_eq!(file, config);
            let samples = if options.model.is_some() { 16 } else { 64 };
            assert_eq!(config.train.samples_per_step, samples);
            assert_eq!(config.model.path, options.model.unwrap_or_default());
            let trained = config.routes.0.iter().find(|route| route.name == TASK_ASKED).unwrap();
            assert_eq!(trained.rewards.len(), parts);
            let rows = std::fs::read_to_string(&config.dataset_in_use().unwrap().path).unwrap();
            assert_eq!(rows.lines().count(), PROMPTS);
        }
    }
}
