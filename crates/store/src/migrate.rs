//! Migrates a file to the current schema: every pending migration, the new version and a check of the
//! result in one transaction. A run that fails or is interrupted changes nothing.

use redb::{Database, ReadTransaction, ReadableDatabase, TableError, WriteTransaction};

use crate::error::StoreError;
use crate::file;
use crate::format::{self, LedgerTables};

#[path = "../../../migrations/0001_first_tables.rs"]
mod m0001;
#[path = "../../../migrations/0002_audit.rs"]
mod m0002;
#[path = "../../../migrations/0003_outbox.rs"]
mod m0003;

/// A step from the previous schema version.
pub(crate) struct Migration {
    pub(crate) to: u32,
    pub(crate) description: &'static str,
    /// Changes the tables, inside the transaction of the run.
    pub(crate) run: fn(&WriteTransaction) -> Result<(), StoreError>,
}

/// Every migration, in order. The last leads to [`format::VERSION`].
pub(crate) const MIGRATIONS: &[Migration] = &[
    Migration { to: 1, description: m0001::DESCRIPTION, run: m0001::run },
    Migration { to: 2, description: m0002::DESCRIPTION, run: m0002::run },
    Migration { to: 3, description: m0003::DESCRIPTION, run: m0003::run },
];

pub(crate) fn to_current(database: &Database) -> Result<(), StoreError> {
    // Each table must have the types of the current schema.
    run(database, MIGRATIONS, |tx| LedgerTables::new(tx).map(drop)).map(drop)
}

/// Runs the pending migrations and checks the result with `verify`. Returns the version that the
/// file had.
pub(crate) fn run(
    database: &Database,
    migrations: &[Migration],
    verify: impl Fn(&WriteTransaction) -> Result<(), StoreError>,
) -> Result<u32, StoreError> {
    let known = migrations.last().map_or(0, |m| m.to);
    let found = version(&database.begin_read()?)?;
    refuse_newer(found, known)?;
    if found == known {
        return Ok(found);
    }
    file::write(database, |tx| {
        for Migration { to, description, run } in migrations.iter().filter(|m| m.to > found) {
            tracing::info!(to, description, "migrating the ledger");
            run(tx)?;
        }
        tx.open_table(format::META)?.insert(format::META_SCHEMA, u64::from(known))?;
        verify(tx)
    })?;
    Ok(found)
}

/// The schema version in the file; 0 for a file without tables.
pub(crate) fn version(tx: &ReadTransaction) -> Result<u32, StoreError> {
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

fn refuse_newer(found: u32, known: u32) -> Result<(), StoreError> {
    if found <= known {
        return Ok(());
    }
    Err(StoreError::Unusable(format!(
        "the ledger has schema version {found}; this hone knows versions up to {known}: use a newer \
         hone, or another data directory"
    )))
}

pub(crate) fn require_current(tx: &ReadTransaction) -> Result<(), StoreError> {
    let (found, known) = (version(tx)?, format::VERSION);
    refuse_newer(found, known)?;
    if found == known {
        return Ok(());
    }
    Err(StoreError::Unusable(format!(
        "the ledger has schema version {found}: start `hone serve` on it once to bring it to version \
         {known}"
    )))
}

fn corrupt_meta(reason: &str) -> StoreError {
    StoreError::Corrupt { table: "meta", reason: reason.to_owned() }
}
