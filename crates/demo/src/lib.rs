//! `hone demo`: a real daemon, simulated users over real HTTP, and a report.
//!
//! The demo uses only the daemon's public HTTP API. The caller passes a closure that starts a daemon
//! with a [`Config`], so that tests can start a fake one.
//!
//! Invariants: users never ask a held-out question; answers to held-out questions are never trained
//! on; the trainer takes no step before the first evaluation has ended.

pub mod client;
pub mod config;
pub mod eval;
mod options;
mod progress;
mod report;
mod session;
pub mod task;
pub mod users;
mod versions;

use std::io::{IsTerminal as _, Write};
use std::path::PathBuf;
use std::pin::pin;

use anyhow::{Context as _, anyhow, bail};
use futures::future::LocalBoxFuture;

use client::Client;
use hone_config::Config;
use progress::DemoProgress;
use report::DemoDir;
use report::{Findings, NextSteps};
use versions::VersionHistory;

pub use options::{DemoOptions, DemoUsage, RewardsMode};
pub use report::DemoReport;

/// The error after Ctrl-C.
const INTERRUPTED: &str = "interrupted";

/// The result of a demo.
#[derive(Clone, Debug)]
pub struct DemoOutcome {
    /// The measurements.
    pub report: DemoReport,
    /// Whether the held-out reward rose beyond its interval and, after a sabotage, ratings withdrew a
    /// sabotaged version and none was promoted. If not, `hone demo` exits with 1.
    pub improved: bool,
}

/// Runs a demo. Writes the report to `out` and progress to stderr.
///
/// # Errors
/// [`DemoUsage`] for an unusable option or data directory, and any other error if there is nothing to
/// report. Failed requests and a reward that did not rise are part of the outcome.
pub async fn run(
    options: DemoOptions,
    start: impl AsyncFnOnce(Config) -> anyhow::Result<DaemonHandle>,
    out: &mut dyn Write,
) -> anyhow::Result<DemoOutcome> {
    let options = options.resolved();
    options.check()?;
    let mut progress = DemoProgress::new(std::io::stderr().is_terminal());
    let mut interrupt = pin!(interrupted());
    if let Some(url) = options.server.clone() {
        let config = Config::default();
        let result = tokio::select! {
            findings = session::run(&options, &config, &url, &mut progress) => {
                findings.and_then(|found| present(&options, None, &url, &found, out))
            }
            () = interrupt => Err(anyhow!(INTERRUPTED)),
        };
        progress.clear();
        // Also after a failure, because evaluations pause the trainer.
        let resumed = Client::new(&url)?.resume().await;
        let outcome = result?;
        resumed?;
        return Ok(outcome);
    }
    let dir = DemoDir::open(options.data.as_deref())?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut config = config::build(options.rewards, options.steps, options.seed, &dir.path, cores);
    config.model.device = options.device;
    config::serve_with(&mut config, options.backend);
    config.rollout.sampler = options.sampler;
    config::promote(&mut config, options.promotion);
    if options.sabotage {
        config::sabotage(&mut config);
    }
    dir.write_config(&config)?;
    progress.begin("starting the daemon");
    let daemon = tokio::select! {
        daemon = start(config.clone()) => daemon.map_err(|e| anyhow!("the daemon did not start: {e:#}"))?,
        () = &mut interrupt => bail!(INTERRUPTED),
    };
    let result = tokio::select! {
        findings = session::run(&options, &config, &daemon.url, &mut progress) => {
            let kept = options.data.is_some().then(|| dir.path.clone());
            findings.and_then(|found| present(&options, kept, &daemon.url, &found, out))
        }
        () = &mut interrupt => Err(anyhow!(INTERRUPTED)),
    };
    progress.clear();
    if options.keep_serving && result.is_ok() {
        interrupt.await;
    }
    progress.begin("shutting down");
    let ended = daemon.shutdown.await;
    progress.clear();
    let outcome = result?;
    ended.map_err(|e| anyhow!("the daemon did not shut down cleanly: {e:#}"))?;
    Ok(outcome)
}

/// Writes the report as text, and as JSON to the file of `--report`.
fn present(
    options: &DemoOptions,
    kept: Option<PathBuf>,
    url: &str,
    findings: &Findings,
    out: &mut dyn Write,
) -> anyhow::Result<DemoOutcome> {
    let next = NextSteps {
        kept,
        serving: (options.keep_serving || options.server.is_some()).then(|| url.to_owned()),
    };
    let mut write = || {
        write!(out, "\n{}", findings.render(&next))?;
        out.flush()?;
        match &options.report {
            Some(file) => report::write_json(&findings.report, file),
            None => Ok(()),
        }
    };
    write().context("cannot write the report")?;
    let report = findings.report.clone();
    let caught = report.versions.as_ref().is_some_and(VersionHistory::caught_sabotage);
    let improved = report.improved() && (!options.sabotage || caught);
    Ok(DemoOutcome { report, improved })
}

/// Resolves at the first Ctrl-C; never if the signal cannot be received.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

/// A running daemon, known only by its URL. Tests start a fake one.
pub struct DaemonHandle {
    /// The base URL of its API, on loopback without TLS as [`config`] has it.
    pub url: String,
    /// Awaiting it shuts the daemon down.
    pub shutdown: LocalBoxFuture<'static, anyhow::Result<()>>,
}
