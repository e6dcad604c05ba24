//! Policy versions: their files and lineage, publication after a parity check, and rollback.
//!
//! Invariants: a version number is used once; a version's files are complete before the ledger
//! names them; the version that the ledger calls active is the one that new requests get, or got
//! before the last crash.

mod candidate;
mod config;
mod error;
mod publish;
mod registry;
mod retention;
mod version_dir;

pub use candidate::{Candidate, PublishOutcome};
pub use config::PolicyConfig;
pub use error::PolicyError;
pub(crate) use registry::is_activated;
pub use registry::{Policies, Rollback};
pub use version_dir::adapter_digest;
pub(crate) use version_dir::version_name;

#[cfg(test)]
mod tests;
