//! The memory plan of a configuration, which the start checks and `--explain-memory` prints.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use hone_core::memory;
use hone_core::metrics::Metrics;
use hone_cuda::{ArenaPlan, DeviceModel, DeviceSampler};
use hone_engine::{EngineBackend, ModelDir};
use hone_model::ModelSpec;
use hone_model::device::{DeviceRoom, decoder_shape, device_float};
use hone_train::memory::{BaseMemory, MemoryPlanner, ProcessMemory, ProcessSetup};
use hone_train::{Learner, available_memory, device_plan};

use super::engines::{EnginesNeeded, NativePurpose, device};
use super::open_model;
use crate::config::Config;
use crate::usage;

/// The memory that a process needs, and the memory that it may hold.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// The plan for samples of up to `max_sample_tokens`.
    #[serde(flatten)]
    pub plan: ProcessMemory,
    /// The longest sample that is trained on, in tokens; without training, the model's context.
    pub max_sample_tokens: usize,
    /// Bytes that the process may hold; `None` if the system does not report it.
    pub available: Option<usize>,
    /// The memory of the GPU that `model.device` selects; `None` if the processor computes all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceReport>,
    /// Why the start is refused; `None` if the plan fits.
    pub refused: Option<String>,
}

/// The memory of a GPU that a process needs, all of which it allocates at its start.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// The device, as `model.device` names it.
    pub device: String,
    /// What the memory is for, the model first.
    pub parts: Vec<DeviceMemoryPart>,
    /// Bytes that are free before the start.
    pub free: u64,
    /// Bytes of them that are left to the driver and to other processes.
    pub reserve: u64,
}

/// A part of a GPU's memory.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceMemoryPart {
    /// Its purpose.
    pub part: String,
    /// Its size.
    pub bytes: u64,
}

impl DeviceReport {
    /// The plan for samples of up to `longest` tokens, and why the start is refused if it does not fit. `None` if no
    /// pass runs on a GPU.
    fn of(
        config: &Config,
        model: &ModelDir,
        spec: &ModelSpec,
        is_f32: bool,
        has_clients: bool,
        longest: usize,
    ) -> anyhow::Result<Option<(Self, Option<String>)>> {
        let needed = EnginesNeeded::of(config, has_clients);
        let purpose = needed.native_purpose(has_clients).filter(|_| !needed.has_mistralrs());
        let Some(purpose) = purpose else { return Ok(None) };
        let Some(device) = device(config, model, &config.data.dir)? else { return Ok(None) };
        let (_, DeviceRoom { free, reserve, workspace }) = device.open().map_err(usage)?;
        let float = device_float(config.train.compute, is_f32);
        let shape = decoder_shape(spec, model.context());
        let mut plans = vec![DeviceModel::plan(&shape, float)?];
        let judge = config.uses_self_judge().then_some(NativePurpose::Judging);
        for purpose in [purpose].into_iter().chain(judge) {
            let (modules, limits) = purpose.on_device(config, model, spec, workspace)?;
            plans.extend(DeviceSampler::plan(&shape, &modules, float, &limits)?);
        }
        let mut advice = "rollout.max_batch_tokens or engine.slots";
        let fixed: u64 = plans.iter().map(ArenaPlan::total).sum();
        if config.train.enabled {
            let modules = Learner::adapter_modules(spec, &config.train)?;
            let room = [free.saturating_sub(reserve).saturating_sub(fixed), workspace];
            plans.extend(device_plan(spec, &shape, &modules, float, longest, room)?);
            advice = "train.max_tokens, rollout.max_batch_tokens or engine.slots";
        }
        let refused = ArenaPlan::check(&plans, free, reserve).err();
        let refused = refused.map(|error| format!("`model.device`: {error}: set {advice} to less"));
        let part = |plan: &ArenaPlan| DeviceMemoryPart {
            part: plan.purpose().to_owned(),
            bytes: plan.total(),
        };
        let device = format!("cuda:{}", device.ordinal);
        let parts = plans.iter().map(part).collect();
        Ok(Some((Self { device, parts, free, reserve }, refused)))
    }
}

