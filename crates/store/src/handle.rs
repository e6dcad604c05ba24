//! The open file: snapshots for readers, durable transactions for the writer, and reopening.
//!
//! redb refuses everything after an I/O error until the file is opened again. The handle does that,
//! so a full disk or a failed write does not end the ledger.

use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::{fs, io};

use redb::{
    Builder, Database, DatabaseError, Durability, ReadTransaction, ReadableDatabase,
    WriteTransaction,
};

use super::StoreError;

/// Pages that redb may cache. Its own default is 1 GiB, too much beside a model.
const CACHE_BYTES: usize = 64 << 20;

/// Opens the file, at first and after a failure.
pub(super) type Opener = Box<dyn Fn() -> Result<Database, StoreError> + Send + Sync>;

enum Slot {
    Open(Database),
    Failed(StoreError),
    Closed,
}

/// The open file.
pub(super) struct Handle {
    slot: RwLock<Slot>,
    open: Opener,
}

impl Handle {
    /// Opens the file with `open` and lets `prepare` bring it into shape.
    pub(super) fn new(
        open: Opener,
        prepare: fn(&Database) -> Result<(), StoreError>,
    ) -> Result<Self, StoreError> {
        let database = open()?;
        prepare(&database)?;
        Ok(Self { slot: RwLock::new(Slot::Open(database)), open })
    }

    /// Runs `f` on a snapshot of what is committed.
    pub(super) fn read<T>(
        &self,
        f: impl FnOnce(&ReadTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let slot = self.shared();
        f(&database(&slot)?.begin_read()?)
    }

    /// Runs `f` in a transaction and commits it durably; an error of `f` rolls it back.
    pub(super) fn write<T>(
        &self,
        f: impl FnOnce(&WriteTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let slot = self.shared();
        write(database(&slot)?, f)
    }

    /// Closes the file and opens it again, waiting for running reads.
    pub(super) fn reopen(&self) -> Result<(), StoreError> {
        let mut slot = self.slot.write().unwrap_or_else(PoisonError::into_inner);
        // The old database must let go of the file's lock before the file can be opened again.
        *slot = Slot::Closed;
        let (next, result) = match (self.open)() {
            Ok(database) => (Slot::Open(database), Ok(())),
            Err(error) => (Slot::Failed(error.clone()), Err(error)),
        };
        *slot = next;
        result
    }

    /// Closes the file, waiting for running reads.
    pub(super) fn close(&self) {
        *self.slot.write().unwrap_or_else(PoisonError::into_inner) = Slot::Closed;
    }

    fn shared(&self) -> RwLockReadGuard<'_, Slot> {
        self.slot.read().unwrap_or_else(PoisonError::into_inner)
    }
}

fn database(slot: &Slot) -> Result<&Database, StoreError> {
    match slot {
        Slot::Open(database) => Ok(database),
        Slot::Failed(error) => Err(error.clone()),
        Slot::Closed => Err(StoreError::Closed),
    }
}

/// One durable transaction.
///
/// Two-phase, because prompts and completions are bytes from strangers, who must not be able to
/// forge a commit slot; quick repair, so that reopening after a crash does not walk the file.
pub(super) fn write<T>(
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

/// Opens or creates the file at `path`.
pub(super) fn create(path: &Path) -> Result<Database, StoreError> {
    if !path.exists() {
        create_whole(path)?;
    }
    open_existing(path)
}

/// Makes an empty database appear under `path` at once: redb refuses a file whose creation was
/// interrupted, so that a kill in the first milliseconds would leave a ledger that never opens.
fn create_whole(path: &Path) -> Result<(), StoreError> {
    let failed = |e: io::Error| StoreError::Database(format!("{}: {e}", path.display()));
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = PathBuf::from(name);
    remove_if_there(&new).map_err(failed)?;
    drop(builder().create(&new).map_err(|e| open_error(&new, e))?);
    // A link replaces nothing that another process made meanwhile; a rename would.
    match fs::hard_link(&new, path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            // A file system without links.
            fs::rename(&new, path).map_err(failed)?;
        }
        _ => fs::remove_file(&new).map_err(failed)?,
    }
    sync_directory(path).map_err(failed)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Opens the file at `path`, which must exist.
pub(super) fn open_existing(path: &Path) -> Result<Database, StoreError> {
    builder().open(path).map_err(|e| open_error(path, e))
}

/// An [`Opener`] of `path`.
pub(super) fn opener(path: &Path) -> Opener {
    let path: PathBuf = path.to_owned();
    Box::new(move || create(&path))
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn open_error(path: &Path, error: DatabaseError) -> StoreError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(path.display().to_string()),
        other => StoreError::Database(format!("{}: {other}", path.display())),
    }
}

/// Makes a new file's name durable; its contents are redb's business.
fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Only Unix can open a directory for this.
    if cfg!(unix) { fs::File::open(parent)?.sync_all() } else { Ok(()) }
}

macro_rules! from_redb {
    ($($error:ident),+ $(,)?) => {$(
        impl From<redb::$error> for StoreError {
            fn from(error: redb::$error) -> Self {
                Self::Database(error.to_string())
            }
        }
    )+};
}

from_redb!(
    StorageError,
    TableError,
    TransactionError,
    CommitError,
    SavepointError,
    SetDurabilityError,
    CompactionError,
);
