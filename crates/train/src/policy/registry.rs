//! The registry of versions: which one is served, which can be, and the return to an earlier one.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::{Mutex, watch};

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion, TokenId, VersionProbe};
use hone_engine::{EngineError, Publisher};
use hone_store::{AnswerCounts, Op, Store};

use super::PolicyError;
use super::canary::{Canary, CanaryStatus, VersionRating};
use super::config::PolicyConfig;
use super::gate::{Examiner, probe_difference};
use super::{ADAPTERS, KnownDigests, base_record};
use super::{RECOVERED, RELEARN, Rollback, WITHDRAWN, activation_ops, relative_dir};

/// The inputs of [`Policies`].
pub struct PolicySetup {
    /// Loads and exchanges versions.
    pub publisher: Arc<dyn Publisher>,
    /// Records versions.
    pub store: Store,
    /// The keys of `[policy]`.
    pub config: PolicyConfig,
    /// The process's Prometheus metrics.
    pub metrics: Arc<Metrics>,
    /// The directory of the adapters' directory.
    pub data_dir: PathBuf,
    /// Token ids of the prompt for the parity probe.
    pub probe_prompt: Vec<TokenId>,
    /// Completes and scores the gate's prompts; `None` leaves out drift and exam.
    pub examiner: Option<Examiner>,
    /// Number of API keys that may rate, for the ratings that earlier processes recorded during a canary.
    pub raters: usize,
    /// Who decides about versions in a server of a fleet; `None` if this process does.
    pub authority: Option<Arc<dyn VersionAuthority>>,
}

/// Takes the decisions of operators about versions to the fleet, which then decides for all of its servers.
#[async_trait]
pub trait VersionAuthority: Send + Sync {
    /// Makes a version the active one of the fleet.
    async fn activate(&self, version: PolicyVersion, reason: &str) -> Result<(), String>;

    /// Keeps the files of a version, or lets them be deleted again.
    async fn pin(&self, version: PolicyVersion, pinned: bool) -> Result<(), String>;
}

/// The only writer of the active version. Share it in an `Arc`.
pub struct Policies {
    pub(super) setup: PolicySetup,
    pub(super) canary: Canary,
    digests: KnownDigests,
    active: AtomicU64,
    /// Locked while a version is staged, examined or loaded, so that there is one at a time.
    pub(super) exchange: Mutex<()>,
    /// Locked while the active version or its record changes, after `exchange` if both are needed. It is
    /// never held while a version is loaded, so that a rollback need not wait.
    pub(super) switch: Mutex<()>,
    /// Counts requests to end a publication in progress.
    pub(super) interrupts: watch::Sender<u64>,
    /// Whether the process ends, which suspends a canary.
    pub(super) suspended: watch::Sender<bool>,
    pub(super) rollback: watch::Sender<Rollback>,
    /// The probe of the version that was examined last.
    pub(super) probe: parking_lot::Mutex<Option<(PolicyVersion, VersionProbe)>>,
}

impl Policies {
    /// Reads the lineage and serves the version that was active last. If its files are missing or
    /// altered, its nearest servable ancestor is served instead and an error is logged.
    ///
    /// # Errors
    /// If the ledger cannot be read or written, or the engine cannot serve the base.
    pub async fn restore(setup: PolicySetup) -> Result<Self, PolicyError> {
        let policies = Self {
            canary: {
                let routes = setup.examiner.iter().flat_map(|examiner| examiner.routes.iter());
                let rated = routes.filter(|route| route.has_feedback()).count();
                Canary::new(&setup.config.canary, rated, Arc::clone(&setup.metrics))
            },
            digests: KnownDigests::default(),
            setup,
            active: AtomicU64::new(0),
            exchange: Mutex::new(()),
            switch: Mutex::new(()),
            interrupts: watch::Sender::new(0),
            suspended: watch::Sender::new(false),
            rollback: watch::Sender::new(Rollback::default()),
            probe: parking_lot::Mutex::default(),
        };
        policies.reconcile().await?;
        Ok(policies)
    }

