//! Brings a file to the current schema.
//!
//! A run is: a persistent savepoint; every pending migration and the new version in one
//! transaction; a check that the result opens; the savepoint deleted. Whatever interrupts it, the
//! savepoint left behind says so, and the next run restores it and starts over.

use redb::{Database, ReadableDatabase, TableError, WriteTransaction};

use super::{StoreError, handle, reader, schema};

#[path = "../../../migrations/0001_first_tables.rs"]
mod m0001;
#[path = "../../../migrations/0002_raters_and_sessions.rs"]
mod m0002;

/// One step from the schema version before it.
pub(super) struct Migration {
    /// The version it leads to.
    pub(super) to: u32,
    /// For the log.
    pub(super) description: &'static str,
    /// The work, inside the run's one transaction.
    pub(super) run: fn(&WriteTransaction) -> Result<(), StoreError>,
}

/// Every migration, in order; the last leads to [`schema::VERSION`].
pub(super) const MIGRATIONS: &[Migration] = &[
    Migration { to: 1, description: m0001::DESCRIPTION, run: m0001::run },
    Migration { to: 2, description: m0002::DESCRIPTION, run: m0002::run },
];

/// Brings a file to [`schema::VERSION`].
pub(super) fn to_current(database: &Database) -> Result<(), StoreError> {
    run(database, MIGRATIONS, opens).map(|_| ())
}

/// Runs what is pending, then checks with `verify`; returns the version that the file had.
pub(super) fn run(
    database: &Database,
    migrations: &[Migration],
    verify: impl Fn(&Database) -> Result<(), StoreError>,
) -> Result<u32, StoreError> {
    let known = migrations.last().map_or(0, |m| m.to);
    // Before anything is touched: a newer file may use savepoints in its own way.
    refuse_newer(version(database)?, known)?;
    undo_unfinished(database)?;
    let found = version(database)?;
    if found == known {
        return Ok(found);
    }
    let savepoint = handle::write(database, |tx| Ok(tx.persistent_savepoint()?))?;
    let migrated = apply(database, migrations, found, known).and_then(|()| verify(database));
    if let Err(error) = migrated {
        restore(database, savepoint)?;
        return Err(error);
    }
    handle::write(database, |tx| Ok(tx.delete_persistent_savepoint(savepoint)?))?;
    Ok(found)
}

/// The schema version in the file; 0 for a file without tables.
pub(super) fn version(database: &Database) -> Result<u32, StoreError> {
    let tx = database.begin_read()?;
    let meta = match tx.open_table(schema::META) {
        Ok(meta) => meta,
        Err(TableError::TableDoesNotExist(_)) if tx.list_tables()?.next().is_none() => {
            return Ok(0);
        }
        Err(TableError::TableDoesNotExist(_)) => {
            return Err(corrupt_meta("a redb file without a schema version is not a ledger"));
        }
        Err(error) => return Err(error.into()),
    };
    let stored = meta.get(schema::META_SCHEMA)?.ok_or_else(|| corrupt_meta("no version"))?;
    u32::try_from(stored.value()).map_err(|e| corrupt_meta(&e.to_string()))
}

/// `NewerSchema` where the file is beyond `known`.
pub(super) fn refuse_newer(found: u32, known: u32) -> Result<(), StoreError> {
    if found > known { Err(StoreError::NewerSchema { found, known }) } else { Ok(()) }
}

/// Whether every table is there with the keys and values of the current schema.
fn opens(database: &Database) -> Result<(), StoreError> {
    let tx = database.begin_read()?;
    reader::stats(&tx)?;
    tx.open_table(schema::REWARDS)?;
    tx.open_table(schema::SAMPLES_OF)?;
    tx.open_table(schema::GROUPS_OF)?;
    tx.open_table(schema::READY)?;
    tx.open_table(schema::UNGROUPED)?;
    tx.open_table(schema::IDEMPOTENCY)?;
    tx.open_table(schema::RATINGS)?;
    tx.open_table(schema::SESSIONS)?;
    tx.open_table(schema::QUARANTINE)?;
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
    handle::write(database, |tx| {
        for migration in migrations.iter().filter(|m| m.to > found) {
            tracing::info!(
                to = migration.to,
                description = migration.description,
                "migrating the ledger"
            );
            (migration.run)(tx)?;
        }
        tx.open_table(schema::META)?.insert(schema::META_SCHEMA, u64::from(known))?;
        Ok(())
    })
}

/// Only migrations make persistent savepoints, so one in the file is an unfinished run's.
fn undo_unfinished(database: &Database) -> Result<(), StoreError> {
    let tx = database.begin_write()?;
    let first = tx.list_persistent_savepoints()?.min();
    tx.abort()?;
    match first {
        Some(savepoint) => {
            tracing::warn!("an earlier migration of the ledger did not finish: starting over");
            restore(database, savepoint)
        }
        None => Ok(()),
    }
}

/// Puts the file back to a savepoint and deletes it.
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
