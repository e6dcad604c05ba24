//! What each [`Op`] does to the tables, inside one write transaction.
//!
//! Every operation may be applied twice with the same outcome (feedback carries the id of its row
//! from outside), so a commit of which nobody knows whether it happened can be repeated.

use std::collections::BTreeMap;

use redb::{ReadableTable, ReadableTableMetadata, Table, WriteTransaction};

use super::codec::{decode, encode};
use super::schema::{self, Id};
use super::{FeedbackEntry, FeedbackOutcome, Op, StoreError};
use crate::types::{
    Group, GroupId, GroupState, Interaction, InteractionId, PolicyRecord, Reward, RewardId,
    RewardSource, Sample, SampleId, SampleOrigin, StepRecord,
};

/// What a transaction did, for metrics and for those who wait on it.
#[derive(Default)]
pub(super) struct Tally {
    /// Rows written, by table.
    pub(super) written: BTreeMap<&'static str, u64>,
    /// Operations without effect, because they judge or train on what was never recorded.
    pub(super) orphans: BTreeMap<&'static str, u64>,
}

/// The tables, opened for writing.
pub(super) struct Writing<'t> {
    interactions: Table<'t, &'static Id, &'static [u8]>,
    samples: Table<'t, &'static Id, &'static [u8]>,
    rewards: Table<'t, (&'static Id, &'static str), &'static [u8]>,
    feedback: Table<'t, &'static Id, &'static [u8]>,
    groups: Table<'t, &'static Id, &'static [u8]>,
    policies: Table<'t, u64, &'static [u8]>,
    steps: Table<'t, u64, &'static [u8]>,
    samples_of: Table<'t, (&'static Id, &'static Id), (bool, u32)>,
    groups_of: Table<'t, (&'static Id, &'static Id), ()>,
    ready: Table<'t, (u64, &'static Id), ()>,
    ungrouped: Table<'t, (u64, &'static Id, &'static str), ()>,
    idempotency: Table<'t, (Option<&'static str>, &'static str), (&'static Id, &'static Id)>,
    /// So far.
    pub(super) tally: Tally,
}

impl<'t> Writing<'t> {
    /// Opens every table.
    pub(super) fn new(tx: &'t WriteTransaction) -> Result<Self, StoreError> {
        Ok(Self {
            interactions: tx.open_table(schema::INTERACTIONS)?,
            samples: tx.open_table(schema::SAMPLES)?,
            rewards: tx.open_table(schema::REWARDS)?,
            feedback: tx.open_table(schema::FEEDBACK)?,
            groups: tx.open_table(schema::GROUPS)?,
            policies: tx.open_table(schema::POLICIES)?,
            steps: tx.open_table(schema::STEPS)?,
            samples_of: tx.open_table(schema::SAMPLES_OF)?,
            groups_of: tx.open_table(schema::GROUPS_OF)?,
            ready: tx.open_table(schema::READY)?,
            ungrouped: tx.open_table(schema::UNGROUPED)?,
            idempotency: tx.open_table(schema::IDEMPOTENCY)?,
            tally: Tally::default(),
        })
    }

    /// How many groups are `Ready`.
    pub(super) fn ready_len(&self) -> Result<u64, StoreError> {
        Ok(self.ready.len()?)
    }

    /// Applies one operation; `feedback_id` names the row if it is feedback.
    pub(super) fn apply(
        &mut self,
        op: &Op,
        feedback_id: RewardId,
    ) -> Result<Option<FeedbackOutcome>, StoreError> {
        match op {
            Op::Interaction(row) => self.interaction(row)?,
            Op::Sample(row) => self.sample(row)?,
            Op::Reward(row) => self.reward(row)?,
            Op::Feedback(entry) => return self.feedback(entry, feedback_id).map(Some),
            Op::Group(row) => self.group(row)?,
            Op::GroupState(id, state) => self.group_state(*id, state)?,
            Op::Policy(row) => self.policy(row)?,
            Op::Step(row) => self.step(row)?,
        }
        Ok(None)
    }

    fn wrote(&mut self, table: &'static str) {
        *self.tally.written.entry(table).or_default() += 1;
    }

