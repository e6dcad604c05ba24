//! A process of a fleet: what its ledger, its policies and its trainer do with the object store that the others share.
//!
//! A server ships its ledger's batches and follows the versions in the manifest. The trainer takes the batches of all
//! servers in, ships its own ledger's, and writes its versions to the manifest; of several trainers, the one that
//! holds the lease runs.

mod commands;
mod erasure;
mod link;
mod server;
mod snapshot;
mod trainer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use hone_core::metrics::Metrics;
use hone_core::types::now_ms;
use hone_fleet::bucket::{Bucket, BucketError, BucketUse};
use hone_fleet::ship::Shipper;
use hone_http::FleetLink;
use hone_store::{LEDGER, Op, Outbox, Store};
use hone_train::TrainHandle;
use hone_train::policy::{Policies, VersionAuthority};

use crate::config::{Config, FleetConfig, FleetRole};
use crate::usage;

pub(crate) use commands::{activate, init, rebuild, status};
use link::{POLL_INTERVAL, ProcessHealth, StoreOutbox, open};
use server::Follower;
use snapshot::Snapshots;
pub(crate) use trainer::Evidence;
use trainer::{ActiveTrainer, LedgerIntake, SharedLease, take_in};

/// The oldest that an unshipped batch becomes while the store answers.
const SHIP_INTERVAL: Duration = Duration::from_millis(500);
/// How often a process says how it is.
const HEALTH_INTERVAL: Duration = Duration::from_secs(5);
/// How long a process that ends waits for the store.
const FLUSH_PATIENCE: Duration = Duration::from_secs(5);

/// What a ledger of a fleet's process records for the others.
pub(crate) fn outbox_of(role: FleetRole) -> Outbox {
    match role {
        FleetRole::All => Outbox::Off,
        FleetRole::Server => Outbox::Server,
        FleetRole::Trainer => Outbox::Trainer,
    }
}

/// The parts of a process that its membership connects with the store.
pub(crate) struct MemberParts {
    pub store: Store,
    pub policies: Arc<Policies>,
    pub trainer: TrainHandle,
    pub metrics: Arc<Metrics>,
    pub evidence: Evidence,
}

/// A process that has joined: the store keeps its promises, and a trainer holds the lease and has the fleet's ledger.
pub(crate) struct Member {
    config: FleetConfig,
    bucket: Bucket,
    data: PathBuf,
    /// Whether the process had no ledger.
    is_new: bool,
    trainer: Option<ActiveTrainer>,
    /// What keeps a server from serving the fleet's version, or the trainer from reading a log.
    problem: watch::Sender<Option<String>>,
}

