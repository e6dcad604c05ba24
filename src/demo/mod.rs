//! `hone demo`: the real daemon, simulated users over real HTTP, and a report.
//!
//! Everything goes through the daemon's public HTTP surface. The composition root is handed in as
//! a closure from [`Config`] to [`Daemon`], so that tests can put a fake daemon there.
//!
//! Invariants: no held-out question is ever asked by a user; no answer to a held-out question is
//! ever trained on; no optimiser step is taken before the first evaluation has ended.

pub mod client;
pub mod config;
pub mod eval;
pub mod progress;
pub mod report;
pub mod scrape;
mod session;
pub mod sse;
pub mod tally;
pub mod task;
pub mod users;

use std::io::{IsTerminal as _, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;

use client::ClientError;
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use progress::DemoProgress;
use report::{Findings, Next};
use serde::Serialize;

use hone_rollout::SamplerKind;

use crate::config::Config;

pub use report::DemoReport;

/// `--steps` where none are given: enough to learn nearly all that there is to learn.
pub const DEFAULT_STEPS: u64 = 80;

/// Whose judgement the policy learns from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RewardsMode {
    /// Built-in graders score shadow siblings; users' thumbs count on what they were served.
    #[default]
    Both,
    /// Built-in graders alone.
    Graded,
    /// Users' thumbs alone, on one served answer a question.
    Feedback,
}

impl RewardsMode {
    /// Whether built-in graders score answers.
    pub fn has_graders(self) -> bool {
        self != Self::Feedback
    }

    /// Whether users post thumbs.
    pub fn has_thumbs(self) -> bool {
        self != Self::Graded
    }
}

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// Optimiser steps, at least 1.
    pub steps: u64,
    /// Seed of the users' questions and of the trainer.
    pub seed: u64,
    /// A new or empty directory to keep the data in; a temporary one where absent.
    pub data: Option<PathBuf>,
    /// Whether to go on serving until Ctrl-C.
    pub keep_serving: bool,
    /// Where to write the figures as JSON.
    pub report: Option<PathBuf>,
    /// Whose judgement counts.
    pub rewards: RewardsMode,
    /// What samples shadow siblings.
    pub sampler: SamplerKind,
}

impl Default for DemoOptions {
    fn default() -> Self {
        Self {
            steps: DEFAULT_STEPS,
            seed: 1,
            data: None,
            keep_serving: false,
            report: None,
            rewards: RewardsMode::default(),
            sampler: SamplerKind::default(),
        }
    }
}

/// A running daemon: where it listens and how to end it.
pub struct Daemon {
    url: String,
    shutdown: Box<dyn FnOnce() -> LocalBoxFuture<'static, anyhow::Result<()>>>,
}

impl Daemon {
    /// A daemon that listens on `addr` and ends when `shutdown`'s future is awaited.
    pub fn new<F, Fut>(addr: SocketAddr, shutdown: F) -> Self
    where
        F: FnOnce() -> Fut + 'static,
        Fut: Future<Output = anyhow::Result<()>> + 'static,
    {
        Self { url: format!("http://{addr}"), shutdown: Box::new(move || shutdown().boxed_local()) }
    }

    /// Where it answers.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Ends it.
    ///
    /// # Errors
    /// If it does not end in order.
    pub async fn shut_down(self) -> anyhow::Result<()> {
        (self.shutdown)().await
    }
}

