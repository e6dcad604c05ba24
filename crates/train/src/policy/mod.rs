//! Versions and lineage: writes PEFT files, gates, publishes, rolls back.
//!
//! Invariants: a version's number is used once; its files are whole before the ledger names them;
//! what the ledger calls active is what new requests get, or was until the last crash.

mod config;
mod files;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tokio::sync::{Mutex, watch};

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion, SamplingParams, TokenId, now_ms};
use hone_engine::{EngineError, Publisher};
use hone_store::{Op, Store, StoreError};

pub use config::PolicyConfig;
pub use files::sha256 as adapter_digest;

/// What can go wrong with a version.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// No such version.
    #[error("there is no policy version {0}")]
    Unknown(PolicyVersion),
    /// It was rejected or its files are gone.
    #[error("policy version {version} cannot be served: {reason}")]
    Unservable {
        /// Which.
        version: PolicyVersion,
        /// Why.
        reason: String,
    },
    /// Files.
    #[error("{0}")]
    Files(String),
    /// The engine refused it.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The ledger refused it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// New weights on offer, as the trainer holds them.
pub trait Candidate {
    /// Writes `adapter_config.json` and `adapter_model.safetensors` into an existing directory.
    fn write(&self, dir: &Path) -> Result<(), String>;

    /// Natural-log probabilities that these weights give to `ids` after `prompt_ids`, at
    /// `temperature`: one for each of `ids`.
    fn score(
        &self,
        prompt_ids: &[TokenId],
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>, String>;
}

/// What became of a candidate.
#[derive(Clone, Debug)]
pub enum PublishOutcome {
    /// New requests get it.
    Published(PolicyRecord),
    /// It was never served; the record's `reason` says why.
    Rejected(PolicyRecord),
    /// Another version than its parent is served by now: it was not even written.
    Overruled,
}

/// A version that was activated by hand: the trainer goes on from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rollback {
    /// Counts activations by hand; 0 is none yet.
    pub count: u64,
    /// The version now served.
    pub version: PolicyVersion,
    /// Its PEFT directory; `None` is the base.
    pub adapter: Option<PathBuf>,
}

/// The one place that changes what is served. Share it behind an `Arc`.
pub struct Policies {
    publisher: Arc<dyn Publisher>,
    store: Store,
    config: PolicyConfig,
    metrics: Arc<Metrics>,
    data_dir: PathBuf,
    /// Ids of the prompt that the parity probe asks.
    probe_prompt: Vec<TokenId>,
    active: AtomicU64,
    /// Held while a version is staged and activated: one publication at a time.
    publishing: Mutex<()>,
    rollback: watch::Sender<Rollback>,
}

