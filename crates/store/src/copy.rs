//! Copies of an open ledger: a file without the pages of erased rows, which takes its place, and backups.
//!
//! Both copy a snapshot while the writer goes on. Pages that rows have left stay readable in the file until
//! something is written over them, so erased texts are only gone with a new file.

use std::path::{Path, PathBuf};
use std::{fs, io};

use redb::{Database, ReadTransaction};
use serde::{Deserialize, Serialize};

use hone_core::files::{at, remove_any, replace_dir, sibling, sync_tree, tree_bytes, write_synced};
use hone_core::types::{UnixMillis, now_ms};

use crate::error::StoreError;
use crate::file::{self, COPY_SUFFIX, Ledger};
use crate::format;
use crate::maintain::{self, CheckReport, CompactReport};
use crate::op::Outbox;
use crate::reader;
use crate::store::Store;
use crate::write::{self, Applier, Batch};

/// File name of the ledger in a data directory.
pub const LEDGER: &str = "ledger.redb";

/// Folder of backups in a data directory.
pub const BACKUPS: &str = "backups";

/// What a data directory holds that a backup leaves out and retention does not count: it can be fetched again, or is a
/// backup.
pub(crate) const LEFT_OUT: [&str; 3] = ["models", "hub", BACKUPS];

/// File of a backup that describes it.
const DESCRIPTION: &str = "backup.json";

/// How often a copy catches up with the writer before the writer waits for the rest.
const ROUNDS: usize = 8;

/// A description of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Backup {
    /// Its directory.
    pub path: PathBuf,
    /// When it was begun. It has everything that was recorded before.
    pub created: UnixMillis,
    /// The last optimizer step.
    pub step: u64,
    /// Number of policy versions.
    pub versions: usize,
    /// Bytes of all files.
    pub bytes: u64,
}

impl Store {
    /// Writes the rows to a new file, which takes the place of the ledger's: the space of erased and replaced
    /// rows returns to the file system, and erased texts are gone. Reads and writes go on meanwhile; they
    /// wait a moment at the end. Needs space for a second file. Blocks.
    ///
    /// # Errors
    /// If the new file cannot be written. The ledger then keeps its file.
    pub fn rewrite(&self) -> Result<CompactReport, StoreError> {
        let _one_at_a_time = self.inner.copying.lock();
        let path = &self.inner.path;
        let bytes_before = tree_bytes(path)?;
        let new = sibling(path, COPY_SUFFIX);
        remove_any(&new)?;
        let snapshot = {
            let mut log = self.inner.log.lock();
            let snapshot = self.inner.file.snapshot()?;
            *log = Some(Vec::new());
            snapshot
        };
        let replaced = copy_to(&snapshot, &new).and_then(|copy| self.take_place(copy, &new));
        if let Err(error) = replaced {
            *self.inner.log.lock() = None;
            remove_any(&new)?;
            return Err(error);
        }
        let bytes_after = tree_bytes(path)?;
        tracing::info!(bytes_before, bytes_after, "the ledger was written to a new file");
        Ok(CompactReport { bytes_before, bytes_after })
    }

    /// Repeats on the copy what was written since its snapshot, and exchanges the files.
    fn take_place(&self, copy: Database, new: &Path) -> Result<(), StoreError> {
        for _ in 0..ROUNDS {
            let logged = self.inner.log.lock().as_mut().map(std::mem::take).unwrap_or_default();
            if logged.is_empty() {
                break;
            }
            repeat_all(&copy, &logged)?;
        }
        // The writer needs the log for its next transaction.
        let mut log = self.inner.log.lock();
        repeat_all(&copy, &log.take().unwrap_or_default())?;
        self.inner.file.replace(copy, new, &self.inner.path)
    }

    /// Bytes of the rows and of their pages. Reads the inner pages of every table.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn live_bytes(&self) -> Result<u64, StoreError> {
        format::live_bytes(&self.inner.file.snapshot()?)
    }

    /// The part of [`Self::live_bytes`] that belongs to no prompt.
    pub(crate) fn history_bytes(&self) -> Result<u64, StoreError> {
        format::history_bytes(&self.inner.file.snapshot()?)
    }

    /// Bytes that the ledger's file takes on the disk, which redb makes longer before it writes to it.
    ///
    /// # Errors
    /// As [`tree_bytes`].
    pub fn file_bytes(&self) -> Result<u64, StoreError> {
        Ok(tree_bytes(&self.inner.path)?)
    }
}

/// A compact file with the rows of a snapshot.
fn copy_to(snapshot: &ReadTransaction, path: &Path) -> Result<Database, StoreError> {
    let mut copy = file::create_at(path)?;
    file::write(&copy, |tx| format::copy_all(snapshot, tx))?;
    // redb doubles a file that grows.
    while copy.compact()? {}
    Ok(copy)
}

fn repeat_all(copy: &Database, transactions: &[Vec<Batch>]) -> Result<(), StoreError> {
    transactions.iter().try_for_each(|batches| file::write(copy, |tx| write::repeat(tx, batches)))
}

/// A backup whose moment is fixed: it has a snapshot of the ledger and the other files as of then.
pub struct StartedBackup {
    snapshot: ReadTransaction,
    /// The directory that becomes the backup.
    folder: PathBuf,
    to: PathBuf,
    created: UnixMillis,
}

