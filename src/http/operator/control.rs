//! The trainer, the policy versions and rollout as traits, so that tests of the routes can replace
//! all three.

use std::sync::Arc;

use async_trait::async_trait;

use hone_core::types::{Interaction, PolicyRecord, PolicyVersion, Sample};
use hone_rollout::Rollout;
use hone_train::policy::{Policies, PolicyError, VersionRating};
use hone_train::{TrainError, TrainHandle, TrainStatus};

/// The trainer, for `/admin/train`.
#[async_trait]
pub trait TrainControl: Send + Sync {
    /// Its state, step and progress.
    fn status(&self) -> TrainStatus;
    /// Takes no further step until resumed.
    fn pause(&self) -> Result<(), TrainError>;
    /// Ends a pause.
    fn resume(&self) -> Result<(), TrainError>;
    /// Takes one step now and returns the status after it.
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

/// The policy versions, for `/admin/policies`.
#[async_trait]
pub trait PolicyControl: Send + Sync {
    /// Every version, in order.
    fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError>;
    /// The version being served.
    fn active(&self) -> PolicyVersion;
    /// Switches serving to an existing version.
    async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError>;
    /// Keeps a version's files, or lets them be deleted again.
    async fn pin(&self, version: PolicyVersion, pinned: bool) -> Result<PolicyRecord, PolicyError>;
    /// The canary that a request with this key must get; `None` is the active version.
    fn assign(&self, key: &str) -> Option<PolicyVersion>;
    /// Adds a rating to the evidence of a canary.
    fn rate(&self, rating: &VersionRating);
    /// Adds the end of a request to the evidence of a canary.
    fn answered(&self, version: PolicyVersion, failed: bool);
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
    async fn pin(&self, version: PolicyVersion, pinned: bool) -> Result<PolicyRecord, PolicyError> {
        self.pin(version, pinned).await
    }
    fn assign(&self, key: &str) -> Option<PolicyVersion> {
        self.assign(key)
    }
    fn rate(&self, rating: &VersionRating) {
        self.rate(rating);
    }
    fn answered(&self, version: PolicyVersion, failed: bool) {
        self.answered(version, failed);
    }
}

/// Receives served completions, to sample shadow groups for their prompts.
pub trait ServedSink: Send + Sync {
    /// Submits one interaction with its served samples. Never blocks.
    fn submit(&self, interaction: Arc<Interaction>, served: Vec<Sample>);
}

impl ServedSink for Rollout {
    fn submit(&self, interaction: Arc<Interaction>, served: Vec<Sample>) {
        self.submit(interaction, served);
    }
}
