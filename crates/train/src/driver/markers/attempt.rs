//! A durable marker of the step that is being computed.
//!
//! A step can end the process: the kernel kills it if memory runs out. The oldest groups come first,
//! so the next start would take the same groups and be killed again. The marker names them before the
//! computation starts. A start that finds it trains them once more, because the end may have had another cause,
//! and drops those that a second marker names.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use hone_core::files::{at, remove_any, replace_file};
use hone_core::types::{GroupId, SampleId};

use crate::data::batch_builder::TrainBatch;
use crate::error::{LearnError, Result};

/// File name of the marker, in the checkpoints' directory.
const FILE: &str = "attempt.json";

/// The groups and samples of a step that did not end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::driver) struct StepAttempt {
    pub(in crate::driver) groups: Vec<GroupId>,
    pub(in crate::driver) samples: Vec<SampleId>,
    /// The groups that were part of an earlier attempt too.
    #[serde(default)]
    pub(in crate::driver) repeated: Vec<GroupId>,
    /// Tokens of the longest sample, prompt included.
    pub(in crate::driver) longest: usize,
}

impl StepAttempt {
    pub(in crate::driver) fn of(batch: &TrainBatch) -> Self {
        let members = || batch.members();
        let corrections = || batch.corrections.iter();
        let tokens = members().map(|(g, m)| g.prompt_ids.len() + m.sample.ids.len());
        let samples = members().map(|(_, member)| member.sample.id);
        Self {
            groups: batch.group_ids(),
            repeated: Vec::new(),
            samples: samples.chain(corrections().map(|one| one.sample)).collect(),
            longest: tokens.chain(corrections().map(|one| one.tokens())).max().unwrap_or_default(),
        }
    }
}

/// The marker's file.
pub(in crate::driver) struct AttemptMarker {
    file: PathBuf,
    /// The groups of an attempt that ended an earlier process.
    suspects: Vec<GroupId>,
}

impl AttemptMarker {
    pub(in crate::driver) fn new(checkpoints: &Path) -> Self {
        Self { file: checkpoints.join(FILE), suspects: Vec::new() }
    }

    /// Notes groups whose next attempt will be their second.
    pub(in crate::driver) fn suspect(&mut self, groups: Vec<GroupId>) {
        self.suspects = groups;
    }

    /// Makes the marker durable. The step may start then.
    pub(in crate::driver) fn set(&self, mut attempt: StepAttempt) -> Result<()> {
        let is_suspect = |group: &&GroupId| self.suspects.contains(group);
        attempt.repeated = attempt.groups.iter().filter(is_suspect).copied().collect();
        let text = serde_json::to_vec(&attempt).map_err(|e| at(&self.file)(e.into()))?;
        if let Some(dir) = self.file.parent() {
            std::fs::create_dir_all(dir).map_err(at(dir))?;
        }
        Ok(replace_file(&self.file, &text)?)
    }

    /// Removes the marker: the step ended, or its groups are dropped.
    pub(in crate::driver) fn clear(&self) -> Result<()> {
        if self.file.exists() { Ok(remove_any(&self.file)?) } else { Ok(()) }
    }

    /// The attempt that did not end; `None` without a marker. An unreadable marker is removed, because
    /// it names no group.
    pub(in crate::driver) fn read(&self) -> Result<Option<StepAttempt>> {
        if !self.file.exists() {
            return Ok(None);
        }
        let text = std::fs::read(&self.file).map_err(at(&self.file)).map_err(LearnError::from)?;
        match serde_json::from_slice(&text) {
            Ok(attempt) => Ok(Some(attempt)),
            Err(error) => {
                tracing::warn!(%error, file = %self.file.display(), "the marker of a step is unreadable");
                self.clear()?;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_read_until_it_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("checkpoints");
        let mut marker = AttemptMarker::new(&dir);
        assert_eq!(marker.read().unwrap(), None);
        let attempt = StepAttempt {
            groups: vec![GroupId::new()],
            repeated: Vec::new(),
            samples: vec![SampleId::new(), SampleId::new()],
            longest: 9,
        };
        marker.set(attempt.clone()).unwrap();
        assert_eq!(AttemptMarker::new(&dir).read().unwrap(), Some(attempt.clone()));
        marker.suspect(vec![GroupId::new(), attempt.groups[0]]);
        marker.set(attempt.clone()).unwrap();
        assert_eq!(marker.read().unwrap().unwrap().repeated, attempt.groups);
        marker.clear().unwrap();
        assert_eq!(marker.read().unwrap(), None);
        marker.clear().unwrap();
        std::fs::write(dir.join(FILE), "{").unwrap();
        assert_eq!(marker.read().unwrap(), None);
        assert!(!dir.join(FILE).exists());
    }
}
