//! The measurements and their table.

use std::fmt;

use serde::Serialize;

use hone_engine::EngineBackend;
use hone_rollout::SamplerKind;

use super::memory::MemoryStats;

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
