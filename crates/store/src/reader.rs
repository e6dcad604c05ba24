//! Queries on a snapshot, or on the open tables of a transaction.

use std::borrow::Borrow;
use std::ops::Bound;
use std::path::Path;

use redb::{
    AccessGuard, Key, Range, ReadTransaction, ReadableTable, ReadableTableMetadata, StorageError,
    TableDefinition, Value,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use hone_core::types::{
    Group, GroupId, Interaction, InteractionId, PolicyRecord, PolicyVersion, Rating, Reward,
    RewardId, RewardSource, Sample, SampleId, StepRecord, UnixMillis, concerns_rater, key_of_rater,
};

use crate::error::StoreError;
use crate::file::{self, Ledger};
use crate::format;
use crate::format::codec::{LedgerRecord, decode};
use crate::format::{Bytes, Id, IdPair};
use crate::migrate::require_current;
use crate::op::{AuditRecord, QuarantinedKey};

/// Number of rows in each table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoreStats {
    /// Prompts.
    pub interactions: u64,
    /// Completions.
    pub samples: u64,
    /// Pieces of feedback, including replaced ones.
    pub feedback: u64,
    /// Current values of reward parts, from graders and clients.
    pub rewards: u64,
    /// Groups in any state.
    pub groups: u64,
    /// Policy versions in any state.
    pub policy_versions: u64,
    /// Optimizer steps.
    pub steps: u64,
}

impl StoreStats {
    /// `(table, rows)` for each table, for display.
    pub fn rows(&self) -> [(&'static str, u64); 7] {
        [
            ("interactions", self.interactions),
            ("samples", self.samples),
            ("feedback", self.feedback),
            ("rewards", self.rewards),
            ("groups", self.groups),
            ("policy_versions", self.policy_versions),
            ("steps", self.steps),
        ]
    }
}

/// The least and the greatest id.
const IDS: (Id, Id) = ([0; 16], [u8::MAX; 16]);

fn prompt_id(id: &Id) -> InteractionId {
    InteractionId(Uuid::from_bytes(*id))
}

/// Queries. Each runs on its own snapshot of the last commit.
///
/// # Errors
/// Every query fails if the file or a record cannot be read, and after [`Store::close`](crate::Store::close).
impl Ledger {
    /// Opens a file of the current schema to read it alone: it stays byte for byte the same. Until the ledger
    /// is dropped, no process can open the file for writing.
    ///
    /// # Errors
    /// `InUse` while a server has it open, or why the file cannot be read, as after a crash.
    pub fn open_read_only(path: &Path) -> Result<Self, StoreError> {
        let ledger = file::open_read_only(path)?;
        ledger.read(require_current)?;
        Ok(ledger)
    }

    /// The record under `key` in `table`.
    fn find<'k, K: Key + 'static, R: LedgerRecord>(
        &self,
        table: TableDefinition<'static, K, Bytes>,
        key: impl Borrow<K::SelfType<'k>>,
    ) -> Result<Option<R>, StoreError> {
        self.read(|tx| get(&tx.open_table(table)?, key))
    }