impl Member {
    /// Joins the fleet of the configuration; `None` without one. A trainer waits until it holds the lease.
    ///
    /// # Errors
    /// If the role and `fleet.url` do not agree, the store cannot hold a fleet, or the trainer's ledger cannot be made
    /// equal to the fleet's.
    pub async fn join(
        config: &Config,
        addr: &str,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Option<Self>> {
        let mut fleet = config.fleet.clone();
        if fleet.name.is_empty() {
            addr.clone_into(&mut fleet.name);
        }
        if fleet.role == FleetRole::All {
            let reason =
                "fleet.url is set: say what this process does with --role server or --role trainer";
            return if fleet.url.is_empty() {
                Ok(None)
            } else {
                Err(usage(anyhow::anyhow!(reason)))
            };
        }
        if fleet.url.is_empty() {
            let reason = "fleet.url is \"\": with --role it must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX";
            return Err(usage(anyhow::anyhow!(reason)));
        }
        let bucket = open(&fleet)?;
        std::fs::create_dir_all(&config.data.dir)
            .with_context(|| format!("data.dir {}", config.data.dir.display()))?;
        let data = config.data.dir.canonicalize()?;
        // With a version of its own, a server goes on while the store is away.
        let is_new = !data.join(LEDGER).exists();
        reach(&bucket, fleet.role == FleetRole::Server && !is_new).await.context("fleet.url")?;
        let trainer = match fleet.role {
            FleetRole::Trainer => {
                Some(ActiveTrainer::begin(&bucket, &data, &fleet.name, metrics).await?)
            }
            _ => None,
        };
        let problem = watch::Sender::default();
        Ok(Some(Self { config: fleet, bucket, data, is_new, trainer, problem }))
    }

    /// What the handlers of requests need.
    pub fn link(&self) -> FleetLink {
        FleetLink {
            problem: self.problem.subscribe(),
            share_erasure: erasure::sharer(&self.bucket),
        }
    }

    /// Takes operators' decisions to the manifest, in a server.
    pub fn authority(&self) -> Option<Arc<dyn VersionAuthority>> {
        let server = self.trainer.is_none();
        server
            .then(|| Arc::new(server::Authority(self.bucket.clone())) as Arc<dyn VersionAuthority>)
    }

    /// Starts the tasks. A server then serves the fleet's active version, unless the store is away and it served a
    /// version before.
    ///
    /// # Errors
    /// If the ledger cannot be read, or the fleet's version cannot be served.
    pub async fn start(self, parts: MemberParts) -> anyhow::Result<RunningMember> {
        let MemberParts { store, policies, trainer: steps, metrics, evidence } = parts;
        let log = store.outbox_state()?.context("the ledger has no outbox")?.log;
        let shipper = Arc::new(Shipper::new(self.bucket.clone(), log, StoreOutbox(store.clone())));
        let (failed, failure) = watch::channel(None);
        let (own, fail) = (Arc::clone(&shipper), failed.clone());
        let mut tasks = vec![tokio::spawn(async move {
            if let Err(error) = own.run(SHIP_INTERVAL, std::future::pending()).await {
                fail.send_replace(Some(error.to_string()));
            }
        })];
        let problems = self.problem.subscribe();
        let erasures = watch::Sender::default();
        tasks.push(tokio::spawn(erasure::follow(
            self.data.clone(),
            store.clone(),
            erasures.subscribe(),
        )));
        let (role, lease) = match self.trainer {
            Some(trainer) => {
                let lease = trainer.lease();
                let mirror =
                    trainer.mirror(&self.bucket, &self.data, &store, &policies, &shipper, erasures);
                let snapshots = Snapshots {
                    bucket: self.bucket.clone(),
                    data: self.data,
                    store: store.clone(),
                    trainer: steps,
                    shipper: Arc::clone(&shipper),
                    lease: Arc::clone(&lease),
                    metrics: Arc::clone(&metrics),
                    created: trainer.snapshot,
                };
                tasks.push(tokio::spawn(snapshots.run()));
                tasks.push(tokio::spawn(mirror.run(failed.clone())));
                tasks.push(tokio::spawn(trainer.keep_lease(failed)));
                let bucket = self.bucket.clone();
                let counted = Arc::clone(&metrics);
                tasks.push(tokio::spawn(take_in(
                    bucket,
                    LedgerIntake {
                        store: store.clone(),
                        policies: Arc::clone(&policies),
                        evidence,
                    },
                    self.problem,
                    counted,
                )));
                ("trainer", Some(lease))
            }
            None => {
                let (bucket, own) = (self.bucket.clone(), Arc::clone(&policies));
                let mut follower = Follower::new(bucket, self.data, own, self.is_new, erasures);
                follower.join().await?;
                tasks.push(tokio::spawn(follower.run(self.problem)));
                ("server", None)
            }
        };
        let health = ProcessHealth {
            role: role.to_owned(),
            name: self.config.name,
            log,
            ..ProcessHealth::default()
        };
        let reporter = Reporter {
            bucket: self.bucket,
            key: format!("servers/{log}.json"),
            health,
            store,
            shipper: Arc::clone(&shipper),
            problems,
            policies,
            metrics,
        };
        reporter.metrics.fleet_process.with_label_values(&[role]).set(1);
        tasks.push(tokio::spawn(reporter.run()));
        Ok(RunningMember { tasks, failure, shipper, lease })
    }
}

/// Tests the store, and waits for it unless the process can go on without it.
async fn reach(bucket: &Bucket, can_go_on: bool) -> Result<(), BucketError> {
    let mut waits = false;
    loop {
        match bucket.probe().await {
            Err(error) if error.is_passing() => {
                if !waits {
                    tracing::error!(%error, "the object store of the fleet does not answer");
                }
                if can_go_on {
                    return Ok(());
                }
                waits = true;
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            reached => return reached,
        }
    }
}

/// The tasks of a [`Member`].
pub(crate) struct RunningMember {
    tasks: Vec<JoinHandle<()>>,
    failure: watch::Receiver<Option<String>>,
    shipper: Arc<Shipper<StoreOutbox>>,
    lease: Option<SharedLease>,
}

impl RunningMember {
    /// Completes with the reason why the process must end: its lease was lost, or its log cannot be written.
    pub async fn failed(&mut self) -> String {
        match self.failure.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "the tasks of the fleet ended".to_owned(),
        }
    }

    /// Ships what the ledger has, for a few seconds at most, and ends the tasks.
    pub async fn stop(self) {
        let flushed = timeout(FLUSH_PATIENCE, self.shipper.ship()).await;
        if !matches!(flushed, Ok(Ok(()))) {
            tracing::warn!(
                "records wait in the ledger for the next start, because the object store is away"
            );
        }
        for task in self.tasks {
            task.abort();
            let _aborted = task.await;
        }
        // A standby need not wait for its end then.
        if let Some(lease) = self.lease.and_then(Arc::into_inner) {
            let _released = timeout(FLUSH_PATIENCE, lease.into_inner().release()).await;
        }
    }
}

/// Writes a process's health to the store and to the metrics.
struct Reporter {
    bucket: Bucket,
    key: String,
    health: ProcessHealth,
    store: Store,
    shipper: Arc<Shipper<StoreOutbox>>,
    problems: watch::Receiver<Option<String>>,
    policies: Arc<Policies>,
    metrics: Arc<Metrics>,
}

impl Reporter {
    async fn run(mut self) {
        let (started, mut known) = (Instant::now(), BucketUse::default());
        loop {
            let used = self.bucket.used();
            let answers = self.policies.take_answers();
            if !answers.is_empty()
                && let Err(error) = self.store.commit_now(vec![Op::Answers(answers)]).await
            {
                tracing::warn!(%error, "the requests of a canary are not counted");
            }
            self.look(started.elapsed(), used);
            self.count(known, used);
            known = used;
            if let Ok(json) = serde_json::to_vec(&self.health) {
                // The next report follows soon.
                let _put = self.bucket.put(&self.key, &json).await;
            }
            tokio::time::sleep(HEALTH_INTERVAL).await;
        }
    }