    async fn reconcile(&self) -> Result<(), PolicyError> {
        let mut records = self.list()?;
        let mut ops = Vec::new();
        if records.is_empty() {
            let base = base_record();
            ops.push(Op::Policy(Box::new(base.clone())));
            records.push(base);
        }
        for record in records.iter_mut().filter(|r| r.state == PolicyState::Candidate) {
            record.state = PolicyState::Rejected;
            record.reason = Some("interrupted before it was served".to_owned());
            ops.push(Op::Policy(Box::new(record.clone())));
        }
        let last_active = records.iter().rev().find(|r| r.state == PolicyState::Active);
        let wanted = last_active.map_or(PolicyVersion::BASE, |r| r.version);
        let served = self.load_servable(&records, wanted).await?;
        if served != wanted {
            ops.extend(activation_ops(&records, served, RECOVERED, PolicyState::Retired));
        }
        if !ops.is_empty() {
            self.setup.store.commit_now(ops).await?;
        }
        self.set_active(served);
        records.iter().for_each(|record| self.report_kl(&record.checks));
        Ok(())
    }

    /// Serves `version` or its nearest ancestor that can be served, and returns that one.
    async fn load_servable(
        &self,
        records: &[PolicyRecord],
        mut version: PolicyVersion,
    ) -> Result<PolicyVersion, PolicyError> {
        while let Some(record) = records.iter().find(|r| r.version == version) {
            match self.load(record).await {
                Ok(()) => return Ok(version),
                Err(error) if version == PolicyVersion::BASE => return Err(error),
                Err(error) => {
                    tracing::error!(%version, %error, "policy version cannot be served, trying its parent");
                    version = record.parent.unwrap_or(PolicyVersion::BASE);
                }
            }
        }
        Ok(PolicyVersion::BASE)
    }

    /// Verifies the files of a recorded version, then stages and activates it.
    pub(super) async fn load(&self, record: &PolicyRecord) -> Result<(), PolicyError> {
        let adapter = self.adapter_dir(record)?;
        self.stage(record.version, adapter.as_deref()).await?;
        self.activate_staged().await?;
        Ok(())
    }

    pub(super) async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        let start = Instant::now();
        self.setup.publisher.stage(version, adapter).await?;
        self.setup.metrics.policy_load_duration.observe(start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Makes the staged version the one that new requests get. Returns how long requests waited.
    pub(super) async fn activate_staged(&self) -> Result<Duration, EngineError> {
        let swap = self.setup.publisher.activate().await?;
        self.setup.metrics.policy_swap_duration.observe(swap.as_secs_f64());
        Ok(swap)
    }

    /// The version's PEFT directory, with its digest verified; `None` for the base.
    pub(super) fn adapter_dir(
        &self,
        record: &PolicyRecord,
    ) -> Result<Option<PathBuf>, PolicyError> {
        let Some(relative) = &record.adapter else { return Ok(None) };
        let dir = self.setup.data_dir.join(relative);
        let version = record.version;
        let digest = self.digests.of(&dir).map_err(|error| PolicyError::Unservable {
            version,
            reason: format!("its adapter cannot be read: {error}"),
        })?;
        if record.sha256.as_deref() == Some(digest.as_str()) {
            Ok(Some(dir))
        } else {
            let reason = "its adapter file is not the one that was published".to_owned();
            Err(PolicyError::Unservable { version, reason })
        }
    }

    pub(super) fn set_active(&self, version: PolicyVersion) {
        self.active.store(version.0, Ordering::Release);
        self.setup.metrics.policy_version.set(i64::try_from(version.0).unwrap_or(i64::MAX));
    }

    /// Every version, in ascending order.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError> {
        Ok(self.setup.store.policies()?)
    }

    /// The version that new requests get.
    pub fn active(&self) -> PolicyVersion {
        PolicyVersion(self.active.load(Ordering::Acquire))
    }

    /// The PEFT directory of the active version; `None` for the base.
    ///
    /// # Errors
    /// If the ledger cannot be read, or the files are missing or altered.
    pub fn active_adapter(&self) -> Result<Option<PathBuf>, PolicyError> {
        match self.setup.store.policy(self.active())? {
            Some(record) => self.adapter_dir(&record),
            None => Ok(None),
        }
    }

    /// Whether there are files of the version whose directory has this name.
    pub(crate) fn has_files(&self, name: &OsStr) -> bool {
        self.setup.data_dir.join(ADAPTERS).join(name).exists()
    }
}

// Activation of an existing version: by an operator, or because the active one is withdrawn.

impl Policies {
    /// Changes whenever an existing version is activated.
    pub fn watch_rollback(&self) -> watch::Receiver<Rollback> {
        self.rollback.subscribe()
    }

