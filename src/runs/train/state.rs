//! The state of a run that survives the process, and its logs.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use hone_core::files::{FileError, at, replace_dir, replace_file};
use hone_core::types::{StepRecord, UnixMillis, now_ms};
use hone_store::StoreError;
use hone_train::monitoring::warnings::{MonitorState, Warning};

use crate::runs::BestTracker;
use crate::runs::eval_set::Evaluation;
use crate::runs::jsonl::JsonlLog;
use crate::runs::tensorboard::EventWriter;

/// The state that a resumed run continues from.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RunState {
    /// Start of the run's first process.
    pub(super) started: UnixMillis,
    /// The evaluation before the first step.
    pub(super) before: Option<Evaluation>,
    /// The evaluation after the last step, or after an early stop.
    pub(super) after: Option<Evaluation>,
    /// Step and mean held-out reward of every evaluation.
    pub(super) held_out: Vec<(u64, f64)>,
    /// The best evaluation and the patience.
    pub(super) best: BestTracker,
    /// The copy of the best step's adapter.
    pub(super) best_adapter: Option<String>,
    /// The warnings of all processes.
    pub(super) warnings: Vec<Warning>,
    /// The state of the health monitor.
    pub(super) watch: MonitorState,
}

impl RunState {
    /// Reads the state of a run that has taken `step` steps; a fresh state if there is no file.
    pub(super) fn load(path: &Path, step: u64) -> anyhow::Result<Self> {
        let place = || path.display().to_string();
        match fs::read(path) {
            Ok(bytes) => {
                let mut state: Self = serde_json::from_slice(&bytes).with_context(place)?;
                // A crash may have undone steps that were evaluated.
                state.held_out.retain(|(at, _)| *at <= step);
                Ok(state)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Self { started: now_ms(), ..Self::default() })
            }
            Err(error) => Err(error).with_context(place),
        }
    }

    /// Replaces the file: after a crash it is either the old or the new one.
    pub(super) fn save(&self, path: &Path) -> anyhow::Result<()> {
        Ok(replace_file(path, &serde_json::to_vec(self)?)?)
    }
}

/// The run's log files.
pub(in crate::runs) struct Logs {
    steps: JsonlLog,
    evaluations: JsonlLog,
    events: Option<EventWriter>,
}

impl Logs {
    /// Opens `steps.jsonl`, `evaluations.jsonl` and TensorBoard's events in `folder`. Their records
    /// after step `first` are dropped.
    pub(in crate::runs) fn open(
        folder: &Path,
        first: u64,
        tensorboard: bool,
    ) -> anyhow::Result<Self> {
        let events = match tensorboard {
            true => {
                let resumed = (first > 0).then_some(first);
                let host = format!("hone.{}", std::process::id());
                Some(EventWriter::create(&folder.join("tensorboard"), &host, now_ms(), resumed)?)
            }
            false => None,
        };
        Ok(Self {
            steps: JsonlLog::open(&folder.join("steps.jsonl"), first)?,
            evaluations: JsonlLog::open(&folder.join("evaluations.jsonl"), first)?,
            events,
        })
    }

    /// Appends the metrics of a step, and TensorBoard's histograms of the values that
    /// `distributions` reads.
    pub(in crate::runs) fn step(
        &mut self,
        record: &StepRecord,
        distributions: impl FnOnce() -> Result<BTreeMap<String, Vec<f64>>, StoreError>,
    ) -> anyhow::Result<()> {
        self.steps.append(record)?;
        if let Some(events) = &mut self.events {
            events.scalars(record)?;
            events.histograms(record.step, record.created, &distributions()?)?;
        }
        Ok(())
    }

    /// Appends the metrics of an evaluation.
    pub(in crate::runs) fn evaluation(&mut self, record: &StepRecord) -> anyhow::Result<()> {
        self.evaluations.append(record)?;
        if let Some(events) = &mut self.events {
            events.scalars(record)?;
        }
        Ok(())
    }
}

/// Replaces the directory `to` with a copy of the files in `from`; after a crash `to` is complete.
pub(super) fn copy_dir(from: &Path, to: &Path) -> Result<(), FileError> {
    replace_dir(to, |new| {
        for entry in fs::read_dir(from).map_err(at(from))? {
            let entry = entry.map_err(at(from))?;
            let path = entry.path();
            if entry.file_type().map_err(at(&path))?.is_file() {
                fs::copy(&path, new.join(entry.file_name())).map_err(at(&path))?;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_survives_and_a_failed_write_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let held_out = vec![(0, 0.25), (10, 0.5), (20, 0.75)];
        let state = RunState { held_out, ..RunState::default() };
        state.save(&path).unwrap();
        // The temporary file cannot be created.
        fs::create_dir(dir.path().join(".state.json.tmp")).unwrap();
        RunState::default().save(&path).unwrap_err();
        let loaded = RunState::load(&path, 10).unwrap();
        assert_eq!(loaded.held_out, [(0, 0.25), (10, 0.5)], "step 20 was undone");
    }

    #[test]
    fn the_best_adapter_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (from, best) = (dir.path().join("v1"), dir.path().join("best"));
        fs::create_dir_all(&best).unwrap();
        fs::write(best.join("old"), "x").unwrap();
        copy_dir(&from, &best).unwrap_err();
        assert!(best.join("old").is_file(), "a failed copy keeps the old adapter");
        fs::create_dir_all(from.join("inner")).unwrap();
        fs::write(from.join("adapter"), "y").unwrap();
        copy_dir(&from, &best).unwrap();
        let names: Vec<_> = fs::read_dir(&best).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["adapter"]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary directory is left");
    }
}
