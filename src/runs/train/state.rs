//! What a run remembers between processes, and its logs.

use std::path::Path;
use std::{fs, io};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use hone_core::types::{StepRecord, UnixMillis, now_ms};
use hone_train::monitoring::warnings::{MonitorState, Warning};

use crate::config::Config;
use crate::runs::early_stop::BestTracker;
use crate::runs::evaluate::Evaluation;
use crate::runs::jsonl::JsonlLog;
use crate::runs::tensorboard::EventWriter;

/// What a resumed run goes on with.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RunState {
    /// When the first process of the run began.
    pub(super) started: UnixMillis,
    /// The held-out prompts before the first step.
    pub(super) before: Option<Evaluation>,
    /// The held-out prompts after the last step so far that ended a run.
    pub(super) after: Option<Evaluation>,
    /// Step and mean held-out reward of every evaluation.
    pub(super) held_out: Vec<(u64, f64)>,
    /// The best of them.
    pub(super) best: BestTracker,
    /// Where its adapter was copied to.
    pub(super) best_adapter: Option<String>,
    /// Every warning that was raised.
    pub(super) warnings: Vec<Warning>,
    pub(super) watch: MonitorState,
}

impl RunState {
    /// Reads the state of a run that has taken `step` steps; a fresh one where there is no file.
    pub(super) fn load(path: &Path, step: u64) -> anyhow::Result<Self> {
        let place = || format!("{}", path.display());
        match fs::read(path) {
            Ok(bytes) => {
                let mut state: Self = serde_json::from_slice(&bytes).with_context(place)?;
                // A crash may have undone steps that were evaluated already.
                state.held_out.retain(|(at, _)| *at <= step);
                Ok(state)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Self { started: now_ms(), ..Self::default() })
            }
            Err(error) => Err(error).with_context(place),
        }
    }

    /// Writes the state, whole or not at all.
    pub(super) fn save(&self, path: &Path) -> anyhow::Result<()> {
        let whole = path.with_extension("json.tmp");
        let written = fs::write(&whole, serde_json::to_vec(self)?);
        written.and_then(|()| fs::rename(&whole, path)).with_context(|| path.display().to_string())
    }
}

/// The run's log files.
pub(super) struct Logs {
    steps: JsonlLog,
    evaluations: JsonlLog,
    events: Option<EventWriter>,
}

impl Logs {
    /// Opens `steps.jsonl`, `evaluations.jsonl` and TensorBoard's events in a folder; what they hold
    /// beyond step `first` is dropped.
    pub(super) fn open(folder: &Path, first: u64, tensorboard: bool) -> anyhow::Result<Self> {
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

    /// One step's figures.
    pub(super) fn step(&mut self, record: &StepRecord) -> anyhow::Result<()> {
        self.steps.append(record)?;
        if let Some(events) = &mut self.events {
            events.scalars(record)?;
        }
        Ok(())
    }

    /// One evaluation's.
    pub(super) fn evaluation(&mut self, record: &StepRecord) -> anyhow::Result<()> {
        self.evaluations.append(record)?;
        if let Some(events) = &mut self.events {
            events.scalars(record)?;
        }
        Ok(())
    }
}

/// Puts a copy of the folder `from` in the place of `to`.
pub(super) fn replace_dir(from: &Path, to: &Path) -> io::Result<()> {
    let fresh = to.with_extension("tmp");
    if fresh.exists() {
        fs::remove_dir_all(&fresh)?;
    }
    fs::create_dir_all(&fresh)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), fresh.join(entry.file_name()))?;
        }
    }
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::rename(&fresh, to)
}

/// What matters of the configuration, for the report.
pub(super) fn summary(config: &Config) -> Vec<(String, String)> {
    let train = &config.train;
    let mut all: Vec<(&str, String)> = vec![
        (
            "dataset.path",
            config.dataset_in_use().map_or_else(String::new, |d| d.path.display().to_string()),
        ),
        ("rollout.group_size", config.rollout.group_size.to_string()),
        ("rollout.temperature", config.rollout.temperature.to_string()),
        ("rollout.max_tokens", config.rollout.max_tokens.to_string()),
        ("train.max_steps", train.max_steps.to_string()),
        ("train.samples_per_step", train.samples_per_step.to_string()),
        ("train.learning_rate", train.learning_rate.to_string()),
        ("train.beta", train.beta.to_string()),
        ("train.lora.r", train.lora.r.to_string()),
        ("train.lora.alpha", train.lora.alpha.to_string()),
        ("train.seed", train.seed.to_string()),
    ];
    let routes = config.routes.0.iter().filter(|r| r.name == config.rollout.dataset_route);
    for part in routes.flat_map(|route| route.parts()) {
        all.push((
            "reward",
            format!("{} ({}), weight {}", part.name, part.kind.name(), part.weight),
        ));
    }
    all.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