    /// Serves an existing version at an operator's request; the trainer continues from it. A
    /// publication or canary in progress ends without effect.
    ///
    /// New requests get the version when this returns. If an engine can serve it before the serving
    /// engine has loaded it, that takes milliseconds, and [`Self::settle`] loads it later.
    ///
    /// # Errors
    /// [`PolicyError::Unknown`], or [`PolicyError::Unservable`] if the version was never promoted or
    /// its files are missing or altered. The active version then stays.
    pub async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError> {
        let Some(authority) = &self.setup.authority else {
            // Samples of withdrawn versions can be trained on.
            let left =
                if reason == RELEARN { PolicyState::RolledBack } else { PolicyState::Retired };
            return self.switch_to(version, reason, left, true).await;
        };
        self.servable_record(version)?;
        authority.activate(version, reason).await.map_err(PolicyError::Authority)?;
        self.servable_record(version)
    }

    /// Rolls the active version back to its nearest ancestor that can be served, because of a warning. Does
    /// nothing if `version` is not active, or is the base.
    ///
    /// # Errors
    /// If no ancestor can be served, or the ledger cannot be written.
    pub async fn withdraw(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<Option<PolicyRecord>, PolicyError> {
        let lineage = self.setup.store.lineage();
        let reason = format!("{WITHDRAWN}: {reason}");
        for ancestor in lineage.chain(version).skip(1) {
            if self.active() != version {
                return Ok(None);
            }
            let promoted =
                self.setup.store.policy(ancestor)?.is_some_and(|r| r.state.was_promoted());
            if !promoted {
                continue;
            }
            match self.switch_to(ancestor, &reason, PolicyState::RolledBack, false).await {
                Err(PolicyError::Unservable { .. } | PolicyError::Unknown(_)) => {}
                result => return result.map(Some),
            }
        }
        Ok(None)
    }

    async fn switch_to(
        &self,
        version: PolicyVersion,
        reason: &str,
        left: PolicyState,
        by_operator: bool,
    ) -> Result<PolicyRecord, PolicyError> {
        {
            let _switch = self.switch.lock().await;
            let (record, adapter) = self.servable(version)?;
            if version == self.active() {
                // An operator who asks for the active version does not want the canary.
                self.interrupts.send_modify(|count| *count += 1);
                return Ok(record);
            }
            if self.setup.publisher.serve_now(version, adapter.as_deref()).await? {
                let served = self.switched(version, reason, left, by_operator).await;
                self.interrupts.send_modify(|count| *count += 1);
                return served;
            }
        }
        self.interrupts.send_modify(|count| *count += 1);
        // Every engine must load it first. The interrupted publication releases the engine soon.
        let _exchange = self.exchange.lock().await;
        let _switch = self.switch.lock().await;
        let (record, _) = self.servable(version)?;
        if version == self.active() {
            return Ok(record);
        }
        self.load(&record).await?;
        self.switched(version, reason, left, by_operator).await
    }

    /// The record of a version that was promoted, and its verified directory.
    fn servable(
        &self,
        version: PolicyVersion,
    ) -> Result<(PolicyRecord, Option<PathBuf>), PolicyError> {
        let record = self.servable_record(version)?;
        let adapter = self.adapter_dir(&record)?;
        Ok((record, adapter))
    }

    /// The record of a version that was promoted.
    fn servable_record(&self, version: PolicyVersion) -> Result<PolicyRecord, PolicyError> {
        let record = self.setup.store.policy(version)?.ok_or(PolicyError::Unknown(version))?;
        if record.state.was_promoted() || record.state == PolicyState::RolledBack {
            return Ok(record);
        }
        let reason = record.reason.unwrap_or_else(|| "it was never promoted".to_owned());
        Err(PolicyError::Unservable { version, reason })
    }

    /// Records that new requests get `version`, and notifies the trainer.
    pub(super) async fn switched(
        &self,
        version: PolicyVersion,
        reason: &str,
        left: PolicyState,
        by_operator: bool,
    ) -> Result<PolicyRecord, PolicyError> {
        let before = self.active();
        let recorded = async {
            let records = self.exchanged(version)?;
            let between = self.left_between(before, version, left)?;
            self.set_active(version);
            let mut ops = activation_ops(&records, version, reason, left);
            ops.extend(between);
            Ok::<_, PolicyError>(self.setup.store.commit_now(ops).await?)
        };
        if let Err(error) = recorded.await {
            self.serve_recorded(before).await;
            return Err(error);
        }
        self.setup.metrics.policy_rollbacks.inc();
        self.rollback.send_modify(|r| {
            *r = Rollback { count: r.count + 1, version, by_operator };
        });
        tracing::info!(%version, reason, "policy version activated");
        self.setup.store.policy(version)?.ok_or(PolicyError::Unknown(version))
    }

    /// The versions between the one that is left and its ancestor that is activated are withdrawn too.
    fn left_between(
        &self,
        from: PolicyVersion,
        to: PolicyVersion,
        left: PolicyState,
    ) -> Result<Vec<Op>, PolicyError> {
        let (store, lineage) = (&self.setup.store, self.setup.store.lineage());
        let mut ops = Vec::new();
        if left == PolicyState::RolledBack && lineage.age(from, to).is_some() {
            for version in lineage.chain(from).skip(1).take_while(|version| *version > to) {
                ops.extend(store.policy(version)?.map(|record| {
                    let reason = Some(format!("withdrawn with version {from}"));
                    Op::Policy(Box::new(PolicyRecord { state: left, reason, ..record }))
                }));
            }
        }
        Ok(ops)
    }

    /// After an activation that could not be recorded, serves the version that the ledger calls active, as a
    /// restart would; `before` if the ledger cannot be read.
    pub(super) async fn serve_recorded(&self, before: PolicyVersion) {
        let records = self.list().unwrap_or_default().into_iter().rev();
        let mut active = records.filter(|r| r.state == PolicyState::Active).map(|r| r.version);
        let version = active.next().unwrap_or(before);
        let dir = self.setup.data_dir.join(relative_dir(version));
        let adapter = (version != PolicyVersion::BASE).then_some(dir.as_path());
        match self.setup.publisher.serve_now(version, adapter).await {
            Ok(true) => {
                self.set_active(version);
                tracing::warn!(%version, "an activation could not be recorded: the recorded version is served");
            }
            result => tracing::error!(%version, ?result, "the recorded version cannot be served"),
        }
    }

    /// The records that the activation of `version` changes: two, or all if the ledger calls another one
    /// active.
    fn exchanged(&self, version: PolicyVersion) -> Result<Vec<PolicyRecord>, PolicyError> {
        let [before, next] =
            [self.setup.store.policy(self.active())?, self.setup.store.policy(version)?];
        match (before, next) {
            (Some(before), Some(next)) if before.state == PolicyState::Active => {
                Ok(vec![before, next])
            }
            _ => self.list(),
        }
    }

    /// Loads each activated version into the serving engine, which then takes over. Runs until the process
    /// ends.
    pub async fn settle(&self) {
        let mut rollbacks = self.rollback.subscribe();
        while rollbacks.changed().await.is_ok() {
            let _exchange = self.exchange.lock().await;
            let version = rollbacks.borrow_and_update().version;
            let Ok((_, adapter)) = self.servable(version) else { continue };
            if version != self.active() {
                continue;
            }
            if let Err(error) = self.stage(version, adapter.as_deref()).await {
                tracing::error!(%version, %error, "the serving engine cannot load the active version");
                continue;
            }
            let _switch = self.switch.lock().await;
            if version == self.active()
                && let Err(error) = self.activate_staged().await
            {
                tracing::error!(%version, %error, "the serving engine cannot take over");
            }
        }
    }

    /// Keeps a version's files until it is unpinned, or lets them be deleted again.
    ///
    /// # Errors
    /// [`PolicyError::Unknown`], [`PolicyError::Unservable`] if a pin is set and the files are gone, or
    /// an error of the ledger.
    pub async fn pin(
        &self,
        version: PolicyVersion,
        pinned: bool,
    ) -> Result<PolicyRecord, PolicyError> {
        if let Some(authority) = &self.setup.authority {
            let record = self.setup.store.policy(version)?.ok_or(PolicyError::Unknown(version))?;
            authority.pin(version, pinned).await.map_err(PolicyError::Authority)?;
            return Ok(PolicyRecord { pinned, ..record });
        }
        let _switch = self.switch.lock().await;
        let mut record = self.setup.store.policy(version)?.ok_or(PolicyError::Unknown(version))?;
        if pinned {
            self.adapter_dir(&record)?;
        }
        record.pinned = pinned;
        self.setup.store.commit_now(vec![Op::Policy(Box::new(record.clone()))]).await?;
        tracing::info!(%version, pinned, "policy version pinned or unpinned");
        Ok(record)
    }

    /// Suspends a publication in progress until the returned value is dropped. A canary continues when the same
    /// weights are published again, also after a restart.
    pub fn suspend(&self) -> Suspension<'_> {
        self.suspended.send_replace(true);
        Suspension(self)
    }
}

