//! Erases a prompt with everything that was recorded for it.
//!
//! Groups and optimizer steps remain, without the erased members: they hold ids and measurements, but
//! nothing that a client sent or received. The prompt's id remains, so that records that arrive later,
//! such as completions that rollout was sampling, are not written.

use redb::ReadableTable;
use uuid::Uuid;

use hone_core::types::{
    Group, GroupState, InteractionId, Reward, RewardId, RewardSource, Sample, SampleId, UnixMillis,
    key_of_rater,
};

use super::groups::ungrouped_key;
use super::tables::Applier;
use crate::error::StoreError;
use crate::format::Id;
use crate::format::codec::encode;
use crate::op::{ERASED, Outbox};
use crate::reader;

impl Applier<'_> {
    /// Erases a prompt, its completions, their rewards and the feedback on them. The prompt's id remains with
    /// `when`; without that, empty groups go too.
    pub(super) fn erase(
        &mut self,
        id: InteractionId,
        when: Option<UnixMillis>,
    ) -> Result<(), StoreError> {
        let key = id.0.as_bytes();
        let row = self.interaction(id)?;
        if let Some(when) = when {
            self.gone.insert(id.0);
            // In a fleet, its records may come later from another process.
            if row.is_some() || self.mode != Outbox::Off {
                self.erased.insert(key, when)?;
            }
        }
        let Some(row) = row else { return Ok(()) };
        if let Some(session) = row.session() {
            self.sessions.remove((row.api_key(), session, key))?;
        }
        self.by_key.remove((row.api_key(), key))?;
        self.same_prompt.remove((&row.prompt_digest(), key))?;
        self.held_out.remove((row.route.as_str(), key))?;
        self.interactions.remove(key)?;
        self.erase_turns(key)?;
        let samples = reader::ids_of(&self.samples_of, key)?;
        let samples: Vec<_> =
            samples.into_iter().map(|id| SampleId(Uuid::from_bytes(id))).collect();
        let groups = self.groups_on(id)?;
        for group in groups {
            let group = self.leave_group(group, &samples)?;
            if when.is_none() && group.members.is_empty() {
                self.forget_group(&group)?;
            }
        }
        samples.into_iter().try_for_each(|sample| self.erase_sample(id, sample))
    }

    /// Erases the digests of a prompt and of its completions. Later prompts that contain the same messages
    /// keep their own.
    fn erase_turns(&mut self, interaction: &Id) -> Result<(), StoreError> {
        for digest in reader::ids_of(&self.turns_of, interaction)? {
            self.turns.remove((&digest, interaction))?;
            self.turns_of.remove((interaction, &digest))?;
        }
        Ok(())
    }

    /// Takes erased members out of a group. Without any member left, a ready group is dropped.
    fn leave_group(&mut self, mut group: Group, erased: &[SampleId]) -> Result<Group, StoreError> {
        let dropped = GroupState::Dropped(ERASED.to_owned());
        let is_ready = group.state == GroupState::Ready;
        if is_ready && group.is_correction() {
            self.count_correction(&dropped);
        }
        let (gone, kept): (Vec<SampleId>, Vec<SampleId>) =
            group.members.iter().copied().partition(|member| erased.contains(member));
        if is_ready {
            let leaving = Group { members: gone, ..group.clone() };
            for _ in self.ratings_in(&leaving)? {
                self.counts.ratings.end(ERASED);
            }
        }
        group.members = kept;
        if let Some(first) = group.members.first() {
            // Its prompt is equal to the erased one.
            let sample: Option<Sample> = reader::get(&self.samples, first.0.as_bytes())?;
            group.interaction = sample.map_or(group.interaction, |sample| sample.interaction);
            group.oldest_version = self.oldest_version(&group.members)?;
        } else if is_ready {
            group.state = dropped;
        }
        self.put_group(&group)?;
        Ok(group)
    }

    /// Removes a group without members, also from its step's record.
    fn forget_group(&mut self, group: &Group) -> Result<(), StoreError> {
        let id = group.id.0.as_bytes();
        if let GroupState::Trained(step) = group.state {
            self.leave_step(step, group.id)?;
        }
        self.ready.remove((group.created, id))?;
        self.groups_of.remove((group.interaction.0.as_bytes(), id))?;
        self.groups.remove(id)?;
        Ok(())
    }

    /// Erases one piece of feedback. A correction's sample has the same id, with a group of its own.
    pub(super) fn erase_feedback(&mut self, id: RewardId) -> Result<(), StoreError> {
        self.gone.insert(id.0);
        let row: Option<Reward> = reader::get(&self.feedback, id.0.as_bytes())?;
        let Some(row) = row else { return Ok(()) };
        let corrected: Option<Sample> = reader::get(&self.samples, id.0.as_bytes())?;
        if let Some(sample) = corrected {
            if let Some(group) = self.group(id.0.as_bytes())? {
                self.leave_group(group, &[sample.id])?;
            }
            self.erase_sample(sample.interaction, sample.id)?;
        }
        let (sample, part) = (row.sample.0.as_bytes(), row.name.as_str());
        let rating = (sample, part, row.key_id.as_deref());
        let is_newest =
            self.ratings.get(rating)?.is_some_and(|newest| newest.value() == id.0.as_bytes());
        if is_newest {
            self.ratings.remove(rating)?;
        }
        self.forget_idempotency(id.0.as_bytes())?;
        self.feedback.remove(id.0.as_bytes())?;
        self.feedback_of.remove((sample, id.0.as_bytes()))?;
        self.combine_without(&row)
    }

    /// Sets a part's value to the mean of the ratings that remain, or removes it, and with it the comment and
    /// the rater of the erased row.
    fn combine_without(&mut self, erased: &Reward) -> Result<(), StoreError> {
        let Some(current) = self.current_reward(erased.sample, &erased.name)? else {
            return Ok(());
        };
        if current.source != RewardSource::Feedback {
            return Ok(());
        }
        let left = reader::ratings(&self.ratings, &self.feedback, erased.sample, &erased.name)?;
        let (sample, part) = (erased.sample.0.as_bytes(), erased.name.as_str());
        let Some(newest) = left.iter().max_by_key(|rating| rating.created) else {
            let rated: Option<Sample> = reader::get(&self.samples, sample)?;
            let in_ready_group = match rated {
                Some(rated) => self.groups_with(rated.interaction, erased.sample, part)?.is_ready,
                None => false,
            };
            if self.waits(erased.sample, part, in_ready_group)? {
                self.counts.ratings.end(ERASED);
            }
            self.ungrouped.remove(ungrouped_key(&current))?;
            self.rewards.remove((sample, part))?;
            return Ok(());
        };
        #[expect(clippy::cast_precision_loss, reason = "a number of raters")]
        let mean = left.iter().map(|rating| rating.value).sum::<f64>() / left.len() as f64;
        let row = Reward {
            value: Some(mean),
            comment: None,
            idempotency_key: None,
            key_id: newest.key_id.clone(),
            ..current
        };
        self.rewards.insert((sample, part), encode(&row)?.as_slice())?;
        Ok(())
    }

    /// Erases a completion with its rewards and the feedback on it.
    fn erase_sample(&mut self, of: InteractionId, id: SampleId) -> Result<(), StoreError> {
        let sample = id.0.as_bytes();
        for reward in reader::rewards_of(&self.rewards, id)? {
            if self.ungrouped.remove(ungrouped_key(&reward))?.is_some() {
                self.counts.ratings.end(ERASED);
            }
            self.rewards.remove((sample, reward.name.as_str()))?;
        }
        for (part, rater) in self.raters_of(sample)? {
            self.ratings.remove((sample, part.as_str(), rater.as_deref()))?;
        }
        for row in reader::ids_of(&self.feedback_of, sample)? {
            self.forget_idempotency(&row)?;
            self.feedback.remove(&row)?;
            self.feedback_of.remove((sample, &row))?;
        }
        self.samples.remove(sample)?;
        self.samples_of.remove((of.0.as_bytes(), sample))?;
        Ok(())
    }

    /// The part and the rater of each rating of a completion.
    fn raters_of(&self, sample: &Id) -> Result<Vec<(String, Option<String>)>, StoreError> {
        let mut found = Vec::new();
        for entry in self.ratings.range((sample, "", None::<&str>)..)? {
            let key = entry?.0;
            let (rated, part, rater) = key.value();
            if rated != sample {
                break;
            }
            found.push((part.to_owned(), rater.map(str::to_owned)));
        }
        Ok(found)
    }

    /// Removes the idempotency key that a row of feedback holds.
    fn forget_idempotency(&mut self, row: &Id) -> Result<(), StoreError> {
        let posted: Option<Reward> = reader::get(&self.feedback, row)?;
        let Some(Reward { key_id, idempotency_key: Some(key), .. }) = posted else { return Ok(()) };
        let key = (key_id.as_deref().and_then(key_of_rater), key.as_str());
        let is_own = self.idempotency.get(key)?.is_some_and(|found| found.value().1 == row);
        if is_own {
            self.idempotency.remove(key)?;
        }
        Ok(())
    }
}
