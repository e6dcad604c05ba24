//! The open database file: snapshots for readers, durable transactions for the writer.
//!
//! After an I/O error redb refuses every operation until the file is opened again. [`Ledger::reopen`] does
//! that, so that the ledger survives a full disk or a failed write.

use std::fs;
use std::io::ErrorKind;
use std::panic;
use std::path::Path;

use parking_lot::RwLock;
use redb::{
    Builder, Database, DatabaseError, Durability, ReadOnlyDatabase, ReadTransaction,
    ReadableDatabase, WriteTransaction,
};

use hone_core::files::{remove_any, sibling, sync_parent};

use crate::error::StoreError;

/// Size of redb's page cache. Its default of 1 GiB is too much next to a model.
pub const CACHE_BYTES: usize = 64 << 20;

/// The end of the name of a copy that is being written.
pub(crate) const COPY_SUFFIX: &str = ".copy";

/// Opens the file, at first and again after an error.
pub(crate) type Opener = Box<dyn Fn() -> Result<Database, StoreError> + Send + Sync>;

enum FileState {
    Open(Database),
    ReadOnly(ReadOnlyDatabase),
    Failed(StoreError),
    Closed,
}

impl FileState {
    fn snapshot(&self) -> Result<ReadTransaction, StoreError> {
        Ok(match self {
            Self::Open(database) => database.begin_read()?,
            Self::ReadOnly(database) => database.begin_read()?,
            closed => return Err(closed.error()),
        })
    }

    fn error(&self) -> StoreError {
        match self {
            Self::Failed(error) => error.clone(),
            _ => StoreError::Closed,
        }
    }
}

/// An open ledger and its queries.
pub struct Ledger {
    /// Readers and the writer share the lock; only reopening and closing are exclusive.
    state: RwLock<FileState>,
}

impl From<Database> for Ledger {
    fn from(database: Database) -> Self {
        Self { state: RwLock::new(FileState::Open(database)) }
    }
}

impl Ledger {
    /// Runs `f` on a snapshot of the last commit.
    pub(crate) fn read<T>(
        &self,
        f: impl FnOnce(&ReadTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let state = self.state.read();
        f(&state.snapshot()?)
    }

    /// Runs `f` in a durable transaction; see [`write`].
    pub(crate) fn write<T>(
        &self,
        f: impl FnOnce(&WriteTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match &*self.state.read() {
            FileState::Open(database) => write(database, f),
            closed => Err(closed.error()),
        }
    }

    /// A snapshot of the last commit that outlives this call.
    pub(crate) fn snapshot(&self) -> Result<ReadTransaction, StoreError> {
        self.state.read().snapshot()
    }

    /// Moves another database to the place of the open one, and uses it from now on. Waits for running reads.
    pub(crate) fn replace(&self, new: Database, at: &Path, path: &Path) -> Result<(), StoreError> {
        let mut state = self.state.write();
        if !matches!(*state, FileState::Open(_)) {
            return Err(state.error());
        }
        fs::rename(at, path).map_err(StoreError::io(&path.display().to_string()))?;
        *state = FileState::Open(new);
        Ok(sync_parent(path)?)
    }

    /// Closes the file and opens it again. Waits for running reads.
    pub(crate) fn reopen(&self, open: &Opener) -> Result<(), StoreError> {
        let mut state = self.state.write();
        // The old database holds the lock of the file until it is dropped.
        *state = FileState::Closed;
        let opened = open();
        let result = opened.as_ref().map(|_| ()).map_err(StoreError::clone);
        *state = opened.map_or_else(FileState::Failed, FileState::Open);
        result
    }

    pub(crate) fn close(&self) {
        *self.state.write() = FileState::Closed;
    }
}

/// Runs `f` in one durable transaction and commits it. An error of `f` rolls it back.
///
/// The commit has two phases, because prompts and completions are untrusted bytes that could forge
/// a one-phase commit slot. Quick repair avoids a walk over the whole file when it is reopened
/// after a crash.
pub(crate) fn write<T>(
    database: &Database,
    f: impl FnOnce(&WriteTransaction) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let mut tx = database.begin_write()?;
    tx.set_durability(Durability::Immediate)?;
    tx.set_two_phase_commit(true);
    tx.set_quick_repair(true);
    match f(&tx) {
        Ok(value) => {
            tx.commit()?;
            Ok(value)
        }
        Err(error) => {
            tx.abort()?;
            Err(error)
        }
    }
}

pub(crate) fn create(path: &Path) -> Result<Database, StoreError> {
    if !path.exists() {
        create_atomically(path)?;
    }
    open_existing(path)
}

/// Creates an empty database at `path` in one step. redb cannot open a file whose creation was
/// interrupted, so a kill during a direct creation would leave a ledger that never opens.
fn create_atomically(path: &Path) -> Result<(), StoreError> {
    let temporary = sibling(path, &format!(".{}.new", std::process::id()));
    remove_any(&temporary)?;
    drop(create_at(&temporary)?);
    // Unlike a rename, a link never replaces a file that another process created meanwhile.
    match fs::hard_link(&temporary, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            // A file system without links.
            fs::rename(&temporary, path).map_err(StoreError::io(&path.display().to_string()))?;
        }
        _ => remove_any(&temporary)?,
    }
    Ok(sync_parent(path)?)
}

/// Creates a database that nothing else uses yet.
pub(crate) fn create_at(path: &Path) -> Result<Database, StoreError> {
    builder().create(path).map_err(|e| open_error(path, e))
}

pub(crate) fn open_existing(path: &Path) -> Result<Database, StoreError> {
    guarded(path, || builder().open(path).map_err(|e| open_error(path, e)))
}

/// Reads the file at `path`. redb panics about some damaged pages.
pub(crate) fn guarded<T>(
    path: &Path,
    read: impl FnOnce() -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let done = panic::catch_unwind(panic::AssertUnwindSafe(read));
    done.unwrap_or_else(|_| Err(StoreError::damaged(path)))
}

/// Opens the file at `path`, which must exist, without ever writing to it. Other readers may have it open
/// too.
pub(crate) fn open_read_only(path: &Path) -> Result<Ledger, StoreError> {
    let open = || builder().open_read_only(path).map_err(|e| open_error(path, e));
    Ok(Ledger { state: RwLock::new(FileState::ReadOnly(guarded(path, open)?)) })
}

pub(crate) fn opener(path: &Path) -> Opener {
    let path = path.to_owned();
    Box::new(move || create(&path))
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn open_error(path: &Path, error: DatabaseError) -> StoreError {
    let shown = path.display();
    match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(shown.to_string()),
        DatabaseError::RepairAborted => StoreError::Unusable(format!(
            "the ledger {shown} was not closed when its last process ended: `hone db check` repairs \
             it"
        )),
        other => StoreError::Failed(format!("{shown}: {}", redb::Error::from(other))),
    }
}
