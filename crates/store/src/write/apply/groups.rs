//! Applies groups and their states, and counts what became of the ratings in them.
//!
//! A rating waits while its value is in the index of ungrouped feedback or in a ready group. Its
//! outcome is final when that group is trained on or dropped.

use redb::ReadableTable;

use hone_core::types::{
    Group, GroupId, GroupState, PolicyVersion, Reward, RewardSource, Sample, SampleId, StepRecord,
    key_of_rater,
};

use super::tables::Applier;
use crate::error::StoreError;
use crate::format::Id;
use crate::format::codec::encode;
use crate::op::{ERASED, MERGED, QUARANTINED};
use crate::reader;

/// Outcome of ratings that were trained on.
const TRAINED: &str = "trained";

/// The outcome of what is in a group of this state, if that is final.
pub(super) fn outcome(state: &GroupState) -> Option<&str> {
    match state {
        GroupState::Ready => None,
        GroupState::Trained(_) => Some(TRAINED),
        GroupState::Dropped(why) => Some(why),
    }
}

pub(super) fn is_dropped(state: &GroupState, reason: &str) -> bool {
    matches!(state, GroupState::Dropped(why) if why == reason)
}

/// The key of a part's value in the index of ungrouped feedback.
pub(super) fn ungrouped_key(row: &Reward) -> (u64, &Id, &str) {
    (row.created, row.sample.0.as_bytes(), &row.name)
}

