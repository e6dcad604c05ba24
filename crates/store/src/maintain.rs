//! What is done to a ledger that nobody serves from: `hone db stats | check | compact | export`.
//!
//! Each function opens the file for itself and answers `InUse` while a server has it.

use std::io::Write;
use std::path::Path;

use redb::{Database, Key, ReadTransaction, ReadableDatabase, TableDefinition, TableHandle};
use serde::Serialize;

use hone_core::types::{Group, Interaction, PolicyRecord, Reward, Sample, StepRecord};

use super::check::Problems;
use super::codec::Row;
use super::{StoreError, StoreStats, check, handle, migrate, reader, schema};

/// What [`check`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckReport {
    /// False where redb found damage (and repaired it).
    pub intact: bool,
    /// Rows by table.
    pub rows: StoreStats,
    /// How many rows cannot be read or refer to what is not there.
    pub problem_count: u64,
    /// The first hundred of them.
    pub problems: Vec<String>,
}

impl CheckReport {
    /// Whether nothing is wrong.
    pub fn is_healthy(&self) -> bool {
        self.intact && self.problem_count == 0
    }
}

/// What [`compact`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CompactReport {
    /// File size before, in bytes.
    pub bytes_before: u64,
    /// File size after, in bytes.
    pub bytes_after: u64,
}

/// Rows by table.
///
/// # Errors
/// `InUse`, `NewerSchema`, or why the file cannot be read.
pub fn stats(path: &Path) -> Result<StoreStats, StoreError> {
    reader::stats(&open(path)?.begin_read()?)
}

/// Every policy version, in order.
///
/// # Errors
/// `InUse`, `NewerSchema`, or why the file cannot be read.
pub fn policies(path: &Path) -> Result<Vec<PolicyRecord>, StoreError> {
    reader::from_number(&open(path)?.begin_read()?, schema::POLICIES, 0, usize::MAX)
}

/// Checks the file's pages, that every row can be read, and that rows refer to rows that exist.
///
/// # Errors
/// `InUse`, `NewerSchema`, or why the file cannot be read or repaired.
pub fn check(path: &Path) -> Result<CheckReport, StoreError> {
    let mut database = open(path)?;
    let intact = database.check_integrity().map_err(|e| StoreError::Database(e.to_string()))?;
    let tx = database.begin_read()?;
    let Problems { count, first } = check::references(&tx)?;
    Ok(CheckReport { intact, rows: reader::stats(&tx)?, problem_count: count, problems: first })
}

/// Gives space that deleted and replaced rows left back to the file system.
///
/// # Errors
/// `InUse`, `NewerSchema`, or why the file cannot be rewritten.
pub fn compact(path: &Path) -> Result<CompactReport, StoreError> {
    let size = || std::fs::metadata(path).map(|m| m.len()).map_err(|e| io_error(&e));
    let bytes_before = size()?;
    let mut database = open(path)?;
    while database.compact()? {}
    drop(database);
    Ok(CompactReport { bytes_before, bytes_after: size()? })
}

/// One line of [`export`].
#[derive(Serialize)]
struct Line<'a, R> {
    table: &'a str,
    row: &'a R,
}

/// Writes every row as one JSON object a line, `{"table": …, "row": …}`, table by table in key
/// order; returns the number of lines.
///
/// # Errors
/// `InUse`, `NewerSchema`, a row that cannot be read, or `out` failing.
pub fn export(path: &Path, mut out: impl Write) -> Result<u64, StoreError> {
    let database = open(path)?;
    let tx = database.begin_read()?;
    let mut lines = 0;
    lines += rows::<_, Interaction>(&tx, schema::INTERACTIONS, &mut out)?;
    lines += rows::<_, Sample>(&tx, schema::SAMPLES, &mut out)?;
    lines += rows::<_, Reward>(&tx, schema::REWARDS, &mut out)?;
    lines += rows::<_, Reward>(&tx, schema::FEEDBACK, &mut out)?;
    lines += rows::<_, Group>(&tx, schema::GROUPS, &mut out)?;
    lines += rows::<_, PolicyRecord>(&tx, schema::POLICIES, &mut out)?;
    lines += rows::<_, StepRecord>(&tx, schema::STEPS, &mut out)?;
    out.flush().map_err(|e| io_error(&e))?;
    Ok(lines)
}

fn rows<K: Key + 'static, R: Row + Serialize>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, K, &'static [u8]>,
    out: &mut impl Write,
) -> Result<u64, StoreError> {
    let mut lines = 0;
    reader::each(tx, table, |_, row: Result<R, _>| {
        let line = Line { table: table.name(), row: &row? };
        serde_json::to_writer(&mut *out, &line).map_err(|e| io_error(&e.into()))?;
        out.write_all(b"\n").map_err(|e| io_error(&e))?;
        lines += 1;
        Ok(())
    })?;
    Ok(lines)
}

fn open(path: &Path) -> Result<Database, StoreError> {
    let database = handle::open_existing(path)?;
    let found = migrate::version(&database)?;
    migrate::refuse_newer(found, schema::VERSION)?;
    if found < schema::VERSION {
        return Err(StoreError::Database(format!(
            "the ledger has schema version {found}: start `hone serve` on it once to bring it to \
             version {}",
            schema::VERSION
        )));
    }
    Ok(database)
}

fn io_error(error: &std::io::Error) -> StoreError {
    StoreError::Database(error.to_string())
}