    /// At most `limit` records under numbers from `first` on.
    fn numbered<R: LedgerRecord>(
        &self,
        table: TableDefinition<'static, u64, Bytes>,
        first: u64,
        limit: usize,
    ) -> Result<Vec<R>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(table)?;
            rows.range(first..)?.take(limit).map(|row| decode(row?.1.value())).collect()
        })
    }

    /// The records that an index has under an interaction, in key order.
    fn indexed<V: Value + 'static, R: LedgerRecord>(
        &self,
        index: TableDefinition<'static, IdPair, V>,
        table: TableDefinition<'static, &'static Id, Bytes>,
        id: InteractionId,
    ) -> Result<Vec<R>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(table)?;
            let ids = ids_of(&tx.open_table(index)?, id.0.as_bytes())?;
            ids.iter().filter_map(|id| get(&rows, id).transpose()).collect()
        })
    }

    /// At most `limit` rows of a table whose keys are UUIDv7: newest first those before `end`, or oldest first
    /// those after it; all if there is no `end`.
    fn page<V: Value + 'static, R>(
        &self,
        table: TableDefinition<'static, &'static Id, V>,
        newest_first: bool,
        end: Option<Uuid>,
        limit: usize,
        read: impl Fn(V::SelfType<'_>) -> Result<R, StoreError>,
    ) -> Result<Vec<R>, StoreError> {
        let end = end.map(Uuid::into_bytes);
        let (mut low, mut high) = (Bound::Included(&IDS.0), Bound::Included(&IDS.1));
        if let Some(end) = &end {
            *(if newest_first { &mut high } else { &mut low }) = Bound::Excluded(end);
        }
        self.read(|tx| {
            let table = tx.open_table(table)?;
            let rows = table.range::<&Id>((low, high))?;
            let row = |row: Result<(AccessGuard<'_, &Id>, AccessGuard<'_, V>), StorageError>| {
                read(row?.1.value())
            };
            if newest_first {
                rows.rev().take(limit).map(row).collect()
            } else {
                rows.take(limit).map(row).collect()
            }
        })
    }

    /// At most `limit` prompts of live traffic and datasets, newest first, of those before `before`.
    pub fn newest_interactions(
        &self,
        before: Option<Uuid>,
        limit: usize,
    ) -> Result<Vec<Interaction>, StoreError> {
        self.page(format::INTERACTIONS, true, before, limit, decode)
    }

    /// At most `limit` prompts after `after`, oldest first.
    pub fn interactions_after(
        &self,
        after: Option<InteractionId>,
        limit: usize,
    ) -> Result<Vec<Interaction>, StoreError> {
        self.page(format::INTERACTIONS, false, after.map(|id| id.0), limit, decode)
    }

    /// At most `limit` pieces of feedback, replaced ones included, newest first, of those before `before`.
    pub fn newest_feedback(
        &self,
        before: Option<Uuid>,
        limit: usize,
    ) -> Result<Vec<Reward>, StoreError> {
        self.page(format::FEEDBACK, true, before, limit, decode)
    }

    /// At most `limit` pieces of feedback recorded since a time and after `after`, oldest first.
    pub fn feedback_since(
        &self,
        since: UnixMillis,
        after: Option<RewardId>,
        limit: usize,
    ) -> Result<Vec<Reward>, StoreError> {
        // Ids sort by time.
        let after = after.map_or_else(|| Uuid::from_u64_pair(since << 16, 0), |id| id.0);
        self.page(format::FEEDBACK, false, Some(after), limit, decode)
    }

    /// At most `limit` groups in any state, newest first, of those before `before`.
    pub fn newest_groups(
        &self,
        before: Option<Uuid>,
        limit: usize,
    ) -> Result<Vec<Group>, StoreError> {
        self.page(format::GROUPS, true, before, limit, decode)
    }

    /// At most `limit` actions of operators, newest first, of those before `before`.
    pub fn audit(
        &self,
        before: Option<Uuid>,
        limit: usize,
    ) -> Result<Vec<AuditRecord>, StoreError> {
        self.page(format::AUDIT, true, before, limit, |text: &str| {
            serde_json::from_str(text)
                .map_err(|error| StoreError::Corrupt { table: "audit", reason: error.to_string() })
        })
    }

    /// At most `limit` completions, newest first; those of one version if it is given.
    pub fn newest_samples(
        &self,
        version: Option<PolicyVersion>,
        limit: usize,
    ) -> Result<Vec<Sample>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::SAMPLES)?;
            let all = rows.iter()?.rev().map(|row| decode(row?.1.value()));
            let is_of = |row: &Result<Sample, StoreError>| match (row, version) {
                (Ok(sample), Some(version)) => sample.version == version,
                _ => true,
            };
            all.filter(is_of).take(limit).collect()
        })
    }

    /// One prompt.
    pub fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        self.find(format::INTERACTIONS, id.0.as_bytes())
    }

    /// One completion.
    pub fn sample(&self, id: SampleId) -> Result<Option<Sample>, StoreError> {
        self.find(format::SAMPLES, id.0.as_bytes())
    }

    /// Every completion of a prompt, in key order.
    pub fn samples_of(&self, id: InteractionId) -> Result<Vec<Sample>, StoreError> {
        self.indexed(format::SAMPLES_OF, format::SAMPLES, id)
    }

    /// At most `limit` prompts of an API key's conversation, oldest first.
    pub fn turns_of(
        &self,
        key_id: Option<&str>,
        session: &str,
        limit: usize,
    ) -> Result<Vec<InteractionId>, StoreError> {
        self.read(|tx| {
            let sessions = tx.open_table(format::SESSIONS)?;
            let entries = sessions.range((key_id, session, &IDS.0)..=(key_id, session, &IDS.1))?;
            entries.take(limit).map(|entry| Ok(prompt_id(entry?.0.value().2))).collect()
        })
    }

    /// At most `limit` chat completions of an API key, oldest or newest first; those after `after`, if
    /// that is given.
    pub fn completions_of(
        &self,
        key_id: Option<&str>,
        after: Option<InteractionId>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<InteractionId>, StoreError> {
        self.read(|tx| {
            let index = tx.open_table(format::BY_KEY)?;
            let (mut low, mut high) = (Bound::Included(IDS.0), Bound::Included(IDS.1));
            if let Some(after) = after {
                let end = if newest_first { &mut high } else { &mut low };
                *end = Bound::Excluded(*after.0.as_bytes());
            }
            let key = |id| (key_id, id);
            let range = (low.as_ref().map(key), high.as_ref().map(key));
            let entries = index.range::<(Option<&str>, &Id)>(range)?;
            let ids = entries.map(|entry| Ok(prompt_id(entry?.0.value().1)));
            if newest_first { ids.rev().take(limit).collect() } else { ids.take(limit).collect() }
        })
    }

    /// At most `limit` live interactions with the same prompt, newest first, itself included.
    pub fn same_prompt(
        &self,
        interaction: &Interaction,
        limit: usize,
    ) -> Result<Vec<InteractionId>, StoreError> {
        self.read(|tx| {
            let index = tx.open_table(format::SAME_PROMPT)?;
            let entries = entries_of(&index, &interaction.prompt_digest())?.rev().take(limit);
            entries.map(|entry| Ok(prompt_id(entry?.0.value().1))).collect()
        })
    }

    /// The newest recorded conversations with a digest ([`Op::Turn`](crate::Op::Turn)), at most `limit`: each
    /// with its prompt, and with the served choice that ends it, or `None` if it is the prompt alone.
    pub fn turns(
        &self,
        digest: [u8; 16],
        limit: usize,
    ) -> Result<Vec<(InteractionId, Option<u32>)>, StoreError> {
        self.read(|tx| {
            let index = tx.open_table(format::TURNS)?;
            let turns = entries_of(&index, &digest)?.rev().take(limit).map(|entry| {
                let (key, choice) = entry?;
                Ok((prompt_id(key.value().1), choice.value()))
            });
            turns.collect()
        })
    }

    /// At most `limit` prompts that only the exams of a route use, newest first.
    pub fn held_out(&self, route: &str, limit: usize) -> Result<Vec<Interaction>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::INTERACTIONS)?;
            let index = tx.open_table(format::HELD_OUT)?;
            let entries = index.range((route, &IDS.0)..=(route, &IDS.1))?.rev().take(limit);
            let found = entries.map(|entry| get(&rows, entry?.0.value().1));
            found.filter_map(Result::transpose).collect()
        })
    }

    /// The digests of the prompts that only exams use, of all routes.
    pub fn held_out_prompts(&self) -> Result<Vec<[u8; 16]>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::INTERACTIONS)?;
            let mut found = Vec::new();
            for entry in tx.open_table(format::HELD_OUT)?.iter()? {
                let prompt: Option<Interaction> = get(&rows, entry?.0.value().1)?;
                found.extend(prompt.map(|prompt| prompt.prompt_digest()));
            }
            Ok(found)
        })
    }

    /// Every reward part of a completion, by name.
    pub fn rewards_of(&self, id: SampleId) -> Result<Vec<Reward>, StoreError> {
        self.read(|tx| rewards_of(&tx.open_table(format::REWARDS)?, id))
    }

    /// Each rater's newest rating of a completion and part.
    pub fn ratings_of(&self, id: SampleId, name: &str) -> Result<Vec<Rating>, StoreError> {
        self.read(|tx| {
            let feedback = tx.open_table(format::FEEDBACK)?;
            ratings(&tx.open_table(format::RATINGS)?, &feedback, id, name)
        })
    }

    /// The newest rating of a completion by each rater of one API key for each part, by the part's name,
    /// with the comment that was posted with it.
    pub fn ratings_by(
        &self,
        id: SampleId,
        key_id: Option<&str>,
    ) -> Result<Vec<Reward>, StoreError> {
        self.read(|tx| {
            let (ratings, feedback) =
                (tx.open_table(format::RATINGS)?, tx.open_table(format::FEEDBACK)?);
            let sample = id.0.as_bytes();
            let mut found = Vec::new();
            for entry in ratings.range((sample, "", None::<&str>)..)? {
                let (key, reward) = entry?;
                let (rated, _, rater) = key.value();
                if rated != sample {
                    break;
                }
                if rater.and_then(key_of_rater) == key_id {
                    found.extend(get::<_, Reward>(&feedback, reward.value())?);
                }
            }
            Ok(found)
        })
    }

    /// The row of feedback that recorded a correction, with the client's API key, by the correction's
    /// sample.
    pub fn correction(&self, id: SampleId) -> Result<Option<Reward>, StoreError> {
        self.find(format::FEEDBACK, id.0.as_bytes())
    }

    /// Whether feedback of a rater is quarantined.
    pub fn is_quarantined(&self, rater: Option<&str>) -> Result<bool, StoreError> {
        let Some(rater) = rater else { return Ok(false) };
        Ok(self.quarantined()?.iter().any(|row| concerns_rater(&row.key_id, rater)))
    }

    /// Quarantined API keys, by id.
    pub fn quarantined(&self) -> Result<Vec<QuarantinedKey>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::QUARANTINE)?;
            let keys = rows.iter()?.map(|row| {
                let (key, value) = row?;
                let (reason, since) = value.value();
                let key_id = key.value().to_owned();
                Ok(QuarantinedKey { key_id, reason: reason.to_owned(), since })
            });
            keys.collect()
        })
    }

    /// One group.
    pub fn group(&self, id: GroupId) -> Result<Option<Group>, StoreError> {
        self.find(format::GROUPS, id.0.as_bytes())
    }

    /// Every group in any state, oldest first.
    pub fn groups(&self) -> Result<Vec<Group>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::GROUPS)?;
            rows.iter()?.map(|row| decode(row?.1.value())).collect()
        })
    }

    /// Every group of a prompt, in key order.
    pub fn groups_of(&self, id: InteractionId) -> Result<Vec<Group>, StoreError> {
        self.indexed(format::GROUPS_OF, format::GROUPS, id)
    }

    /// At most `limit` groups in state `Ready`, oldest first.
    pub fn ready_groups(&self, limit: usize) -> Result<Vec<Group>, StoreError> {
        self.read(|tx| {
            let (groups, ready) = (tx.open_table(format::GROUPS)?, tx.open_table(format::READY)?);
            let found = ready.iter()?.take(limit).map(|entry| get(&groups, entry?.0.value().1));
            found.filter_map(Result::transpose).collect()
        })
    }

    /// At most `limit` groups in state `Ready`, newest first.
    pub fn newest_ready_groups(&self, limit: usize) -> Result<Vec<Group>, StoreError> {
        self.read(|tx| {
            let (groups, ready) = (tx.open_table(format::GROUPS)?, tx.open_table(format::READY)?);
            let newest = ready.iter()?.rev().take(limit);
            newest
                .map(|entry| get(&groups, entry?.0.value().1))
                .filter_map(Result::transpose)
                .collect()
        })
    }

    pub(crate) fn ready_count(&self) -> Result<usize, StoreError> {
        let ready = self.read(|tx| Ok(tx.open_table(format::READY)?.len()?))?;
        Ok(usize::try_from(ready).unwrap_or(usize::MAX))
    }

    /// Number of ratings that wait for a group or, in a ready group, for the trainer.
    pub(crate) fn waiting_ratings(&self) -> Result<usize, StoreError> {
        let ready = self.ready_groups(usize::MAX)?;
        self.read(|tx| {
            let rewards = tx.open_table(format::REWARDS)?;
            let ungrouped = tx.open_table(format::UNGROUPED)?.len()?;
            let mut count = usize::try_from(ungrouped).unwrap_or(usize::MAX);
            for (member, part) in ready.iter().flat_map(pairs) {
                let reward: Option<Reward> = get(&rewards, (member.0.as_bytes(), part))?;
                let waits = |r: Reward| r.source == RewardSource::Feedback && r.value.is_some();
                count += usize::from(reward.is_some_and(waits));
            }
            Ok(count)
        })
    }

    pub(crate) fn waiting_corrections(&self) -> Result<usize, StoreError> {
        Ok(self.ready_groups(usize::MAX)?.iter().filter(|group| group.is_correction()).count())
    }

    /// Feedback that waits for a group, as `(sample, part name)`: at most `limit` entries, oldest
    /// first, recorded at or before `until`. A committed group removes the entries of its members
    /// and parts. A value that changes after that group was trained on is added again.
    pub fn ungrouped_feedback(
        &self,
        until: UnixMillis,
        limit: usize,
    ) -> Result<Vec<(SampleId, String)>, StoreError> {
        self.read(|tx| {
            let table = tx.open_table(format::UNGROUPED)?;
            let mut found = Vec::new();
            for entry in table.iter()?.take(limit) {
                let key = entry?.0;
                let (created, sample, name) = key.value();
                if created > until {
                    break;
                }
                found.push((SampleId(Uuid::from_bytes(*sample)), name.to_owned()));
            }
            Ok(found)
        })
    }

    /// One policy version.
    pub fn policy(&self, version: PolicyVersion) -> Result<Option<PolicyRecord>, StoreError> {
        self.find(format::POLICIES, version.0)
    }

    /// Every policy version, in order.
    pub fn policies(&self) -> Result<Vec<PolicyRecord>, StoreError> {
        self.numbered(format::POLICIES, 0, usize::MAX)
    }

    /// The last optimizer step.
    pub fn last_step(&self) -> Result<Option<StepRecord>, StoreError> {
        self.read(|tx| {
            let steps = tx.open_table(format::STEPS)?;
            steps.last()?.map(|(_, bytes)| decode(bytes.value())).transpose()
        })
    }

    /// At most `limit` optimizer steps from `first` on.
    pub fn steps(&self, first: u64, limit: usize) -> Result<Vec<StepRecord>, StoreError> {
        self.numbered(format::STEPS, first, limit)
    }

    /// When the oldest prompt arrived.
    pub fn oldest(&self) -> Result<Option<UnixMillis>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::INTERACTIONS)?;
            let first = rows.first()?.map(|(_, bytes)| decode::<Interaction>(bytes.value()));
            Ok(first.transpose()?.map(|row| row.created))
        })
    }

    /// Number of rows in each table.
    pub fn stats(&self) -> Result<StoreStats, StoreError> {
        self.read(|tx| {
            Ok(StoreStats {
                interactions: rows(tx, format::INTERACTIONS)?,
                samples: rows(tx, format::SAMPLES)?,
                feedback: rows(tx, format::FEEDBACK)?,
                rewards: rows(tx, format::REWARDS)?,
                groups: rows(tx, format::GROUPS)?,
                policy_versions: rows(tx, format::POLICIES)?,
                steps: rows(tx, format::STEPS)?,
            })
        })
    }
}

