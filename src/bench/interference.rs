//! What rollouts and training cost the clients who are served meanwhile.
//!
//! One daemon on loopback serves the embedded model. In turns it is left alone with its clients
//! (idle) and made to sample and train as fast as it can (busy), so that whatever else the machine
//! does meets both; the clients' requests are the same throughout.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use serde_json::json;
use tokio::time::sleep;

use hone_dataset::DatasetConfig;
use hone_rollout::{RolloutConfig, SamplerKind};
use hone_train::config::{ScheduleKind, TrainConfig};

use super::{Folder, machine};
use crate::config::{Config, LogConfig};
use crate::demo::client::{Ask, Client};
use crate::demo::config::{GROUP_SIZE, SAMPLES_PER_STEP, TASK_ASKED, TASK_HELD_OUT};
use crate::demo::scrape::Scrape;
use crate::demo::tally::percentile;
use crate::demo::task::{MAX_TOKENS, QuestionSplit, Questions};
use crate::demo::{Daemon, RewardsMode};

/// Longest wait for the daemon to be ready, or for what is under way to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// Prompts of the rollouts.
const PROMPTS: usize = 512;

/// What is measured.
#[derive(Clone, Debug)]
pub struct InterferenceOptions {
    /// Turns of idle and busy.
    pub rounds: u32,
    /// Length of each of the two in a turn.
    pub seconds: f64,
    /// Clients, each with one request at a time.
    pub users: usize,
    /// What a client pauses between two requests in the mean, in milliseconds; pauses are uniform
    /// from nothing to twice as much.
    pub pause_ms: f64,
    /// What samples the rollouts.
    pub sampler: SamplerKind,
}

/// What clients met in one condition.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Met {
    /// Requests.
    pub requests: usize,
    /// Those that failed.
    pub failed: usize,
    /// The first failure, in words.
    pub failure: Option<String>,
    /// Time to the first token in ms: the median and the 99th percentile (nearest rank).
    pub first_token_ms: [f64; 2],
    /// Time from one token's text to the next in ms, likewise.
    pub per_token_ms: [f64; 2],
}

/// What came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InterferenceReport {
    /// What sampled the rollouts.
    pub sampler: SamplerKind,
    /// Clients.
    pub users: usize,
    /// Seconds of each condition.
    pub seconds: f64,
    /// The clients alone.
    pub idle: Met,
    /// While rollouts are sampled and the trainer trains.
    pub busy: Met,
    /// Optimiser steps a second while busy.
    pub steps_per_second: f64,
    /// Completions a second that were sampled for the trainer while busy.
    pub rollouts_per_second: f64,
    /// Cores that the process used, idle and busy.
    pub cores: [f64; 2],
    /// Load of the machine before and after.
    pub load: [f64; 2],
}

impl InterferenceReport {
    /// Busy over idle: the 99th percentiles of the time to the first token.
    pub fn first_token_ratio(&self) -> f64 {
        self.busy.first_token_ms[1] / self.idle.first_token_ms[1]
    }
}

impl fmt::Display for InterferenceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { users, seconds, idle, busy, .. } = self;
        writeln!(
            f,
            "{users} client(s), {seconds:.0} s of each in turns, sampler: {:?}",
            self.sampler
        )?;
        writeln!(f, "                          idle        busy       ratio")?;
        let mut line = |what: &str, idle: f64, busy: f64, unit: &str| {
            writeln!(
                f,
                "{what:<20} {idle:>7.2} {unit:<3} {busy:>7.2} {unit:<3} {:>7.2}",
                busy / idle
            )
        };
        for (i, name) in ["p50", "p99"].into_iter().enumerate() {
            let what = format!("first token {name}");
            line(&what, idle.first_token_ms[i], busy.first_token_ms[i], "ms")?;
        }
        for (i, name) in ["p50", "p99"].into_iter().enumerate() {
            let what = format!("per token {name}");
            line(&what, idle.per_token_ms[i], busy.per_token_ms[i], "ms")?;
        }
        line("cores used", self.cores[0], self.cores[1], "")?;
        writeln!(
            f,
            "requests             {} idle, {} busy; {} and {} failed",
            idle.requests, busy.requests, idle.failed, busy.failed
        )?;
        if let Some(failure) = idle.failure.as_ref().or(busy.failure.as_ref()) {
            writeln!(f, "first failure        {failure}")?;
        }
        writeln!(
            f,
            "meanwhile            {:.1} optimiser steps and {:.0} rollouts a second",
            self.steps_per_second, self.rollouts_per_second
        )?;
        write!(f, "load                 {:.2} before, {:.2} after", self.load[0], self.load[1])
    }
}

