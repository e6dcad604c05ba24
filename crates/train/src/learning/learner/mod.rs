//! The pure part of training: samples in, better adapter out. No I/O but its own files; a clock only
//! tells where a step's time went.
//!
//! One [`Learner::step`] computes the clipped GRPO loss of [`super::loss`] over a batch of samples,
//! backpropagates it to the adapter and updates it with AdamW. Work is spread over the rayon pool
//! that the caller runs it in, in shards of fixed size whose gradients are added in a fixed order:
//! the result does not depend on the number of threads.

mod checkpointing;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_engine::ModelDir;
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{LoraConfig, peft, weights};
use hone_model::{Model, ModelError, ModelSpec};

use super::average::Average;
use super::forward_backward::ForwardBackward;
use super::objective::{AdaptiveCoefficients, Objective, Totals};
use super::optimizer::{AdamW, AdamWConfig, clip_global_norm};
use super::reference::Reference;
use super::snapshot::Snapshot;
use super::step_timing::{StepTiming, timed};
use super::{objective, schedule};
use crate::config::{OptimizerKind, TrainConfig};
use crate::data::packing::TrainSample;
use crate::error::{LearnError, Result};

pub use super::step_stats::StepStats;

/// Why a step is skipped whose samples were all refused, masked or without an advantage.
pub(crate) const NO_SAMPLE: &str = "no sample is left to train on";

/// The adapter, its optimiser and its random stream over a frozen base model.
pub struct Learner {
    model: Model,
    lora: LoraWeights,
    optimizer: AdamW,
    average: Option<Average>,
    reference: Reference,
    config: TrainConfig,
    rng: ChaCha8Rng,
    steps: u64,
    adaptive: AdaptiveCoefficients,
    /// Prompt and completion tokens of all steps.
    tokens: u64,
    /// Where the last step's time went.
    split: StepTiming,
}

impl Learner {
    /// Loads the base model on the CPU and starts with a fresh adapter.
    ///
    /// # Errors
    /// If the model is not supported or cannot be read, or the configuration is out of range.
    pub fn new(model: &ModelDir, config: &TrainConfig) -> Result<Self> {
        let spec = ModelSpec::from_config(&model.config)?;
        let base = Model::load(spec, &model.weights, config.base_dtype, &Device::Cpu)?;
        Self::with_model(base, config)
    }