    fn look(&mut self, uptime: Duration, used: BucketUse) {
        let health = &mut self.health;
        health.at = self.bucket.now().unwrap_or_default();
        health.version = self.policies.active().0;
        if let Ok(Some(outbox)) = self.store.outbox_state() {
            (health.head, health.shipped) = (outbox.last, outbox.shipped);
            health.lag_ms = outbox.oldest.map_or(0, |oldest| now_ms().saturating_sub(oldest));
        }
        (health.requests, health.uptime) = (used.requests, uptime.as_secs());
        let shipping = self.shipper.state().borrow().error.clone();
        health.error = shipping.or_else(|| self.problems.borrow().clone());
    }

    fn count(&self, known: BucketUse, used: BucketUse) {
        let (metrics, health) = (&self.metrics, &self.health);
        let gauge = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        metrics.fleet_unshipped.set(gauge(health.head.saturating_sub(health.shipped)));
        metrics.fleet_lag.set(Duration::from_millis(health.lag_ms).as_secs_f64());
        metrics.fleet_failing.set(health.error.is_some().into());
        metrics.fleet_held.set(gauge(self.store.held_feedback().unwrap_or_default()));
        let (writes, reads) = (used.writes - known.writes, used.requests - known.requests);
        let failed = used.failures - known.failures;
        for (kind, count) in [("write", writes), ("read", reads - writes), ("failed", failed)] {
            metrics.fleet_store_requests.with_label_values(&[kind]).inc_by(count);
        }
        let (sent, received) = (used.sent - known.sent, used.received - known.received);
        for (direction, bytes) in [("sent", sent), ("received", received)] {
            metrics.fleet_store_bytes.with_label_values(&[direction]).inc_by(bytes);
        }
    }
}
