//! The state of a run that survives the process, and its folder.

use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use hone_core::files::{FileError, replace_file};
use hone_core::types::{UnixMillis, now_ms};
use hone_train::monitoring::warnings::{MonitorState, Warning};

use crate::config::{self, Config};
use crate::runs::eval_set::Evaluation;
use crate::runs::jsonl::JsonlLog;
use crate::runs::report::RunReport;
use crate::runs::{BestTracker, RunProgress, RunView};

/// The state that a resumed run continues from.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RunState {
    pub(super) started: UnixMillis,
    /// The evaluation before the first step.
    pub(super) before: Option<Evaluation>,
    /// The evaluation after the last step, or after an early stop.
    pub(super) after: Option<Evaluation>,
    /// Step and mean held-out reward of every evaluation.
    pub(super) held_out: Vec<(u64, f64)>,
    pub(super) best: BestTracker,
    pub(super) best_adapter: Option<String>,
    pub(super) warnings: Vec<Warning>,
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

/// The folder `run` of a data directory, and the progress of the run.
pub(in crate::runs) struct RunFolder {
    pub(in crate::runs) path: PathBuf,
    /// `steps.jsonl`
    pub(in crate::runs) steps: JsonlLog,
    /// `evaluations.jsonl`
    pub(in crate::runs) evaluations: JsonlLog,
    saved_config: SavedConfig,
    config_file: PathBuf,
    pub(in crate::runs) progress: RunProgress,
    pub(in crate::runs) view: RunView,
    pub(in crate::runs) began: Instant,
}

impl RunFolder {
    /// Opens the folder of a run that has taken `first` steps. Logged records of later ones are dropped.
    pub(in crate::runs) fn open(
        config: &Config,
        saved_config: SavedConfig,
        first: u64,
        terminal: bool,
    ) -> anyhow::Result<Self> {
        let path = config.data.dir.join("run");
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        let steps = config.train.max_steps;
        Ok(Self {
            steps: JsonlLog::open(&path.join("steps.jsonl"), first)?,
            evaluations: JsonlLog::open(&path.join("evaluations.jsonl"), first)?,
            config_file: saved_config.save(&path, first)?,
            saved_config,
            path,
            progress: RunProgress::new(terminal, steps / 40),
            view: RunView::new(first, steps),
            began: Instant::now(),
        })
    }

    /// Completes the report with the end and the configuration, and writes it to `to`, or to `report` in the
    /// folder. Returns it with its file.
    pub(in crate::runs) fn write_report(
        self,
        report: RunReport,
        to: Option<PathBuf>,
    ) -> anyhow::Result<(RunReport, PathBuf)> {
        let report = RunReport {
            ended: now_ms(),
            configuration: self.saved_config.keys,
            configuration_text: self.saved_config.text,
            configuration_file: Some(self.config_file.display().to_string()),
            ..report
        };
        let file = report.write(&to.unwrap_or_else(|| self.path.join("report")))?;
        Ok((report, file))
    }
}

/// The effective configuration: file, environment and flags together.
#[derive(Clone, Debug)]
pub(in crate::runs) struct SavedConfig {
    /// The keys that differ from the defaults, and the parts of the dataset's route.
    keys: Vec<(String, String)>,
    /// All keys as TOML, without secrets.
    text: String,
}

impl SavedConfig {
    pub(in crate::runs) fn new(config: &Config) -> Result<Self, toml::ser::Error> {
        let mut keys = config::differences(config)?;
        let routes = config.routes.0.iter().filter(|r| r.name == config.rollout.dataset_route);
        for part in routes.flat_map(|route| route.parts()) {
            let value = format!("{} ({}), weight {}", part.name, part.kind.name(), part.weight);
            keys.push(("route.reward".to_owned(), value));
        }
        Ok(Self { keys, text: config::effective(config)? })
    }

    /// Writes `config.toml` in the run's folder, in place of that of an earlier process. `step` is the
    /// last step before this one.
    fn save(&self, folder: &Path, step: u64) -> Result<PathBuf, FileError> {
        let path = folder.join("config.toml");
        let head = format!("# Configuration of `hone train` from step {} on.", step + 1);
        let note = "# The keys of the server, if any, are replaced by random ones.";
        replace_file(&path, format!("{head}\n{note}\n\n{}", self.text).as_bytes())?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use hone_core::files::replace_dir;

    use super::*;
    use crate::app::adapters::copy_files;

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
        replace_dir(&best, |new| copy_files(&from, new)).unwrap_err();
        assert!(best.join("old").is_file(), "a failed copy keeps the old adapter");
        fs::create_dir_all(from.join("inner")).unwrap();
        fs::write(from.join("adapter"), "y").unwrap();
        replace_dir(&best, |new| copy_files(&from, new)).unwrap();
        let names: Vec<_> = fs::read_dir(&best).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["adapter"]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary directory is left");
    }
}