impl StartedBackup {
    /// Fixes the moment of a backup of the data directory `data`: takes a snapshot of `ledger`, and links the
    /// other files, or copies them to another file system. No step may be recorded meanwhile. A version may be
    /// published: its files are there before the ledger names it.
    ///
    /// # Errors
    /// If `to` exists or cannot be written, or the ledger cannot be read.
    pub fn begin(ledger: &Ledger, data: &Path, to: &Path) -> Result<Self, StoreError> {
        if fs::symlink_metadata(to).is_ok() {
            return Err(StoreError::Unusable(format!("{} exists already", to.display())));
        }
        let folder = sibling(to, ".tmp");
        remove_any(&folder)?;
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        let (snapshot, created) = (ledger.snapshot()?, now_ms());
        for entry in fs::read_dir(data).map_err(at(data))? {
            let entry = entry.map_err(at(data))?;
            let name = entry.file_name();
            let text = name.to_string_lossy();
            let is_ledger = text.starts_with(LEDGER);
            if is_ledger
                || text.starts_with('.')
                || LEFT_OUT.contains(&&*text)
                || entry.path() == folder
            {
                continue;
            }
            link(&entry.path(), &folder.join(&name))?;
        }
        Ok(Self { snapshot, folder, to: to.to_owned(), created })
    }

    /// Writes the ledger's rows of that moment. The backup appears as a whole or not at all.
    ///
    /// # Errors
    /// If it cannot be written. What was written is removed.
    pub fn finish(self) -> Result<Backup, StoreError> {
        let done = self.write();
        if done.is_err() {
            remove_any(&self.folder)?;
        }
        done
    }

    fn write(&self) -> Result<Backup, StoreError> {
        let Self { snapshot, folder, to, created } = self;
        drop(copy_to(snapshot, &folder.join(LEDGER))?);
        let (versions, step) = reader::versions_and_step(snapshot)?;
        let bytes = tree_bytes(folder)?;
        let backup = Backup { path: to.clone(), created: *created, step, versions, bytes };
        let text = serde_json::to_string_pretty(&backup);
        let text = text.map_err(|e| StoreError::Failed(format!("{DESCRIPTION}: {e}")))?;
        write_synced(&folder.join(DESCRIPTION), text.as_bytes())?;
        sync_tree(folder)?;
        fs::rename(folder, to).map_err(at(to))?;
        hone_core::files::sync_parent(to)?;
        tracing::info!(path = %to.display(), bytes, step, "a backup was written");
        Ok(backup)
    }
}

/// Backs up the data directory of a stopped daemon.
///
/// # Errors
/// `InUse` while a daemon runs, or as [`StartedBackup`].
pub fn backup(data: &Path, to: &Path) -> Result<Backup, StoreError> {
    let path = data.join(LEDGER);
    file::guarded(&path, || {
        let ledger = Ledger::from(maintain::open(&path)?);
        StartedBackup::begin(&ledger, data, to)?.finish()
    })
}

/// Copies a backup to the data directory `data`, which must be empty or absent, and checks its ledger. A
/// server's log ends, because a fleet's store may have other batches of it; a trainer's log goes on.
///
/// # Errors
/// If `from` is no backup, `data` holds something, or a file cannot be copied.
pub fn restore(from: &Path, data: &Path) -> Result<CheckReport, StoreError> {
    if !from.join(DESCRIPTION).exists() {
        let text = format!("{} is no backup: it has no {DESCRIPTION}", from.display());
        return Err(StoreError::Unusable(text));
    }
    if fs::read_dir(data).is_ok_and(|mut entries| entries.next().is_some()) {
        let text = format!("{} is not empty: move it away first", data.display());
        return Err(StoreError::Unusable(text));
    }
    replace_dir::<StoreError>(data, |new| {
        copy_tree(from, new, &|from, to| fs::copy(from, to).map(drop))
    })?;
    let path = data.join(LEDGER);
    file::guarded(&path, || {
        file::write(&maintain::open(&path)?, |tx| {
            let mut tables = Applier::new(tx)?;
            if tables.mode == Outbox::Server { tables.open_log(Outbox::Off) } else { Ok(()) }
        })
    })?;
    maintain::check(&path)
}

/// Links or copies a file or a directory.
fn link(from: &Path, to: &Path) -> Result<(), StoreError> {
    let one = |from: &Path, to: &Path| match fs::hard_link(from, to) {
        // Another file system, or one without links.
        Err(error) if error.kind() != io::ErrorKind::NotFound => fs::copy(from, to).map(drop),
        linked => linked,
    };
    copy_tree(from, to, &one)
}

/// Repeats `one` for each file. A file or a directory that was deleted meanwhile, such as an old checkpoint's, is left out.
fn copy_tree(
    from: &Path,
    to: &Path,
    one: &impl Fn(&Path, &Path) -> io::Result<()>,
) -> Result<(), StoreError> {
    if !from.is_dir() {
        return match one(from, to) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(to)(error).into()),
            _ => Ok(()),
        };
    }
    let entries = match fs::read_dir(from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(at(from))?,
    };
    fs::create_dir_all(to).map_err(at(to))?;
    for entry in entries {
        let entry = entry.map_err(at(from))?;
        copy_tree(&entry.path(), &to.join(entry.file_name()), one)?;
    }
    Ok(())
}
