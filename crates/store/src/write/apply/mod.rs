//! Applies operations to the tables.
//!
//! Applying an operation twice has the same effect as once; for feedback the caller chooses the
//! row's id for that reason. The writer can therefore repeat a commit after an I/O error even if
//! the first attempt may have succeeded.

mod corrections;
mod erase;
mod feedback;
mod groups;
mod intake;
mod outbox;
mod tables;

use std::collections::BTreeMap;

use redb::ReadableTable;
use uuid::Uuid;

use hone_core::types::{
    GroupId, GroupState, Interaction, InteractionId, PolicyRecord, PolicyState, PromptSource,
    Reward, RewardId, Sample, SampleId, SampleOrigin, StepRecord, concerns_rater,
};

use crate::error::StoreError;
use crate::format::codec::{decode, encode};
use crate::op::{AuditRecord, FeedbackOutcome, Op, Outbox, QUARANTINED, QuarantinedKey};
use crate::reader;
use groups::{is_dropped, ungrouped_key};

pub(crate) use tables::{AppliedCounts, Applier};

impl Applier<'_> {
    /// Applies one operation. `feedback_id` is the id of the row that feedback creates, or of the group for members
    /// that leave theirs.
    pub(crate) fn apply(
        &mut self,
        op: &Op,
        feedback_id: RewardId,
    ) -> Result<Option<FeedbackOutcome>, StoreError> {
        if !op.is_feedback() {
            self.combine_ratings()?;
        } else if self.forward(op, feedback_id)? {
            return Ok(Some(FeedbackOutcome::Forwarded));
        }
        match op {
            Op::Interaction(row) => self.add_interaction(row)?,
            Op::Sample(row) => self.add_sample(row)?,
            Op::Turn { digest, interaction, choice } => {
                self.add_turn(digest, *interaction, *choice)?;
            }
            Op::Reward(row) => self.add_reward(row)?,
            Op::Feedback(entries) => return self.add_feedback(entries, feedback_id).map(Some),
            Op::Conversation(turns) => return self.add_conversation(turns, feedback_id).map(Some),
            Op::Correction(entry) => return self.add_correction(entry, feedback_id).map(Some),
            Op::Metadata(id, metadata) => self.set_metadata(*id, metadata)?,
            Op::Erase(id, when) => self.erase(*id, Some(*when))?,
            Op::Expire(id) => self.erase(*id, None)?,
            Op::EraseFeedback(id) => self.erase_feedback(*id)?,
            Op::ExpireSteps(last) => self.expire_steps(*last)?,
            Op::Audit(row) => self.add_audit(row)?,
            Op::Quarantine(row) => self.quarantine_key(row)?,
            Op::Release(key_id) => self.release_key(key_id)?,
            Op::Group(row) => self.add_group(row)?,
            Op::GroupState(id, state) => self.set_group_state(*id, state)?,
            Op::DropMembers { group, members, reason } => {
                self.drop_members(*group, members, reason, GroupId(feedback_id.0))?;
            }
            Op::Policy(row) => self.add_policy(row)?,
            Op::Step(row) => self.add_step(row)?,
            Op::Shipped(sequence) => self.set_shipped((*sequence).min(self.last_batch()?))?,
            Op::TakeIn(other) => self.take_in(other)?,
            Op::ExpireHeld(before) => self.expire_held(*before)?,
            Op::Answers(counts) if self.intake.is_some() => self.answers.extend(counts.clone()),
            Op::Answers(_) => {}
        }
        Ok(None)
    }

    fn add_interaction(&mut self, row: &Interaction) -> Result<(), StoreError> {
        let id = row.id.0.as_bytes();
        if self.erased.get(id)?.is_some() {
            self.count_orphan("interactions");
            return Ok(());
        }
        self.put_interaction(row)?;
        if row.source == PromptSource::Live {
            self.same_prompt.insert((&row.prompt_digest(), id), ())?;
            if row.endpoint.is_completions() && !row.is_text() {
                self.by_key.insert((row.api_key(), id), ())?;
            }
        }
        if row.held_out {
            self.held_out.insert((row.route.as_str(), id), ())?;
        }
        self.count_written("interactions");
        Ok(())
    }

    /// Writes a prompt, and adds it to its session.
    fn put_interaction(&mut self, row: &Interaction) -> Result<(), StoreError> {
        let id = row.id.0.as_bytes();
        self.interactions.insert(id, encode(row)?.as_slice())?;
        if let Some(session) = row.session() {
            self.sessions.insert((row.api_key(), session, id), ())?;
        }
        Ok(())
    }

    fn set_metadata(
        &mut self,
        id: InteractionId,
        metadata: &BTreeMap<String, String>,
    ) -> Result<(), StoreError> {
        let Some(mut row) = self.interaction(id)? else {
            self.count_orphan("interactions");
            return Ok(());
        };
        if let Some(session) = row.session() {
            self.sessions.remove((row.api_key(), session, id.0.as_bytes()))?;
        }
        row.metadata = metadata.clone();
        self.put_interaction(&row)
    }

    fn add_sample(&mut self, row: &Sample) -> Result<(), StoreError> {
        // The prompt is recorded before its completions. It may be erased before they arrive.
        if self.interactions.get(row.interaction.0.as_bytes())?.is_none() {
            self.count_orphan("samples");
            return Ok(());
        }
        self.samples.insert(row.id.0.as_bytes(), encode(row)?.as_slice())?;
        let served = row.origin == SampleOrigin::Served;
        self.samples_of
            .insert((row.interaction.0.as_bytes(), row.id.0.as_bytes()), (served, row.choice))?;
        self.count_written("samples");
        if served && self.intake.is_some() {
            self.release_held(row.interaction)?;
        }
        Ok(())
    }

    fn add_turn(
        &mut self,
        digest: &[u8; 16],
        interaction: InteractionId,
        choice: Option<u32>,
    ) -> Result<(), StoreError> {
        let id = interaction.0.as_bytes();
        if self.interactions.get(id)?.is_none() {
            self.count_orphan("turns");
            return Ok(());
        }
        self.turns.insert((digest, id), choice)?;
        self.turns_of.insert((id, digest), ())?;
        self.count_written("turns");
        Ok(())
    }

    fn add_reward(&mut self, row: &Reward) -> Result<(), StoreError> {
        if self.samples.get(row.sample.0.as_bytes())?.is_none() {
            self.count_orphan("rewards");
            return Ok(());
        }
        if self.waits(row.sample, &row.name, false)? {
            self.counts.ratings.end("replaced");
        }
        self.put_reward(row)?;
        Ok(())
    }

    fn add_policy(&mut self, row: &PolicyRecord) -> Result<(), StoreError> {
        self.policies.insert(row.version.0, encode(row)?.as_slice())?;
        self.counts.policies.push(row.clone());
        self.count_written("policy_versions");
        Ok(())
    }

    fn add_step(&mut self, row: &StepRecord) -> Result<(), StoreError> {
        self.steps.insert(row.step, encode(row)?.as_slice())?;
        self.count_written("steps");
        for group in &row.groups {
            self.set_group_state(*group, &GroupState::Trained(row.step))?;
        }
        self.ignored = false;
        Ok(())
    }
}

