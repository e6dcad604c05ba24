//! The registry of versions: which one is served, which can be, and rollback to an earlier one.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, watch};

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion, TokenId, now_ms};
use hone_engine::{EngineError, Publisher};
use hone_store::{Op, Store};

use super::PolicyError;
use super::canary::Canary;
use super::config::PolicyConfig;
use super::gate::Examiner;
use super::guard::ActiveGuard;
use super::{ADAPTERS, KnownDigests};
use super::{RECOVERED, Rollback, activation_ops};

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
}

/// The only writer of the active version. Share it in an `Arc`.
pub struct Policies {
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) store: Store,
    pub(super) config: PolicyConfig,
    pub(super) metrics: Arc<Metrics>,
    pub(super) data_dir: PathBuf,
    pub(super) probe_prompt: Vec<TokenId>,
    pub(super) examiner: Option<Examiner>,
    pub(super) canary: Canary,
    pub(super) guard: ActiveGuard,
    digests: KnownDigests,
    active: AtomicU64,
    /// Locked while a version is staged, examined or loaded, so that there is one at a time.
    pub(super) exchange: Mutex<()>,
    /// Locked while the active version or its record changes. Taken after `exchange` if both are
    /// needed. It is never held while a version is loaded, so that a rollback need not wait.
    pub(super) switch: Mutex<()>,
    /// Counts requests to end a publication in progress.
    pub(super) interrupts: watch::Sender<u64>,
    /// Whether the process ends, which suspends a canary.
    pub(super) suspended: watch::Sender<bool>,
    pub(super) rollback: watch::Sender<Rollback>,
}

impl Policies {
    /// Reads the lineage and serves the version that was active last. If its files are missing or
    /// altered, its nearest servable ancestor is served instead and an error is logged.
    ///
    /// # Errors
    /// If the ledger cannot be read or written, or the engine cannot serve the base.
    pub async fn restore(setup: PolicySetup) -> Result<Self, PolicyError> {
        let PolicySetup { publisher, store, config, metrics, data_dir, probe_prompt, examiner } =
            setup;
        let policies = Self {
            canary: Canary::new(&config.canary, Arc::clone(&metrics)),
            guard: ActiveGuard::new(&config.rollback),
            digests: KnownDigests::default(),
            publisher,
            store,
            config,
            metrics,
            data_dir,
            probe_prompt,
            examiner,
            active: AtomicU64::new(0),
            exchange: Mutex::new(()),
            switch: Mutex::new(()),
            interrupts: watch::Sender::new(0),
            suspended: watch::Sender::new(false),
            rollback: watch::Sender::new(Rollback::default()),
        };
        policies.reconcile().await?;
        Ok(policies)
    }

    /// Reconciles ledger and engine at startup.
    async fn reconcile(&self) -> Result<(), PolicyError> {
        let mut records = self.list()?;
        let mut ops = Vec::new();
        if records.is_empty() {
            let base = PolicyRecord {
                version: PolicyVersion::BASE,
                parent: None,
                step: 0,
                adapter: None,
                sha256: None,
                metrics: std::collections::BTreeMap::new(),
                state: PolicyState::Active,
                reason: None,
                created: now_ms(),
                pinned: false,
                checks: Vec::new(),
            };
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
            self.store.commit_now(ops).await?;
        }
        self.set_active(served);
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
        self.publisher.stage(version, adapter).await?;
        self.metrics.policy_load_duration.observe(start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Makes the staged version the one that new requests get. Returns how long requests waited.
    pub(super) async fn activate_staged(&self) -> Result<Duration, EngineError> {
        let swap = self.publisher.activate().await?;
        self.metrics.policy_swap_duration.observe(swap.as_secs_f64());
        Ok(swap)
    }

    /// The version's PEFT directory, with its digest verified; `None` for the base. The file is read again
    /// only if it has changed.
    pub(super) fn adapter_dir(
        &self,
        record: &PolicyRecord,
    ) -> Result<Option<PathBuf>, PolicyError> {
        let Some(relative) = &record.adapter else { return Ok(None) };
        let dir = self.data_dir.join(relative);
        let version = record.version;
        let digest = self.digests.of(&dir).map_err(|error| {
            let reason = format!("its adapter cannot be read: {error}");
            PolicyError::Unservable { version, reason, source: Some(error) }
        })?;
        if record.sha256.as_deref() == Some(digest.as_str()) {
            Ok(Some(dir))
        } else {
            let reason = "its adapter file is not the one that was published".to_owned();
            Err(PolicyError::Unservable { version, reason, source: None })
        }
    }

    pub(super) fn set_active(&self, version: PolicyVersion) {
        self.active.store(version.0, Ordering::Release);
        self.metrics.policy_version.set(i64::try_from(version.0).unwrap_or(i64::MAX));
    }

    /// Every version, in ascending order.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError> {
        Ok(self.store.policies()?)
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
        match self.store.policy(self.active())? {
            Some(record) => self.adapter_dir(&record),
            None => Ok(None),
        }
    }

    /// Whether there are files of the version whose directory has this name.
    pub(crate) fn has_files(&self, name: &OsStr) -> bool {
        self.data_dir.join(ADAPTERS).join(name).exists()
    }
}
