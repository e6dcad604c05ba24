//! The daemon: `Core` served over HTTP.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use hone_core::files::replace_file;
use hone_core::memory;
use hone_core::metrics::Metrics;
use hone_core::types::now_ms;
use hone_engine::Engine;
use hone_http::{AppState, DiskLimit, KeyRing, LearningLimits, Startup, Tls};
use hone_reward::kinds::RewardKind;
use hone_reward::routes::{RewardConfig, RouteConfig};
use hone_store::{FeedbackEntry, Store};
use hone_train::TrainHandle;
use hone_train::monitoring::warnings::{
    HealthMonitor, MonitorState, Warning, WarningAction, WarningKind,
};
use hone_train::policy::{Policies, Promotion};

use super::core::Core;
use crate::config::{Config, ConfigError, FleetRole, ServerConfig};
use crate::fleet::{Member, MemberParts, RunningMember};
use crate::tracker::{RunStatus, Tracker};
use crate::usage;

/// A running daemon.
pub struct Service {
    /// Address on which it listens.
    pub addr: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<std::io::Result<()>>,
    monitor: JoinHandle<()>,
    trimmer: JoinHandle<()>,
    core: Core,
    /// What the process does in a fleet.
    member: Option<RunningMember>,
    tracker: Option<Tracker>,
    keys: Arc<KeyRing>,
    tls: Arc<Tls>,
    /// `server.shutdown_grace_seconds`.
    grace: Duration,
}

/// Starts the configured daemon and returns when it answers requests. Probes are answered as soon as the
/// address is bound.
///
/// # Errors
/// If a key or the certificate is invalid, no key protects an address beyond loopback, the address is in use, or a
/// part of the daemon cannot be started.
pub async fn start(mut config: Config) -> anyhow::Result<Service> {
    let keys = Arc::new(KeyRing::load(&config.server).map_err(usage)?);
    let tls = Arc::new(Tls::load(&config.server.tls).map_err(usage)?);
    let listener = TcpListener::bind(config.server.bind)
        .await
        .with_context(|| format!("server.bind {}", config.server.bind))?;
    let addr = listener.local_addr()?;
    let metrics = Arc::new(Metrics::new()?);
    let ready = Arc::new(AtomicBool::new(true));
    let server_config = Arc::new(config.server.clone());
    let startup = Startup::new(Arc::clone(&server_config), Arc::clone(&metrics), ready.clone())
        .with_tls(Arc::clone(&tls));
    let (stop, stopped) = oneshot::channel();
    let stopped = async {
        // An error means that the `Service` was dropped, or that the start failed, which stops the server
        // too.
        let _dropped = stopped.await;
    };
    let server = tokio::spawn(hone_http::serve(listener, startup.clone(), stopped));
    tracing::info!(%addr, "listening while the model is loading");
    let holdout_share = holdout_share(&config);
    let learns = config.train.enabled;
    if config.fleet.role == FleetRole::Server {
        // The trainer learns, also from the dataset.
        config.train.enabled = false;
        config.dataset.path = PathBuf::new();
    }
    let member = Member::join(&config, &addr.to_string(), &metrics).await?;
    super::fetch_dataset(&mut config).await?;
    let authority = member.as_ref().and_then(Member::authority);
    let core = Core::start(&config, metrics, authority, keys.raters()).await?;
    let state = Arc::new(AppState {
        engine: core.engine.clone(),
        store: core.store.clone(),
        routes: core.routes.clone(),
        graders: core.backends.clone(),
        rollout: Some(Arc::new(core.rollout.clone())),
        policies: core.policies.clone(),
        train: Arc::new(core.trainer()),
        learning: LearningLimits {
            enabled: learns,
            max_staleness: config.train.feedback_max_staleness,
            correction_weight: config.train.correction_weight,
        },
        metrics: core.metrics.clone(),
        holdout_share,
        fleet: member.as_ref().map(Member::link),
        config: server_config,
        recent_turns: Default::default(),
        keys: Arc::clone(&keys),
        disk: DiskLimit {
            dir: config.data.dir.clone(),
            min_free: config.data.min_free_bytes,
            retention: config.store.retention,
        },
        ready,
        started: now_ms(),
    });
    let member = match member {
        Some(member) => {
            let own = Arc::clone(&state);
            let evidence = Arc::new(move |entry: &FeedbackEntry, sample| {
                hone_http::count_evidence(&own, entry, sample);
            });
            let parts = MemberParts {
                store: core.store.clone(),
                policies: core.policies.clone(),
                trainer: core.trainer(),
                metrics: core.metrics.clone(),
                evidence,
            };
            Some(member.start(parts).await?)
        }
        None => None,
    };
    startup.finish(state);
    let monitor = tokio::spawn(
        StepWatch {
            store: core.store.clone(),
            metrics: core.metrics.clone(),
            policies: core.policies.clone(),
            trainer: core.trainer(),
            actions: config.run.warnings.actions.clone(),
            state: config.data.dir.join("monitor.json"),
        }
        .run(config.clone()),
    );
    let trimmer = tokio::spawn(trim_memory());
    let model = &core.engine.info().name;
    let tracker = Tracker::start(&config, ("hone serve", model), Some(&core.store), &core.metrics)?;
    let data = config.data.dir.display();
    report_deciders(&config, keys.raters());
    tracing::info!(%addr, %model, %data, "ready");
    let grace = Duration::from_secs(config.server.shutdown_grace_seconds);
    Ok(Service { addr, stop, server, monitor, trimmer, core, member, tracker, keys, tls, grace })
}

