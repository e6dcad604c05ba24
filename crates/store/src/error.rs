//! Errors of the ledger.

use std::io;
use std::path::Path;

use uuid::Uuid;

use hone_core::files::FileError;

use crate::health::{PATIENCE, StoreTrouble};

/// Why the ledger could not be opened, read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened, an operation on it failed, or the writer ended or lost writes.
    #[error("ledger: {0}")]
    Failed(String),
    /// A stored value cannot be decoded.
    #[error("ledger: {table} holds a value that cannot be read: {reason}: see `hone db check`")]
    Corrupt {
        /// The table.
        table: &'static str,
        /// The decoder's message.
        reason: String,
    },
    /// The file's pages are damaged, its schema has another version, or its last process did not close it.
    #[error("{0}")]
    Unusable(String),
    /// Another process has opened the file.
    #[error("the ledger {0} is in use by another process")]
    InUse(String),
    /// A batch does not follow the last one of its log: the log, and the expected and the given sequence.
    #[error("the log {0} goes on with batch {2}, where batch {1} must follow")]
    Gap(Uuid, u64, u64),
    /// The queue is full.
    #[error("the ledger's queue is full")]
    Overloaded,
    /// Nothing can be written at the moment, so the write was not tried.
    #[error(transparent)]
    Unavailable(#[from] StoreTrouble),
    /// The disk did not answer in time. The write may be recorded later.
    #[error(
        "the ledger has not answered for {} seconds: what was sent may still be recorded when the disk answers",
        PATIENCE.as_secs()
    )]
    TimedOut,
    /// The ledger was closed.
    #[error("the ledger is closed")]
    Closed,
}

impl StoreError {
    pub(crate) fn io(context: &str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Failed(format!("{context}: {error}"))
    }

    /// The file's pages are damaged, so that it cannot be read.
    pub(crate) fn damaged(path: &Path) -> Self {
        Self::Unusable(format!(
            "the ledger {} is damaged and cannot be read: examine it with `hone db check`, or \
             restore it from a backup",
            path.display()
        ))
    }
}

impl From<FileError> for StoreError {
    fn from(error: FileError) -> Self {
        Self::Failed(error.to_string())
    }
}

macro_rules! from_redb {
    ($($error:ident),+ $(,)?) => {$(
        impl From<redb::$error> for StoreError {
            fn from(error: redb::$error) -> Self {
                Self::Failed(redb::Error::from(error).to_string())
            }
        }
    )+};
}

from_redb!(
    CommitError,
    CompactionError,
    DatabaseError,
    SetDurabilityError,
    StorageError,
    TableError,
    TransactionError,
);
