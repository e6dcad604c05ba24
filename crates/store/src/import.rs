//! `hone db import`: a new ledger from the lines that `hone db export` wrote.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::Path;

use redb::{Database, ReadableTable};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use hone_core::files::{remove_any, sibling, sync_parent};
use hone_core::types::{Group, Reward, RewardId, RewardSource, StepRecord, key_of_rater};

use crate::error::StoreError;
use crate::file;
use crate::format::codec::{decode, encode};
use crate::maintain::references;
use crate::migrate;
use crate::op::Op;
use crate::write::Applier;

/// Lines of one transaction.
const BATCH: usize = 4096;

/// The result of [`import`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// Number of rows written, by table.
    pub imported: BTreeMap<String, u64>,
    /// Number of rows of tables that this version does not import.
    pub left_out: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct ImportLine {
    table: String,
    row: Value,
}

/// Makes a ledger at `path`, which must not exist, from the lines of an export, and checks it. Indexes follow from the
/// records. Feedback that no later group contains waits for a group again. Quarantines, the tombstones of erased prompts
/// and the index of conversations are not in an export.
///
/// # Errors
/// If the file exists, a line cannot be read (names the line), a record refers to a missing one, or the file cannot be
/// written. Then nothing is left at `path`.
pub fn import(path: &Path, lines: impl BufRead) -> Result<ImportReport, StoreError> {
    let failed = |reason: String| StoreError::Failed(format!("{}: {reason}", path.display()));
    if path.exists() {
        return Err(failed("it exists already, and is not replaced".to_owned()));
    }
    let temporary = sibling(path, ".import");
    remove_any(&temporary)?;
    let made = fill(&temporary, lines);
    let moved = made.and_then(|report| {
        std::fs::rename(&temporary, path).map_err(StoreError::io(&path.display().to_string()))?;
        sync_parent(path)?;
        Ok(report)
    });
    if moved.is_err() {
        remove_any(&temporary)?;
    }
    moved
}

fn fill(path: &Path, lines: impl BufRead) -> Result<ImportReport, StoreError> {
    let database = file::create(path)?;
    migrate::to_current(&database)?;
    let mut report = ImportReport::default();
    let mut batch = Vec::new();
    for (number, line) in (1_usize..).zip(lines.lines()) {
        batch.push((number, line.map_err(StoreError::io(&format!("line {number}")))?));
        if batch.len() == BATCH {
            write_batch(&database, &mut batch, &mut report)?;
        }
    }
    write_batch(&database, &mut batch, &mut report)?;
    file::write(&database, |tx| {
        await_groups(&mut Applier::new(tx)?)?;
        let problems = references(tx)?;
        match problems.first.first() {
            None => Ok(()),
            Some(first) => Err(StoreError::Failed(format!(
                "the lines are no complete export: {} problems, such as: {first}",
                problems.count
            ))),
        }
    })?;
    Ok(report)
}

fn write_batch(
    database: &Database,
    batch: &mut Vec<(usize, String)>,
    report: &mut ImportReport,
) -> Result<(), StoreError> {
    file::write(database, |tx| {
        let mut tables = Applier::new(tx)?;
        for (number, text) in batch.drain(..).filter(|(_, text)| !text.trim().is_empty()) {
            let place = |error: String| StoreError::Failed(format!("line {number}: {error}"));
            let line: ImportLine =
                serde_json::from_str(&text).map_err(|error| place(error.to_string()))?;
            let counts = match add(&mut tables, &line.table, line.row) {
                Ok(true) => &mut report.imported,
                Ok(false) => &mut report.left_out,
                Err(error) => return Err(place(error.to_string())),
            };
            *counts.entry(line.table).or_default() += 1;
        }
        Ok(())
    })
}

/// Writes one row with its index entries; returns whether its table is known.
fn add(tables: &mut Applier<'_>, table: &str, row: Value) -> Result<bool, StoreError> {
    fn record<R: DeserializeOwned>(row: Value) -> Result<R, StoreError> {
        serde_json::from_value(row).map_err(|error| StoreError::Failed(error.to_string()))
    }

    let op = match table {
        "interactions" => Op::Interaction(Box::new(record(row)?)),
        "samples" => Op::Sample(Box::new(record(row)?)),
        "policy_versions" => Op::Policy(Box::new(record(row)?)),
        "groups" => {
            let group: Group = record(row)?;
            let prompt = group.interaction.0.as_bytes();
            // Only a group of an erased prompt has no members.
            if group.members.is_empty() && tables.interactions.get(prompt)?.is_none() {
                tables.erased.insert(prompt, group.created)?;
            }
            Op::Group(Box::new(group))
        }
        "rewards" => {
            let reward: Reward = record(row)?;
            let key = (reward.sample.0.as_bytes(), reward.name.as_str());
            tables.rewards.insert(key, encode(&reward)?.as_slice())?;
            return Ok(true);
        }
        "feedback" => {
            add_feedback(tables, &record(row)?)?;
            return Ok(true);
        }
        "steps" => {
            // Not as an operation, which would mark its groups as trained, though a rollback may have returned them.
            let step: StepRecord = record(row)?;
            tables.steps.insert(step.step, encode(&step)?.as_slice())?;
            return Ok(true);
        }
        _ => return Ok(false),
    };
    tables.apply(&op, RewardId::new())?;
    Ok(true)
}

/// Rows of feedback are in the order of their ids, so the last rating of a rater is the newest.
fn add_feedback(tables: &mut Applier<'_>, row: &Reward) -> Result<(), StoreError> {
    let (sample, id) = (row.sample.0.as_bytes(), row.id.0.as_bytes());
    tables.feedback.insert(id, encode(row)?.as_slice())?;
    tables.feedback_of.insert((sample, id), ())?;
    if let Some(key) = row.idempotency_key.as_deref() {
        let api_key = row.key_id.as_deref().and_then(key_of_rater);
        tables.idempotency.insert((api_key, key), (sample, id))?;
    }
    if row.value.is_some() {
        tables.ratings.insert((sample, row.name.as_str(), row.key_id.as_deref()), id)?;
    }
    Ok(())
}

/// Lets feedback wait for a group that no group contains which was made later.
fn await_groups(tables: &mut Applier<'_>) -> Result<(), StoreError> {
    let mut grouped = BTreeMap::new();
    for row in tables.groups.iter()? {
        let group: Group = decode(row?.1.value())?;
        for (member, part) in crate::reader::pairs(&group) {
            let newest = grouped.entry((member, part.to_owned())).or_insert(group.created);
            *newest = group.created.max(*newest);
        }
    }
    let mut waiting = Vec::new();
    for row in tables.rewards.iter()? {
        let reward: Reward = decode(row?.1.value())?;
        let rated = reward.source == RewardSource::Feedback && reward.value.is_some();
        let newest = grouped.get(&(reward.sample, reward.name.clone()));
        if rated && newest.is_none_or(|newest| *newest < reward.created) {
            waiting.push(reward);
        }
    }
    for reward in waiting {
        let key = (reward.created, reward.sample.0.as_bytes(), reward.name.as_str());
        tables.ungrouped.insert(key, ())?;
    }
    Ok(())
}
