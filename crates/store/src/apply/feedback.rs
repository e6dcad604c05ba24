//! What clients say: recorded as it was posted, joined over raters, and put up for training.

use redb::ReadableTable;
use uuid::Uuid;

use hone_core::types::{GroupState, InteractionId, Reward, RewardId, RewardSource, SampleId};

use super::Writing;
use crate::codec::encode;
use crate::schema::Id;
use crate::{FeedbackEntry, FeedbackOutcome, StoreError, reader};

impl Writing<'_> {
    /// Records one piece of feedback, unless its idempotency key was seen before.
    pub(super) fn feedback(
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

    /// Records one value for several turns. Where one turn had several choices, or none that ended,
    /// nothing says what the conversation went on from: it is left out.
    pub(super) fn conversation(
        &mut self,
        turns: &[FeedbackEntry],
        id: RewardId,
    ) -> Result<FeedbackOutcome, StoreError> {
        let Some(first) = turns.first() else { return Ok(FeedbackOutcome::Credited(0)) };
        if let Some((_, seen)) = self.seen_before(first)?
            && seen != id
        {
            return Ok(FeedbackOutcome::AlreadyCredited(self.credited(seen)?));
        }
        let mut credited = 0;
        for turn in turns {
            let Some(sample) = self.only_choice(turn.interaction)? else { continue };
            let own = nth(id, credited);
            // The key stands for the post as a whole, under its first row.
            let key = turn.idempotency_key.clone().filter(|_| credited == 0);
            let turn = FeedbackEntry { idempotency_key: key, ..turn.clone() };
            if self.feedback.get(own.0.as_bytes())?.is_none() {
                self.record_feedback(&turn, own, sample)?;
            }
            credited += 1;
        }
        Ok(FeedbackOutcome::Credited(credited))
    }

    /// How many rows a conversation's feedback has.
    fn credited(&self, id: RewardId) -> Result<usize, StoreError> {
        let mut count = 0;
        while self.feedback.get(nth(id, count).0.as_bytes())?.is_some() {
            count += 1;
        }
        Ok(count)
    }

    fn only_choice(&self, interaction: InteractionId) -> Result<Option<SampleId>, StoreError> {
        let id = interaction.0.as_bytes();
        let mut only = None;
        for entry in self.samples_of.range((id, &Id::default())..=(id, &[u8::MAX; 16]))? {
            let (key, value) = entry?;
            let (served, _) = value.value();
            if served && only.replace(SampleId(Uuid::from_bytes(*key.value().1))).is_some() {
                return Ok(None);
            }
        }
        Ok(only)
    }

    fn seen_before(
        &self,
        entry: &FeedbackEntry,
    ) -> Result<Option<(SampleId, RewardId)>, StoreError> {
        let Some(key) = entry.idempotency_key.as_deref() else { return Ok(None) };
        let found = self.idempotency.get((entry.key_id.as_deref(), key))?;
        Ok(found.map(|guard| {
            let (sample, reward) = guard.value();
            (SampleId(Uuid::from_bytes(*sample)), RewardId(Uuid::from_bytes(*reward)))
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
                return Ok(Some(SampleId(Uuid::from_bytes(*key.value().1))));
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
        let posted = Reward {
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
        self.feedback.insert(id.0.as_bytes(), encode(&posted)?.as_slice())?;
        self.wrote("feedback");
        if let Some(key) = entry.idempotency_key.as_deref() {
            self.idempotency
                .insert((entry.key_id.as_deref(), key), (sample.0.as_bytes(), id.0.as_bytes()))?;
        }
        if posted.value.is_some() {
            let rated = (sample.0.as_bytes(), entry.name.as_str(), entry.key_id.as_deref());
            self.ratings.insert(rated, id.0.as_bytes())?;
        }
        let ratings = reader::ratings(&self.ratings, &self.feedback, sample, &entry.name)?;
        // What is trained on is what all raters come to; what each of them said stays on record.
        let reward = Reward { value: (entry.join)(&ratings), ..posted };
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
}

/// The id of a conversation's row: its own random bits are told apart by its place, so that the
/// same operation repeated finds the rows that it made.
fn nth(id: RewardId, place: usize) -> RewardId {
    RewardId(Uuid::from_u128(id.0.as_u128() ^ place as u128))
}
