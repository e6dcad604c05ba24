//! Policy versions: their files and lineage, the checks before their publication, and rollback.
//!
//! [`Policies::publish`] writes new weights as a candidate and has the gate and, if configured, a canary
//! decide whether it becomes the active version. [`Policies::activate`] and [`Policies::withdraw`]
//! return to an earlier version, which ends a publication in progress.
//!
//! Invariants: a version number is used once; a version's files are complete before the ledger
//! names them; the version that the ledger calls active is the one that new requests get, or got
//! before the last crash, except for the requests of a canary; a version is promoted, rejected or
//! rolled back from its canary exactly once.

mod activation;
mod canary;
mod candidate;
mod config;
mod error;
mod gate;
mod guard;
mod publish;
mod registry;
mod retention;
mod rollback;
mod traffic;
mod version_dir;

pub use activation::Suspension;
pub use canary::VersionRating;
pub use candidate::{Candidate, PublishOutcome, ScoredBy};
pub use config::{CanaryConfig, CanaryLimit, GateConfig, PolicyConfig, Promotion, RollbackConfig};
pub use error::PolicyError;
pub use gate::{ExamPrompt, Examiner};
pub use registry::{Policies, PolicySetup};
pub use rollback::Rollback;
pub(crate) use rollback::is_activated;
pub use version_dir::adapter_digest;
pub(crate) use version_dir::{relative_dir, version_name, write_version};

#[cfg(test)]
mod tests;
