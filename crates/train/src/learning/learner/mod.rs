//! The adapter under training with its optimizer state.
//!
//! [`Learner::step`] is one optimizer step on samples. It runs on the caller's rayon pool, in shards
//! of fixed size whose gradients are added in a fixed order, so the result does not depend on the
//! number of threads. `checkpointing` saves, restores and rolls back a learner.

mod checkpointing;
mod step;

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use parking_lot::Mutex;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use hone_cuda::AdapterModule;
use hone_engine::ModelDir;
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{LoraConfig, peft, weights};
use hone_model::device::{DeviceBase, adapter_modules, planned_modules};
use hone_model::kernels::compute::Compute;
use hone_model::weights::LoadOptions;
use hone_model::{Model, ModelError, ModelSpec};

use super::Average;
use super::Snapshot;
use super::StepTiming;
use super::device::{DevicePasses, SharedPasses};
use super::objective::AdaptiveCoefficients;
use super::optimizer::AdamW;
use crate::config::{KlConfig, PeakRate, TrainConfig};
use crate::error::Result;

pub use step::StepStats;
pub(crate) use step::completion_metrics;

/// [`StepStats::skipped`] of a step whose samples were all masked or refused.
pub(crate) const NO_SAMPLE: &str = "no sample is left to train on";

/// An adapter with its optimizer state, over a frozen base model.
pub struct Learner {
    model: Model,
    /// Computes the passes of steps and the scores of snapshots, if `model.device` is a GPU.
    device: Option<SharedPasses>,
    lora: LoraWeights,
    optimizer: AdamW,
    average: Option<Average>,
    reference: Reference,
    config: TrainConfig,
    /// Seeds the dropout of every pass.
    rng: ChaCha8Rng,
    /// Steps taken; skipped steps do not count.
    steps: u64,
    /// Steps to go of the warm-up that follows a reset of the moments.
    restart: u64,
    adaptive: AdaptiveCoefficients,
    /// Prompt and completion tokens of all steps.
    tokens: u64,
    /// Durations of the last step's parts.
    timing: StepTiming,
    /// Tokens of the longest shard that the memory permits; at least the target is used.
    longest_shard: usize,
}

impl Learner {
    /// Loads the base model on the CPU and starts with a fresh adapter.
    ///
    /// # Errors
    /// If the model is not supported or cannot be read, or the adapter does not fit it.
    pub fn new(
        model: &ModelDir,
        options: impl Into<LoadOptions>,
        config: &TrainConfig,
    ) -> Result<Self> {
        let spec = ModelSpec::from_config(&model.config)?;
        let base = Model::load(spec, &model.weights, options, &Device::Cpu)?;
        Self::with_model(base, config)
    }

