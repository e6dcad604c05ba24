//! Whose feedback is set aside, and what comes back when it no longer is.

use redb::ReadableTable;

use hone_core::types::{GroupState, Sample, SampleId};

use super::Writing;
use crate::codec::decode;
use crate::schema::Id;
use crate::{Quarantined, SET_ASIDE, StoreError};

impl Writing<'_> {
    /// Sets a key's feedback aside.
    pub(super) fn set_aside(&mut self, row: &Quarantined) -> Result<(), StoreError> {
        if self.quarantine.get(row.key_id.as_str())?.is_none() {
            self.quarantine.insert(row.key_id.as_str(), (row.reason.as_str(), row.since))?;
            self.wrote("quarantine");
        }
        Ok(())
    }

    /// Lets a key's feedback count again. Reads every rating: this is rare, and done by hand.
    pub(super) fn release(&mut self, key_id: &str) -> Result<(), StoreError> {
        if self.quarantine.remove(key_id)?.is_none() {
            return Ok(());
        }
        let mut given = Vec::new();
        for entry in self.ratings.iter()? {
            let key = entry?.0;
            let (sample, name, rater) = key.value();
            if rater == Some(key_id) {
                given.push((SampleId(uuid::Uuid::from_bytes(*sample)), name.to_owned()));
            }
        }
        for (sample, name) in given {
            if self.was_dropped(sample, &name)?
                && let Some(reward) = self.current_reward(sample, &name)?
                && reward.value.is_some()
            {
                let key = (reward.created, sample.0.as_bytes(), name.as_str());
                self.ungrouped.insert(key, ())?;
            }
        }
        Ok(())
    }

    /// Whether the last group that names a part of a sample was dropped for the quarantine alone.
    fn was_dropped(&self, id: SampleId, name: &str) -> Result<bool, StoreError> {
        let sample: Sample = match self.samples.get(id.0.as_bytes())? {
            Some(bytes) => decode(bytes.value())?,
            None => return Ok(false),
        };
        let mut dropped = false;
        let prompt = sample.interaction.0.as_bytes();
        for entry in self.groups_of.range((prompt, &Id::default())..=(prompt, &[u8::MAX; 16]))? {
            let key = entry?.0;
            let Some(group) = self.load_group(key.value().1)? else { continue };
            if group.members.contains(&id) && group.parts.iter().any(|part| part == name) {
                dropped = matches!(&group.state, GroupState::Dropped(why) if why == SET_ASIDE);
            }
        }
        Ok(dropped)
    }
}
