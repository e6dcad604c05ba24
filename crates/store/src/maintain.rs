//! Offline operations: `hone db stats | check | compact | export | erase`.
//!
//! Each function opens the file exclusively, and returns `InUse` while a server has it open.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use redb::{
    Database, Key, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, TableHandle,
    Value, WriteTransaction,
};
use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

use hone_core::files::tree_bytes;
use hone_core::metrics::Metrics;
use hone_core::types::{
    Group, GroupState, Interaction, PolicyRecord, Reward, RewardSource, Sample, SampleOrigin,
    StepRecord,
};

use crate::erasure::{Erasure, ErasureFilter};
use crate::error::StoreError;
use crate::file::{self, Ledger};
use crate::format::codec::{LedgerRecord, decode};
use crate::format::{self, Bytes, Id, LedgerTables};
use crate::migrate;
use crate::op::{AuditRecord, LoggedBatch, Op};
use crate::reader::StoreStats;
use crate::store::{Store, StoreConfig};

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
/// `InUse`, another schema, or why the file cannot be read.
pub fn stats(path: &Path) -> Result<StoreStats, StoreError> {
    file::guarded(path, || Ledger::from(open(path)?).stats())
}

/// Returns every policy version, in order.
pub fn policies(path: &Path) -> Result<Vec<PolicyRecord>, StoreError> {
    file::guarded(path, || Ledger::from(open(path)?).policies())
}

/// Checks the file's pages, that every record can be decoded, and that records refer to existing
/// records.
pub fn check(path: &Path) -> Result<CheckReport, StoreError> {
    file::guarded(path, || {
        let mut database = open(path)?;
        let intact = database.check_integrity()?;
        let tables = database.begin_read()?.list_tables()?.count();
        // A transaction opens every table, and makes those that are missing. It changes nothing.
        let tx = database.begin_write()?;
        let problems = references(&tx);
        let missing = tx.list_tables()?.count() - tables;
        tx.abort()?;
        if missing > 0 {
            let reason = format!("{missing} of its tables are missing");
            return Err(StoreError::Corrupt { table: "the file", reason });
        }
        let Problems { count, first } = problems?;
        let rows = Ledger::from(database).stats()?;
        Ok(CheckReport { intact, rows, problem_count: count, problems: first })
    })
}

/// Returns the space of deleted and replaced rows to the file system.
pub fn compact(path: &Path) -> Result<CompactReport, StoreError> {
    let bytes_before = tree_bytes(path)?;
    let mut database = open(path)?;
    file::guarded(path, || {
        while database.compact()? {}
        Ok(())
    })?;
    drop(database);
    Ok(CompactReport { bytes_before, bytes_after: tree_bytes(path)? })
}

/// Erases a selection from the ledger of a stopped daemon, as [`Store::erase`], and then writes the rows to a new
/// file. `by` is the kind of the selection, for the audit record.
///
/// # Errors
/// As [`stats`], or if the file cannot be written.
pub fn erase(
    path: &Path,
    selection: &ErasureFilter,
    by: &str,
    dry_run: bool,
) -> Result<Erasure, StoreError> {
    drop(open(path)?);
    file::guarded(path, || {
        let metrics = Metrics::new().map_err(|e| StoreError::Failed(e.to_string()))?;
        let store = Store::open(path, &StoreConfig::default(), Arc::new(metrics))?;
        let erased = store.erase(selection, u64::MAX, dry_run)?;
        if !dry_run {
            let detail =
                json!({"by": by, "completions": erased.completions, "feedback": erased.feedback});
            let record = AuditRecord::new("command", "erase", "", detail, "ok");
            store.commit_blocking(vec![Op::Audit(Box::new(record))])?;
            store.rewrite()?;
        }
        futures::executor::block_on(store.close())?;
        Ok(erased)
    })
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
    lines += export_table::<_, Interaction>(&tx, format::INTERACTIONS, &mut out)?;
    lines += export_table::<_, Sample>(&tx, format::SAMPLES, &mut out)?;
    lines += export_table::<_, Reward>(&tx, format::REWARDS, &mut out)?;
    lines += export_table::<_, Reward>(&tx, format::FEEDBACK, &mut out)?;
    lines += export_table::<_, Group>(&tx, format::GROUPS, &mut out)?;
    lines += export_table::<_, PolicyRecord>(&tx, format::POLICIES, &mut out)?;
    lines += export_table::<_, StepRecord>(&tx, format::STEPS, &mut out)?;
    out.flush().map_err(export_error)?;
    Ok(lines)
}

