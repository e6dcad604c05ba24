//! Loads pipelines of one model.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use candle_core::Device;
use mistralrs::core::{
    AdapterPaths, DefaultSchedulerMethod, DeviceMapSetting, LocalModelPaths, MistralRsBuilder,
    ModelDType, ModelPaths, NormalLoaderBuilder, NormalSpecificConfig, SchedulerConfig,
};
use parking_lot::Mutex;

use hone_engine::{EngineError, ModelDir};

use super::SharedPipeline;
use super::adapter::Adapter;

/// Bytes of weights that are small enough to hold several more copies in memory, and to trim later.
const SMALL: u64 = 64 << 20;

/// The minimum time between two trims for a small model. A trim stops every thread, and the next copy
/// needs the pages again.
const TRIM_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct PipelineLoader {
    id: String,
    dir: PathBuf,
    weights: Vec<PathBuf>,
    /// Whether the weights are at most [`SMALL`].
    small: bool,
    trimmed: Mutex<Option<Instant>>,
}

impl PipelineLoader {
    /// Creates a loader of the directory that was written for `model`.
    pub fn new(model: &ModelDir, dir: PathBuf) -> Self {
        let names = model.weights.iter().filter_map(|path| path.file_name());
        let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(u64::MAX, |file| file.len());
        let bytes = model.weights.iter().map(bytes).fold(0, u64::saturating_add);
        Self {
            id: model.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            weights: names.map(|name| dir.join(name)).collect(),
            dir,
            small: bytes <= SMALL,
            trimmed: Mutex::default(),
        }
    }

    /// Returns freed pages to the operating system. glibc keeps them, and a replaced copy of the
    /// weights is a large part of the process. Does nothing within [`TRIM_INTERVAL`] of the last trim
    /// if the model is small.
    pub fn trim_memory(&self) {
        let mut trimmed = self.trimmed.lock();
        if self.small && trimmed.is_some_and(|at| at.elapsed() < TRIM_INTERVAL) {
            return;
        }
        *trimmed = Some(Instant::now());
        hone_core::memory::trim();
    }

    /// How many of `copies` to load at the same time: all of a small model, otherwise one, so that at
    /// most one additional copy is in memory.
    pub fn copies_at_once(&self, copies: usize) -> usize {
        if self.small { copies.max(1) } else { 1 }
    }

    /// Loads the model in f32 on the CPU, with `adapter` merged into its weights: a pipeline for hot swaps, and what
    /// builds an engine around it at start. Blocks.
    pub fn load(
        &self,
        adapter: Option<&Adapter>,
    ) -> Result<(SharedPipeline, MistralRsBuilder), EngineError> {
        let fail = |e: anyhow::Error| EngineError::Model(format!("{}: {e:#}", self.dir.display()));
        let paths: Box<dyn ModelPaths> = Box::new(LocalModelPaths {
            tokenizer_filename: self.dir.join("tokenizer.json"),
            config_filename: self.dir.join("config.json"),
            template_filename: Some(self.dir.join("tokenizer_config.json")),
            filenames: self.weights.clone(),
            adapter_paths: AdapterPaths::None,
            gen_conf: Some(self.dir.join("generation_config.json")),
            preprocessor_config: None,
            processor_config: None,
            chat_template_json_filename: None,
        });
        let config = NormalSpecificConfig::default();
        let loader =
            NormalLoaderBuilder::new(config, None, None, Some(self.id.clone()), false, None)
                .build(None)
                .map_err(fail)?;
        if adapter.is_some() && !self.small {
            // The optimizer step before has freed about as much memory as this copy takes.
            self.trim_memory();
        }
        let load = || {
            let (dtype, device) = (ModelDType::F32, Device::Cpu);
            let map = DeviceMapSetting::dummy();
            loader
                .load_model_from_path(&paths, &dtype, &device, true, map, None, None)
                .map_err(fail)
        };
        let pipeline = match adapter {
            Some(adapter) => adapter.merged(load)?,
            None => load()?,
        };
        // The leases limit the engine to one sequence. The scheduler's own limit is not reliable.
        let scheduler = SchedulerConfig::DefaultScheduler {
            method: DefaultSchedulerMethod::Fixed(std::num::NonZeroUsize::MIN),
        };
        // Without the prefix cache, which is never evicted on the CPU and does not know about versions.
        let engine = MistralRsBuilder::new(pipeline.clone(), scheduler, false, None)
            .with_no_kv_cache(false)
            .with_no_prefix_cache(true)
            .with_prefix_cache_n(0);
        // SAFETY: every `SharedPipeline` of a `dyn Pipeline` is created here, and `NormalLoaderBuilder` loads
        // every pipeline as mistral.rs's `NormalPipeline`.
        let pipeline = unsafe { SharedPipeline::new(pipeline) };
        Ok((pipeline, engine))
    }
}