    fn orphan(&mut self, table: &'static str) {
        *self.tally.orphans.entry(table).or_default() += 1;
    }

    fn interaction(&mut self, row: &Interaction) -> Result<(), StoreError> {
        self.interactions.insert(row.id.0.as_bytes(), encode(row)?.as_slice())?;
        self.wrote("interactions");
        Ok(())
    }

    fn sample(&mut self, row: &Sample) -> Result<(), StoreError> {
        self.samples.insert(row.id.0.as_bytes(), encode(row)?.as_slice())?;
        let served = row.origin == SampleOrigin::Served;
        self.samples_of
            .insert((row.interaction.0.as_bytes(), row.id.0.as_bytes()), (served, row.choice))?;
        self.wrote("samples");
        Ok(())
    }

    fn reward(&mut self, row: &Reward) -> Result<(), StoreError> {
        if self.samples.get(row.sample.0.as_bytes())?.is_none() {
            self.orphan("rewards");
            return Ok(());
        }
        self.put_reward(row)?;
        Ok(())
    }

    /// Writes a part's current value; returns the one that it replaces.
    fn put_reward(&mut self, row: &Reward) -> Result<Option<Reward>, StoreError> {
        let sample = row.sample.0.as_bytes();
        let previous = self.current_reward(row.sample, &row.name)?;
        if let Some(previous) = &previous {
            // Nothing to remove where a group trains on it already, or it was a grader's.
            self.ungrouped.remove((previous.created, sample, row.name.as_str()))?;
        }
        self.rewards.insert((sample, row.name.as_str()), encode(row)?.as_slice())?;
        self.wrote("rewards");
        Ok(previous)
    }

    fn current_reward(&self, sample: SampleId, name: &str) -> Result<Option<Reward>, StoreError> {
        match self.rewards.get((sample.0.as_bytes(), name))? {
            Some(bytes) => decode(bytes.value()).map(Some),
            None => Ok(None),
        }
    }

    fn feedback(
        &mut self,
        entry: &FeedbackEntry,
        id: RewardId,
    ) -> Result<FeedbackOutcome, StoreError> {
        if let Some((sample, first)) = self.seen_before(entry)? {
            // The same row again is this very operation repeated, not another post.
            return Ok(if first == id {
                FeedbackOutcome::Recorded(sample)
            } else {
                FeedbackOutcome::Duplicate(sample)
            });
        }
        if self.interactions.get(entry.interaction.0.as_bytes())?.is_none() {
            return Ok(FeedbackOutcome::UnknownCompletion);
        }
        let Some(sample) = self.served_choice(entry.interaction, entry.choice)? else {
            return Ok(FeedbackOutcome::UnknownChoice);
        };
        if self.feedback.get(id.0.as_bytes())?.is_none() {
            self.record_feedback(entry, id, sample)?;
        }
        Ok(FeedbackOutcome::Recorded(sample))
    }

    fn seen_before(
        &self,
        entry: &FeedbackEntry,
    ) -> Result<Option<(SampleId, RewardId)>, StoreError> {
        let Some(key) = entry.idempotency_key.as_deref() else { return Ok(None) };
        let found = self.idempotency.get((entry.key_id.as_deref(), key))?;
        Ok(found.map(|guard| {
            let (sample, reward) = guard.value();
            (SampleId(uuid::Uuid::from_bytes(*sample)), RewardId(uuid::Uuid::from_bytes(*reward)))
        }))
    }

    fn served_choice(
        &self,
        interaction: InteractionId,
        choice: u32,
    ) -> Result<Option<SampleId>, StoreError> {
        let id = interaction.0.as_bytes();
        for entry in self.samples_of.range((id, &Id::default())..=(id, &[u8::MAX; 16]))? {
            let (key, value) = entry?;
            if value.value() == (true, choice) {
                return Ok(Some(SampleId(uuid::Uuid::from_bytes(*key.value().1))));
            }
        }
        Ok(None)
    }

