//! `hone bench interference`: the effect of rollouts and training on the latency of clients.
//!
//! A daemon on loopback serves the embedded model, or another one. It alternates between serving only
//! (idle), sampling and training at full speed (busy) and, if requested, changes of the active version
//! (changing), so that other processes affect all of them. The clients' requests are alike, but those of one
//! condition are not repeated in another, because the prefix cache would answer them sooner.

mod memory;
mod report;
mod setup;

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::time::{sleep, sleep_until};

use hone_core::types::PolicyVersion;

use super::{Folder, machine};
use crate::config::Config;
use crate::demo::DaemonHandle;
use crate::demo::client::{Client, Scrape, UserRequest};
use crate::demo::config::TASK_HELD_OUT;
use crate::demo::tally::percentile;
use crate::demo::task::{MAX_TOKENS, QuestionKind, QuestionSplit, Questions};

use memory::MemoryReading;
use setup::config;

pub use memory::MemoryStats;
pub use report::{ChangingStats, ClientStats, InterferenceReport};
pub use setup::InterferenceOptions;

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
    let before = machine::load();
    let daemon = start(config(options, &dir.0)?).await?;
    let measured = measure(options, &Client::new(daemon.url())?).await;
    daemon.shut_down().await?;
    let mut report = measured?;
    report.load = [before, machine::load()];
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
        let (began, processor) = (Instant::now(), machine::processor_seconds());
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
        self.processor += machine::processor_seconds() - processor;
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
}
