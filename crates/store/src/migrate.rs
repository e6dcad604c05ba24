//! Migrates a file to the current schema.
//!
//! A run creates a persistent savepoint, applies every pending migration and the new version in one
//! transaction, checks that the result opens, and deletes the savepoint. If a run is interrupted,
//! the savepoint remains; the next run restores it and starts again.

use redb::{Database, ReadableDatabase, TableError, WriteTransaction};

use crate::error::StoreError;
use crate::format;
use crate::{file, reader};

#[path = "../../../migrations/0001_first_tables.rs"]
mod m0001;

/// A step from the previous schema version.
pub(crate) struct Migration {
    /// The version that it leads to.
    pub(crate) to: u32,
    /// Description for the log.
    pub(crate) description: &'static str,
    /// Changes the tables, inside the transaction of the run.
    pub(crate) run: fn(&WriteTransaction) -> Result<(), StoreError>,
}

/// Every migration, in order. The last leads to [`schema::VERSION`].
pub(crate) const MIGRATIONS: &[Migration] =
    &[Migration { to: 1, description: m0001::DESCRIPTION, run: m0001::run }];

/// Migrates a file to [`schema::VERSION`].
pub(crate) fn to_current(database: &Database) -> Result<(), StoreError> {
    run(database, MIGRATIONS, opens).map(|_| ())
}

/// Runs the pending migrations and checks the result with `verify`. Returns the version that the
/// file had.
pub(crate) fn run(
    database: &Database,
    migrations: &[Migration],
    verify: impl Fn(&Database) -> Result<(), StoreError>,
) -> Result<u32, StoreError> {
    let known = migrations.last().map_or(0, |m| m.to);
    // First, because a newer version may use savepoints differently.
    refuse_newer(version(database)?, known)?;
    undo_interrupted(database)?;
    let found = version(database)?;
    if found == known {
        return Ok(found);
    }
    let savepoint = file::write(database, |tx| Ok(tx.persistent_savepoint()?))?;
    let migrated = apply(database, migrations, found, known).and_then(|()| verify(database));
    if let Err(error) = migrated {
        restore(database, savepoint)?;
        return Err(error);
    }
    file::write(database, |tx| Ok(tx.delete_persistent_savepoint(savepoint)?))?;
    Ok(found)
}

/// The schema version in the file; 0 for a file without tables.
pub(crate) fn version(database: &impl ReadableDatabase) -> Result<u32, StoreError> {
    let tx = database.begin_read()?;
    let meta = match tx.open_table(format::META) {
        Ok(meta) => meta,
        Err(TableError::TableDoesNotExist(_)) if tx.list_tables()?.next().is_none() => {
            return Ok(0);
        }
        Err(TableError::TableDoesNotExist(_)) => {
            return Err(corrupt_meta("a redb file without a schema version is not a ledger"));
        }
        Err(error) => return Err(error.into()),
    };
    let stored = meta.get(format::META_SCHEMA)?.ok_or_else(|| corrupt_meta("no version"))?;
    u32::try_from(stored.value()).map_err(|e| corrupt_meta(&e.to_string()))
}

/// Returns `NewerSchema` if the file's version is newer than `known`.
pub(crate) fn refuse_newer(found: u32, known: u32) -> Result<(), StoreError> {
    if found > known { Err(StoreError::NewerSchema { found, known }) } else { Ok(()) }
}

/// Returns `NewerSchema` or `OlderSchema` if the file does not have the current version.
pub(crate) fn require_current(database: &impl ReadableDatabase) -> Result<(), StoreError> {
    let (found, known) = (version(database)?, format::VERSION);
    refuse_newer(found, known)?;
    if found < known { Err(StoreError::OlderSchema { found, known }) } else { Ok(()) }
}

/// Checks that every table exists with the key and value types of the current schema.
fn opens(database: &Database) -> Result<(), StoreError> {
    let tx = database.begin_read()?;
    reader::stats(&tx)?;
    tx.open_table(format::REWARDS)?;
    tx.open_table(format::SAMPLES_OF)?;
    tx.open_table(format::GROUPS_OF)?;
    tx.open_table(format::READY)?;
    tx.open_table(format::UNGROUPED)?;
    tx.open_table(format::IDEMPOTENCY)?;
    tx.open_table(format::RATINGS)?;
    tx.open_table(format::SESSIONS)?;
    tx.open_table(format::SAME_PROMPT)?;
    tx.open_table(format::HELD_OUT)?;
    tx.open_table(format::QUARANTINE)?;
    tx.open_table(format::BY_KEY)?;
    tx.open_table(format::FEEDBACK_OF)?;
    tx.open_table(format::ERASED)?;
    tx.open_table(format::TURNS)?;
    tx.open_table(format::TURNS_OF)?;
    Ok(())
}

fn corrupt_meta(reason: &str) -> StoreError {
    StoreError::Corrupt { table: "meta", reason: reason.to_owned() }
}

fn apply(
    database: &Database,
    migrations: &[Migration],
    found: u32,
    known: u32,
) -> Result<(), StoreError> {
    file::write(database, |tx| {
        for migration in migrations.iter().filter(|m| m.to > found) {
            tracing::info!(
                to = migration.to,
                description = migration.description,
                "migrating the ledger"
            );
            (migration.run)(tx)?;
        }
        tx.open_table(format::META)?.insert(format::META_SCHEMA, u64::from(known))?;
        Ok(())
    })
}

/// Restores the savepoint of an interrupted run. Only migrations create persistent savepoints.
fn undo_interrupted(database: &Database) -> Result<(), StoreError> {
    let tx = database.begin_write()?;
    let first = tx.list_persistent_savepoints()?.min();
    tx.abort()?;
    match first {
        Some(savepoint) => {
            tracing::warn!("an earlier migration of the ledger was interrupted: starting again");
            restore(database, savepoint)
        }
        None => Ok(()),
    }
}

/// Restores a savepoint and deletes it.
fn restore(database: &Database, id: u64) -> Result<(), StoreError> {
    let mut tx = database.begin_write()?;
    tx.set_two_phase_commit(true);
    tx.set_quick_repair(true);
    let savepoint = tx.get_persistent_savepoint(id)?;
    tx.restore_savepoint(&savepoint)?;
    tx.delete_persistent_savepoint(id)?;
    tx.commit()?;
    Ok(())
}