    /// Whether a learner could start on a model, told without reading its weights.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn check(model: &ModelDir, config: &TrainConfig) -> Result<()> {
        validate(config)?;
        let spec = ModelSpec::from_config(&model.config)?;
        let path = &config.lora.init_adapter;
        if path.as_os_str().is_empty() {
            weights::named_plan(&spec, &config.lora)?;
            return Ok(());
        }
        let (found, _) = peft::read(path, &spec, DType::F32, &Device::Cpu)?;
        adopt(&weights::with_fused_modules(&spec, &config.lora), found, path).map(drop)
    }

    /// Starts with a fresh adapter, or with `train.lora.init_adapter`, over a model that is loaded
    /// already.
    ///
    /// # Errors
    /// If the configuration is out of range, or the adapter to start from cannot be read, does not
    /// fit the model or is of another shape than `train.lora` asks for.
    pub fn with_model(model: Model, config: &TrainConfig) -> Result<Self> {
        validate(config)?;
        let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
        let (spec, dtype, device) = (model.spec(), model.dtype(), model.device());
        let mut config = config.clone();
        config.lora = weights::with_fused_modules(spec, &config.lora);
        let lora = if config.lora.init_adapter.as_os_str().is_empty() {
            LoraWeights::fresh(spec, &config.lora, &mut rng, dtype, device)?
        } else {
            let path = config.lora.init_adapter.clone();
            let (found, lora) = peft::read(&path, spec, dtype, device)?;
            config.lora = adopt(&config.lora, found, &path)?;
            lora
        };
        let optimizer = AdamW::new(AdamWConfig {
            beta1: config.adam_beta1,
            beta2: config.adam_beta2,
            eps: config.adam_eps,
            weight_decay: config.weight_decay,
            eight_bit: config.optimizer == OptimizerKind::AdamW8bit,
        });
        let average = Average::new(&config);
        let (adaptive, reference) =
            (AdaptiveCoefficients::new(&config), Reference::new(&config.kl));
        Ok(Self {
            model,
            lora,
            optimizer,
            average,
            reference,
            config,
            rng,
            steps: 0,
            adaptive,
            tokens: 0,
            split: StepTiming::default(),
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

    /// The settings it trains with; those of an adapter it started from are in `lora`.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Steps taken since the first one; a skipped step does not count.
    pub fn step_count(&self) -> u64 {
        self.steps
    }

    /// Sets what the schedule rises to and falls from: a curriculum's stages differ in it.
    pub fn set_peak_rate(&mut self, rate: f64) {
        self.config.learning_rate = rate;
    }

    /// One optimiser step (`train.num_iterations` updates) on `samples`. `current_version` is the
    /// version whose weights are the learner's own now; give a version that no sample has where the
    /// learner has moved on since the last published one. `max_completion_tokens` is the divisor of
    /// the `dr_grpo` loss.
    ///
    /// A loss, gradient or update that is not finite changes nothing, in whichever iteration it
    /// comes: parameters, moments, average, schedule and random stream stay as they were before the
    /// step. [`StepStats::skipped`] says so.
    ///
    /// # Errors
    /// If a sample is malformed or a tensor operation fails; nothing is changed then either.
    pub fn step(
        &mut self,
        samples: &[TrainSample],
        current_version: u64,
        max_completion_tokens: usize,
    ) -> Result<StepStats> {
        let (rng, adaptive, tokens) = (self.rng.clone(), self.adaptive, self.tokens);
        // One iteration changes parameters last of all, if at all.
        let before = match self.config.num_iterations {
            1 => None,
            _ => Some((self.lora.tensors()?, self.optimizer.clone())),
        };
        let outcome = self.try_step(samples, current_version, max_completion_tokens);
        if outcome.as_ref().map_or(true, |stats| stats.skipped.is_some()) {
            (self.rng, self.adaptive, self.tokens) = (rng, adaptive, tokens);
            if let Some((tensors, optimizer)) = before {
                self.lora.assign(&tensors)?;
                self.optimizer = optimizer;
            }
        }
        outcome
    }

    fn try_step(
        &mut self,
        samples: &[TrainSample],
        current_version: u64,
        max_completion_tokens: usize,
    ) -> Result<StepStats> {
        for (index, sample) in samples.iter().enumerate() {
            sample.validate(index, self.spec().vocab_size)?;
        }
        self.split = StepTiming::default();
        let mut stats = StepStats::default();
        let masks = self.config.mask_truncated_completions;
        let mut active: Vec<usize> =
            (0..samples.len()).filter(|index| !(masks && samples[*index].truncated)).collect();
        let mut totals = Totals::default();
        let mut references = vec![None; samples.len()];
        let mut old = vec![None; samples.len()];
        let learning_rate = schedule::learning_rate(&self.config, self.steps);
        // What is served is the average, once it is one of several steps.
        let own_served = self.average.as_ref().is_none_or(|average| average.count() < 2);
        let mut norms = Vec::new();
        for iteration in 0..self.config.num_iterations {
            let dropout_seed = self.rng.random();
            let outcome = loop {
                if active.is_empty() {
                    break None;
                }
                let mut pass = ForwardBackward {
                    model: &self.model,
                    lora: &self.lora,
                    reference: self.reference.lora(),
                    config: &self.config,
                    samples,
                    active: &active,
                    objective: Objective::new(&self.config, &self.adaptive),
                    lengths: lengths(samples, &active),
                    max_completion_tokens,
                    current_version: (iteration == 0 && own_served).then_some(current_version),
                    dropout_seed,
                    references: &mut references,
                    old: &mut old,
                };
                let outcome = pass.run()?;
                self.split.add(&outcome.split);
                let refused = outcome.refused(self.config.max_sampler_difference);
                if refused.is_empty() {
                    break Some(outcome);
                }
                // The normaliser counts who is trained on, so the pass is repeated without them.
                active.retain(|index| !refused.contains(index));
                stats.refused.extend(refused);
            };
            let Some(mut outcome) = outcome else {
                stats.skipped = Some(NO_SAMPLE.to_owned());
                break;
            };
            totals.add(&outcome.totals);
            let limit = self.config.max_grad_norm;
            let clip = || clip_global_norm(&mut outcome.gradients, limit);
            let norm = timed(&mut self.split.optimizer, clip)?;
            if !(outcome.totals.loss.is_finite() && norm.is_finite()) {
                stats.skipped = Some(format!("loss {}, gradient norm {norm}", outcome.totals.loss));
                break;
            }
            norms.push(norm);
            let parameters = self.lora.parameters();
            let update = || self.optimizer.update(&parameters, &outcome.gradients, learning_rate);
            if !timed(&mut self.split.optimizer, update)? {
                stats.skipped = Some("an updated value is not finite".to_owned());
                break;
            }
            self.adaptive.update(&outcome.totals, &self.config);
        }
        totals.describe(&self.config, &mut stats.metrics);
        self.describe(samples, &mut stats);
        stats.metrics.insert("learning_rate".to_owned(), learning_rate);
        if !norms.is_empty() {
            let mean = norms.iter().sum::<f64>() / norms.len() as f64;
            stats.metrics.insert("grad_norm".to_owned(), mean);
        }
        if stats.skipped.is_none() {
            if let Some(average) = &mut self.average {
                average.observe(&self.lora, self.steps + 1)?;
            }
            self.reference.observe(&self.lora, self.steps + 1)?;
            self.steps += 1;
        }
        Ok(stats)
    }

    /// What is known without the network.
    fn describe(&mut self, samples: &[TrainSample], stats: &mut StepStats) {
        let tokens: usize = samples.iter().map(|s| s.prompt_ids.len() + s.ids.len()).sum();
        self.tokens += tokens as u64;
        let lengths = samples.iter().map(|s| (s.ids.len(), s.truncated));
        stats.metrics.extend(objective::completions(lengths));
        let mut put = |name: &str, value| stats.metrics.insert(name.to_owned(), value);
        put("num_tokens", self.tokens as f64);
        if self.config.kl.target > 0.0 {
            put("beta", self.adaptive.beta);
        }
        if self.config.entropy.coef > 0.0 || self.config.entropy.adaptive {
            put("entropy_coef", self.adaptive.entropy_coef);
        }
    }

    /// What is served and saved: the average where `train.ema_decay` or `train.swa_start` asks for
    /// one and there is one, else the adapter itself.
    pub fn served(&self) -> &LoraWeights {
        self.average.as_ref().and_then(Average::lora).unwrap_or(&self.lora)
    }

    /// Where the last step's time went.
    pub fn split(&self) -> StepTiming {
        self.split
    }

    /// Bytes that the optimiser's moments take.
    pub fn optimizer_bytes(&self) -> usize {
        self.optimizer.bytes()
    }

    /// Copies of the tensors being trained under their PEFT names.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn adapter(&self) -> Result<BTreeMap<String, Tensor>> {
        Ok(self.lora.tensors()?)
    }

    /// The policy as it is [served](Self::served): what is scored and written.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let (model, lora) = (self.model.clone(), self.served().copy()?);
        Ok(Snapshot { model, lora, config: self.config.lora.clone() })
    }
}

