//! `hone demo`: a real daemon, simulated users over real HTTP, and a report.
//!
//! The demo uses only the daemon's public HTTP API. The caller passes a closure that starts a daemon
//! with a [`Config`], so that tests can start a fake one.
//!
//! Invariants: users never ask a held-out question; answers to held-out questions are never trained
//! on; the trainer takes no step before the first evaluation has ended.

pub mod client;
pub mod config;
mod daemon;
mod dir;
mod error;
pub mod eval;
mod options;
pub mod progress;
pub mod report;
mod session;
pub mod tally;
pub mod task;
pub mod users;
pub mod versions;

use std::io::{IsTerminal as _, Write};
use std::pin::pin;

use dir::DemoDir;
use progress::DemoProgress;
use report::{Findings, NextSteps};

use crate::config::Config;

pub use daemon::DaemonHandle;
pub use error::DemoError;
pub use options::{DEFAULT_STEPS, DemoOptions, RewardsMode};
pub use report::DemoReport;

/// The result of a demo.
#[derive(Clone, Debug)]
pub struct DemoOutcome {
    /// The measurements.
    pub report: DemoReport,
    /// Whether the held-out reward rose beyond its interval and, after a sabotage, a version was rolled
    /// back. If not, `hone demo` exits with 1.
    pub improved: bool,
}

/// Runs a demo. Writes the report to `out` and progress to stderr.
///
/// # Errors
/// If there is nothing to report. Failed requests and a reward that did not rise are part of the
/// outcome.
pub async fn run(
    options: DemoOptions,
    start: impl AsyncFnOnce(Config) -> anyhow::Result<DaemonHandle>,
    out: &mut dyn Write,
) -> Result<DemoOutcome, DemoError> {
    options.check()?;
    let dir = DemoDir::open(options.data.as_deref())?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut config = config::build(options.rewards, options.steps, options.seed, &dir.path, cores);
    config::serve_with(&mut config, options.backend);
    config.rollout.sampler = options.sampler;
    config::promote(&mut config, options.promotion);
    if options.sabotage {
        config::sabotage(&mut config);
    }
    dir.write_config(&config)?;
    let mut progress = DemoProgress::new(std::io::stderr().is_terminal());
    let mut interrupt = pin!(interrupted());

    progress.begin("starting the daemon");
    let daemon = tokio::select! {
        daemon = start(config.clone()) => daemon.map_err(DemoError::Start)?,
        () = &mut interrupt => return Err(DemoError::Interrupted),
    };
    let result = tokio::select! {
        findings = session::run(&options, &config, daemon.url(), &mut progress) => {
            findings.and_then(|found| present(&options, &dir, daemon.url(), &found, out))
        }
        () = &mut interrupt => Err(DemoError::Interrupted),
    };
    progress.clear();
    if options.keep_serving && result.is_ok() {
        interrupt.await;
    }
    progress.begin("shutting down");
    let ended = daemon.shut_down().await;
    progress.clear();
    let outcome = result?;
    ended.map_err(DemoError::Shutdown)?;
    Ok(outcome)
}

/// Writes the report as text, and as JSON to the file of `--report`.
fn present(
    options: &DemoOptions,
    dir: &DemoDir,
    url: &str,
    findings: &Findings,
    out: &mut dyn Write,
) -> Result<DemoOutcome, DemoError> {
    let next = NextSteps {
        kept: (!dir.is_temporary).then(|| dir.path.clone()),
        serving: options.keep_serving.then(|| url.to_owned()),
    };
    write!(out, "\n{}", findings.render(&next))?;
    out.flush()?;
    if let Some(file) = &options.report {
        report::write_json(&findings.report, file)?;
    }
    let report = findings.report.clone();
    let rolled_back = report.versions.as_ref().map_or(0, |versions| versions.rolled_back);
    let improved = report.improved() && (!options.sabotage || rolled_back > 0);
    Ok(DemoOutcome { report, improved })
}

/// Resolves at the first Ctrl-C; never if the signal cannot be received.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}
