//! `hone bench interference`: the effect of rollouts and training on the latency of clients.
//!
//! A daemon on loopback serves the embedded model, or another one. It alternates between serving only
//! (idle), sampling and training at full speed (busy) and, if requested, changes of the active version
//! (changing), so that other processes affect all of them. The clients' requests are the same in each.

mod setup;

use std::fmt;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use tokio::time::{sleep, sleep_until};

use hone_core::memory::resident;
use hone_core::types::PolicyVersion;
use hone_engine::EngineBackend;
use hone_rollout::SamplerKind;

use super::{Folder, machine};
use crate::config::Config;
use crate::demo::DaemonHandle;
use crate::demo::client::{Client, Scrape, UserRequest};
use crate::demo::config::TASK_HELD_OUT;
use crate::demo::tally::percentile;
use crate::demo::task::{MAX_TOKENS, QuestionKind, QuestionSplit, Questions};

use setup::config;

pub use setup::InterferenceOptions;

/// Longest wait for the daemon to be ready, or for rollouts and training to end.
const PATIENCE: Duration = Duration::from_secs(300);
/// Versions that are activated in turn.
const VERSIONS: usize = 8;

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
    /// Optimizer steps per second while busy.
    pub steps_per_second: f64,
    /// Completions sampled for the trainer per second while busy.
    pub rollouts_per_second: f64,
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
            "meanwhile            {:.1} optimizer steps and {:.0} rollouts a second",
            self.steps_per_second, self.rollouts_per_second
        )?;
        if let Some(changing) = &self.changing {
            let ChangingStats { changes, versions, clients, resident_mib } = changing;
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
            let [first, last] = resident_mib;
            writeln!(f, "  requests           {}; {} failed", clients.requests, clients.failed)?;
            writeln!(f, "  resident           {first:.0} MiB, {last:.0} MiB in the last round")?;
        }
        write!(f, "load                 {:.2} before, {:.2} after", self.load[0], self.load[1])
    }
}

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
    let (mut steps, mut rollouts) = (0.0, 0.0);
    let mut changing = ConditionSamples::default();
    let (mut changes, mut versions, mut memory) = (0, 0, Vec::new());
    let rounds = options.rounds.max(1);
    let samples = |scrape: &Scrape| scrape.value("hone_rollout_samples_total").unwrap_or(0.0);
    for round in 0..u64::from(rounds) {
        client.pause().await?;
        settle(client).await?;
        idle.watch(options, client, round).await;
        client.resume().await?;
        let before = (client.trainer().await?.step, samples(&client.metrics().await?));
        busy.watch(options, client, round).await;
        steps += (client.trainer().await?.step - before.0) as f64;
        rollouts += samples(&client.metrics().await?) - before.1;
        if options.changes > 0 {
            client.pause().await?;
            settle(client).await?;
            let chosen = last_promoted(client).await?;
            let count = options.changes.div_ceil(rounds);
            let (failures, ()) = tokio::join!(
                change_versions(options, client, &chosen, count),
                changing.watch(options, client, round)
            );
            changing.failures.extend(failures);
            changes += count as usize;
            versions = versions.max(chosen.len());
            memory.push(resident() as f64 / (1024.0 * 1024.0));
        }
    }
    client.pause().await?;
    let changing = memory.first().zip(memory.last()).map(|(first, last)| ChangingStats {
        changes,
        versions,
        resident_mib: [*first, *last],
        clients: changing.stats(),
    });
    let seconds = busy.seconds.max(1e-9);
    Ok(InterferenceReport {
        model: options.model.clone(),
        backend: options.backend,
        sampler: options.sampler,
        users: options.users,
        seconds: options.seconds * f64::from(rounds),
        steps_per_second: steps / seconds,
        rollouts_per_second: rollouts / seconds,
        cores: [idle.processor / idle.seconds.max(1e-9), busy.processor / seconds],
        idle: idle.stats(),
        busy: busy.stats(),
        changing,
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
        if trainer.settled() && samples == before {
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
    /// Runs the clients for the duration of the condition.
    async fn watch(&mut self, options: &InterferenceOptions, client: &Client, round: u64) {
        let (began, processor) = (Instant::now(), machine::processor_seconds());
        let until = began + Duration::from_secs_f64(options.seconds);
        let users = (0..options.users.max(1)).map(|user| {
            // The same requests in all conditions of a round.
            let seed = round << 16 | user as u64;
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
            }),
            steps_per_second: 5.0,
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
        meanwhile            5.0 optimizer steps and 320 rollouts a second
        version changes      2000 between 8 versions
          first token p50                 55.00 ms     1.10
          per token p50                    1.10 ms     1.10
          first token p99                108.90 ms     1.10
          per token p99                    1.10 ms     1.10
          requests           100; 0 failed
          resident           250 MiB, 251 MiB in the last round
        load                 0.10 before, 1.90 after
        ");
    }
}
