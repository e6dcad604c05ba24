//! What each [`Op`] does to the tables, inside one write transaction.
//!
//! Every operation may be applied twice with the same outcome (feedback carries the id of its row
//! from outside), so a commit of which nobody knows whether it happened can be repeated.

mod feedback;
mod quarantine;

use std::collections::BTreeMap;

use redb::{ReadableTable, ReadableTableMetadata, Table, WriteTransaction};

use hone_core::types::{
    Group, GroupId, GroupState, Interaction, PolicyRecord, Reward, RewardId, Sample, SampleId,
    SampleOrigin, StepRecord,
};

use super::codec::{decode, encode};
use super::schema::Id;
use super::{FeedbackOutcome, Op, StoreError, schema};

/// What a transaction did, for metrics and for those who wait on it.
#[derive(Default)]
pub(super) struct AppliedCounts {
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
    ratings: Table<'t, (&'static Id, &'static str, Option<&'static str>), &'static Id>,
    sessions: Table<'t, (Option<&'static str>, &'static str, &'static Id), ()>,
    quarantine: Table<'t, &'static str, (&'static str, u64)>,
    /// So far.
    pub(super) tally: AppliedCounts,
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
            ratings: tx.open_table(schema::RATINGS)?,
            sessions: tx.open_table(schema::SESSIONS)?,
            quarantine: tx.open_table(schema::QUARANTINE)?,
            tally: AppliedCounts::default(),
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
            Op::Conversation(turns) => return self.conversation(turns, feedback_id).map(Some),
            Op::Quarantine(row) => self.set_aside(row)?,
            Op::Release(key_id) => self.release(key_id)?,
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
        if let Some(session) = row.session() {
            self.sessions.insert((row.key_id.as_deref(), session, row.id.0.as_bytes()), ())?;
        }
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
