//! Errors of policy versions.

use std::io;

use hone_core::files::FileError;
use hone_core::types::PolicyVersion;
use hone_engine::EngineError;
use hone_store::StoreError;

use crate::error::LearnError;

/// Why a version cannot be listed, published or activated.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The ledger has no version of this number.
    #[error("there is no policy version {0}")]
    Unknown(PolicyVersion),
    /// The version was rejected, or its files are missing or altered.
    #[error("policy version {version} cannot be served: {reason}")]
    Unservable {
        /// The version that was asked for.
        version: PolicyVersion,
        /// A clause without a period.
        reason: String,
        /// The I/O error, if its files cannot be read.
        source: Option<io::Error>,
    },
    /// The version's files cannot be written.
    #[error(transparent)]
    Files(#[from] FileError),
    /// The candidate cannot be written or scored.
    #[error(transparent)]
    Candidate(#[from] LearnError),
    /// The engine cannot load, probe or activate the version.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The ledger cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
}