impl Applier<'_> {
    /// Removes the records of old steps, and the measurements and checks of the versions that they made. Their
    /// groups keep the number of their step, and versions their place in the lineage.
    fn expire_steps(&mut self, last: u64) -> Result<(), StoreError> {
        self.steps.retain_in(..=last, |_, _| false)?;
        let mut old = Vec::new();
        for row in self.policies.iter()? {
            let record: PolicyRecord = decode(row?.1.value())?;
            let is_over = matches!(
                record.state,
                PolicyState::Retired | PolicyState::Rejected | PolicyState::RolledBack
            );
            if record.step <= last
                && is_over
                && !record.pinned
                && !(record.metrics.is_empty() && record.checks.is_empty())
            {
                old.push(record);
            }
        }
        for record in old {
            let short = PolicyRecord { metrics: BTreeMap::new(), checks: Vec::new(), ..record };
            self.policies.insert(short.version.0, encode(&short)?.as_slice())?;
        }
        Ok(())
    }

    fn add_audit(&mut self, row: &AuditRecord) -> Result<(), StoreError> {
        let text = serde_json::to_string(row);
        let text =
            text.map_err(|e| StoreError::Failed(format!("an action cannot be encoded: {e}")))?;
        self.audit.insert(row.id.as_bytes(), text.as_str())?;
        self.count_written("audit");
        Ok(())
    }
}

// Applies the beginning and the end of the quarantine of an API key or of one of its end users.

impl Applier<'_> {
    /// Quarantines a key, unless it is quarantined already.
    fn quarantine_key(&mut self, row: &QuarantinedKey) -> Result<(), StoreError> {
        if self.quarantine.get(row.key_id.as_str())?.is_none() {
            self.quarantine.insert(row.key_id.as_str(), (row.reason.as_str(), row.since))?;
            self.count_written("quarantine");
        }
        Ok(())
    }

    /// Ends a key's quarantine. This reads all feedback, which is acceptable because operators do
    /// it rarely.
    fn release_key(&mut self, key_id: &str) -> Result<(), StoreError> {
        if self.quarantine.remove(key_id)?.is_none() {
            return Ok(());
        }
        let mut rated = Vec::new();
        for entry in self.ratings.iter()? {
            let key = entry?.0;
            let (sample, name, rater) = key.value();
            if rater.is_some_and(|rater| concerns_rater(key_id, rater)) {
                rated.push((SampleId(Uuid::from_bytes(*sample)), name.to_owned()));
            }
        }
        for (sample, name) in rated {
            if self.was_quarantined(sample, &name)?
                && let Some(reward) = self.current_reward(sample, &name)?
                && reward.value.is_some()
                && self.mode != Outbox::Server
                && self.ungrouped.insert(ungrouped_key(&reward), ())?.is_none()
            {
                self.counts.ratings.received += 1;
            }
        }
        self.release_corrections(key_id)
    }

    /// Whether the last group that contains a part of a sample was dropped because of a quarantine.
    fn was_quarantined(&self, id: SampleId, name: &str) -> Result<bool, StoreError> {
        let sample: Option<Sample> = reader::get(&self.samples, id.0.as_bytes())?;
        let Some(sample) = sample else { return Ok(false) };
        let mut dropped = false;
        for group in self.groups_on(sample.interaction)? {
            if group.members.contains(&id) && group.parts.iter().any(|part| part == name) {
                dropped = is_dropped(&group.state, QUARANTINED);
            }
        }
        Ok(dropped)
    }
}