impl Policies {
    /// Reads the lineage and serves what was active last. Where its files are missing or altered,
    /// its nearest servable ancestor is served instead, and the log says so.
    ///
    /// # Errors
    /// If the ledger cannot be read or written or the engine cannot serve the base.
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
            publishing: Mutex::new(()),
            rollback: watch::Sender::new(Rollback::default()),
        };
        policies.reconcile().await?;
        Ok(policies)
    }

    /// Brings ledger and engine to one opinion after a start.
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
            };
            ops.push(Op::Policy(Box::new(base.clone())));
            records.push(base);
        }
        for record in &mut records {
            if record.state == PolicyState::Candidate {
                record.state = PolicyState::Rejected;
                record.reason = Some("interrupted before it was served".to_owned());
                ops.push(Op::Policy(Box::new(record.clone())));
            }
        }
        let wanted = records
            .iter()
            .rev()
            .find(|r| r.state == PolicyState::Active)
            .map_or(PolicyVersion::BASE, |r| r.version);
        let mut version = wanted;
        let served = loop {
            let Some(record) = records.iter().find(|r| r.version == version) else {
                break PolicyVersion::BASE;
            };
            match self.load(record).await {
                Ok(()) => break version,
                Err(error) if version != PolicyVersion::BASE => {
                    tracing::error!(%version, %error, "policy version cannot be served, trying its parent");
                    version = record.parent.unwrap_or(PolicyVersion::BASE);
                }
                Err(error) => return Err(error),
            }
        };
        if served != wanted {
            ops.extend(Self::exchange_states(
                &records,
                served,
                "its successor's files are unusable",
            ));
        }
        if !ops.is_empty() {
            self.store.commit_now(ops).await?;
        }
        self.served(served);
        Ok(())
    }

    /// Stages and activates a recorded version, its files checked.
    async fn load(&self, record: &PolicyRecord) -> Result<(), PolicyError> {
        let adapter = self.adapter_dir(record)?;
        let start = Instant::now();
        self.publisher.stage(record.version, adapter.as_deref()).await?;
        self.metrics.policy_load_duration.observe(start.elapsed().as_secs_f64());
        let held = self.publisher.activate().await?;
        self.metrics.policy_swap_duration.observe(held.as_secs_f64());
        Ok(())
    }

    /// The version's PEFT directory, found whole; `None` for the base.
    fn adapter_dir(&self, record: &PolicyRecord) -> Result<Option<PathBuf>, PolicyError> {
        let Some(relative) = &record.adapter else { return Ok(None) };
        let dir = self.data_dir.join(relative);
        let unservable =
            |reason: String| PolicyError::Unservable { version: record.version, reason };
        let found = files::sha256(&dir)
            .map_err(|error| unservable(format!("its adapter cannot be read: {error}")))?;
        if record.sha256.as_deref() == Some(found.as_str()) {
            Ok(Some(dir))
        } else {
            Err(unservable("its adapter file is not the one that was published".to_owned()))
        }
    }

    fn served(&self, version: PolicyVersion) {
        self.active.store(version.0, Ordering::Release);
        self.metrics.policy_version.set(i64::try_from(version.0).unwrap_or(i64::MAX));
    }

    /// Ledger writes that make `version` the only active one.
    fn exchange_states(records: &[PolicyRecord], version: PolicyVersion, reason: &str) -> Vec<Op> {
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

    /// Every version, in order.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError> {
        Ok(self.store.policies()?)
    }

    /// The version being served.
    pub fn active(&self) -> PolicyVersion {
        PolicyVersion(self.active.load(Ordering::Acquire))
    }

    /// The PEFT directory of the version being served; `None` is the base.
    ///
    /// # Errors
    /// If the ledger cannot be read or the files are gone.
    pub fn active_adapter(&self) -> Result<Option<PathBuf>, PolicyError> {
        match self.store.policy(self.active())? {
            Some(record) => self.adapter_dir(&record),
            None => Ok(None),
        }
    }

    /// Tells when a version is activated by hand.
    pub fn watch_rollback(&self) -> watch::Receiver<Rollback> {
        self.rollback.subscribe()
    }

    /// Serves a version that exists; the trainer goes on from it.
    ///
    /// # Errors
    /// [`PolicyError::Unknown`], or [`PolicyError::Unservable`] for a version that was rejected or
    /// whose files are gone; then nothing changes.
    pub async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError> {
        let _publishing = self.publishing.lock().await;
        let records = self.list()?;
        let record =
            records.iter().find(|r| r.version == version).ok_or(PolicyError::Unknown(version))?;
        if matches!(record.state, PolicyState::Rejected | PolicyState::Candidate) {
            let reason = record.reason.clone().unwrap_or_else(|| "it was never served".to_owned());
            return Err(PolicyError::Unservable { version, reason });
        }
        if version != self.active() {
            let adapter = self.adapter_dir(record)?;
            self.load(record).await?;
            self.served(version);
            self.metrics.policy_rollbacks.inc();
            self.store.commit_now(Self::exchange_states(&records, version, reason)).await?;
            self.rollback.send_modify(|r| {
                *r = Rollback { count: r.count + 1, version, adapter };
            });
            tracing::info!(%version, reason, "policy version activated");
        }
        self.store.policy(version)?.ok_or(PolicyError::Unknown(version))
    }

    /// Writes, gates and publishes new weights.
    ///
    /// The gate of this version is parity: the staged engine samples from a fixed prompt, and the
    /// candidate must give those tokens the same log-probabilities, in the mean within
    /// `policy.parity_tolerance`. A rejected version is recorded and never served. A candidate whose
    /// `parent` is no longer the active version is given up: what was activated by hand stays.
    ///
    /// # Errors
    /// If files, engine or ledger fail; what is served has not changed then.
    pub async fn propose(
        &self,
        candidate: &dyn Candidate,
        parent: PolicyVersion,
        step: u64,
        metrics: std::collections::BTreeMap<String, f64>,
    ) -> Result<PublishOutcome, PolicyError> {
        let _publishing = self.publishing.lock().await;
        if parent != self.active() {
            tracing::info!(%parent, active = %self.active(), step, "weights are not published: overruled");
            return Ok(PublishOutcome::Overruled);
        }
        let records = self.list()?;
        let next = records.last().map_or(1, |r| r.version.0 + 1);
        let version = PolicyVersion(next);
        let relative = files::relative_dir(version);
        let mut record = PolicyRecord {
            version,
            parent: Some(parent),
            step,
            adapter: Some(relative.clone()),
            sha256: None,
            metrics,
            state: PolicyState::Candidate,
            reason: None,
            created: now_ms(),
        };
        let dir = self.data_dir.join(relative);
        record.sha256 = Some(files::write(&dir, candidate, &record)?);
        self.store.commit_now(vec![Op::Policy(Box::new(record.clone()))]).await?;

        let start = Instant::now();
        self.publisher.stage(version, Some(&dir)).await?;
        self.metrics.policy_load_duration.observe(start.elapsed().as_secs_f64());

        let difference = self.parity(candidate, version).await?;
        record.metrics.insert("parity_logprob_difference".to_owned(), difference);
        self.metrics.policy_parity_difference.set(difference);
        if difference.is_nan() || difference > self.config.parity_tolerance {
            record.state = PolicyState::Rejected;
            record.reason = Some(format!(
                "parity: served and trained log-probabilities differ by {difference:.2e} in the \
                 mean, more than policy.parity_tolerance {:.2e}",
                self.config.parity_tolerance
            ));
            self.metrics.policy_rejected.with_label_values(&["parity"]).inc();
            self.store.commit_now(vec![Op::Policy(Box::new(record.clone()))]).await?;
            tracing::error!(%version, difference, "policy version rejected by the parity gate");
            return Ok(PublishOutcome::Rejected(record));
        }

        let held = self.publisher.activate().await?;
        self.metrics.policy_swap_duration.observe(held.as_secs_f64());
        self.metrics.policy_published.inc();
        self.served(version);
        record.state = PolicyState::Active;
        let mut ops = Self::exchange_states(&records, version, "");
        ops.push(Op::Policy(Box::new(record.clone())));
        self.store.commit_now(ops).await?;
        tracing::info!(
            %version, %parent, step, parity = difference,
            swap_us = u64::try_from(held.as_micros()).unwrap_or(u64::MAX),
            "policy version published"
        );
        self.prune(&records, version);
        Ok(PublishOutcome::Published(record))
    }

    /// Mean absolute difference between served and trained log-probabilities on the probe.
    async fn parity(
        &self,
        candidate: &dyn Candidate,
        version: PolicyVersion,
    ) -> Result<f64, PolicyError> {
        let params = SamplingParams {
            seed: version.0,
            max_tokens: self.config.probe_tokens,
            ..SamplingParams::default()
        };
        let sampled = self.publisher.probe(&self.probe_prompt, &params).await?;
        let ids: Vec<TokenId> = sampled.iter().map(|(id, _)| *id).collect();
        let scored = candidate
            .score(&self.probe_prompt, &ids, params.temperature)
            .map_err(PolicyError::Files)?;
        let total: f64 = sampled
            .iter()
            .zip(&scored)
            .map(|((_, served), trained)| f64::from((served - trained).abs()))
            .sum();
        #[expect(clippy::cast_precision_loss, reason = "a probe has a few tokens")]
        let count = sampled.len().max(1) as f64;
        Ok(total / count)
    }

    /// Deletes adapter directories beyond `policy.keep_versions`; never the active one or the one
    /// before it. Lineage and metrics stay in the ledger.
    fn prune(&self, records: &[PolicyRecord], active: PolicyVersion) {
        let previous =
            records.iter().rev().find(|r| r.state == PolicyState::Active).map(|r| r.version);
        let with_files: Vec<&PolicyRecord> =
            records.iter().filter(|r| r.adapter.is_some()).collect();
        let excess = (with_files.len() + 1).saturating_sub(self.config.keep_versions.max(2));
        for record in with_files.into_iter().take(excess) {
            if record.version == active || Some(record.version) == previous {
                continue;
            }
            let Some(relative) = &record.adapter else { continue };
            let dir = self.data_dir.join(relative);
            if dir.exists()
                && let Err(error) = std::fs::remove_dir_all(&dir)
            {
                tracing::warn!(version = %record.version, %error, "old adapter could not be deleted");
            }
        }
    }
}

#[cfg(test)]
mod tests;