fn export_table<K: Key + 'static, R: LedgerRecord + Serialize>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, K, Bytes>,
    out: &mut impl Write,
) -> Result<u64, StoreError> {
    #[derive(Serialize)]
    struct ExportLine<'a, R> {
        table: &'a str,
        row: &'a R,
    }

    let mut lines = 0;
    for row in tx.open_table(table)?.iter()? {
        let line = ExportLine { table: table.name(), row: &decode::<R>(row?.1.value())? };
        serde_json::to_writer(&mut *out, &line).map_err(|error| export_error(error.into()))?;
        out.write_all(b"\n").map_err(export_error)?;
        lines += 1;
    }
    Ok(lines)
}

fn export_error(error: io::Error) -> StoreError {
    StoreError::io("the export cannot be written")(error)
}

pub(crate) fn open(path: &Path) -> Result<Database, StoreError> {
    let database = file::open_existing(path)?;
    migrate::require_current(&database.begin_read()?)?;
    Ok(database)
}

// Checks that every record can be decoded and refers to existing records, and that the indexes
// match the records.

const DESCRIBED: usize = 100;

#[derive(Default)]
pub(crate) struct Problems {
    pub(crate) count: u64,
    pub(crate) first: Vec<String>,
}

impl Problems {
    fn add(&mut self, table: &str, key: impl Display, what: impl Display) {
        self.count += 1;
        if self.first.len() < DESCRIBED {
            self.first.push(format!("{table} {key}: {what}"));
        }
    }
}

