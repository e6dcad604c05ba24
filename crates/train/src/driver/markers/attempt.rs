//! A durable marker of the step that is being computed.
//!
//! A step can end the process: the kernel kills it if memory runs out. The oldest groups come first,
//! so the next start would take the same groups and be killed again. The marker names them before the
//! computation starts, and a start that finds it drops them.

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
            samples: samples.chain(corrections().map(|one| one.sample)).collect(),
            longest: tokens.chain(corrections().map(|one| one.tokens())).max().unwrap_or_default(),
        }
    }
}

/// The marker's file.
pub(in crate::driver) struct AttemptMarker(PathBuf);

impl AttemptMarker {
    pub(in crate::driver) fn new(checkpoints: &Path) -> Self {
        Self(checkpoints.join(FILE))
    }

    /// Makes the marker durable. The step may start then.
    pub(in crate::driver) fn set(&self, attempt: &StepAttempt) -> Result<()> {
        let text = serde_json::to_vec(attempt).map_err(|e| at(&self.0)(e.into()))?;
        if let Some(dir) = self.0.parent() {
            std::fs::create_dir_all(dir).map_err(at(dir))?;
        }
        Ok(replace_file(&self.0, &text)?)
    }

    /// Removes the marker: the step ended, or its groups are dropped.
    pub(in crate::driver) fn clear(&self) -> Result<()> {
        if self.0.exists() { Ok(remove_any(&self.0)?) } else { Ok(()) }
    }

    /// The attempt that did not end; `None` without a marker. An unreadable marker is removed, because
    /// it names no group.
    pub(in crate::driver) fn read(&self) -> Result<Option<StepAttempt>> {
        if !self.0.exists() {
            return Ok(None);
        }
        let text = std::fs::read(&self.0).map_err(at(&self.0)).map_err(LearnError::from)?;
        match serde_json::from_slice(&text) {
            Ok(attempt) => Ok(Some(attempt)),
            Err(error) => {
                tracing::warn!(%error, file = %self.0.display(), "the marker of a step is unreadable");
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
        let marker = AttemptMarker::new(&dir);
        assert_eq!(marker.read().unwrap(), None);
        let attempt = StepAttempt {
            groups: vec![GroupId::new()],
            samples: vec![SampleId::new(), SampleId::new()],
            longest: 9,
        };
        marker.set(&attempt).unwrap();
        assert_eq!(AttemptMarker::new(&dir).read().unwrap(), Some(attempt));
        marker.clear().unwrap();
        assert_eq!(marker.read().unwrap(), None);
        marker.clear().unwrap();
        std::fs::write(dir.join(FILE), "{").unwrap();
        assert_eq!(marker.read().unwrap(), None);
        assert!(!dir.join(FILE).exists());
    }
}
