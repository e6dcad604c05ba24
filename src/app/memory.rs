//! The memory plan of a configuration, which the start checks and `--explain-memory` prints.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use hone_core::memory;
use hone_core::metrics::Metrics;
use hone_engine::ModelDir;
use hone_model::ModelSpec;
use hone_train::memory::{BaseMemory, MemoryPlanner, ProcessMemory, ProcessSetup};
use hone_train::{Learner, available_memory};

use super::model::open_model;
use super::sampler::slots;
use crate::config::Config;

/// The memory that a process needs, and the memory that it may hold.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// The plan for samples of up to `max_sample_tokens`.
    #[serde(flatten)]
    pub plan: ProcessMemory,
    /// The longest sample that is trained on, in tokens.
    pub max_sample_tokens: usize,
    /// Bytes that the process may hold; `None` if the system does not report it.
    pub available: Option<usize>,
    /// Why training is refused; `None` if the plan fits.
    pub refused: Option<String>,
}

impl MemoryReport {
    /// The plan of `hone serve`, or without clients of `hone train` and `hone eval`.
    ///
    /// # Errors
    /// If the model's configuration or the headers of its weight files cannot be read.
    pub(super) fn of(config: &Config, model: &ModelDir, has_clients: bool) -> anyhow::Result<Self> {
        Self::with(config, model, setup(config, model, has_clients))
    }

    fn with(config: &Config, model: &ModelDir, setup: ProcessSetup) -> anyhow::Result<Self> {
        let spec = ModelSpec::from_config(&model.config)?;
        let train = &config.train;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let planner = MemoryPlanner {
            spec: &spec,
            base: BaseMemory::read(&spec, &model.weights, train.base_dtype)?,
            config: train,
            threads: if train.threads == 0 { cores } else { train.threads },
            context: model.context(),
            setup,
        };
        // What is resident now is part of the plan.
        let resident = usize::try_from(memory::resident()).unwrap_or(usize::MAX);
        let available = available_memory().map(|bytes| bytes.saturating_add(resident));
        let (max_sample_tokens, refused) = match planner.longest_sample(available) {
            Ok(tokens) => (tokens, None),
            Err(error) => (train.max_tokens, Some(error.to_string())),
        };
        let plan = planner.plan(max_sample_tokens);
        Ok(Self { plan, max_sample_tokens, available, refused })
    }

    /// Refuses a process that does not fit into the memory.
    ///
    /// # Errors
    /// If the plan does not fit.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        self.refused.as_ref().map_or(Ok(()), |reason| Err(anyhow::Error::msg(reason.clone())))
    }

    /// Sets the metrics of the plan.
    pub(super) fn export(&self, metrics: &Metrics) {
        let bytes = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        for part in &self.plan.parts {
            metrics.memory_planned.with_label_values(&[part.part]).set(bytes(part.bytes));
        }
        metrics.memory_planned_peak.set(bytes(self.plan.peak));
    }
}

impl fmt::Display for MemoryReport {
    /// The table of the parts, then the available memory and, if it does not suffice, the reason.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.plan)?;
        if let Some(bytes) = self.available {
            write!(f, "\n{:<34} {:>9.1} MiB", "available", bytes as f64 / f64::from(1 << 20))?;
        }
        if let Some(reason) = &self.refused {
            write!(f, "\nrefused: {reason}")?;
        }
        Ok(())
    }
}

/// The parts of the process beside the trainer.
fn setup(config: &Config, model: &ModelDir, has_clients: bool) -> ProcessSetup {
    let native = config.rollout.sampler.is_native(true);
    let serves = has_clients || !native;
    let samples = native && (config.rollout.enabled || !serves);
    let size = |path: &PathBuf| {
        let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
        usize::try_from(bytes).unwrap_or(usize::MAX)
    };
    ProcessSetup {
        replicas: if serves { config.engine.replicas.max(1) } else { 0 },
        sequences: if samples { slots(config) } else { 0 },
        cache_positions: if samples { config.rollout.max_batch_tokens } else { 0 },
        weight_files: model.weights.iter().map(size).sum(),
        tokenizer_file: model.tokenizer_json().map_or(0, |text| text.len()),
        ledger_cache: hone_store::CACHE_BYTES,
    }
}

/// The longest sample, in tokens, for which a run that neither serves nor samples has memory.
///
/// # Errors
/// If the model's configuration or the headers of its weight files cannot be read, or training does not
/// fit into the memory.
pub fn longest_recorded_sample(config: &Config, model: &ModelDir) -> anyhow::Result<usize> {
    let ledger_cache = hone_store::CACHE_BYTES;
    let setup = ProcessSetup { ledger_cache, ..ProcessSetup::default() };
    let memory = MemoryReport::with(config, model, setup)?;
    memory.check()?;
    Ok(memory.max_sample_tokens)
}

/// The memory plan of `hone serve`, or without clients of `hone train`. Loads no weights.
///
/// # Errors
/// If the model cannot be found, read or trained.
pub async fn explain_memory(config: &Config, has_clients: bool) -> anyhow::Result<MemoryReport> {
    let dir = open_model(config, &config.data.dir).await?;
    Learner::check(&dir, &config.train)?;
    MemoryReport::of(config, &dir, has_clients)
}
