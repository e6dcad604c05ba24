//! What an operator erases: completions by id, session, end user, API key or age, and the feedback of an end user or a
//! key on completions of others.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, NaiveDate, NaiveTime, Utc};
use redb::{ReadTransaction, ReadableTable};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use hone_core::types::{
    Group, GroupState, Interaction, InteractionId, PolicyRecord, Reward, RewardId, UnixMillis,
    concerns_rater, key_of_rater, now_ms, rater_id,
};

use crate::error::StoreError;
use crate::format::codec::decode;
use crate::format::{self, Id};
use crate::op::{LoggedBatch, Op, id_of_turn};
use crate::reader::{get, ids_of};
use crate::store::Store;

/// Prompts that one transaction erases, so that clients' writes do not wait for all.
const BATCH: usize = 128;

/// The beginning of a date in UTC such as `2026-01-31`, or a time of RFC 3339; `None` for another text and before 1970.
pub fn parse_moment(text: &str) -> Option<UnixMillis> {
    let date = || Some(text.parse::<NaiveDate>().ok()?.and_time(NaiveTime::MIN).and_utc());
    let time = DateTime::parse_from_rfc3339(text).ok().map(|time| time.with_timezone(&Utc));
    u64::try_from(time.or_else(date)?.timestamp_millis()).ok()
}

/// Which completions are erased.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErasureFilter {
    /// One completion.
    Completion(InteractionId),
    /// The completions of conversations with this `metadata.session_id`, of every key.
    Session(String),
    /// The completions and the feedback of an end user, by the name in the field `user`, of every key.
    EndUser(String),
    /// The completions and the feedback of an API key with its end users, or of one of these, by id.
    Key(String),
    /// The completions of before this time.
    Before(UnixMillis),
}

impl ErasureFilter {
    fn has_prompt(&self, row: &Interaction) -> bool {
        match self {
            Self::Completion(id) => row.id == *id,
            Self::Session(session) => row.session() == Some(session),
            Self::EndUser(_) | Self::Key(_) => self.has_rater(row.key_id.as_deref()),
            Self::Before(time) => row.created < *time,
        }
    }

    fn has_rater(&self, rater: Option<&str>) -> bool {
        let Some(rater) = rater else { return false };
        match self {
            Self::EndUser(user) => {
                rater_id(key_of_rater(rater), Some(user)).as_deref() == Some(rater)
            }
            Self::Key(id) => concerns_rater(id, rater),
            _ => false,
        }
    }
}

/// What was, or would be, erased.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Erasure {
    /// Prompts, each with its completions.
    pub completions: usize,
    /// Sampled and corrected texts.
    pub samples: usize,
    /// Pieces of feedback.
    pub feedback: usize,
    /// Policy versions that were trained on any of it.
    pub versions: Vec<u64>,
}

/// What a selection finds.
#[derive(Default)]
struct Selected {
    prompts: Vec<InteractionId>,
    /// Feedback on completions that stay.
    feedback: Vec<RewardId>,
    report: Erasure,
}

impl Store {
    /// Erases what a selection finds of those rows that were made up to `until`: the prompts as [`Op::Erase`] does, and
    /// the feedback as [`Op::EraseFeedback`]. With `dry_run` it only reports. The texts stay in free pages of the file
    /// until [`Store::rewrite`]. Blocks.
    ///
    /// # Errors
    /// If the ledger cannot be read or written. What was erased before the error stays erased.
    pub fn erase(
        &self,
        selection: &ErasureFilter,
        until: UnixMillis,
        dry_run: bool,
    ) -> Result<Erasure, StoreError> {
        let found = find(&self.inner.file.snapshot()?, selection, until)?;
        if dry_run {
            return Ok(found.report);
        }
        let now = now_ms();
        let prompts = found.prompts.iter().map(|id| Op::Erase(*id, now));
        let ops: Vec<Op> =
            prompts.chain(found.feedback.into_iter().map(Op::EraseFeedback)).collect();
        for batch in ops.chunks(BATCH) {
            self.commit_blocking(batch.to_vec())?;
        }
        Ok(found.report)
    }
}

