//! Offline operations: `hone db stats | check | compact | export`.
//!
//! Each function opens the file exclusively, and returns `InUse` while a server has it open.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

use redb::{
    Database, Key, ReadOnlyTable, ReadTransaction, ReadableDatabase, ReadableTable,
    TableDefinition, TableHandle, Value,
};
use serde::Serialize;
use uuid::Uuid;

use hone_core::types::{
    Group, GroupState, Interaction, PolicyRecord, Reward, RewardSource, Sample, SampleOrigin,
    StepRecord,
};

use crate::error::StoreError;
use crate::format;
use crate::format::codec::{LedgerRecord, decode};
use crate::format::{Bytes, Id, IdPair};
use crate::reader::StoreStats;
use crate::{file, migrate, reader};

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
        reader::from_number(&open(path)?.begin_read()?, format::POLICIES, 0, usize::MAX)
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
        let Problems { count, first } = references(&tx)?;
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

// Checks that every record can be decoded and refers to existing records, and that the indexes
// match the records.

/// Number of problems that are described.
const DESCRIBED: usize = 100;

/// Problems found in a snapshot.
#[derive(Default)]
pub(crate) struct Problems {
    /// Number of problems.
    pub(crate) count: u64,
    /// Descriptions of the first ones.
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
type Rows<K> = ReadOnlyTable<K, Bytes>;

struct Checker<'t> {
    tx: &'t ReadTransaction,
    interactions: Rows<&'static Id>,
    samples: Rows<&'static Id>,
    rewards: Rows<(&'static Id, &'static str)>,
    feedback: Rows<&'static Id>,
    groups: Rows<&'static Id>,
    policies: Rows<u64>,
    samples_of: ReadOnlyTable<IdPair, (bool, u32)>,
    groups_of: ReadOnlyTable<IdPair, ()>,
    ready: ReadOnlyTable<(u64, &'static Id), ()>,
    erased: ReadOnlyTable<&'static Id, u64>,
    feedback_of: ReadOnlyTable<IdPair, ()>,
}

/// Finds every problem in a snapshot.
pub(crate) fn references(tx: &ReadTransaction) -> Result<Problems, StoreError> {
    let checker = Checker {
        tx,
        interactions: tx.open_table(format::INTERACTIONS)?,
        samples: tx.open_table(format::SAMPLES)?,
        rewards: tx.open_table(format::REWARDS)?,
        feedback: tx.open_table(format::FEEDBACK)?,
        groups: tx.open_table(format::GROUPS)?,
        policies: tx.open_table(format::POLICIES)?,
        samples_of: tx.open_table(format::SAMPLES_OF)?,
        groups_of: tx.open_table(format::GROUPS_OF)?,
        ready: tx.open_table(format::READY)?,
        erased: tx.open_table(format::ERASED)?,
        feedback_of: tx.open_table(format::FEEDBACK_OF)?,
    };
    let mut problems = Problems::default();
    checker.check_records(&mut problems)?;
    checker.check_indexes(&mut problems)?;
    Ok(problems)
}

impl Checker<'_> {
    fn check_records(&self, problems: &mut Problems) -> Result<(), StoreError> {
        self.each(problems, format::INTERACTIONS, name, |key, row: Interaction| {
            let erased = self.erased.get(*key)?.is_some();
            Ok(vec![(row.id.0.as_bytes() == *key, "wrong key"), (!erased, "it was erased")])
        })?;
        self.each(problems, format::SAMPLES, name, |key, row: Sample| {
            let prompt = row.interaction.0.as_bytes();
            let indexed = self.samples_of.get((prompt, *key))?.map(|v| v.value());
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
                (self.interactions.get(prompt)?.is_some(), "its interaction is missing"),
                (indexed == Some(expected), "its index entry is wrong"),
                (paired, "ids and log-probabilities differ in number"),
                (masses, "ids and kept masses differ in number"),
                (spans, "a forced token is outside its ids"),
            ])
        })?;
        let reward_key = |(sample, part): &(&Id, &str)| format!("{} {part}", name(sample));
        self.each(problems, format::REWARDS, reward_key, |(sample, part), row: Reward| {
            let right = row.sample.0.as_bytes() == *sample && row.name == *part;
            let known = self.samples.get(*sample)?.is_some();
            Ok(vec![(right, "wrong key"), (known, "its sample is missing")])
        })?;
        self.each(problems, format::FEEDBACK, name, |key, row: Reward| {
            // A correction has a sample in place of a value.
            let has_sample = self.samples.get(*key)?.is_some();
            let current = self.rewards.get((row.sample.0.as_bytes(), row.name.as_str()))?;
            let indexed = self.feedback_of.get((row.sample.0.as_bytes(), *key))?.is_some();
            Ok(vec![
                (row.id.0.as_bytes() == *key, "wrong key"),
                (has_sample || current.is_some(), "its reward is missing"),
                (indexed, "its index entry is missing"),
            ])
        })?;
        self.each(problems, format::GROUPS, name, |key, row: Group| {
            let prompt = row.interaction.0.as_bytes();
            let indexed = self.groups_of.get((prompt, *key))?.is_some();
            let waits = self.ready.get((row.created, *key))?.is_some();
            let right = waits == (row.state == GroupState::Ready);
            let erased = row.members.is_empty() && self.erased.get(prompt)?.is_some();
            let known = erased || self.interactions.get(prompt)?.is_some();
            let mut conditions = vec![
                (row.id.0.as_bytes() == *key, "wrong key"),
                (known, "its interaction is missing"),
                (indexed, "its index entry is missing"),
                (right, "the index of ready groups disagrees"),
            ];
            for member in &row.members {
                let known = self.samples.get(member.0.as_bytes())?.is_some();
                conditions.push((known, "a member is missing"));
            }
            Ok(conditions)
        })?;
        self.each(problems, format::POLICIES, u64::to_string, |key, row: PolicyRecord| {
            let parent = row.parent.map(|parent| self.policies.get(parent.0)).transpose()?;
            let known = parent.is_none_or(|parent| parent.is_some());
            Ok(vec![(row.version.0 == *key, "wrong key"), (known, "its parent is missing")])
        })?;
        self.each(problems, format::STEPS, u64::to_string, |key, row: StepRecord| {
            let mut conditions = vec![(row.step == *key, "wrong key")];
            for group in &row.groups {
                let known = self.groups.get(group.0.as_bytes())?.is_some();
                conditions.push((known, "a group is missing"));
            }
            Ok(conditions)
        })
    }

    /// Checks that index entries refer to existing records. [`Self::check_records`] checks the
    /// opposite direction.
    fn check_indexes(&self, problems: &mut Problems) -> Result<(), StoreError> {
        let (samples, groups) = (&self.samples, &self.groups);
        self.each_entry(problems, format::SAMPLES_OF, samples, "no such sample", |key, _| *key.1)?;
        self.each_entry(problems, format::GROUPS_OF, groups, "no such group", |key, ()| *key.1)?;
        self.each_entry(problems, format::READY, groups, "no such group", |key, ()| *key.1)?;
        let (missing, feedback) = ("no such feedback", &self.feedback);
        self.each_entry(problems, format::IDEMPOTENCY, feedback, missing, |_, value| *value.1)?;
        self.each_entry(problems, format::RATINGS, feedback, missing, |_, value| *value)?;
        self.each_entry(problems, format::FEEDBACK_OF, feedback, missing, |key, ()| *key.1)?;
        let (missing, interactions) = ("no such interaction", &self.interactions);
        self.each_entry(problems, format::BY_KEY, interactions, missing, |key, ()| *key.1)?;
        self.each_entry(problems, format::SESSIONS, interactions, missing, |key, ()| *key.2)?;
        self.each_entry(problems, format::SAME_PROMPT, interactions, missing, |key, ()| *key.1)?;
        self.each_entry(problems, format::HELD_OUT, interactions, missing, |key, ()| *key.1)?;
        self.each_entry(problems, format::TURNS, interactions, missing, |key, _| *key.1)?;
        self.each_entry(problems, format::TURNS_OF, interactions, missing, |key, ()| *key.0)?;
        for entry in self.tx.open_table(format::UNGROUPED)?.iter()? {
            let key = entry?.0;
            let (created, sample, part) = key.value();
            let right = match self.rewards.get((sample, part))? {
                Some(bytes) => waits_since(bytes.value(), created),
                None => false,
            };
            if !right {
                problems.add(format::UNGROUPED.name(), name(&sample), "no such feedback");
            }
        }
        Ok(())
    }

    /// Checks that `rows` has the record that `target` takes from each entry of an index.
    fn each_entry<K: Key + 'static, V: Value + 'static>(
        &self,
        problems: &mut Problems,
        index: TableDefinition<'static, K, V>,
        rows: &Rows<&'static Id>,
        missing: &str,
        target: impl Fn(K::SelfType<'_>, V::SelfType<'_>) -> Id,
    ) -> Result<(), StoreError> {
        for entry in self.tx.open_table(index)?.iter()? {
            let (key, value) = entry?;
            let id = target(key.value(), value.value());
            if rows.get(&id)?.is_none() {
                problems.add(index.name(), name(&&id), missing);
            }
        }
        Ok(())
    }

    /// Checks the conditions of every record of a table, and that it can be decoded.
    fn each<K: Key + 'static, R: LedgerRecord>(
        &self,
        problems: &mut Problems,
        table: TableDefinition<'static, K, Bytes>,
        show: impl Fn(&K::SelfType<'_>) -> String,
        conditions: impl Fn(&K::SelfType<'_>, R) -> Conditions,
    ) -> Result<(), StoreError> {
        reader::each(self.tx, table, |key, row| {
            match row {
                Ok(row) => {
                    for (_, what) in conditions(&key, row)?.iter().filter(|(holds, _)| !holds) {
                        problems.add(table.name(), show(&key), what);
                    }
                }
                Err(error) => problems.add(table.name(), show(&key), error),
            }
            Ok(())
        })
    }
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
