//! Applies the beginning and the end of the quarantine of an API key or of one of its end users.

use redb::ReadableTable;
use uuid::Uuid;

use hone_core::types::{GroupState, Sample, SampleId, concerns_rater};

use super::tables::LedgerTables;
use crate::error::StoreError;
use crate::op::{QUARANTINED, QuarantinedKey};
use crate::reader;

impl LedgerTables<'_> {
    /// Quarantines a key, unless it is quarantined already.
    pub(super) fn quarantine_key(&mut self, row: &QuarantinedKey) -> Result<(), StoreError> {
        if self.quarantine.get(row.key_id.as_str())?.is_none() {
            self.quarantine.insert(row.key_id.as_str(), (row.reason.as_str(), row.since))?;
            self.count_written("quarantine");
        }
        Ok(())
    }

    /// Ends a key's quarantine. This reads all feedback, which is acceptable because operators do
    /// it rarely.
    pub(super) fn release_key(&mut self, key_id: &str) -> Result<(), StoreError> {
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
            {
                let key = (reward.created, sample.0.as_bytes(), name.as_str());
                if self.ungrouped.insert(key, ())?.is_none() {
                    self.counts.received += 1;
                }
            }
        }
        self.release_corrections(key_id)
    }

    /// Whether the last group that contains a part of a sample was dropped because of a quarantine.
    fn was_quarantined(&self, id: SampleId, name: &str) -> Result<bool, StoreError> {
        let sample: Option<Sample> = reader::get(&self.samples, id.0.as_bytes())?;
        let Some(sample) = sample else { return Ok(false) };
        let mut dropped = false;
        for entry in reader::entries_of(&self.groups_of, sample.interaction.0.as_bytes())? {
            let Some(group) = self.group(entry?.0.value().1)? else { continue };
            if group.members.contains(&id) && group.parts.iter().any(|part| part == name) {
                dropped = matches!(&group.state, GroupState::Dropped(why) if why == QUARANTINED);
            }
        }
        Ok(dropped)
    }
}