/// No publication makes progress while this exists.
pub struct Suspension<'a>(&'a Policies);

impl Drop for Suspension<'_> {
    fn drop(&mut self) {
        self.0.suspended.send_replace(false);
    }
}

// A server of a fleet, whose trainer decides about versions.

impl Policies {
    /// What servers compare themselves with before they serve a version that this process examined.
    pub fn probe_of(&self, version: PolicyVersion) -> Option<VersionProbe> {
        let last = self.probe.lock();
        last.as_ref().filter(|(of, _)| *of == version).map(|(_, probe)| probe.clone())
    }

    /// Records versions and serves those that the fleet's trainer chose: `active`, and to its share of the traffic
    /// `canary`. Their adapters are in the data directory. An engine that serves one version only has no canary.
    ///
    /// # Errors
    /// If the ledger cannot be written, the engine cannot load a version, or its log-probabilities differ from those of
    /// `probes`. What was served before is served then.
    pub async fn follow(
        &self,
        records: Vec<PolicyRecord>,
        active: PolicyVersion,
        canary: Option<(PolicyVersion, f64)>,
        probes: &BTreeMap<PolicyVersion, VersionProbe>,
    ) -> Result<(), PolicyError> {
        let _exchange = self.exchange.lock().await;
        let ops = records.into_iter().map(|record| Op::Policy(Box::new(record))).collect();
        self.setup.store.commit_now(ops).await?;
        let record =
            |version| self.setup.store.policy(version)?.ok_or(PolicyError::Unknown(version));
        let begun = self.canary();
        if begun.is_some()
            && (begun != canary.map(|(version, _)| version) || active != self.active())
        {
            self.canary.follow(None);
            self.setup.publisher.end_canary();
        }
        if active != self.active() {
            self.stage_probed(&record(active)?, probes).await?;
            self.activate_staged().await?;
            self.set_active(active);
            tracing::info!(version = %active, "the fleet's active version is served");
            self.prune(&self.list()?, active);
        }
        if let Some((version, share)) = canary {
            if self.canary().is_none() {
                self.stage_probed(&record(version)?, probes).await?;
                if !self.setup.publisher.begin_canary().await? {
                    return Ok(());
                }
                tracing::info!(%version, "the fleet's canary is served");
            }
            self.canary.follow(Some((version, share)));
        }
        Ok(())
    }

