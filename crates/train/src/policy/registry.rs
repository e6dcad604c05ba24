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

use super::config::PolicyConfig;
use super::error::PolicyError;
use super::version_dir::{ADAPTERS, adapter_digest};

/// Reason of a version that is served because the files of its successor are unusable.
const RECOVERED: &str = "its successor's files are unusable";

/// Whether an operator activated the version.
pub(crate) fn is_activated(record: &PolicyRecord) -> bool {
    let reason = record.reason.as_deref();
    record.state == PolicyState::Active && reason.is_some_and(|reason| reason != RECOVERED)
}

/// The last activation by an operator. The trainer then continues from that version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rollback {
    /// Number of such activations since the process started; 0 before the first.
    pub count: u64,
    /// The version that is served now.
    pub version: PolicyVersion,
    /// Its PEFT directory; `None` for the base.
    pub adapter: Option<PathBuf>,
}

/// The only writer of the active version. Share it in an `Arc`.
pub struct Policies {
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) store: Store,
    pub(super) config: PolicyConfig,
    pub(super) metrics: Arc<Metrics>,
    pub(super) data_dir: PathBuf,
    /// Token ids of the prompt for the parity probe.
    pub(super) probe_prompt: Vec<TokenId>,
    active: AtomicU64,
    /// Locked while a version is staged and activated, so that there is one exchange at a time.
    pub(super) exchange: Mutex<()>,
    rollback: watch::Sender<Rollback>,
}

impl Policies {
    /// Reads the lineage and serves the version that was active last. If its files are missing or
    /// altered, its nearest servable ancestor is served instead and an error is logged.
    ///
    /// # Errors
    /// If the ledger cannot be read or written, or the engine cannot serve the base.
    pub async fn restore(
        publisher: Arc<dyn Publisher>,
        store: Store,
        config: PolicyConfig,
        metrics: Arc<Metrics>,
        data_dir: &Path,
        probe_prompt: Vec<TokenId>,
    ) -> Result<Self, PolicyError> {
        let policies = Self {
            publisher,
            store,
            config,
            metrics,
            data_dir: data_dir.to_owned(),
            probe_prompt,
            active: AtomicU64::new(0),
            exchange: Mutex::new(()),
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
            ops.extend(activation_ops(&records, served, RECOVERED));
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
    async fn load(&self, record: &PolicyRecord) -> Result<(), PolicyError> {
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

    /// The version's PEFT directory, with its digest verified; `None` for the base.
    fn adapter_dir(&self, record: &PolicyRecord) -> Result<Option<PathBuf>, PolicyError> {
        let Some(relative) = &record.adapter else { return Ok(None) };
        let dir = self.data_dir.join(relative);
        let version = record.version;
        let digest = adapter_digest(&dir).map_err(|error| {
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

    /// Changes whenever an operator activates a version.
    pub fn watch_rollback(&self) -> watch::Receiver<Rollback> {
        self.rollback.subscribe()
    }

    /// Serves an existing version at an operator's request; the trainer continues from it.
    ///
    /// # Errors
    /// [`PolicyError::Unknown`], or [`PolicyError::Unservable`] if the version was rejected or its
    /// files are missing or altered. The active version then stays.
    pub async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError> {
        let _exchange = self.exchange.lock().await;
        let records = self.list()?;
        let record =
            records.iter().find(|r| r.version == version).ok_or(PolicyError::Unknown(version))?;
        if matches!(record.state, PolicyState::Rejected | PolicyState::Candidate) {
            let reason = record.reason.clone().unwrap_or_else(|| "it was never served".to_owned());
            return Err(PolicyError::Unservable { version, reason, source: None });
        }
        if version != self.active() {
            let adapter = self.adapter_dir(record)?;
            self.load(record).await?;
            self.set_active(version);
            self.metrics.policy_rollbacks.inc();
            self.store.commit_now(activation_ops(&records, version, reason)).await?;
            self.rollback.send_modify(|r| {
                *r = Rollback { count: r.count + 1, version, adapter };
            });
            tracing::info!(%version, reason, "policy version activated");
        }
        self.store.policy(version)?.ok_or(PolicyError::Unknown(version))
    }
}

/// Ledger writes that make `version` the only active one among `records`.
pub(super) fn activation_ops(
    records: &[PolicyRecord],
    version: PolicyVersion,
    reason: &str,
) -> Vec<Op> {
    let mut ops = Vec::new();
    for record in records {
        let mut changed = record.clone();
        if record.version == version {
            changed.state = PolicyState::Active;
            changed.reason = (!reason.is_empty()).then(|| reason.to_owned());
        } else if record.state == PolicyState::Active {
            changed.state = PolicyState::Retired;
        } else {
            continue;
        }
        ops.push(Op::Policy(Box::new(changed)));
    }
    ops
}