/// Takes the settings of an adapter to start from; those of the configuration must not differ.
fn adopt(own: &LoraConfig, found: LoraConfig, path: &Path) -> Result<LoraConfig> {
    own.adopt(found).map_err(|(key, own, found)| {
        let reason = format!(
            "its {key} is {found}, but `train.lora.{key}` is {own}; leave the key out to take the \
             adapter's"
        );
        ModelError::adapter(path, reason).into()
    })
}

/// The length of every completion; 0 for those that are not trained on.
fn lengths(samples: &[TrainSample], active: &[usize]) -> Vec<usize> {
    let mut lengths = vec![0; samples.len()];
    for index in active {
        lengths[*index] = samples[*index].ids.len();
    }
    lengths
}

/// Settings without which a step makes no sense.
fn validate(config: &TrainConfig) -> Result<()> {
    let wrong = |key, value: String, expected| Err(LearnError::Setting { key, value, expected });
    if config.micro_batch == 0 {
        return wrong("train.micro_batch", "0".to_owned(), "at least 1");
    }
    if config.num_iterations == 0 {
        return wrong("train.num_iterations", "0".to_owned(), "at least 1");
    }
    if !(0.0..1.0).contains(&config.lora.dropout) {
        return wrong("train.lora.dropout", config.lora.dropout.to_string(), "from 0 to below 1");
    }
    Ok(())
}

#[cfg(test)]
mod resume_tests;

#[cfg(test)]
mod tests;

#[cfg(test)]
mod init_adapter_tests;
