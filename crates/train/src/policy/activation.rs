//! Activation of an existing version: by an operator, or because the active one is withdrawn.

use std::path::PathBuf;

use tokio::sync::watch;

use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion};
use hone_store::Op;

use super::PolicyError;
use super::registry::Policies;
use super::{Rollback, WITHDRAWN, activation_ops};

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
        self.switch_to(version, reason, PolicyState::Retired, true).await
    }

    /// Rolls the active version back to its nearest ancestor that can be served, because a rule found
    /// it worse. Does nothing if `version` is not active, or is the base.
    ///
    /// # Errors
    /// If no ancestor can be served, or the ledger cannot be written.
    pub async fn withdraw(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<Option<PolicyRecord>, PolicyError> {
        let lineage = self.store.lineage();
        let reason = format!("{WITHDRAWN}: {reason}");
        for ancestor in lineage.chain(version).skip(1) {
            if self.active() != version {
                return Ok(None);
            }
            let promoted = self.store.policy(ancestor)?.is_some_and(|r| r.state.was_promoted());
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
            if self.publisher.serve_now(version, adapter.as_deref()).await? {
                let served = self.switched(version, adapter, reason, left, by_operator).await;
                self.interrupts.send_modify(|count| *count += 1);
                return served;
            }
        }
        self.interrupts.send_modify(|count| *count += 1);
        // Every engine must load it first. The interrupted publication releases the engine soon.
        let _exchange = self.exchange.lock().await;
        let _switch = self.switch.lock().await;
        let (record, adapter) = self.servable(version)?;
        if version == self.active() {
            return Ok(record);
        }
        self.load(&record).await?;
        self.switched(version, adapter, reason, left, by_operator).await
    }

    /// The record of a version that was promoted, and its verified directory.
    fn servable(
        &self,
        version: PolicyVersion,
    ) -> Result<(PolicyRecord, Option<PathBuf>), PolicyError> {
        let record = self.store.policy(version)?.ok_or(PolicyError::Unknown(version))?;
        if !record.state.was_promoted() && record.state != PolicyState::RolledBack {
            let reason = record.reason.unwrap_or_else(|| "it was never promoted".to_owned());
            return Err(PolicyError::Unservable { version, reason, source: None });
        }
        let adapter = self.adapter_dir(&record)?;
        Ok((record, adapter))
    }

    /// Records that new requests get `version`, and notifies the trainer.
    async fn switched(
        &self,
        version: PolicyVersion,
        adapter: Option<PathBuf>,
        reason: &str,
        left: PolicyState,
        by_operator: bool,
    ) -> Result<PolicyRecord, PolicyError> {
        let records = self.exchanged(version)?;
        self.set_active(version);
        self.metrics.policy_rollbacks.inc();
        self.store.commit_now(activation_ops(&records, version, reason, left)).await?;
        self.rollback.send_modify(|r| {
            *r = Rollback { count: r.count + 1, version, adapter, by_operator };
        });
        tracing::info!(%version, reason, "policy version activated");
        self.store.policy(version)?.ok_or(PolicyError::Unknown(version))
    }

    /// The records that the activation of `version` changes: its own and that of the active version, or all if
    /// the ledger does not call that one active.
    fn exchanged(&self, version: PolicyVersion) -> Result<Vec<PolicyRecord>, PolicyError> {
        let [before, next] = [self.store.policy(self.active())?, self.store.policy(version)?];
        match (before, next) {
            (Some(before), Some(next)) if before.state == PolicyState::Active => {
                Ok(vec![before, next])
            }
            _ => self.list(),
        }
    }

    /// Loads each activated version into the serving engine, which then takes over from the engine that
    /// served it at once. Runs until the registry is dropped or the process ends.
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
        let _switch = self.switch.lock().await;
        let mut record = self.store.policy(version)?.ok_or(PolicyError::Unknown(version))?;
        if pinned {
            self.adapter_dir(&record)?;
        }
        record.pinned = pinned;
        self.store.commit_now(vec![Op::Policy(Box::new(record.clone()))]).await?;
        tracing::info!(%version, pinned, "policy version pinned or unpinned");
        Ok(record)
    }

    /// Suspends a canary in progress, and every other publication, until the returned value is dropped.
    /// The same weights continue the canary when they are published again, also after a restart.
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