impl MemoryReport {
    /// Plans a process that starts, logs the plan in MiB, refuses one that does not fit, and exports it. Returns
    /// the longest sample, in tokens. The memory of mistral.rs without training is not planned.
    pub(super) fn at_start(
        config: &Config,
        model: &ModelDir,
        has_clients: bool,
        metrics: &Metrics,
    ) -> anyhow::Result<usize> {
        if !config.train.enabled && EnginesNeeded::of(config, has_clients).has_mistralrs() {
            return Ok(model.context());
        }
        let report = Self::of(config, model, has_clients)?;
        let mib = |bytes: usize| bytes >> 20;
        let held = report.plan.parts.iter().filter(|part| mib(part.bytes) > 0);
        let parts: Vec<String> =
            held.map(|part| format!("{} {}", part.part, mib(part.bytes))).collect();
        let (peak, available) = (mib(report.plan.peak), report.available.map(mib));
        let parts = parts.join(", ");
        tracing::info!(peak, available, parts, "memory plan in MiB");
        let device = report.device.iter().flat_map(|device| &device.parts);
        let parts: Vec<_> =
            device.clone().map(|of| format!("{} {}", of.part, of.bytes >> 20)).collect();
        if let Some(DeviceReport { device, free, .. }) = &report.device {
            tracing::info!(%device, free = free >> 20, parts = parts.join(", "), "memory plan of the GPU in MiB");
        }
        let longest = report.checked()?;
        for DeviceMemoryPart { part, bytes } in device {
            let gauge = metrics.device_memory.with_label_values(&[part.as_str()]);
            gauge.add(i64::try_from(*bytes).unwrap_or(i64::MAX));
        }
        let bytes = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        for part in &report.plan.parts {
            metrics.memory_planned.with_label_values(&[part.part]).set(bytes(part.bytes));
        }
        metrics.memory_planned_peak.set(bytes(report.plan.peak));
        Ok(longest)
    }

    /// The plan of `hone serve`, or without clients of `hone train` and `hone eval`.
    pub(super) fn of(config: &Config, model: &ModelDir, has_clients: bool) -> anyhow::Result<Self> {
        let spec = ModelSpec::from_config(&model.config)?;
        let base = BaseMemory::read(&spec, &model.weights, config.load_options())?;
        let setup = setup(config, model, &spec, has_clients);
        let report = Self::with(config, model, &spec, base, setup);
        let longest = report.max_sample_tokens;
        let is_f32 = base.is_f32;
        Ok(match DeviceReport::of(config, model, &spec, is_f32, has_clients, longest)? {
            Some((device, refused)) => {
                Self { device: Some(device), refused: report.refused.or(refused), ..report }
            }
            None => report,
        })
    }

    fn with(
        config: &Config,
        model: &ModelDir,
        spec: &ModelSpec,
        base: BaseMemory,
        setup: ProcessSetup,
    ) -> Self {
        let train = &config.train;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let planner = MemoryPlanner {
            spec,
            base,
            config: train,
            threads: cores,
            context: model.context(),
            setup,
        };
        // What is resident now is part of the plan.
        let resident = usize::try_from(memory::resident()).unwrap_or(usize::MAX);
        let available = available_memory().map(|bytes| bytes.saturating_add(resident));
        let (max_sample_tokens, refused) = if setup.trains {
            match planner.longest_sample(available) {
                Ok(tokens) => (tokens, None),
                Err(error) => (train.max_tokens, Some(error.to_string())),
            }
        } else {
            let tokens = model.context();
            (tokens, refusal(planner.plan(tokens).peak, available))
        };
        let plan = planner.plan(max_sample_tokens);
        Self { plan, max_sample_tokens, available, device: None, refused }
    }

