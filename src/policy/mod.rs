//! Versions and lineage: writes PEFT files, gates, publishes, rolls back.
// STUB: signatures only.

use crate::types::{PolicyRecord, PolicyVersion};

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
    Engine(#[from] crate::engine::EngineError),
    /// The ledger refused it.
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
}

/// The one place that changes what is served. Share it behind an `Arc`.
pub struct Policies {}

#[expect(unused_variables, clippy::unused_async, reason = "stub")]
impl Policies {
    /// Every version, in order.
    pub fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError> {
        Ok(Vec::new())
    }
    /// The version being served.
    pub fn active(&self) -> PolicyVersion {
        PolicyVersion::BASE
    }
    /// Serves a version that exists; the trainer goes on from it.
    pub async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError> {
        Err(PolicyError::Unknown(version))
    }
}