    fn record_feedback(
        &mut self,
        entry: &FeedbackEntry,
        id: RewardId,
        sample: SampleId,
    ) -> Result<(), StoreError> {
        let reward = Reward {
            id,
            sample,
            name: entry.name.clone(),
            value: entry.value,
            source: RewardSource::Feedback,
            created: entry.created,
            idempotency_key: entry.idempotency_key.clone(),
            comment: entry.comment.clone(),
            key_id: entry.key_id.clone(),
        };
        self.feedback.insert(id.0.as_bytes(), encode(&reward)?.as_slice())?;
        self.wrote("feedback");
        if let Some(key) = entry.idempotency_key.as_deref() {
            self.idempotency
                .insert((entry.key_id.as_deref(), key), (sample.0.as_bytes(), id.0.as_bytes()))?;
        }
        let previous = self.put_reward(&reward)?;
        let changed = previous.is_none_or(|p| p.value != reward.value);
        if reward.value.is_some() && self.needs_group(entry.interaction, &reward, changed)? {
            self.ungrouped
                .insert((reward.created, sample.0.as_bytes(), reward.name.as_str()), ())?;
        }
        Ok(())
    }

    /// Whether feedback has to wait for a group of its own: no group names it, or only groups that
    /// are past the trainer do and its value is another one now.
    fn needs_group(
        &self,
        interaction: InteractionId,
        reward: &Reward,
        changed: bool,
    ) -> Result<bool, StoreError> {
        let mut past = false;
        let id = interaction.0.as_bytes();
        for entry in self.groups_of.range((id, &Id::default())..=(id, &[u8::MAX; 16]))? {
            let key = entry?.0;
            let Some(group) = self.load_group(key.value().1)? else { continue };
            if group.members.contains(&reward.sample) && group.parts.contains(&reward.name) {
                if group.state == GroupState::Ready {
                    return Ok(false);
                }
                past = true;
            }
        }
        Ok(changed || !past)
    }

    fn load_group(&self, id: &Id) -> Result<Option<Group>, StoreError> {
        match self.groups.get(id)? {
            Some(bytes) => decode(bytes.value()).map(Some),
            None => Ok(None),
        }
    }

    fn group(&mut self, row: &Group) -> Result<(), StoreError> {
        for member in &row.members {
            if self.samples.get(member.0.as_bytes())?.is_none() {
                self.orphan("groups");
                return Ok(());
            }
        }
        self.put_group(row)?;
        self.groups_of.insert((row.interaction.0.as_bytes(), row.id.0.as_bytes()), ())?;
        for member in &row.members {
            for part in &row.parts {
                if let Some(reward) = self.current_reward(*member, part)? {
                    let key = (reward.created, member.0.as_bytes(), part.as_str());
                    self.ungrouped.remove(key)?;
                }
            }
        }
        Ok(())
    }

    /// Writes a group and keeps the index of ready ones true.
    fn put_group(&mut self, row: &Group) -> Result<(), StoreError> {
        let id = row.id.0.as_bytes();
        if let Some(previous) = self.load_group(id)? {
            self.ready.remove((previous.created, id))?;
        }
        self.groups.insert(id, encode(row)?.as_slice())?;
        if row.state == GroupState::Ready {
            self.ready.insert((row.created, id), ())?;
        }
        self.wrote("groups");
        Ok(())
    }

    fn group_state(&mut self, id: GroupId, state: &GroupState) -> Result<(), StoreError> {
        match self.load_group(id.0.as_bytes())? {
            Some(group) => self.put_group(&Group { state: state.clone(), ..group }),
            None => {
                self.orphan("groups");
                Ok(())
            }
        }
    }

    fn policy(&mut self, row: &PolicyRecord) -> Result<(), StoreError> {
        self.policies.insert(row.version.0, encode(row)?.as_slice())?;
        self.wrote("policy_versions");
        Ok(())
    }

    fn step(&mut self, row: &StepRecord) -> Result<(), StoreError> {
        self.steps.insert(row.step, encode(row)?.as_slice())?;
        self.wrote("steps");
        for group in &row.groups {
            self.group_state(*group, &GroupState::Trained(row.step))?;
        }
        Ok(())
    }
}
