//! What the HTTP surface asks of the trainer, the policies and rollout, as traits: tests of the
//! routes need none of the three.

use std::sync::Arc;

use async_trait::async_trait;

use hone_core::types::{Interaction, PolicyRecord, PolicyVersion, Sample};
use hone_rollout::Rollout;
use hone_train::policy::{Policies, PolicyError};
use hone_train::{TrainError, TrainHandle, TrainStatus};

/// The trainer, as `/admin/train` sees it.
#[async_trait]
pub trait TrainControl: Send + Sync {
    /// What it is doing.
    fn status(&self) -> TrainStatus;
    /// Takes no further step until resumed.
    fn pause(&self) -> Result<(), TrainError>;
    /// Goes on.
    fn resume(&self) -> Result<(), TrainError>;
    /// Takes one step now; the status after it.
    async fn step(&self) -> Result<TrainStatus, TrainError>;
}

#[async_trait]
impl TrainControl for TrainHandle {
    fn status(&self) -> TrainStatus {
        self.status()
    }
    fn pause(&self) -> Result<(), TrainError> {
        self.pause()
    }
    fn resume(&self) -> Result<(), TrainError> {
        self.resume()
    }
    async fn step(&self) -> Result<TrainStatus, TrainError> {
        self.step().await
    }
}

/// The policy versions, as `/admin/policies` sees them.
#[async_trait]
pub trait PolicyControl: Send + Sync {
    /// Every version, in order.
    fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError>;
    /// The version being served.
    fn active(&self) -> PolicyVersion;
    /// Serves a version that exists.
    async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError>;
}

#[async_trait]
impl PolicyControl for Policies {
    fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError> {
        self.list()
    }
    fn active(&self) -> PolicyVersion {
        self.active()
    }
    async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError> {
        self.activate(version, reason).await
    }
}

/// Whoever makes groups of what was served.
pub trait ServedSink: Send + Sync {
    /// Takes one interaction with its served samples. Never waits.
    fn offer(&self, interaction: Arc<Interaction>, served: Vec<Sample>);
}

impl ServedSink for Rollout {
    fn offer(&self, interaction: Arc<Interaction>, served: Vec<Sample>) {
        self.submit(interaction, served);
    }
}