/// What a demo came to.
#[derive(Clone, Debug)]
pub struct DemoOutcome {
    /// The figures.
    pub report: DemoReport,
    /// Whether the held-out reward rose: exit code 0, else 1.
    pub improved: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// An option that cannot be used.
    #[error("{0}")]
    Options(String),
    /// The data directory.
    #[error("data directory {dir}: {reason}")]
    Data {
        /// Which.
        dir: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The daemon did not start.
    #[error("the daemon did not start: {0:#}")]
    Start(anyhow::Error),
    /// The daemon did not end in order.
    #[error("the daemon did not shut down in order: {0:#}")]
    Shutdown(anyhow::Error),
    /// A request that the demo cannot do without.
    #[error(transparent)]
    Request(#[from] ClientError),
    /// The trainer gave up.
    #[error("the trainer failed: {0}")]
    Trainer(String),
    /// The report could not be written.
    #[error("cannot write the report: {0}")]
    Output(#[from] std::io::Error),
    /// Ctrl-C before the end.
    #[error("interrupted")]
    Interrupted,
}

/// Runs a demo from start to end: results to `out`, progress to stderr.
///
/// # Errors
/// If there is nothing to report. Failed requests and a reward that did not rise are in the
/// outcome.
pub async fn run(
    options: DemoOptions,
    start: impl AsyncFnOnce(Config) -> anyhow::Result<Daemon>,
    out: &mut dyn Write,
) -> Result<DemoOutcome, DemoError> {
    options.check()?;
    let home = Home::open(options.data.as_deref())?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut config = config::build(options.rewards, options.steps, options.seed, &home.dir, cores);
    config.rollout.sampler = options.sampler;
    home.write_config(&config)?;
    let mut progress = DemoProgress::new(std::io::stderr().is_terminal());
    let mut interrupt = pin!(interrupted());

    progress.begin("starting the daemon");
    let daemon = tokio::select! {
        daemon = start(config.clone()) => daemon.map_err(DemoError::Start)?,
        () = &mut interrupt => return Err(DemoError::Interrupted),
    };
    let result = tokio::select! {
        findings = session::conduct(&options, &config, &daemon.url, &mut progress) => {
            findings.and_then(|found| present(&options, &home, &daemon.url, &found, out))
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

/// Writes the report for people, and for machines where asked to.
fn present(
    options: &DemoOptions,
    home: &Home,
    url: &str,
    findings: &Findings,
    out: &mut dyn Write,
) -> Result<DemoOutcome, DemoError> {
    let next = Next {
        kept: (!home.temporary).then(|| home.dir.clone()),
        serving: options.keep_serving.then(|| url.to_owned()),
    };
    write!(out, "\n{}", findings.render(&next))?;
    out.flush()?;
    if let Some(file) = &options.report {
        report::write_json(&findings.report, file)?;
    }
    Ok(DemoOutcome { report: findings.report.clone(), improved: findings.improved() })
}

impl DemoOptions {
    /// What would only be noticed minutes later otherwise.
    fn check(&self) -> Result<(), DemoError> {
        if self.steps == 0 {
            return Err(DemoError::Options("--steps is 0; it must be at least 1".to_owned()));
        }
        let Some(file) = &self.report else { return Ok(()) };
        let parent = match file.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        if file.is_dir() || !parent.is_dir() {
            let file = file.display();
            return Err(DemoError::Options(format!(
                "--report {file}: it must be a file in a directory that exists"
            )));
        }
        Ok(())
    }
}

/// Resolves at the first Ctrl-C; never where signals cannot be heard.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

/// The data directory; a temporary one goes when this does.
struct Home {
    dir: PathBuf,
    temporary: bool,
}

impl Home {
    /// A demo begins at the base model, so its directory must be new or empty.
    fn open(data: Option<&Path>) -> Result<Self, DemoError> {
        let name = format!("hone-demo-{}", uuid::Uuid::now_v7().simple());
        let dir = data.map_or_else(|| std::env::temp_dir().join(name), Path::to_owned);
        let wrong = |reason: String| DemoError::Data { dir: dir.clone(), reason };
        std::fs::create_dir_all(&dir).map_err(|e| wrong(e.to_string()))?;
        let mut entries = std::fs::read_dir(&dir).map_err(|e| wrong(e.to_string()))?;
        if entries.next().is_some() {
            return Err(wrong(
                "is not empty; a demo starts afresh, so name a new one (`hone serve --data` \
                 goes on with an old one)"
                    .to_owned(),
            ));
        }
        let full = dir.canonicalize().map_err(|e| wrong(e.to_string()))?;
        Ok(Self { dir: full, temporary: data.is_none() })
    }

    /// Leaves the configuration with which `hone serve` goes on from here.
    fn write_config(&self, demo: &Config) -> Result<(), DemoError> {
        let wrong = |reason: String| DemoError::Data { dir: self.dir.clone(), reason };
        let text = toml::to_string(&config::to_serve(demo)).map_err(|e| wrong(e.to_string()))?;
        std::fs::write(self.dir.join(report::SERVE_FILE), text).map_err(|e| wrong(e.to_string()))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if self.temporary {
            // What cannot be removed is left to the system's own cleaning.
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_directory_goes_and_a_named_one_stays() {
        let home = Home::open(None).unwrap();
        let dir = home.dir.clone();
        std::fs::write(dir.join("ledger"), "x").unwrap();
        drop(home);
        assert!(!dir.exists());

        let parent = tempfile::tempdir().unwrap();
        let named = parent.path().join("a/b");
        drop(Home::open(Some(&named)).unwrap());
        assert!(named.is_dir());
        std::fs::write(named.join("ledger"), "x").unwrap();
        let error = Home::open(Some(&named)).err().unwrap().to_string();
        assert!(error.contains("is not empty"), "{error}");
    }

    #[test]
    fn useless_options_are_refused_at_once() {
        let parent = tempfile::tempdir().unwrap();
        let with = |steps, report: Option<PathBuf>| {
            DemoOptions { steps, report, ..DemoOptions::default() }.check()
        };
        assert!(with(1, None).is_ok());
        assert!(with(1, Some("report.json".into())).is_ok());
        assert!(with(1, Some(parent.path().join("report.json"))).is_ok());
        assert!(with(0, None).unwrap_err().to_string().contains("--steps is 0"));
        assert!(with(1, Some(parent.path().to_owned())).is_err());
        assert!(with(1, Some(parent.path().join("no/report.json"))).is_err());
    }
}
