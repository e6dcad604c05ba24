//! Training of an adapter on samples. No I/O except checkpoint and adapter files.
//!
//! `learner` holds the adapter with its optimizer state. Its `step` passes through the files in
//! this order, where each of `train.num_iterations` updates repeats 2 to 4:
//!
//! 1. `learner::step` selects the samples. `learning_rate` is the step's.
//! 2. `forward_backward` splits the samples into shards (`data::packing`), runs the model forward, has
//!    `objective` turn log-probabilities and entropies into the gradient of `loss`, and backpropagates. With
//!    `model.device`, `device` computes both passes, and the scores of a [`Snapshot`].
//! 3. `learner::step` repeats the pass without samples that the sampler cannot have drawn, and skips
//!    the step if the loss or a gradient is not finite.
//! 4. `optimizer` clips the gradients and updates the adapter.
//! 5. `Average` and `Reference` follow the updated adapter.
//!
//! `checkpoint` defines the files that `learner::checkpointing` saves and restores.

pub(crate) mod checkpoint;
mod device;
pub(crate) mod features;
mod forward_backward;
pub(crate) mod learner;
mod loss;
mod objective;
mod optimizer;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;
use rayon::prelude::*;
use serde::Serialize;

use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{LoraConfig, peft};
use hone_model::kernels::parallel::with_threads;
use hone_model::{Model, ModelSpec};

use crate::config::{AverageKind, ScheduleKind, TrainConfig};
use crate::data::packing::{PackedBatch, TrainSample};
use crate::error::Result;
use crate::memory;

use device::SharedPasses;

pub use device::device_plan;

/// Floats stored as their bits, for `#[serde(with = "float_bits")]`. `serde_json` may parse a decimal
/// that it wrote to a neighboring float, but a resumed run must continue with the same numbers.
pub(crate) mod float_bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(x: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(x.to_bits())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        u64::deserialize(d).map(f64::from_bits)
    }
}

/// The same for lists of floats.
pub(crate) mod float_list_bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(list: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(list.iter().map(|x| x.to_bits()))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<f64>, D::Error> {
        let bits = Vec::<u64>::deserialize(d)?;
        Ok(bits.into_iter().map(f64::from_bits).collect())
    }
}

// Durations of a step's parts.

/// Wall time of one step's parts, in seconds; that of parallel shards in proportion to their sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTiming {
    /// Forward passes with the adapter, and the loss.
    pub forward: f64,
    /// Forward passes of the reference policy.
    pub reference: f64,
    /// Backward passes, with the layers that they recompute.
    pub backward: f64,
    /// Gradient clipping and AdamW.
    pub optimizer: f64,
}

impl StepTiming {
    /// Sum of all parts, in seconds.
    pub fn total(&self) -> f64 {
        self.forward + self.reference + self.backward + self.optimizer
    }

    /// Adds the parts of `other`.
    pub fn add(&mut self, other: &Self) {
        self.add_scaled(other, 1.0);
    }

    fn add_scaled(&mut self, other: &Self, factor: f64) {
        self.forward += factor * other.forward;
        self.reference += factor * other.reference;
        self.backward += factor * other.backward;
        self.optimizer += factor * other.optimizer;
    }

    /// Scales all parts so that they sum to `total` seconds.
    pub(crate) fn scaled(self, total: f64) -> Self {
        let mut scaled = Self::default();
        if self.total() > 0.0 {
            scaled.add_scaled(&self, total / self.total());
        }
        scaled
    }
}

/// Runs `f` and adds its duration to `seconds`.
pub(crate) fn timed<R>(seconds: &mut f64, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    *seconds += start.elapsed().as_secs_f64();
    result
}

/// Maps shards in parallel with one thread each, or, for a wide model, in turn on all threads of the pool.
pub(crate) fn map_shards<S: Sync, T: Send>(
    spec: &ModelSpec,
    shards: &[S],
    f: impl Fn(&S) -> T + Sync,
) -> Vec<T> {
    if memory::shards_in_parallel(spec) {
        return shards.par_iter().map(&f).collect();
    }
    with_threads(rayon::current_num_threads(), || shards.iter().map(f).collect())
}

// The learning-rate schedule.