    /// Checks that a learner can start on a model, without reading the model's weights.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn check(model: &ModelDir, config: &TrainConfig) -> Result<()> {
        Self::adapter_modules(&ModelSpec::from_config(&model.config)?, config).map(drop)
    }

    /// The linear layers that the adapter of a learner is on.
    ///
    /// # Errors
    /// If the adapter to start from cannot be read, or no adapter of these settings fits the model.
    pub fn adapter_modules(spec: &ModelSpec, config: &TrainConfig) -> Result<Vec<AdapterModule>> {
        let path = &config.lora.init_adapter;
        if path.as_os_str().is_empty() {
            return Ok(planned_modules(spec, &config.lora)?);
        }
        let (found, lora) = peft::read(path, spec, DType::F32, &Device::Cpu)?;
        adopt(&weights::with_fused_modules(spec, &config.lora), found, path)?;
        Ok(adapter_modules(&lora))
    }

    /// Starts with a fresh adapter, or with `train.lora.init_adapter`, over a loaded model.
    ///
    /// # Errors
    /// If the adapter to start from cannot be read, or no adapter of these settings fits the model.
    pub fn with_model(model: Model, config: &TrainConfig) -> Result<Self> {
        let model = model.with_compute(config.compute);
        match (config.compute, model.compute()) {
            (Compute::F32, _) => {}
            (_, Compute::Bf16) => {
                tracing::info!("the trainer's products with the base are in bf16");
            }
            (_, Compute::F32) => tracing::warn!(
                "train.compute = \"bf16\" has no effect: it needs Linux and a processor with AMX, or \
                 AMD's from Zen 4 on; products are in f32"
            ),
        }
        let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
        let (spec, dtype, device) = (model.spec(), model.dtype(), model.device());
        let mut config = config.clone();
        config.lora = weights::with_fused_modules(spec, &config.lora);
        config.learning_rate = PeakRate::Fixed(config.learning_rate.of(spec.parameters()));
        let (lora, reference) = if config.lora.init_adapter.as_os_str().is_empty() {
            (LoraWeights::fresh(spec, &config.lora, &mut rng, dtype, device)?, None)
        } else {
            let path = config.lora.init_adapter.clone();
            let (found, lora) = peft::read(&path, spec, dtype, device)?;
            config.lora = adopt(&config.lora, found, &path)?;
            // Without a KL there is no reference.
            let reference = (config.beta != 0.0).then(|| lora.copy()).transpose()?;
            (lora, reference)
        };
        Ok(Self {
            model,
            device: None,
            lora,
            optimizer: AdamW::default(),
            average: Average::new(&config),
            reference: Reference { initial: reference, synced: None },
            adaptive: AdaptiveCoefficients::new(&config),
            config,
            rng,
            steps: 0,
            restart: 0,
            tokens: 0,
            timing: StepTiming::default(),
            longest_shard: 0,
        })
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    /// The frozen base. Clones share its weights.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Number of steps taken; skipped steps do not count.
    pub fn step_count(&self) -> u64 {
        self.steps
    }

    /// Sets the peak of the learning-rate schedule, for a stage of a curriculum.
    pub fn set_peak_rate(&mut self, rate: f64) {
        self.config.learning_rate = PeakRate::Fixed(rate);
    }

    /// Sets the tokens of the longest shard that the memory permits, which samples of a long prefix share.
    pub fn set_longest_shard(&mut self, tokens: usize) {
        self.longest_shard = tokens;
    }

    /// Has steps and scores compute on a GPU that has the base, with samples of up to `longest` tokens if its memory permits them;
    /// [`Self::longest_shard`] is what it permits.
    ///
    /// # Errors
    /// If the memory does not suffice, or the device refuses.
    pub fn use_device(&mut self, base: &DeviceBase, longest: usize) -> Result<()> {
        let passes = DevicePasses::open(base, &self.lora, self.model.spec(), longest)?;
        self.longest_shard = longest.min(passes.longest_shard());
        self.device = Some(Arc::new(Mutex::new(passes)));
        Ok(())
    }

    /// Tokens of the longest shard, and so of the longest sample.
    pub fn longest_shard(&self) -> usize {
        self.longest_shard
    }

    /// The adapter to serve: the average if one is configured and has values, else the trained adapter.
    pub fn served(&self) -> &LoraWeights {
        self.average.as_ref().and_then(|average| average.lora.as_ref()).unwrap_or(&self.lora)
    }

    /// Durations of the last step's parts.
    pub fn timing(&self) -> StepTiming {
        self.timing
    }

    /// A copy of the [served](Self::served) policy, to score and publish.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let (model, lora) = (self.model.clone(), Arc::new(self.served().copy()?));
        let (config, device) = (self.config.lora.clone(), self.device.clone());
        Ok(Snapshot { model, lora, config, device })
    }
}

/// Merges the settings of the adapter to start from into the configured ones.
fn adopt(own: &LoraConfig, found: LoraConfig, path: &Path) -> Result<LoraConfig> {
    own.adopt(found).map_err(|(key, own, found)| {
        let reason = format!(
            "its {key} is {found}, but `train.lora.{key}` is {own}; remove the key to use the \
             adapter's value"
        );
        ModelError::adapter(path, reason).into()
    })
}

// The reference policy: the base model or `train.lora.init_adapter`, so the KL is 0 at the start, and a penalty
// does not undo what the adapter has learned. Every `train.kl.sync_steps` steps
// `reference <- alpha policy + (1 - alpha) reference` (Gorbatovski et al. 2024, TR-DPO; TRL's `sync_ref_model`)
// on the adapter's factors. Of the base these are the policy's A with a zero B, so its delta becomes alpha
// times the policy's.

#[derive(Clone, Debug)]
pub(crate) struct Reference {
    /// The adapter that the run starts from; `None` is the base.
    initial: Option<LoraWeights>,
    /// `None` before the first synchronization.
    synced: Option<LoraWeights>,
}

impl Reference {
    /// Synchronizes with the policy if that is due after step number `steps` (from 1).
    pub(crate) fn observe(
        &mut self,
        policy: &LoraWeights,
        steps: u64,
        config: &KlConfig,
    ) -> Result<()> {
        if config.sync_steps == 0 || !steps.is_multiple_of(config.sync_steps) {
            return Ok(());
        }
        let reference = match (self.synced.take(), &self.initial) {
            (Some(reference), _) => reference,
            (None, Some(initial)) => initial.copy()?,
            (None, None) => policy.zeroed_copy()?,
        };
        reference.lerp(policy, config.sync_mixup)?;
        self.synced = Some(reference);
        Ok(())
    }

    pub(crate) fn lora(&self) -> Option<&LoraWeights> {
        self.synced.as_ref().or(self.initial.as_ref())
    }
}

#[cfg(test)]
mod tests;