/// Says if the ratings of one API key can decide about versions. Operators may expect more than one opinion.
fn report_deciders(config: &Config, keys: usize) {
    let takes_any_share = |part: &RewardConfig| match &part.kind {
        RewardKind::Feedback(params) => keys < 2 || params.max_key_share >= 1.0,
        _ => false,
    };
    let ratings_decide = config.policy.promotion == Promotion::Canary;
    let mut parts = config.routes.0.iter().flat_map(RouteConfig::parts);
    if config.train.enabled && ratings_decide && parts.any(|part| takes_any_share(&part)) {
        tracing::warn!(
            keys,
            "the ratings of any API key decide about versions while no other key rates: see \
             max_key_share in docs/safety.md"
        );
    }
}

/// How often freed memory is returned to the system.
const TRIM_INTERVAL: Duration = Duration::from_secs(30);

/// Returns freed memory to the system from time to time. Runs until it is aborted.
async fn trim_memory() {
    loop {
        tokio::time::sleep(TRIM_INTERVAL).await;
        // Not at a background priority: other threads may wait for a lock of the allocator meanwhile.
        let trimmed = tokio::task::spawn_blocking(|| {
            let started = Instant::now();
            memory::trim_unused().map(|bytes| (bytes, started.elapsed()))
        });
        if let Ok(Some((bytes, took))) = trimmed.await {
            tracing::debug!(bytes, ?took, "freed memory was returned to the system");
        }
    }
}

/// The share of live prompts to hold out: none if no exam uses them.
fn holdout_share(config: &Config) -> f64 {
    let gate = &config.policy.gate;
    let has_exam = config.train.enabled
        && config.policy.promotion != Promotion::Direct
        && gate.prompts > 0
        && gate.exam_file.is_empty();
    if has_exam { gate.holdout_share } else { 0.0 }
}

impl Service {
    /// The engine that answers clients.
    pub fn engine(&self) -> Arc<dyn Engine> {
        self.core.engine.clone()
    }

    /// The ledger.
    pub fn store(&self) -> &Store {
        &self.core.store
    }

    /// The URL of the server.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_enabled() { "https" } else { "http" };
        format!("{scheme}://{}", self.addr)
    }

    /// Replaces the API keys and the certificate by those of `config`, whose other values are not used. Running
    /// requests and open connections continue. Returns the number of keys.
    ///
    /// # Errors
    /// If a key or the certificate is invalid, or no key would protect an address beyond loopback. Keys and
    /// certificate then stay as they are.
    pub fn reload(&self, config: &ServerConfig) -> Result<usize, ConfigError> {
        let files = self.tls.read_again(&config.tls)?;
        let keys = self.keys.reload(config)?;
        self.tls.replace(files);
        Ok(keys)
    }

    /// Completes with the reason why the process must end, such as a trainer's lost lease.
    pub async fn failed(&mut self) -> String {
        match &mut self.member {
            Some(member) => member.failed().await,
            None => std::future::pending().await,
        }
    }

    /// Shuts the daemon down without losing an acknowledged record. Running requests and the trainer's
    /// step together have `server.shutdown_grace_seconds` to finish.
    ///
    /// # Errors
    /// If the server failed or the ledger cannot be closed. Either way, all phases run.
    pub async fn shutdown(self) -> anyhow::Result<()> {
        let started = Instant::now();
        tracing::info!("shutdown 1/4: no new requests, running ones finish");
        // An error means that the server has ended already.
        let _ended = self.stop.send(()).is_err();
        self.monitor.abort();
        self.trimmer.abort();
        let served = self.server.await;
        if let Some(member) = self.member {
            member.stop().await;
        }
        if let Some(tracker) = self.tracker {
            tracker.finish(RunStatus::Finished).await;
        }
        let closed = self.core.shutdown(self.grace.saturating_sub(started.elapsed())).await;
        served??;
        closed
    }
}

/// Installs the handlers of Ctrl-C and SIGTERM. The future completes on the first of these signals.
///
/// # Errors
/// If a handler cannot be installed.
pub fn shutdown_signal() -> std::io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};

        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        Ok(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        })
    }
    #[cfg(not(unix))]
    Ok(async {
        // If the signal cannot be handled, it ends the process.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
}

/// Receives SIGHUP, which then no longer ends the process.
pub struct ReloadSignal(#[cfg(unix)] tokio::signal::unix::Signal);

impl ReloadSignal {
    /// Installs the handler.
    pub fn new() -> std::io::Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};

            Ok(Self(signal(SignalKind::hangup())?))
        }
        #[cfg(not(unix))]
        Ok(Self())
    }

    /// Completes on the next SIGHUP, and never on systems without it.
    pub async fn recv(&mut self) {
        #[cfg(unix)]
        if self.0.recv().await.is_some() {
            return;
        }
        std::future::pending().await
    }
}

