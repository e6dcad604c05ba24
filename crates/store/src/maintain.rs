//! Offline operations: `hone db stats | check | compact | export`.
//!
//! Each function opens the file exclusively, and returns `InUse` while a server has it open.

use std::io::{self, Write};
use std::path::Path;

use redb::{Database, Key, ReadTransaction, ReadableDatabase, TableDefinition, TableHandle};
use serde::Serialize;

use hone_core::types::{Group, Interaction, PolicyRecord, Reward, Sample, StepRecord};

use crate::check::{self, Problems};
use crate::error::StoreError;
use crate::format::codec::LedgerRecord;
use crate::format::schema::{self, Bytes};
use crate::reader::{self, StoreStats};
use crate::{file, migrate};

/// The result of [`check`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckReport {
    /// Whether redb found its pages intact. It repaired them if not.
    pub intact: bool,
    /// Number of rows in each table.
    pub rows: StoreStats,
    /// Number of records that cannot be decoded or refer to missing records.
    pub problem_count: u64,
    /// Descriptions of the first hundred problems.
    pub problems: Vec<String>,
}

impl CheckReport {
    /// Whether the check found no problem.
    pub fn is_healthy(&self) -> bool {
        self.intact && self.problem_count == 0
    }
}

/// The result of [`compact`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CompactReport {
    /// File size before, in bytes.
    pub bytes_before: u64,
    /// File size after, in bytes.
    pub bytes_after: u64,
}

/// Counts the rows of each table.
///
/// # Errors
/// `InUse`, `NewerSchema`, `OlderSchema`, or why the file cannot be read.
pub fn stats(path: &Path) -> Result<StoreStats, StoreError> {
    file::guarded(path, || reader::stats(&open(path)?.begin_read()?))
}

/// Returns every policy version, in order.
///
/// # Errors
/// As [`stats`].
pub fn policies(path: &Path) -> Result<Vec<PolicyRecord>, StoreError> {
    file::guarded(path, || {
        reader::from_number(&open(path)?.begin_read()?, schema::POLICIES, 0, usize::MAX)
    })
}

/// Checks the file's pages, that every record can be decoded, and that records refer to existing
/// records.
///
/// # Errors
/// As [`stats`], or why the file cannot be repaired.
pub fn check(path: &Path) -> Result<CheckReport, StoreError> {
    file::guarded(path, || {
        let mut database = open(path)?;
        let intact = database.check_integrity()?;
        let tx = database.begin_read()?;
        let Problems { count, first } = check::references(&tx)?;
        Ok(CheckReport { intact, rows: reader::stats(&tx)?, problem_count: count, problems: first })
    })
}

/// Returns the space of deleted and replaced rows to the file system.
///
/// # Errors
/// As [`stats`], or why the file cannot be rewritten.
pub fn compact(path: &Path) -> Result<CompactReport, StoreError> {
    let size = || {
        let metadata = std::fs::metadata(path);
        metadata.map(|m| m.len()).map_err(StoreError::io(&path.display().to_string()))
    };
    let bytes_before = size()?;
    let mut database = open(path)?;
    file::guarded(path, || {
        while database.compact()? {}
        Ok(())
    })?;
    drop(database);
    Ok(CompactReport { bytes_before, bytes_after: size()? })
}

/// One line of [`export`].
#[derive(Serialize)]
struct ExportLine<'a, R> {
    table: &'a str,
    row: &'a R,
}

/// Writes every row as one JSON object per line, `{"table": …, "row": …}`, table by table in key
/// order. Returns the number of lines.
///
/// # Errors
/// As [`stats`], a record that cannot be decoded, or a failure of `out`.
pub fn export(path: &Path, out: impl Write) -> Result<u64, StoreError> {
    file::guarded(path, || export_tables(path, out))
}

fn export_tables(path: &Path, mut out: impl Write) -> Result<u64, StoreError> {
    let database = open(path)?;
    let tx = database.begin_read()?;
    let mut lines = 0;
    lines += export_table::<_, Interaction>(&tx, schema::INTERACTIONS, &mut out)?;
    lines += export_table::<_, Sample>(&tx, schema::SAMPLES, &mut out)?;
    lines += export_table::<_, Reward>(&tx, schema::REWARDS, &mut out)?;
    lines += export_table::<_, Reward>(&tx, schema::FEEDBACK, &mut out)?;
    lines += export_table::<_, Group>(&tx, schema::GROUPS, &mut out)?;
    lines += export_table::<_, PolicyRecord>(&tx, schema::POLICIES, &mut out)?;
    lines += export_table::<_, StepRecord>(&tx, schema::STEPS, &mut out)?;
    out.flush().map_err(export_error)?;
    Ok(lines)
}

fn export_table<K: Key + 'static, R: LedgerRecord + Serialize>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, K, Bytes>,
    out: &mut impl Write,
) -> Result<u64, StoreError> {
    let mut lines = 0;
    reader::each(tx, table, |_, row: Result<R, _>| {
        let line = ExportLine { table: table.name(), row: &row? };
        serde_json::to_writer(&mut *out, &line).map_err(|error| export_error(error.into()))?;
        out.write_all(b"\n").map_err(export_error)?;
        lines += 1;
        Ok(())
    })?;
    Ok(lines)
}

fn export_error(error: io::Error) -> StoreError {
    StoreError::io("the export cannot be written")(error)
}

fn open(path: &Path) -> Result<Database, StoreError> {
    let database = file::open_existing(path)?;
    migrate::require_current(&database)?;
    Ok(database)
}