fn find(
    tx: &ReadTransaction,
    selection: &ErasureFilter,
    until: UnixMillis,
) -> Result<Selected, StoreError> {
    let mut found = Selected::default();
    let prompts = tx.open_table(format::INTERACTIONS)?;
    let (samples_of, groups_of) =
        (tx.open_table(format::SAMPLES_OF)?, tx.open_table(format::GROUPS_OF)?);
    let groups = tx.open_table(format::GROUPS)?;
    let mut steps = BTreeSet::new();
    let mut samples = BTreeSet::<Id>::new();
    let mut add_group = |id: &Id| -> Result<(), StoreError> {
        let group: Option<Group> = get(&groups, id)?;
        if let Some(GroupState::Trained(step)) = group.map(|group| group.state) {
            steps.insert(step);
        }
        Ok(())
    };
    let mut add = |row: Interaction| -> Result<(), StoreError> {
        let id = row.id.0.as_bytes();
        samples.extend(ids_of(&samples_of, id)?);
        ids_of(&groups_of, id)?.iter().try_for_each(&mut add_group)?;
        found.prompts.push(row.id);
        Ok(())
    };
    if let ErasureFilter::Completion(id) = selection {
        get(&prompts, id.0.as_bytes())?.map_or(Ok(()), &mut add)?;
    } else {
        for entry in prompts.iter()? {
            let row: Interaction = decode(entry?.1.value())?;
            if row.created <= until && selection.has_prompt(&row) {
                add(row)?;
            }
        }
    }
    let recorded = tx.open_table(format::FEEDBACK)?;
    for entry in recorded.iter()? {
        let row: Reward = decode(entry?.1.value())?;
        let goes_with_prompt = samples.contains(row.sample.0.as_bytes());
        let is_of_rater = row.created <= until && selection.has_rater(row.key_id.as_deref());
        if goes_with_prompt || is_of_rater {
            found.report.feedback += 1;
        }
        if !goes_with_prompt && is_of_rater {
            // The group of a correction has its id.
            add_group(row.id.0.as_bytes())?;
            found.feedback.push(row.id);
        }
    }
    // Feedback on completions of other processes has no row yet, or never here.
    let (outbox, held) = (tx.open_table(format::OUTBOX)?, tx.open_table(format::HELD)?);
    let unshipped = outbox.iter()?.map(|row| decode::<LoggedBatch>(row?.1.value()));
    let held = held.iter()?.map(|row| decode(row?.1.value()));
    for batch in unshipped.chain(held) {
        let batch = batch?;
        for (op, id) in batch.ops {
            let (choices, rater) = op.posts();
            if batch.at <= until
                && selection.has_rater(rater)
                && recorded.get(id.0.as_bytes())?.is_none()
            {
                found.feedback.extend((0..choices.len()).map(|row| id_of_turn(id, row)));
                found.report.feedback += choices.len();
            }
        }
    }
    found.report.completions = found.prompts.len();
    found.report.samples = samples.len();
    found.report.versions = trained_on(tx, &steps)?;
    Ok(found)
}

/// The versions of which a step on the way from version 0 is one of `steps`.
fn trained_on(tx: &ReadTransaction, steps: &BTreeSet<u64>) -> Result<Vec<u64>, StoreError> {
    let mut affected = BTreeSet::new();
    let mut last_steps = BTreeMap::new();
    // Parents have smaller numbers than their children.
    for entry in tx.open_table(format::POLICIES)?.iter()? {
        let row: PolicyRecord = decode(entry?.1.value())?;
        last_steps.insert(row.version, row.step);
        let Some(parent) = row.parent else { continue };
        let before = last_steps.get(&parent).copied().unwrap_or_default();
        let own = steps.range(before + 1..row.step.max(before) + 1).next().is_some();
        if own || affected.contains(&parent) {
            affected.insert(row.version);
        }
    }
    Ok(affected.into_iter().map(|version| version.0).collect())
}

// Retention: what is older than the ledger keeps, or more than its bound has room for.

impl Store {
    /// Erases at most `limit` prompts that are due, oldest first up to the first one where the search ends,
    /// and returns their number. They leave no trace.
    ///
    /// # Errors
    /// If the ledger cannot be read or written.
    pub(crate) fn expire(
        &self,
        limit: usize,
        is_due: impl Fn(&Interaction) -> bool,
        ends: impl Fn(&Interaction) -> bool,
    ) -> Result<usize, StoreError> {
        let mut due = Vec::new();
        {
            let tx = self.inner.file.snapshot()?;
            for entry in tx.open_table(format::INTERACTIONS)?.iter()? {
                let row: Interaction = decode(entry?.1.value())?;
                if due.len() == limit || ends(&row) {
                    break;
                }
                if is_due(&row) {
                    due.push(Op::Expire(row.id));
                }
            }
        }
        for batch in due.chunks(BATCH) {
            self.commit_blocking(batch.to_vec())?;
        }
        Ok(due.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_a_date_or_a_time() {
        assert_eq!(parse_moment("1970-01-02"), Some(86_400_000));
        assert_eq!(parse_moment("1970-01-01T01:00:00+01:00"), Some(0));
        for text in ["", "yesterday", "2026-13-01", "1969-12-31"] {
            assert_eq!(parse_moment(text), None, "{text}");
        }
    }
}