// Watches the trainer's steps for warnings, and acts on them.

/// Interval at which the ledger is polled for new steps.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The parts that warnings concern.
pub(super) struct StepWatch {
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub policies: Arc<Policies>,
    pub trainer: TrainHandle,
    /// What to do when a warning begins.
    pub actions: BTreeMap<String, WarningAction>,
    /// File with the monitor's state, so that a restart neither forgets the first steps, which later
    /// ones are compared with, nor repeats a warning.
    pub state: PathBuf,
}

impl StepWatch {
    /// Watches every step from the last one that was watched.
    pub async fn run(self, config: Config) {
        let saved = self.saved();
        let last_step = || self.store.last_step().ok().flatten().map_or(0, |last| last.step);
        let mut seen = saved.as_ref().map_or_else(last_step, MonitorState::last_step);
        let mut monitor = config.health_monitor(saved.unwrap_or_default());
        let mut halvings = halvings_of(&self.actions, monitor.state());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            // Read errors are ignored here; callers that need the ledger report them.
            let records = self.store.steps(seen + 1, 64).unwrap_or_default();
            if records.is_empty() {
                continue;
            }
            for record in records {
                seen = record.step;
                for warning in monitor.observe(&record, &self.metrics) {
                    self.act(&warning).await;
                }
                let wanted = halvings_of(&self.actions, monitor.state());
                if wanted != std::mem::replace(&mut halvings, wanted)
                    && let Err(error) = self.trainer.lower_rate(wanted)
                {
                    tracing::error!(%error, "the learning rate cannot be changed");
                }
            }
            self.save(&monitor);
        }
    }

    async fn act(&self, warning: &Warning) {
        let kind = warning.kind.as_str();
        let done = match self.actions.get(kind).copied().unwrap_or_default() {
            // The rate follows the warnings in progress.
            WarningAction::Log | WarningAction::LowerRate => return,
            WarningAction::Pause => self.trainer.pause().map_err(|e| e.to_string()),
            WarningAction::RollBack => {
                let reason = format!("{kind}: {}", warning.message);
                let active = self.policies.active();
                let withdrawn = self.policies.withdraw(active, &reason).await;
                withdrawn.map(drop).map_err(|e| e.to_string())
            }
        };
        match done {
            Ok(()) => tracing::warn!(kind, "the action of the warning was taken"),
            Err(error) => tracing::error!(kind, error, "the action of the warning failed"),
        }
    }

    /// The state that an earlier process saved; `None` if it is missing or unreadable.
    fn saved(&self) -> Option<MonitorState> {
        let bytes = std::fs::read(&self.state).ok()?;
        let warn = |error| {
            tracing::warn!(%error, file = %self.state.display(), "warnings begin from this start");
        };
        serde_json::from_slice(&bytes).map_err(warn).ok()
    }

    fn save(&self, monitor: &HealthMonitor) {
        let written = serde_json::to_vec(monitor.state())
            .map_err(|error| error.to_string())
            .and_then(|text| replace_file(&self.state, &text).map_err(|error| error.to_string()));
        if let Err(error) = written {
            tracing::warn!(error, "the state of the warnings is not saved");
        }
    }
}

/// How many warnings in progress halve the learning rate. An episode that ended halves it no longer, because the rate would
/// fall to nothing over a year of episodes.
fn halvings_of(actions: &BTreeMap<String, WarningAction>, state: &MonitorState) -> u32 {
    let lowers = |kind: &WarningKind| actions.get(kind.as_str()) == Some(&WarningAction::LowerRate);
    u32::try_from(state.active().filter(lowers).count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use hone_core::types::StepRecord;

    use super::*;

    #[test]
    fn a_warning_halves_the_learning_rate_while_it_lasts() {
        let config =
            crate::config::parse("[run.warnings]\nactions = { kl_explosion = 'lower_rate' }")
                .unwrap();
        let (actions, metrics) = (&config.run.warnings.actions, Metrics::new().unwrap());
        let mut monitor = config.health_monitor(MonitorState::default());
        let mut after = |steps: std::ops::Range<u64>, kl: f64| {
            for step in steps {
                let metrics_of = BTreeMap::from([("kl".to_owned(), kl)]);
                let record =
                    StepRecord { step, metrics: metrics_of, groups: Vec::new(), created: 0 };
                monitor.check(&record, &metrics);
            }
            halvings_of(actions, monitor.state())
        };
        assert_eq!(after(1..20, 0.01), 0);
        assert_eq!(after(20..40, 5.0), 1);
        assert_eq!(after(40..80, 0.01), 0);
        // The next episode starts from the full rate again.
        assert_eq!(after(80..100, 5.0), 1);
    }
}
