//! Durable markers of what the trainer has begun, beside its checkpoints.

mod attempt;

use std::path::{Path, PathBuf};

use hone_core::files::{at, remove_any, replace_file};

use crate::error::Result;

pub(super) use attempt::{AttemptMarker, StepAttempt};

// A durable marker of an operator's activation that the trainer's weights do not follow yet.
//
// The ledger names the active version, but not whether training pauses since it was activated. Without the
// marker, a start could not distinguish an activation of the version that the checkpoint descends from, which
// undoes unpublished steps and pauses training, from none.

/// File name of the marker, in the checkpoints' directory.
const FILE: &str = "activation";

/// The marker's file, which is empty.
pub(in crate::driver) struct ActivationMarker(PathBuf);

impl ActivationMarker {
    pub(in crate::driver) fn new(checkpoints: &Path) -> Self {
        Self(checkpoints.join(FILE))
    }

    /// Whether the weights do not follow an activation yet.
    pub(in crate::driver) fn is_set(&self) -> bool {
        self.0.exists()
    }

    /// Makes the marker durable, unless it is set already.
    pub(in crate::driver) fn set(&self) -> Result<()> {
        if self.is_set() {
            return Ok(());
        }
        if let Some(dir) = self.0.parent() {
            std::fs::create_dir_all(dir).map_err(at(dir))?;
        }
        Ok(replace_file(&self.0, b"")?)
    }

    /// Removes the marker: the weights follow the activation, and a checkpoint has them.
    pub(in crate::driver) fn clear(&self) -> Result<()> {
        if self.is_set() { Ok(remove_any(&self.0)?) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_set_until_it_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("checkpoints");
        let marker = ActivationMarker::new(&dir);
        marker.clear().unwrap();
        for _ in 0..2 {
            assert!(!marker.is_set());
            marker.set().unwrap();
            marker.set().unwrap();
            assert!(ActivationMarker::new(&dir).is_set());
            marker.clear().unwrap();
        }
    }
}