    /// Stages a version, and compares the engine with its probe.
    async fn stage_probed(
        &self,
        record: &PolicyRecord,
        probes: &BTreeMap<PolicyVersion, VersionProbe>,
    ) -> Result<(), PolicyError> {
        let (version, adapter) = (record.version, self.adapter_dir(record)?);
        self.stage(version, adapter.as_deref()).await?;
        let Some(probe) = probes.get(&version) else { return Ok(()) };
        let difference = probe_difference(self.setup.publisher.as_ref(), probe).await?;
        if difference <= probe.bound {
            return Ok(());
        }
        let reason = format!(
            "its log-probabilities here differ from the trainer's by {difference:.2e} nats per token, \
             more than {:.0e}: is this the trainer's model?",
            probe.bound
        );
        Err(PolicyError::Unservable { version, reason })
    }
}

// Live traffic: which version a request gets, and what its ratings and failures decide.

impl Policies {
    /// The version of the canary in progress, which is an earlier one while the active version is compared with it.
    pub fn canary(&self) -> Option<PolicyVersion> {
        self.canary.version()
    }

    /// The evidence of the canary in progress.
    pub fn canary_status(&self) -> Option<CanaryStatus> {
        self.canary.status()
    }

    /// The version that a request with this key must get; `None` is the active one. A key keeps its version
    /// throughout a canary, except that further keys join when its share rises.
    pub fn assign(&self, key: &str) -> Option<PolicyVersion> {
        self.canary.assign(key)
    }

    /// Whether this process decides about a canary in progress, for which ratings are evidence.
    pub fn counts_ratings(&self) -> bool {
        self.canary.is_running()
    }

    /// Adds a client's rating to the evidence of the canary.
    pub fn rate(&self, rating: &VersionRating) {
        self.canary.rate(rating);
    }

    /// Adds the end of a request to the same evidence: whether a version failed to answer it.
    pub fn answered(&self, version: PolicyVersion, failed: bool) {
        self.canary.answered(version, failed);
    }

    /// What ended since the last call during a canary that another process decides about.
    pub fn take_answers(&self) -> BTreeMap<PolicyVersion, AnswerCounts> {
        self.canary.take_answers()
    }
}