impl Applier<'_> {
    pub(super) fn add_group(&mut self, row: &Group) -> Result<(), StoreError> {
        let mut prompts = vec![row.interaction];
        for member in &row.members {
            let sample: Option<Sample> = reader::get(&self.samples, member.0.as_bytes())?;
            let Some(sample) = sample else {
                self.count_orphan("groups");
                return Ok(());
            };
            prompts.push(sample.interaction);
        }
        // Counted before the ratings leave the index of ungrouped feedback.
        let waiting = self.ungrouped_in(row)?;
        let known = self.group(row.id.0.as_bytes())?;
        self.put_group(row)?;
        for prompt in prompts {
            self.groups_of.insert((prompt.0.as_bytes(), row.id.0.as_bytes()), ())?;
        }
        for rating in &waiting {
            self.ungrouped.remove(ungrouped_key(rating))?;
        }
        if known.is_none() { self.count_outcome(&row.state, &waiting) } else { Ok(()) }
    }

    /// Changes the state of a group.
    ///
    /// A merged group stays merged, because another group has its ratings, unless a step that began
    /// before the merger trained on it: its members then leave the other group. They also do if the
    /// group was trained on or dropped before the merger, or if the merger lacks some of its ratings. Such
    /// a group stays ready.
    pub(super) fn set_group_state(
        &mut self,
        id: GroupId,
        state: &GroupState,
    ) -> Result<(), StoreError> {
        let Some(group) = self.group(id.0.as_bytes())? else {
            self.count_orphan("groups");
            return Ok(());
        };
        let was_merged = is_dropped(&group.state, MERGED);
        if was_merged && !matches!(state, GroupState::Trained(_)) {
            return Ok(());
        }
        let merges = is_dropped(state, MERGED);
        if was_merged {
            self.leave_merged(&group)?;
        } else if merges && !(group.state == GroupState::Ready && self.is_superseded(&group)?) {
            return self.leave_merged(&group);
        }
        // An undone step does not make a group ready whose members were all erased.
        let erased = GroupState::Dropped(ERASED.to_owned());
        let is_empty = group.members.is_empty() && *state == GroupState::Ready;
        let state = if is_empty { &erased } else { state };
        let was_waiting = was_merged || group.state == GroupState::Ready;
        let ratings = self.ratings_in(&group)?;
        if was_waiting {
            self.count_outcome(state, &ratings)?;
            if group.is_correction() {
                self.count_correction(state);
            }
        } else if *state == GroupState::Ready {
            self.counts.ratings.received += ratings.len() as u64;
            self.counts.corrections.received += u64::from(group.is_correction());
        }
        self.put_group(&Group { state: state.clone(), ..group })
    }

    /// Takes a group out of the record of a step that is undone, or that retention forgets the group of.
    pub(super) fn leave_step(&mut self, step: u64, group: GroupId) -> Result<(), StoreError> {
        let record: Option<StepRecord> = reader::get(&self.steps, step)?;
        if let Some(mut record) = record {
            record.groups.retain(|trained| *trained != group);
            self.steps.insert(step, encode(&record)?.as_slice())?;
        }
        Ok(())
    }

    /// Records members of a ready group as a dropped group of their own, with the id `new`.
    pub(super) fn drop_members(
        &mut self,
        id: GroupId,
        members: &[SampleId],
        reason: &str,
        new: GroupId,
    ) -> Result<(), StoreError> {
        let Some(mut group) = self.group(id.0.as_bytes())? else {
            self.count_orphan("groups");
            return Ok(());
        };
        let (dropped, kept): (Vec<SampleId>, Vec<SampleId>) =
            group.members.iter().copied().partition(|member| members.contains(member));
        if group.state != GroupState::Ready || dropped.is_empty() {
            return Ok(());
        }
        let state = GroupState::Dropped(reason.to_owned());
        if kept.is_empty() {
            return self.set_group_state(id, &state);
        }
        let oldest_version = self.oldest_version(&dropped)?;
        let own = Group { id: new, members: dropped, oldest_version, state, ..group.clone() };
        self.count_outcome(&own.state, &self.ratings_in(&own)?)?;
        self.add_group(&own)?;
        group.oldest_version = self.oldest_version(&kept)?;
        group.members = kept;
        self.put_group(&group)
    }

    /// The other ready groups that have ratings of a group.
    fn sharing_ratings(&self, own: &Group) -> Result<Vec<Group>, StoreError> {
        let mut sharing = self.groups_on(own.interaction)?;
        sharing.retain(|group| {
            group.id != own.id
                && group.state == GroupState::Ready
                && group.parts.iter().any(|part| own.parts.contains(part))
                && group.members.iter().any(|member| own.members.contains(member))
        });
        Ok(sharing)
    }

    /// Whether each rating of a group is in another ready group or waits for one. It is not if that group
    /// was not recorded, because one of its members was erased meanwhile.
    fn is_superseded(&self, group: &Group) -> Result<bool, StoreError> {
        let others = self.sharing_ratings(group)?;
        let waiting = self.ungrouped_in(group)?;
        Ok(self.ratings_in(group)?.iter().all(|rating| {
            let Reward { sample, name, .. } = rating;
            let mut others = others.iter();
            waiting.iter().any(|waiting| waiting.id == rating.id)
                || others.any(|other| other.members.contains(sample) && other.parts.contains(name))
        }))
    }

    /// Takes the members of a group that was trained on, dropped for another reason or stays ready, out
    /// of the other ready groups that have its ratings. Ratings of these members for other parts wait for
    /// a group again.
    fn leave_merged(&mut self, own: &Group) -> Result<(), StoreError> {
        for mut group in self.sharing_ratings(own)? {
            for rating in self.ratings_in(&group)? {
                if own.members.contains(&rating.sample) && !own.parts.contains(&rating.name) {
                    self.ungrouped.insert(ungrouped_key(&rating), ())?;
                }
            }
            group.members.retain(|member| !own.members.contains(member));
            if group.members.is_empty() {
                group.state = GroupState::Dropped(MERGED.to_owned());
            } else {
                group.oldest_version = self.oldest_version(&group.members)?;
            }
            self.put_group(&group)?;
        }
        Ok(())
    }

    pub(super) fn oldest_version(&self, members: &[SampleId]) -> Result<PolicyVersion, StoreError> {
        let mut oldest = None;
        for member in members {
            let sample: Option<Sample> = reader::get(&self.samples, member.0.as_bytes())?;
            oldest = oldest.into_iter().chain(sample.map(|sample| sample.version)).min();
        }
        Ok(oldest.unwrap_or(PolicyVersion::BASE))
    }

    /// The ratings of a group's members and parts that have a value.
    pub(super) fn ratings_in(&self, group: &Group) -> Result<Vec<Reward>, StoreError> {
        let mut found = Vec::new();
        for (member, part) in reader::pairs(group) {
            let reward = self.current_reward(member, part)?;
            let is_rating = |r: &Reward| r.source == RewardSource::Feedback && r.value.is_some();
            found.extend(reward.filter(is_rating));
        }
        Ok(found)
    }

    /// The ratings of a group's members and parts that wait for a group.
    fn ungrouped_in(&self, group: &Group) -> Result<Vec<Reward>, StoreError> {
        let mut found = Vec::new();
        for (member, part) in reader::pairs(group) {
            let Some(reward) = self.current_reward(member, part)? else { continue };
            if self.ungrouped.get(ungrouped_key(&reward))?.is_some() {
                found.push(reward);
            }
        }
        Ok(found)
    }

    /// Counts ratings whose group has this state, if that is final.
    fn count_outcome(&mut self, state: &GroupState, ratings: &[Reward]) -> Result<(), StoreError> {
        let Some(outcome) = outcome(state).filter(|outcome| *outcome != MERGED) else {
            return Ok(());
        };
        for Reward { sample, name, .. } in ratings {
            let left_out = outcome == TRAINED && self.is_quarantined(*sample, name)?;
            self.counts.ratings.end(if left_out { QUARANTINED } else { outcome });
        }
        Ok(())
    }

    /// Whether all ratings of a completion and part are by quarantined keys.
    fn is_quarantined(&self, sample: SampleId, part: &str) -> Result<bool, StoreError> {
        for rating in reader::ratings(&self.ratings, &self.feedback, sample, part)? {
            let Some(rater) = rating.key_id else { return Ok(false) };
            let key = key_of_rater(&rater).unwrap_or(&rater);
            if self.quarantine.get(rater.as_str())?.is_none() && self.quarantine.get(key)?.is_none()
            {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