/// The daemon's configuration: rollouts from a dataset without end, and steps so small that the
/// model stays as it is, because a model that is always right would leave nothing to train on.
fn config(options: &InterferenceOptions, dir: &Path) -> anyhow::Result<Config> {
    let dataset = dir.join("prompts.jsonl");
    let rows = Questions::new(1, QuestionSplit::Asked).take(PROMPTS).map(|question| {
        json!({"prompt": question.text(), "answer": question.answer().to_string()}).to_string()
            + "\n"
    });
    std::fs::write(&dataset, rows.collect::<String>()).context("the prompts")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let demo = crate::demo::config::build(RewardsMode::Graded, 1, 1, &dir.join("data"), cores);
    Ok(Config {
        dataset: DatasetConfig { path: dataset, ..DatasetConfig::default() },
        // That nothing is learned is meant.
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
            samples_per_step: SAMPLES_PER_STEP,
            learning_rate: 1e-7,
            min_learning_rate: 0.0,
            schedule: ScheduleKind::Constant,
            ..demo.train.clone()
        },
        ..demo
    })
}

/// Measures on a daemon that `start` starts.
///
/// # Errors
/// If the daemon cannot be started or asked how it is. Requests of clients that fail are counted.
pub async fn run(
    options: &InterferenceOptions,
    start: impl AsyncFnOnce(Config) -> anyhow::Result<Daemon>,
) -> anyhow::Result<InterferenceReport> {
    let dir = Folder::temporary()?;
    let before = machine::load();
    let daemon = start(config(options, &dir.0)?).await?;
    let measured = measure(options, &Client::new(daemon.url())?).await;
    daemon.shut_down().await?;
    let mut report = measured?;
    report.load = [before, machine::load()];
    Ok(report)
}

/// One condition, over all rounds.
#[derive(Default)]
struct Seen {
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
    let (mut idle, mut busy) = (Seen::default(), Seen::default());
    let (mut steps, mut rollouts) = (0.0, 0.0);
    let samples = |scrape: &Scrape| scrape.value("hone_rollout_samples_total").unwrap_or(0.0);
    for round in 0..u64::from(options.rounds.max(1)) {
        client.pause().await?;
        settle(client).await?;
        idle.watch(options, client, 2 * round).await;
        client.resume().await?;
        let before = (client.trainer().await?.step, samples(&client.metrics().await?));
        busy.watch(options, client, 2 * round + 1).await;
        steps += (client.trainer().await?.step - before.0) as f64;
        rollouts += samples(&client.metrics().await?) - before.1;
    }
    client.pause().await?;
    let seconds = busy.seconds.max(1e-9);
    Ok(InterferenceReport {
        sampler: options.sampler,
        users: options.users,
        seconds: options.seconds * f64::from(options.rounds.max(1)),
        steps_per_second: steps / seconds,
        rollouts_per_second: rollouts / seconds,
        cores: [idle.processor / idle.seconds.max(1e-9), busy.processor / seconds],
        idle: idle.met(),
        busy: busy.met(),
        load: [0.0; 2],
    })
}

/// Waits until the trainer rests and no more rollouts are sampled.
async fn settle(client: &Client) -> anyhow::Result<()> {
    const LOOK: Duration = Duration::from_millis(200);
    let until = Instant::now() + PATIENCE;
    let mut before = -1.0;
    loop {
        let trainer = client.trainer().await?;
        let samples = client.metrics().await?.value("hone_rollout_samples_total").unwrap_or(0.0);
        if trainer.settled() && samples == before {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < until,
            "no rest in {PATIENCE:?}: the trainer is {} at step {}, {samples} rollouts were sampled",
            trainer.state,
            trainer.step
        );
        before = samples;
        sleep(LOOK).await;
    }
}