/// The learning rate of the optimizer step that follows `done` steps.
///
/// Warm-up is linear, `peak * (done + 1) / warmup`, and reaches the peak with its last step
/// (transformers starts with a step of rate 0, which learns nothing). The schedules after it equal
/// those of transformers. With `x = (done - warmup) / (total - warmup)`, clamped to 0 to 1, and `low`
/// the schedule's `min_learning_rate`:
///
/// - constant: `peak`
/// - linear: `peak (1 - x)`
/// - cosine: `low + (peak - low) (1 + cos(pi x)) / 2`
/// - polynomial: `low + (peak - low) (1 - x)^power`
/// - inverse_sqrt: `peak / sqrt((done + t - warmup) / t)`, with `t` the configured warm-up steps, or
///   10 000 without any
pub(crate) fn learning_rate(config: &TrainConfig, done: u64) -> f64 {
    // The learner has resolved an automatic rate.
    let peak = config.learning_rate.fixed().unwrap_or_default();
    // The peak of a curriculum stage may be below the configured minimum.
    let low = config.schedule.min_learning_rate.min(peak);
    let warmup = config.warmup();
    if done < warmup {
        return peak * (done + 1) as f64 / warmup as f64;
    }
    let past = (done - warmup) as f64;
    let span = config.schedule_steps().saturating_sub(warmup).max(1) as f64;
    let x = (past / span).min(1.0);
    match config.schedule.kind {
        ScheduleKind::Constant => peak,
        ScheduleKind::Linear => peak * (1.0 - x),
        ScheduleKind::Cosine => low + (peak - low) * 0.5 * (1.0 + (std::f64::consts::PI * x).cos()),
        ScheduleKind::Polynomial => low + (peak - low) * (1.0 - x).powf(config.schedule.power),
        ScheduleKind::InverseSqrt => {
            let configured = config.configured_warmup().filter(|steps| *steps > 0);
            let t = configured.map_or(10_000.0, |steps| steps as f64);
            peak / ((past + t) / t).sqrt()
        }
    }
}

/// Steps of the warm-up that follows a reset of the moments: the schedule's, or 10. Adam's first updates have
/// the size of the learning rate whatever the gradient's noise, so they must be small at any time.
pub(crate) fn restart_steps(config: &TrainConfig) -> u64 {
    match config.warmup() {
        0 => 10,
        steps => steps,
    }
}

/// The factor of the scheduled rate with `remaining` steps of that warm-up to go, linear up to 1.
pub(crate) fn restart_factor(config: &TrainConfig, remaining: u64) -> f64 {
    let steps = restart_steps(config);
    (steps + 1 - remaining.clamp(1, steps)) as f64 / steps as f64
}

// The average of the adapter's factors over steps, which is served in place of the current values: exponential
// (Polyak & Juditsky 1992, as `torch.optim.swa_utils.get_ema_multi_avg_fn`) or uniform from some step on
// (Izmailov et al. 2018). It starts as a copy of the first values, without the untrained initial ones.

/// A configured average.
#[derive(Clone, Debug, Default)]
pub(crate) struct Average {
    /// `None` before the first values.
    pub(crate) lora: Option<LoraWeights>,
    /// Number of values in the average. The average of one value is a copy of it.
    pub(crate) count: u64,
}

impl Average {
    /// The average that `train.average` configures, if any.
    pub(crate) fn new(config: &TrainConfig) -> Option<Self> {
        (config.average.kind != AverageKind::None).then(Self::default)
    }

    /// Adds the values `p` after step number `steps` (from 1): `avg <- decay avg + (1 - decay) p`, or, from
    /// the step `start` on, `avg <- avg + (p - avg) / n`.
    pub(crate) fn observe(
        &mut self,
        lora: &LoraWeights,
        steps: u64,
        config: &TrainConfig,
    ) -> Result<()> {
        let share = match config.average.kind {
            AverageKind::Ema => 1.0 - config.average.decay,
            _ if steps < config.average.start => return Ok(()),
            _ => 1.0 / (self.count + 1) as f64,
        };
        match &self.lora {
            None => self.lora = Some(lora.copy()?),
            Some(average) => average.lerp(lora, share)?,
        }
        self.count += 1;
        Ok(())
    }
}

// A copy of the policy, to be published while training continues.

/// A copy of the served adapter that later steps do not change, over the shared base model.
pub struct Snapshot {
    pub(crate) model: Model,
    pub(crate) lora: Arc<LoraWeights>,
    pub(crate) config: LoraConfig,
    /// What computes scores in place of the model, where it can.
    pub(crate) device: Option<SharedPasses>,
}

