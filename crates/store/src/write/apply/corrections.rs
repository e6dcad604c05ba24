//! Applies corrections. A correction is a sample with a group of its own, so that a step trains on it,
//! is undone and is repeated as with any other group. No policy sampled it and it has no reward, so
//! nothing compares it with other completions.
//!
//! The sample, the group and the row of feedback have the same id, that of the operation: a repeated
//! operation finds what it recorded, and the row has the API key of a group.

use redb::ReadableTable;

use hone_core::types::{
    Group, GroupId, GroupState, Reward, RewardId, RewardSource, Sample, SampleId, SampleOrigin,
    concerns_rater,
};

use super::groups::{is_dropped, outcome};
use super::tables::Applier;
use crate::error::StoreError;
use crate::format::codec::decode;
use crate::op::{CorrectionEntry, FeedbackEntry, FeedbackOutcome, QUARANTINED, id_of_turn};
use crate::reader;

/// Name of a correction's row of feedback. It is no reward part.
const NAME: &str = "correction";
/// Reason of a correction that waited when the same client corrected the completion again.
const REPLACED: &str = "replaced";

impl Applier<'_> {
    /// Records a correction, and the rating that was posted with it.
    pub(super) fn add_correction(
        &mut self,
        entry: &CorrectionEntry,
        id: RewardId,
    ) -> Result<FeedbackOutcome, StoreError> {
        let known = self.find_idempotent(entry.key_id.as_deref(), entry.idempotency_key.as_deref());
        if let Some((sample, first)) = known?
            && first != id
        {
            return Ok(if self.is_same_correction(first, entry)? {
                FeedbackOutcome::Duplicate(sample)
            } else {
                FeedbackOutcome::Reused
            });
        }
        let Some(prompt) = self.interaction(entry.interaction)? else {
            return Ok(FeedbackOutcome::UnknownCompletion);
        };
        let Some(sample) = self.served_choice(entry.interaction, entry.choice)? else {
            return Ok(FeedbackOutcome::UnknownChoice);
        };
        if let Some(rating) = &entry.rating {
            // The correction's row holds the idempotency key for both.
            let rating = FeedbackEntry { idempotency_key: None, ..rating.clone() };
            let row = id_of_turn(id, 1);
            self.record_feedback(&rating, row, sample)?;
        }
        if !self.has_row(id)? {
            self.record_correction(entry, id, sample, prompt.route)?;
        }
        Ok(FeedbackOutcome::Recorded(sample))
    }

    /// Whether a row recorded the same correction, with the same rating.
    fn is_same_correction(
        &self,
        row: RewardId,
        entry: &CorrectionEntry,
    ) -> Result<bool, StoreError> {
        let rating_row = id_of_turn(row, 1);
        let same_rating = match &entry.rating {
            Some(rating) => self.is_same(rating_row, rating)?,
            None => !self.has_row(rating_row)?,
        };
        let text: Option<Sample> = reader::get(&self.samples, row.0.as_bytes())?;
        let row: Option<Reward> = reader::get(&self.feedback, row.0.as_bytes())?;
        let corrected = self.served_choice(entry.interaction, entry.choice)?;
        Ok(same_rating
            && text.is_some_and(|sample| sample.text == entry.text)
            && row.is_some_and(|row| {
                row.name == NAME
                    && Some(row.sample) == corrected
                    && row.comment == entry.comment
                    && row.key_id == entry.key_id
            }))
    }

    fn record_correction(
        &mut self,
        entry: &CorrectionEntry,
        id: RewardId,
        corrected: SampleId,
        route: String,
    ) -> Result<(), StoreError> {
        let original: Option<Sample> = reader::get(&self.samples, corrected.0.as_bytes())?;
        let version = original.map(|sample| sample.version).unwrap_or_default();
        self.replace_waiting(entry)?;
        let posted = Reward {
            id,
            sample: corrected,
            name: NAME.to_owned(),
            value: None,
            source: RewardSource::Feedback,
            created: entry.created,
            idempotency_key: entry.idempotency_key.clone(),
            comment: entry.comment.clone(),
            key_id: entry.key_id.clone(),
        };
        self.insert_posted(&posted)?;
        let sample = Sample::new(entry.interaction, SampleOrigin::Correction, version);
        self.add_sample(&Sample {
            id: SampleId(id.0),
            choice: entry.choice,
            created: entry.created,
            ids: entry.ids.clone(),
            text: entry.text.clone(),
            ..sample
        })?;
        let state = match &entry.unused {
            Some(reason) => GroupState::Dropped(reason.clone()),
            None => GroupState::Ready,
        };
        self.counts.corrections.received += 1;
        self.count_correction(&state);
        self.add_group(&Group {
            id: GroupId(id.0),
            interaction: entry.interaction,
            route,
            members: vec![SampleId(id.0)],
            parts: Vec::new(),
            oldest_version: version,
            created: entry.created,
            state,
        })
    }

    /// Drops the correction of the same client for the same choice, if it waits for the trainer.
    fn replace_waiting(&mut self, entry: &CorrectionEntry) -> Result<(), StoreError> {
        for group in self.groups_on(entry.interaction)? {
            let sample: Option<Sample> = reader::get(&self.samples, group.id.0.as_bytes())?;
            let row: Option<Reward> = reader::get(&self.feedback, group.id.0.as_bytes())?;
            if group.state == GroupState::Ready
                && group.is_correction()
                && sample.is_some_and(|sample| sample.choice == entry.choice)
                && row.is_some_and(|row| row.key_id == entry.key_id)
            {
                self.set_group_state(group.id, &GroupState::Dropped(REPLACED.to_owned()))?;
            }
        }
        Ok(())
    }

    /// Makes the corrections of a released key ready that were dropped because of its quarantine.
    pub(super) fn release_corrections(&mut self, key_id: &str) -> Result<(), StoreError> {
        let mut dropped = Vec::new();
        for entry in self.feedback.iter()? {
            let row: Reward = decode(entry?.1.value())?;
            let concerned = row.key_id.as_deref().is_some_and(|by| concerns_rater(key_id, by));
            if !concerned || row.name != NAME {
                continue;
            }
            if let Some(group) = self.group(row.id.0.as_bytes())?
                && is_dropped(&group.state, QUARANTINED)
            {
                dropped.push(group.id);
            }
        }
        dropped.into_iter().try_for_each(|id| self.set_group_state(id, &GroupState::Ready))
    }

    /// Counts a correction whose group gets this state, if that is final.
    pub(super) fn count_correction(&mut self, state: &GroupState) {
        if let Some(outcome) = outcome(state) {
            self.counts.corrections.end(outcome);
        }
    }
}
