//! Applies feedback: records each post, combines the raters' newest ratings, and marks the combined
//! value as waiting for a group.
//!
//! The ratings of a part are combined once for all posts of a transaction, because combining them reads those of
//! every rater: a list of many posts on one completion would otherwise take quadratic time.

use redb::ReadableTable;
use uuid::Uuid;

use hone_core::types::{
    GroupState, InteractionId, PolicyVersion, Reward, RewardId, RewardSource, Sample, SampleId,
    aggregate, key_of_rater,
};

use super::groups::ungrouped_key;
use super::tables::{Applier, PendingRating};
use crate::error::StoreError;
use crate::format::codec::encode;
use crate::op::{Elsewhere, FeedbackEntry, FeedbackOutcome, Outbox, id_of_turn};
use crate::reader;

impl Applier<'_> {
    /// Records ratings of one client: all, or no one of them.
    pub(super) fn add_feedback(
        &mut self,
        entries: &[FeedbackEntry],
        id: RewardId,
    ) -> Result<FeedbackOutcome, StoreError> {
        let entries: Result<Option<Vec<_>>, _> =
            entries.iter().map(|entry| self.by_its_rater(entry)).collect();
        let Some(entries) = entries? else { return Ok(FeedbackOutcome::UnknownCompletion) };
        let entries = entries.as_slice();
        // If the row is the same, this operation is being repeated; it is not another post.
        if let Some((sample, known)) = self.find_first(entries)?
            && known != id
        {
            let mut same = !self.has_row(id_of_turn(known, entries.len()))?;
            for (number, entry) in entries.iter().enumerate() {
                same = same && self.is_same(id_of_turn(known, number), entry)?;
            }
            let reused = FeedbackOutcome::Reused;
            return Ok(if same { FeedbackOutcome::Duplicate(sample) } else { reused });
        }
        let mut rated = Vec::with_capacity(entries.len());
        for entry in entries {
            match self.rated(entry)? {
                Ok(sample) => rated.push((entry, sample)),
                Err(unknown) => return Ok(unknown),
            }
        }
        let first = rated.first().map(|(_, sample)| *sample);
        self.record_all(&rated, id)?;
        Ok(first.map_or(FeedbackOutcome::Credited(0), FeedbackOutcome::Recorded))
    }

    /// The entry with who rates; `None` if its API key may not rate the completion. Only the ledger with the completion
    /// knows the end user of the request, who rates unless the post names another.
    fn by_its_rater(&self, entry: &FeedbackEntry) -> Result<Option<FeedbackEntry>, StoreError> {
        let mut entry = entry.clone();
        let Some(allowed) = entry.elsewhere.take() else { return Ok(Some(entry)) };
        let Some(completion) = self.interaction(entry.interaction)? else { return Ok(Some(entry)) };
        let key = entry.key_id.as_deref().and_then(key_of_rater);
        if completion.api_key() != key {
            return Ok(Some(entry).filter(|_| allowed == Elsewhere::Any));
        }
        if entry.key_id.as_deref() == key {
            entry.key_id = completion.key_id;
        }
        Ok(Some(entry))
    }

    /// Records one rating for several turns. Turns without the choice that is rated are skipped.
    pub(super) fn add_conversation(
        &mut self,
        turns: &[FeedbackEntry],
        id: RewardId,
    ) -> Result<FeedbackOutcome, StoreError> {
        if let Some((_, known)) = self.find_first(turns)?
            && known != id
        {
            // The conversation may have got further turns since, also before the first credited one: a
            // choice that was continued later.
            for turn in turns {
                if self.is_same(known, turn)? {
                    return Ok(FeedbackOutcome::AlreadyCredited(self.count_credited(known)?));
                }
            }
            return Ok(FeedbackOutcome::Reused);
        }
        let mut rated = Vec::with_capacity(turns.len());
        for turn in turns {
            let sample = self.served_choice(turn.interaction, turn.choice)?;
            rated.extend(sample.map(|sample| (turn, sample)));
        }
        self.record_all(&rated, id)?;
        Ok(FeedbackOutcome::Credited(rated.len()))
    }

    /// Records the ratings of one post. The first row holds the idempotency key for all.
    fn record_all(
        &mut self,
        rated: &[(&FeedbackEntry, SampleId)],
        id: RewardId,
    ) -> Result<(), StoreError> {
        for (number, (entry, sample)) in rated.iter().enumerate() {
            let idempotency_key = entry.idempotency_key.clone().filter(|_| number == 0);
            let entry = FeedbackEntry { idempotency_key, ..(*entry).clone() };
            self.record_feedback(&entry, id_of_turn(id, number), *sample)?;
        }
        Ok(())
    }

    /// The sample that an entry rates, or why there is no such sample.
    fn rated(
        &self,
        entry: &FeedbackEntry,
    ) -> Result<Result<SampleId, FeedbackOutcome>, StoreError> {
        if self.interactions.get(entry.interaction.0.as_bytes())?.is_none() {
            return Ok(Err(FeedbackOutcome::UnknownCompletion));
        }
        let sample = self.served_choice(entry.interaction, entry.choice)?;
        Ok(sample.ok_or(FeedbackOutcome::UnknownChoice))
    }

    /// Whether a row recorded the same rating of the same completion by the same rater.
    pub(super) fn is_same(&self, row: RewardId, entry: &FeedbackEntry) -> Result<bool, StoreError> {
        let row: Option<Reward> = reader::get(&self.feedback, row.0.as_bytes())?;
        let sample = self.served_choice(entry.interaction, entry.choice)?;
        Ok(row.is_some_and(|row| {
            Some(row.sample) == sample
                && row.name == entry.name
                && row.value == entry.value
                && row.comment == entry.comment
                && row.key_id == entry.key_id
        }))
    }

    pub(super) fn has_row(&self, row: RewardId) -> Result<bool, StoreError> {
        Ok(self.feedback.get(row.0.as_bytes())?.is_some())
    }

    /// Number of rows that an earlier conversation's feedback created.
    fn count_credited(&self, id: RewardId) -> Result<usize, StoreError> {
        let mut count = 0;
        while self.has_row(id_of_turn(id, count))? {
            count += 1;
        }
        Ok(count)
    }

    /// The sample and row of the first feedback with the idempotency key of the first entry.
    fn find_first(
        &self,
        entries: &[FeedbackEntry],
    ) -> Result<Option<(SampleId, RewardId)>, StoreError> {
        let Some(first) = entries.first() else { return Ok(None) };
        self.find_idempotent(first.key_id.as_deref(), first.idempotency_key.as_deref())
    }

    /// The sample and row of the first feedback of a rater's API key with this idempotency key.
    pub(super) fn find_idempotent(
        &self,
        rater: Option<&str>,
        key: Option<&str>,
    ) -> Result<Option<(SampleId, RewardId)>, StoreError> {
        let Some(key) = key else { return Ok(None) };
        let found = self.idempotency.get((rater.and_then(key_of_rater), key))?;
        Ok(found.map(|guard| {
            let (sample, reward) = guard.value();
            (SampleId(Uuid::from_bytes(*sample)), RewardId(Uuid::from_bytes(*reward)))
        }))
    }

    /// The sample of a served choice.
    pub(super) fn served_choice(
        &self,
        interaction: InteractionId,
        choice: u32,
    ) -> Result<Option<SampleId>, StoreError> {
        for entry in reader::entries_of(&self.samples_of, interaction.0.as_bytes())? {
            let (key, value) = entry?;
            if value.value() == (true, choice) {
                return Ok(Some(SampleId(Uuid::from_bytes(*key.value().1))));
            }
        }
        Ok(None)
    }

    /// Records a rating, unless the operation is repeated and has recorded it.
    pub(super) fn record_feedback(
        &mut self,
        entry: &FeedbackEntry,
        id: RewardId,
        sample: SampleId,
    ) -> Result<(), StoreError> {
        if self.has_row(id)? {
            return Ok(());
        }
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
        self.insert_posted(&posted)?;
        if posted.value.is_some() {
            let rater = (sample.0.as_bytes(), entry.name.as_str(), entry.key_id.as_deref());
            self.ratings.insert(rater, id.0.as_bytes())?;
        }
        self.counts.ratings.received += 1;
        let mut values = 1;
        if entry.value.is_none() {
            self.counts.ratings.end("comment");
            values = 0;
        }
        let key = (sample, entry.name.clone());
        values += self.pending.get(&key).map_or(0, |earlier| earlier.values);
        let (interaction, aggregate) = (entry.interaction, entry.aggregate);
        self.pending.insert(key, PendingRating { interaction, last: posted, aggregate, values });
        if self.intake.is_some() {
            let rated: Option<Sample> = reader::get(&self.samples, sample.0.as_bytes())?;
            let version = rated.map_or(PolicyVersion::BASE, |rated| rated.version);
            self.taken.push((entry.clone(), sample, version));
        }
        Ok(())
    }

    /// Writes a row of feedback with its idempotency key.
    pub(super) fn insert_posted(&mut self, row: &Reward) -> Result<(), StoreError> {
        let (sample, id) = (row.sample.0.as_bytes(), row.id.0.as_bytes());
        self.feedback.insert(id, encode(row)?.as_slice())?;
        self.feedback_of.insert((sample, id), ())?;
        self.count_written("feedback");
        if let Some(key) = row.idempotency_key.as_deref() {
            let api_key = row.key_id.as_deref().and_then(key_of_rater);
            self.idempotency.insert((api_key, key), (sample, id))?;
        }
        Ok(())
    }

    /// Combines the ratings of every part that was posted for. Each operation that reads their values needs this
    /// first, and so does the end of the transaction.
    pub(crate) fn combine_ratings(&mut self) -> Result<(), StoreError> {
        for ((sample, part), pending) in std::mem::take(&mut self.pending) {
            self.combine(sample, &part, pending)?;
        }
        Ok(())
    }

    fn combine(
        &mut self,
        sample: SampleId,
        part: &str,
        pending: PendingRating,
    ) -> Result<(), StoreError> {
        let PendingRating { interaction, last, aggregate: rule, values } = pending;
        let ratings = reader::ratings(&self.ratings, &self.feedback, sample, part)?;
        let PartGroups { is_past, trained, is_ready: in_ready_group } =
            self.groups_with(interaction, sample, part)?;
        // The trainer uses the combined value; the table `feedback` keeps what each rater posted.
        let reward = Reward { value: aggregate(rule, &ratings), ..last };
        let waited = self.waits(sample, part, in_ready_group)?;
        let previous = self.put_reward(&reward)?;
        let changed = previous.is_none_or(|p| p.value != reward.value);
        // Either no group contains it, or it changed after every such group was trained on or dropped. A rater may
        // correct a rating; one that changes again and again would train each time.
        let needs_group = reward.value.is_some()
            && !in_ready_group
            && (changed || !is_past)
            && trained < MOST_TRAINED;
        if needs_group && self.mode != Outbox::Server {
            self.ungrouped.insert(ungrouped_key(&reward), ())?;
        }
        // Of several posts, the last one counts.
        for _ in 0..values.saturating_sub(1) + usize::from(waited) {
            self.counts.ratings.end("replaced");
        }
        if values > 0 && reward.value.is_none() {
            self.counts.ratings.end("tied");
        } else if values > 0 && !needs_group && !in_ready_group {
            self.counts.ratings.end("repeated");
        }
        Ok(())
    }

    /// Whether a rating of a completion and part waits for a group or, in a ready group, for the
    /// trainer.
    pub(super) fn waits(
        &self,
        sample: SampleId,
        part: &str,
        in_ready_group: bool,
    ) -> Result<bool, StoreError> {
        let Some(reward) = self.current_reward(sample, part)? else { return Ok(false) };
        Ok(reward.source == RewardSource::Feedback
            && reward.value.is_some()
            && (in_ready_group || self.ungrouped.get(ungrouped_key(&reward))?.is_some()))
    }

    /// The groups that contain a part of a completion.
    pub(super) fn groups_with(
        &self,
        interaction: InteractionId,
        sample: SampleId,
        part: &str,
    ) -> Result<PartGroups, StoreError> {
        let mut found = PartGroups::default();
        for group in self.groups_on(interaction)? {
            if group.members.contains(&sample) && group.parts.iter().any(|name| name == part) {
                match group.state {
                    GroupState::Ready => found.is_ready = true,
                    GroupState::Trained(_) => found.trained += 1,
                    GroupState::Dropped(_) => {}
                }
                found.is_past |= group.state != GroupState::Ready;
            }
        }
        Ok(found)
    }
}

/// Number of groups that may train on the same part of a completion, each with another value.
const MOST_TRAINED: usize = 2;

/// Which groups contain a part of a completion.
#[derive(Default)]
pub(super) struct PartGroups {
    /// One that was trained on or dropped.
    is_past: bool,
    /// Number of those that were trained on.
    trained: usize,
    /// One that waits for the trainer.
    pub(super) is_ready: bool,
}