impl Snapshot {
    /// Natural-log probability of each of `ids` after `prompt`, at `temperature`.
    ///
    /// # Errors
    /// If `prompt` or `ids` is empty, an id is outside the vocabulary, or the temperature is not above 0.
    pub fn score(&self, prompt: &[u32], ids: &[u32], temperature: f32) -> Result<Vec<f32>> {
        let sample = TrainSample {
            prompt_ids: prompt.to_vec(),
            ids: ids.to_vec(),
            logprobs: vec![0.0; ids.len()],
            temperature,
            ..TrainSample::default()
        };
        sample.validate(0, self.model.spec().vocab_size)?;
        let layout = PackedBatch::new(&[(prompt, ids, temperature)], self.model.device())?;
        if let Some(device) = &self.device
            && let Some(logprobs) = device.lock().score(&layout, &self.lora)?
        {
            return Ok(logprobs);
        }
        let saved =
            self.model.forward_saving(&layout.ids, &layout.segments, &self.lora, None, 0)?;
        let hidden = saved.hidden().detach();
        let PackedBatch { rows, targets, temperatures, .. } = &layout;
        let stats = self.model.stats(&hidden, rows, targets, temperatures)?;
        Ok(stats.narrow(1, 0, 1)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
    }

    /// The base model: the same adapter with a delta of 0.
    ///
    /// # Errors
    /// If a tensor cannot be created.
    pub fn base(&self) -> Result<Self> {
        Ok(self.with(self.lora.zeroed_copy()?, self.config.clone()))
    }

    /// The adapter in a PEFT directory, over the same base model.
    ///
    /// # Errors
    /// If the adapter cannot be read or does not fit the model.
    pub fn with_adapter(&self, dir: &Path) -> Result<Self> {
        let (config, lora) = peft::read(dir, self.model.spec(), DType::F32, self.model.device())?;
        Ok(self.with(lora, config))
    }

    /// Another adapter over the same base model.
    fn with(&self, lora: LoraWeights, config: LoraConfig) -> Self {
        let (model, device) = (self.model.clone(), self.device.clone());
        Self { model, lora: Arc::new(lora), config, device }
    }

    /// Writes the adapter as a PEFT directory and syncs it to disk.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, dir: &Path, base_model_name: &str) -> Result<()> {
        Ok(peft::write(dir, &self.lora, &self.config, base_model_name)?)
    }
}

#[cfg(test)]
mod tests {
    use super::StepTiming;

    #[test]
    fn scaling_keeps_proportions() {
        let timing = StepTiming { forward: 1.0, reference: 0.5, backward: 2.0, optimizer: 0.5 };
        let half = timing.scaled(2.0);
        assert_eq!(
            half,
            StepTiming { forward: 0.5, reference: 0.25, backward: 1.0, optimizer: 0.25 }
        );
        assert_eq!(StepTiming::default().scaled(1.0), StepTiming::default());
    }

    mod schedule {
        use super::super::*;
        use crate::config::{PeakRate, Schedule};

        fn rates(kind: ScheduleKind, warmup_steps: u64, steps: u64) -> Vec<f64> {
            let config = TrainConfig {
                learning_rate: PeakRate::Fixed(2.0),
                schedule: Schedule { steps, ..kind.into() },
                warmup_steps: Some(warmup_steps as f64),
                ..TrainConfig::default()
            };
            (0..=steps + 2).map(|done| learning_rate(&config, done)).collect()
        }

        #[test]
        fn warm_up_reaches_the_peak_with_its_last_step() {
            let constant = rates(ScheduleKind::Constant, 4, 10);
            assert_eq!(&constant[..5], &[0.5, 1.0, 1.5, 2.0, 2.0]);
            assert!(constant[4..].iter().all(|r| *r == 2.0));
            let config =
                TrainConfig { warmup_steps: Some(0.1), max_steps: 42, ..TrainConfig::default() };
            assert_eq!(config.warmup(), 5);
            let counted = TrainConfig { warmup_steps: Some(5.0), ..config.clone() };
            assert!(
                (0..50).all(|done| learning_rate(&config, done) == learning_rate(&counted, done))
            );
            assert!(rates(ScheduleKind::Cosine, 5, 3).iter().all(|r| r.is_finite()));
        }

        #[test]
        fn rates_equal_those_of_transformers() {
            let path = hone_model::testing::test_file("reference/learning/optimizer_cases.json");
            let text = std::fs::read(path).unwrap();
            let cases: serde_json::Value = serde_json::from_slice(&text).unwrap();
            for case in cases["schedules"].as_array().unwrap() {
                let config: TrainConfig = serde_json::from_value(case["settings"].clone()).unwrap();
                let rates: Vec<f64> = serde_json::from_value(case["rates"].clone()).unwrap();
                let warmup = config.warmup();
                for done in 0..rates.len() as u64 - 1 {
                    // transformers starts warm-up with a step of rate 0, which Hone leaves out.
                    let expected = rates[(done + u64::from(done < warmup)) as usize];
                    let own = learning_rate(&config, done);
                    let shown = &case["settings"];
                    assert!(
                        (own - expected).abs() < 1e-12,
                        "{shown} {done}: {own} against {expected}"
                    );
                }
            }
        }