/// Conditions that hold for a consistent record, each with the problem if it does not hold.
type Conditions = Result<Vec<(bool, &'static str)>, StoreError>;

pub(crate) fn references(tx: &WriteTransaction) -> Result<Problems, StoreError> {
    let tables = LedgerTables::new(tx)?;
    let mut problems = Problems::default();
    check_records(&tables, &mut problems)?;
    check_indexes(&tables, &mut problems)?;
    Ok(problems)
}

fn check_records(t: &LedgerTables<'_>, found: &mut Problems) -> Result<(), StoreError> {
    each(found, &t.interactions, name, |key, row: Interaction| {
        let erased = t.erased.get(*key)?.is_some();
        Ok(vec![(row.id.0.as_bytes() == *key, "wrong key"), (!erased, "it was erased")])
    })?;
    each(found, &t.samples, name, |key, row: Sample| {
        let prompt = row.interaction.0.as_bytes();
        let indexed = t.samples_of.get((prompt, *key))?.map(|v| v.value());
        let expected = (row.origin == SampleOrigin::Served, row.choice);
        let is_correction = row.origin == SampleOrigin::Correction;
        let expected_logprobs = if is_correction { 0 } else { row.ids.len() };
        let paired = row.logprobs.len() == expected_logprobs;
        let masses = row.kept.is_empty() || row.kept.len() == row.ids.len();
        let spans = row
            .forced
            .iter()
            .all(|span| span.start < span.end && span.end as usize <= row.ids.len());
        Ok(vec![
            (row.id.0.as_bytes() == *key, "wrong key"),
            (t.interactions.get(prompt)?.is_some(), "its interaction is missing"),
            (indexed == Some(expected), "its index entry is wrong"),
            (paired, "ids and log-probabilities differ in number"),
            (masses, "ids and kept masses differ in number"),
            (spans, "a forced token is outside its ids"),
        ])
    })?;
    let reward_key = |(sample, part): &(&Id, &str)| format!("{} {part}", name(sample));
    each(found, &t.rewards, reward_key, |(sample, part), row: Reward| {
        let right = row.sample.0.as_bytes() == *sample && row.name == *part;
        let known = t.samples.get(*sample)?.is_some();
        Ok(vec![(right, "wrong key"), (known, "its sample is missing")])
    })?;
    each(found, &t.feedback, name, |key, row: Reward| {
        // A correction has a sample in place of a value.
        let has_sample = t.samples.get(*key)?.is_some();
        let current = t.rewards.get((row.sample.0.as_bytes(), row.name.as_str()))?;
        let indexed = t.feedback_of.get((row.sample.0.as_bytes(), *key))?.is_some();
        Ok(vec![
            (row.id.0.as_bytes() == *key, "wrong key"),
            (has_sample || current.is_some(), "its reward is missing"),
            (indexed, "its index entry is missing"),
        ])
    })?;
    each(found, &t.groups, name, |key, row: Group| {
        let prompt = row.interaction.0.as_bytes();
        let indexed = t.groups_of.get((prompt, *key))?.is_some();
        let waits = t.ready.get((row.created, *key))?.is_some();
        let right = waits == (row.state == GroupState::Ready);
        let erased = row.members.is_empty() && t.erased.get(prompt)?.is_some();
        let known = erased || t.interactions.get(prompt)?.is_some();
        let mut conditions = vec![
            (row.id.0.as_bytes() == *key, "wrong key"),
            (known, "its interaction is missing"),
            (indexed, "its index entry is missing"),
            (right, "the index of ready groups disagrees"),
        ];
        for member in &row.members {
            let known = t.samples.get(member.0.as_bytes())?.is_some();
            conditions.push((known, "a member is missing"));
        }
        Ok(conditions)
    })?;
    each(found, &t.policies, u64::to_string, |key, row: PolicyRecord| {
        let parent = row.parent.map(|parent| t.policies.get(parent.0)).transpose()?;
        let known = parent.is_none_or(|parent| parent.is_some());
        Ok(vec![(row.version.0 == *key, "wrong key"), (known, "its parent is missing")])
    })?;
    each(found, &t.steps, u64::to_string, |key, row: StepRecord| {
        let mut conditions = vec![(row.step == *key, "wrong key")];
        for group in &row.groups {
            let known = t.groups.get(group.0.as_bytes())?.is_some();
            conditions.push((known, "a group is missing"));
        }
        Ok(conditions)
    })
}

/// Checks that index entries refer to existing records. [`check_records`] checks the
/// opposite direction.
fn check_indexes(t: &LedgerTables<'_>, found: &mut Problems) -> Result<(), StoreError> {
    each(found, &t.outbox, u64::to_string, |_, _: LoggedBatch| Ok(Vec::new()))?;
    each(found, &t.held, |(_, id)| name(id), |_, _: LoggedBatch| Ok(Vec::new()))?;
    let (samples, groups) = ((&t.samples, "no such sample"), (&t.groups, "no such group"));
    each_entry(found, &t.samples_of, samples, |key, _| *key.1)?;
    each_entry(found, &t.groups_of, groups, |key, ()| *key.1)?;
    each_entry(found, &t.ready, groups, |key, ()| *key.1)?;
    let feedback = (&t.feedback, "no such feedback");
    each_entry(found, &t.idempotency, feedback, |_, value| *value.1)?;
    each_entry(found, &t.ratings, feedback, |_, value| *value)?;
    each_entry(found, &t.feedback_of, feedback, |key, ()| *key.1)?;
    let prompts = (&t.interactions, "no such interaction");
    each_entry(found, &t.by_key, prompts, |key, ()| *key.1)?;
    each_entry(found, &t.sessions, prompts, |key, ()| *key.2)?;
    each_entry(found, &t.same_prompt, prompts, |key, ()| *key.1)?;
    each_entry(found, &t.held_out, prompts, |key, ()| *key.1)?;
    each_entry(found, &t.turns, prompts, |key, _| *key.1)?;
    each_entry(found, &t.turns_of, prompts, |key, ()| *key.0)?;
    for entry in t.ungrouped.iter()? {
        let key = entry?.0;
        let (created, sample, part) = key.value();
        let right = match t.rewards.get((sample, part))? {
            Some(bytes) => waits_since(bytes.value(), created),
            None => false,
        };
        if !right {
            found.add("ungrouped_feedback", name(&sample), "no such feedback");
        }
    }
    Ok(())
}

/// Checks that `rows` has the record that `target` takes from each entry of an index; else it is `missing`.
fn each_entry<K: Key + 'static, V: Value + 'static>(
    found: &mut Problems,
    index: &(impl ReadableTable<K, V> + TableHandle),
    (rows, missing): (&impl ReadableTable<&'static Id, Bytes>, &str),
    target: impl Fn(K::SelfType<'_>, V::SelfType<'_>) -> Id,
) -> Result<(), StoreError> {
    for entry in index.iter()? {
        let (key, value) = entry?;
        let id = target(key.value(), value.value());
        if rows.get(&id)?.is_none() {
            found.add(index.name(), name(&&id), missing);
        }
    }
    Ok(())
}

/// Checks the conditions of every record of a table, and that it can be decoded.
fn each<K: Key + 'static, R: LedgerRecord>(
    found: &mut Problems,
    table: &(impl ReadableTable<K, Bytes> + TableHandle),
    show: impl Fn(&K::SelfType<'_>) -> String,
    conditions: impl Fn(&K::SelfType<'_>, R) -> Conditions,
) -> Result<(), StoreError> {
    for row in table.iter()? {
        let (key, value) = row?;
        let key = key.value();
        match decode(value.value()) {
            Ok(row) => {
                for (_, what) in conditions(&key, row)?.iter().filter(|(holds, _)| !holds) {
                    found.add(table.name(), show(&key), what);
                }
            }
            Err(error) => found.add(table.name(), show(&key), error),
        }
    }
    Ok(())
}

/// Whether a reward is feedback of this time. A record that cannot be decoded is reported
/// elsewhere.
fn waits_since(bytes: &[u8], created: u64) -> bool {
    decode::<Reward>(bytes)
        .map_or(true, |r| r.source == RewardSource::Feedback && r.created == created)
}

fn name(id: &&Id) -> String {
    Uuid::from_bytes(**id).simple().to_string()
}