/// Number of policy versions, and the last step.
pub(crate) fn versions_and_step(tx: &ReadTransaction) -> Result<(usize, u64), StoreError> {
    let versions = rows(tx, format::POLICIES)?;
    let step = tx.open_table(format::STEPS)?.last()?.map_or(0, |(step, _)| step.value());
    Ok((usize::try_from(versions).unwrap_or(usize::MAX), step))
}

fn rows<K: Key + 'static>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, K, Bytes>,
) -> Result<u64, StoreError> {
    Ok(tx.open_table(table)?.len()?)
}

pub(crate) fn get<'k, K: Key + 'static, R: LedgerRecord>(
    table: &impl ReadableTable<K, Bytes>,
    key: impl Borrow<K::SelfType<'k>>,
) -> Result<Option<R>, StoreError> {
    table.get(key)?.map(|bytes| decode(bytes.value())).transpose()
}

/// The entries of an index under `id`, in key order.
pub(crate) fn entries_of<'t, V: Value + 'static>(
    index: &'t impl ReadableTable<IdPair, V>,
    id: &Id,
) -> Result<Range<'t, IdPair, V>, StoreError> {
    Ok(index.range((id, &IDS.0)..=(id, &IDS.1))?)
}

pub(crate) fn ids_of<V: Value + 'static>(
    index: &impl ReadableTable<IdPair, V>,
    id: &Id,
) -> Result<Vec<Id>, StoreError> {
    entries_of(index, id)?.map(|entry| Ok(*entry?.0.value().1)).collect()
}