        #[test]
        fn without_a_key_warm_up_takes_ten_steps_or_a_tenth_of_the_schedule() {
            let warmup = |max_steps, warmup_steps| {
                let config = TrainConfig { max_steps, warmup_steps, ..TrainConfig::default() };
                config.check().unwrap();
                config.warmup()
            };
            assert_eq!([0, 5, 40, 100, 1000].map(|steps| warmup(steps, None)), [10, 0, 4, 10, 10]);
            assert_eq!(warmup(40, Some(0.5)), 20);
            // The scale of this schedule is a choice of the user, not a consequence of the default.
            let config = TrainConfig {
                schedule: ScheduleKind::InverseSqrt.into(),
                learning_rate: PeakRate::Fixed(2.0),
                ..TrainConfig::default()
            };
            assert!(learning_rate(&config, 1000) > 0.9 * 2.0);
        }

        #[test]
        fn a_restart_rises_linearly_to_the_schedule() {
            let factors = |config: &TrainConfig| -> Vec<f64> {
                (0..=restart_steps(config)).rev().map(|left| restart_factor(config, left)).collect()
            };
            let config = TrainConfig { warmup_steps: Some(4.0), ..TrainConfig::default() };
            assert_eq!(factors(&config), [0.25, 0.5, 0.75, 1.0, 1.0]);
            let without = TrainConfig { warmup_steps: Some(0.0), ..config.clone() };
            assert_eq!(factors(&without)[..3], [0.1, 0.2, 0.3]);
            // A checkpoint of a longer warm-up begins with the first step of this one.
            assert_eq!(restart_factor(&config, 9), 0.25);
        }

        #[test]
        fn a_peak_below_the_minimum_rate_lowers_the_minimum() {
            let config = TrainConfig {
                schedule: Schedule { min_learning_rate: 1e-5, ..ScheduleKind::Cosine.into() },
                learning_rate: PeakRate::Fixed(1e-6),
                ..TrainConfig::default()
            };
            assert!((0..2000).all(|done| learning_rate(&config, done) <= 1e-6));
        }
    }

    mod average {
        use candle_core::{DType, Device};
        use rand::SeedableRng;
        use rand_chacha::ChaCha8Rng;
        use serde_json::Value;

        use hone_model::testing::{test_file, tiny_spec, values};

        use super::super::*;
        use crate::config::AverageConfig;
        use crate::testing::tiny_config;

        fn averages(config: &TrainConfig, steps: u64) -> Vec<[f64; 2]> {
            let mut rng = ChaCha8Rng::seed_from_u64(0);
            let (spec, device) = (tiny_spec(), Device::Cpu);
            let lora =
                LoraWeights::fresh(&spec, &config.lora, &mut rng, DType::F64, &device).unwrap();
            let mut average = Average::new(config).unwrap();
            let mut found = Vec::new();
            for step in 1..=steps {
                for (name, var) in lora.parameters() {
                    let value = if name.contains("lora_A") {
                        (step * step) as f64
                    } else {
                        1.0 / step as f64
                    };
                    var.set(&(var.ones_like().unwrap() * value).unwrap()).unwrap();
                }
                average.observe(&lora, step, config).unwrap();
                if let Some(average) = &average.lora {
                    let parameters = average.parameters();
                    found.push([values(parameters[0].1)[0], values(parameters[1].1)[0]]);
                }
            }
            assert_eq!(average.count, found.len() as u64);
            found
        }

        #[test]
        fn averages_equal_those_of_pytorch() {
            let text = std::fs::read(test_file("reference/learning/optimizer_cases.json")).unwrap();
            let reference: Value = serde_json::from_slice(&text).unwrap();
            let expected = |key: &str| -> Vec<[f64; 2]> {
                serde_json::from_value(reference[key]["values"].clone()).unwrap()
            };
            let decay = reference["ema"]["decay"].as_f64().unwrap();
            let start = reference["swa"]["start"].as_u64().unwrap();
            let ema = AverageConfig { decay, ..AverageKind::Ema.into() };
            let swa = AverageConfig { start, ..AverageKind::Swa.into() };
            let ema = averages(&TrainConfig { average: ema, ..tiny_config() }, 5);
            let swa = averages(&TrainConfig { average: swa, ..tiny_config() }, 6);
            for (own, torch) in [(ema, expected("ema")), (swa, expected("swa"))] {
                assert_eq!(own.len(), torch.len());
                for (own, torch) in own.iter().flatten().zip(torch.iter().flatten()) {
                    assert!(
                        (own - torch).abs() < 1e-12 * torch.abs().max(1.0),
                        "{own} against {torch}"
                    );
                }
            }
            assert!(Average::new(&tiny_config()).is_none());
        }
    }
}