    /// The longest sample.
    ///
    /// # Errors
    /// If the process does not fit into the memory.
    fn checked(&self) -> anyhow::Result<usize> {
        match &self.refused {
            Some(reason) => Err(anyhow::Error::msg(reason.clone())),
            None => Ok(self.max_sample_tokens),
        }
    }
}

impl fmt::Display for MemoryReport {
    /// The table of the parts, then the available memory, the same of a GPU and, if either does not suffice, the reason.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.plan)?;
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        if let Some(bytes) = self.available {
            write!(f, "\n{:<34} {:>9.1} MiB", "available", mib(bytes as f64))?;
        }
        if let Some(DeviceReport { device, parts, free, reserve }) = &self.device {
            let held = parts.iter().map(|DeviceMemoryPart { part, bytes }| (part.as_str(), *bytes));
            for (part, bytes) in held.chain([("left to the driver", *reserve), ("free", *free)]) {
                let part = format!("{device}: {part}");
                write!(f, "\n{part:<34} {:>9.1} MiB", mib(bytes as f64))?;
            }
        }
        if let Some(reason) = &self.refused {
            write!(f, "\nrefused: {reason}")?;
        }
        Ok(())
    }
}

/// Why a process that does not train cannot start with this plan.
fn refusal(peak: usize, available: Option<usize>) -> Option<String> {
    let available = available.filter(|available| peak > *available)?;
    Some(format!(
        "the process needs about {} MiB, but {} MiB are available: set rollout.max_batch_tokens or \
         engine.slots to less",
        peak.div_ceil(1 << 20),
        available >> 20
    ))
}

/// The parts of the process beside the trainer.
fn setup(config: &Config, model: &ModelDir, spec: &ModelSpec, has_clients: bool) -> ProcessSetup {
    let needed = EnginesNeeded::of(config, has_clients);
    let judging = config.uses_self_judge().then_some(config.engine.backend);
    let judge = (judging == Some(EngineBackend::Native)).then_some(NativePurpose::Judging);
    let purpose = needed.native_purpose(has_clients);
    let native = || purpose.into_iter().chain(judge);
    let size = |path: &PathBuf| {
        let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
        usize::try_from(bytes).unwrap_or(usize::MAX)
    };
    ProcessSetup {
        trains: config.train.enabled,
        replicas: if needed.has_mistralrs() { config.engine.replicas.max(1) } else { 0 },
        judge_replicas: usize::from(judging == Some(EngineBackend::Mistralrs)),
        sequences: native().map(|purpose| purpose.slots(config)).sum(),
        sampler_buffers: native().map(|p| p.settings(config, model).buffer_bytes(spec)).sum(),
        cache_positions: native().map(|purpose| purpose.cache_positions(config)).sum(),
        versions: purpose.map_or(0, NativePurpose::versions),
        kept_versions: purpose.map_or(0, |purpose| purpose.kept_versions(config)),
        weight_files: model.weights.iter().map(size).sum(),
        tokenizer_file: model.tokenizer_json().map_or(0, |text| text.len()),
        ledger_cache: hone_store::CACHE_BYTES,
    }
}

/// The longest sample, in tokens, for which a run that neither serves nor samples has memory.
pub fn longest_recorded_sample(config: &Config, model: &ModelDir) -> anyhow::Result<usize> {
    let ledger_cache = hone_store::CACHE_BYTES;
    let setup = ProcessSetup { trains: true, ledger_cache, ..ProcessSetup::default() };
    let spec = ModelSpec::from_config(&model.config)?;
    let base = BaseMemory::read(&spec, &model.weights, config.load_options())?;
    MemoryReport::with(config, model, &spec, base, setup).checked()
}

/// The memory plan of `hone serve`, or without clients of `hone train`. Loads no weights.
pub async fn explain_memory(config: &Config, has_clients: bool) -> anyhow::Result<MemoryReport> {
    let dir = open_model(config, &config.data.dir).await?;
    Learner::check(&dir, &config.train)?;
    EnginesNeeded::of(config, has_clients).check(config, &dir).map_err(usage)?;
    MemoryReport::of(config, &dir, has_clients)
}