/// Every reward part of a completion, by name.
pub(crate) fn rewards_of(
    rewards: &impl ReadableTable<(&'static Id, &'static str), Bytes>,
    id: SampleId,
) -> Result<Vec<Reward>, StoreError> {
    let sample = id.0.as_bytes();
    let mut found = Vec::new();
    for row in rewards.range((sample, "")..)? {
        let (key, value) = row?;
        if key.value().0 != sample {
            break;
        }
        found.push(decode(value.value())?);
    }
    Ok(found)
}

/// Each rater's newest rating of a completion and part.
pub(crate) fn ratings(
    ratings: &impl ReadableTable<(&'static Id, &'static str, Option<&'static str>), &'static Id>,
    feedback: &impl ReadableTable<&'static Id, Bytes>,
    id: SampleId,
    name: &str,
) -> Result<Vec<Rating>, StoreError> {
    let sample = id.0.as_bytes();
    let mut found = Vec::new();
    for entry in ratings.range((sample, name, None::<&str>)..)? {
        let (key, reward) = entry?;
        if (key.value().0, key.value().1) != (sample, name) {
            break;
        }
        let Some(row) = get::<_, Reward>(feedback, reward.value())? else { continue };
        let rating = |value| Rating { key_id: row.key_id, value, created: row.created };
        found.extend(row.value.map(rating));
    }
    Ok(found)
}

pub(crate) fn pairs(group: &Group) -> impl Iterator<Item = (SampleId, &str)> {
    let parts = group.parts.iter().map(String::as_str);
    group.members.iter().flat_map(move |member| parts.clone().map(|part| (*member, part)))
}
