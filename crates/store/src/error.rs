//! Errors of the ledger.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use hone_core::files::FileError;

/// Why the ledger could not be opened, read or written.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The file at this path could not be opened as a database.
    #[error("ledger: {}: {source}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of redb.
        source: Arc<redb::Error>,
    },
    /// An operation on the open database failed.
    #[error("ledger: {0}")]
    Database(#[source] Arc<redb::Error>),
    /// An operation of the operating system failed.
    #[error("ledger: {context}: {source}")]
    Io {
        /// The path, or the operation.
        context: String,
        /// The error of the operating system.
        source: Arc<io::Error>,
    },
    /// A value cannot be encoded.
    #[error("ledger: a value cannot be encoded: {0}")]
    Encode(#[from] postcard::Error),
    /// A stored value cannot be decoded.
    #[error("ledger: {table} holds a value that cannot be read: {reason}: see `hone db check`")]
    Corrupt {
        /// The table.
        table: &'static str,
        /// The decoder's message.
        reason: String,
    },
    /// The file's pages are damaged, so that it cannot be read.
    #[error("the ledger {} is damaged and cannot be read: examine it with `hone db check`, or restore it from a backup", .0.display())]
    Damaged(PathBuf),
    /// A newer version of Hone wrote the file.
    #[error(
        "the ledger has schema version {found}; this hone knows versions up to {known}: \
         use a newer hone, or another data directory"
    )]
    NewerSchema {
        /// The version of the file.
        found: u32,
        /// The newest version that this binary can read.
        known: u32,
    },
    /// The file needs a migration, which only [`Store::open`](crate::Store::open) runs.
    #[error(
        "the ledger has schema version {found}: start `hone serve` on it once to bring it to \
         version {known}"
    )]
    OlderSchema {
        /// The version of the file.
        found: u32,
        /// The version that this binary needs.
        known: u32,
    },
    /// Another process has opened the file.
    #[error("the ledger {0} is in use by another process")]
    InUse(String),
    /// The last process that wrote the file ended without closing it, and reading alone cannot repair
    /// it.
    #[error(
        "the ledger {0} was not closed when its last process ended: `hone db check` repairs it"
    )]
    NotClosed(String),
    /// The queue is full; only operations that may be shed are refused.
    #[error("the ledger's queue is full")]
    Overloaded,
    /// The ledger was closed.
    #[error("the ledger is closed")]
    Closed,
    /// The writer thread panicked, ended early or lost writes.
    #[error("ledger: {0}")]
    Writer(String),
}

impl StoreError {
    /// Adds what was attempted to an I/O error, for use with `map_err`.
    pub(crate) fn io(context: &str) -> impl FnOnce(io::Error) -> Self {
        let context = context.to_owned();
        move |source| Self::Io { context, source: Arc::new(source) }
    }
}

impl From<FileError> for StoreError {
    fn from(error: FileError) -> Self {
        Self::io(&error.path.display().to_string())(error.source)
    }
}

macro_rules! from_redb {
    ($($error:ident),+ $(,)?) => {$(
        impl From<redb::$error> for StoreError {
            fn from(error: redb::$error) -> Self {
                Self::Database(Arc::new(error.into()))
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

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn errors_contain_the_text_of_their_source() {
        let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
        let database = StoreError::from(redb::StorageError::Io(refused()));
        let file = StoreError::from(FileError { path: PathBuf::from("data"), source: refused() });
        for (error, text) in [(database, "ledger: I/O error: "), (file, "ledger: data: ")] {
            let source = error.source().unwrap().to_string();
            assert!(error.to_string().starts_with(text), "{error}");
            assert!(error.to_string().ends_with(&source), "{error}");
        }
    }
}