impl Seen {
    /// Clients ask for the condition's time.
    async fn watch(&mut self, options: &InterferenceOptions, client: &Client, round: u64) {
        let (began, processor) = (Instant::now(), machine::processor_seconds());
        let until = began + Duration::from_secs_f64(options.seconds);
        let users = (0..options.users.max(1)).map(|user| {
            // The same requests in both conditions of a turn.
            let seed = (round / 2) << 16 | user as u64;
            ask_until(client, seed, options.pause_ms, until)
        });
        for seen in futures::future::join_all(users).await {
            self.first.extend(seen.first);
            self.gaps.extend(seen.gaps);
            self.failures.extend(seen.failures);
            self.requests += seen.requests;
        }
        self.processor += machine::processor_seconds() - processor;
        self.seconds += began.elapsed().as_secs_f64();
    }

    fn met(self) -> Met {
        let quantiles = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            [0.5, 0.99].map(|q| percentile(&values, q).unwrap_or(f64::NAN))
        };
        Met {
            requests: self.requests,
            failed: self.failures.len(),
            failure: self.failures.into_iter().next(),
            first_token_ms: quantiles(self.first),
            per_token_ms: quantiles(self.gaps),
        }
    }
}

/// One client.
async fn ask_until(client: &Client, seed: u64, pause_ms: f64, until: Instant) -> Seen {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut seen = Seen::default();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    for question in Questions::new(seed, QuestionSplit::HeldOut) {
        sleep(Duration::from_secs_f64(rng.random_range(0.0..=2.0) * pause_ms / 1e3)).await;
        if Instant::now() >= until {
            break;
        }
        let ask = Ask {
            text: question.text(),
            // A route without rewards: nothing of it is trained on.
            metadata: [("task".to_owned(), TASK_HELD_OUT.to_owned())].into(),
            seed: rng.random::<u32>().into(),
            max_tokens: MAX_TOKENS,
        };
        seen.requests += 1;
        match client.ask(&ask).await {
            Ok(answer) => {
                seen.first.push(ms(answer.first_token));
                seen.gaps.extend(answer.gaps.into_iter().map(ms));
            }
            Err(error) => seen.failures.push(error.to_string()),
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_is_configured_as_a_file_could() {
        let dir = tempfile::tempdir().unwrap();
        let options = InterferenceOptions {
            rounds: 1,
            seconds: 1.0,
            users: 1,
            pause_ms: 10.0,
            sampler: SamplerKind::Engine,
        };
        let config = config(&options, dir.path()).unwrap();
        crate::config::validate(&config).unwrap();
        assert_eq!(crate::config::parse(&toml::to_string(&config).unwrap()).unwrap(), config);
        let rows = std::fs::read_to_string(config.dataset_in_use().unwrap().path).unwrap();
        assert_eq!(rows.lines().count(), PROMPTS);
    }

    #[test]
    fn quantiles_and_failures_are_told_by_condition() {
        let seen = |scale: f64| Seen {
            first: (1..=100).map(|i| f64::from(i) * scale).collect(),
            gaps: vec![scale],
            requests: 100,
            ..Seen::default()
        };
        let mut failed = seen(2.0);
        failed.failures.push("no answer".to_owned());
        let report = InterferenceReport {
            sampler: SamplerKind::Native,
            users: 2,
            seconds: 30.0,
            idle: seen(1.0).met(),
            busy: failed.met(),
            steps_per_second: 5.0,
            rollouts_per_second: 320.0,
            cores: [0.5, 2.0],
            load: [0.1, 1.9],
        };
        assert_eq!(report.idle.first_token_ms, [50.0, 99.0]);
        assert_eq!(report.first_token_ratio(), 2.0);
        insta::assert_snapshot!(report, @r"
        2 client(s), 30 s of each in turns, sampler: Native
                                  idle        busy       ratio
        first token p50        50.00 ms   100.00 ms     2.00
        first token p99        99.00 ms   198.00 ms     2.00
        per token p50           1.00 ms     2.00 ms     2.00
        per token p99           1.00 ms     2.00 ms     2.00
        cores used              0.50        2.00        4.00
        requests             100 idle, 100 busy; 0 and 1 failed
        first failure        no answer
        meanwhile            5.0 optimiser steps and 320 rollouts a second
        load                 0.10 before, 1.90 after
        ");
    }
}
