//! Every key of the trainer.

mod objective;
mod warnings;

use serde::{Deserialize, Serialize};

use hone_core::config::range::{above, at_least, below, between};
use hone_core::config::{Checked, Problem};
use hone_core::threads::BackgroundPriority;
use hone_model::adapter::{BaseDtype, LoraConfig};

pub use objective::{
    AdvantageBaseline, AdvantageScale, CorrectionConfig, CorrectionMode, EntropyConfig, KlConfig,
    KlEstimator, LossKind, RatioLevel, RewardAggregation, VespoConfig, ZeroVariance,
};
pub use warnings::WarningConfig;

/// How the learning rate moves after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Stays.
    #[default]
    Constant,
    /// Falls to 0 at the schedule's end in a line.
    Linear,
    /// Falls to `min_learning_rate` at the schedule's end along half a cosine.
    Cosine,
    /// Falls to `min_learning_rate` at the schedule's end with `schedule_power`.
    Polynomial,
    /// Falls with the square root of the steps, without end.
    InverseSqrt,
}

/// What turns gradients into steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerKind {
    /// AdamW with moments in 32 bits.
    #[default]
    #[serde(rename = "adamw")]
    AdamW,
    /// AdamW with moments in 8 bits (Dettmers et al. 2021): a quarter of the memory.
    #[serde(rename = "adamw_8bit")]
    AdamW8bit,
}

/// Whether the backward pass computes layers again, to save memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Those layers whose activations would take more than 768 MiB.
    #[default]
    Auto,
    /// All: least memory, about a third more time.
    Always,
    /// None.
    Never,
}

/// The trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Whether to train at all.
    pub enabled: bool,
    /// Seed of initialisation, dropout and batch order.
    pub seed: u64,
    /// Stop after this many optimiser steps; 0 never stops.
    pub max_steps: u64,
    /// Trained samples that make an optimiser step.
    pub samples_per_step: usize,
    /// Samples computed at once; the rest of the step accumulates gradients.
    pub micro_batch: usize,
    /// Whether the backward pass computes layers again.
    pub recompute: Recompute,
    /// How the frozen base lies in memory.
    pub base_dtype: BaseDtype,
    /// Optimiser steps on the same samples.
    pub num_iterations: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// After warm-up.
    pub schedule: ScheduleKind,
    /// Steps over which the rate rises from 0.
    pub warmup_steps: u64,
    /// The same as a share of [`Self::schedule_steps`]; 0 leaves it to `warmup_steps`.
    pub warmup_ratio: f64,
    /// Where linear, cosine and polynomial schedules end; 0 takes `max_steps`.
    pub total_steps: u64,
    /// Where cosine and polynomial schedules end up.
    pub min_learning_rate: f64,
    /// The polynomial schedule's power.
    pub schedule_power: f64,
    /// What turns gradients into steps.
    pub optimizer: OptimizerKind,
    /// AdamW's first decay.
    pub adam_beta1: f64,
    /// AdamW's second decay.
    pub adam_beta2: f64,
    /// AdamW's epsilon.
    pub adam_eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Gradient norm limit; 0 leaves gradients alone.
    pub max_grad_norm: f64,
    /// Serve an exponential average of the adapter with this decay per step; 0 serves the adapter.
    pub ema_decay: f64,
    /// Serve the mean of the adapter over all steps from this one on; 0 serves the adapter.
    pub swa_start: u64,
    /// Coefficient of the KL to the reference policy.
    pub beta: f64,
    /// The ratio's lower clip is 1 minus this.
    pub clip_low: f64,
    /// The ratio's upper clip is 1 plus this.
    pub clip_high: f64,
    /// The surrogate and how token losses are summed.
    pub loss: LossKind,
    /// What the importance ratio is taken of.
    pub importance_sampling_level: RatioLevel,
    /// The ratio is bounded by this before the clipped surrogate's minimum; 0 is no bound.
    pub delta: f64,
    /// The loss of a negative advantage A is bounded by -A times this; 0 is no bound.
    pub dual_clip: f64,
    /// Sharpness of sapo's gate for positive advantages.
    pub sapo_tau_pos: f64,
    /// Sharpness of sapo's gate for the others.
    pub sapo_tau_neg: f64,
    /// Only this share of the step's tokens, those of the highest entropy, carries the surrogate.
    pub top_entropy_quantile: f64,
    /// Sequences of negative advantage whose recorded log-probabilities are higher than the
    /// policy's by more than this in the mean carry no surrogate; 0 keeps all.
    pub off_policy_mask_threshold: f64,
    /// Completions that ended at their token limit are not trained on.
    pub mask_truncated_completions: bool,
    /// What group advantages are divided by.
    pub advantage_scale: AdvantageScale,
    /// What a group's rewards are compared with.
    pub advantage_baseline: AdvantageBaseline,
    /// How several rewards become one advantage.
    pub reward_aggregation: RewardAggregation,
    /// What happens to groups whose rewards are all equal.
    pub zero_variance_groups: ZeroVariance,
    /// Samples that a running baseline remembers (an exponential window).
    pub baseline_window: f64,
    /// Members more versions behind than this are dropped; 0 allows the current version only.
    pub max_staleness: u64,
    /// Refuse to train on a sample whose recorded and recomputed log-probabilities of the same
    /// version differ by more than this in the mean; 0 never refuses.
    pub max_sampler_difference: f64,
    /// Threads of the trainer's own pool; 0 takes every core.
    pub threads: usize,
    /// How those threads, the native sampler's and others that no client waits for give way.
    pub priority: BackgroundPriority,
    /// Checkpoints to keep.
    pub keep_checkpoints: usize,
    /// The weights of `vespo`.
    pub vespo: VespoConfig,
    /// The KL to the reference.
    pub kl: KlConfig,
    /// The entropy bonus.
    pub entropy: EntropyConfig,
    /// Correction for the sampler's difference.
    pub sampler_correction: CorrectionConfig,
    /// The adapter.
    pub lora: LoraConfig,
}

impl TrainConfig {
    /// Checks every range, the adapter's and the loss's included.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("train.samples_per_step", self.samples_per_step, 1, 1 << 20)?;
        between("train.micro_batch", self.micro_batch, 1, 1 << 16)?;
        between("train.num_iterations", self.num_iterations, 1, 64)?;
        above("train.learning_rate", self.learning_rate, 0.0)?;
        optimizer(self)?;
        below("train.adam_beta1", self.adam_beta1, 0.0, 1.0)?;
        below("train.adam_beta2", self.adam_beta2, 0.0, 1.0)?;
        above("train.adam_eps", self.adam_eps, 0.0)?;
        at_least("train.weight_decay", self.weight_decay, 0.0)?;
        at_least("train.max_grad_norm", self.max_grad_norm, 0.0)?;
        objective::check(self)?;
        at_least("train.baseline_window", self.baseline_window, 1.0)?;
        at_least("train.max_sampler_difference", self.max_sampler_difference, 0.0)?;
        between("train.threads", self.threads, 0, 4096)?;
        between("train.keep_checkpoints", self.keep_checkpoints, 1, 10_000)?;
        self.lora.check()
    }

    /// Steps of the whole schedule; 0 where it has no end.
    pub fn schedule_steps(&self) -> u64 {
        if self.total_steps > 0 { self.total_steps } else { self.max_steps }
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            seed: 0,
            max_steps: 0,
            samples_per_step: 64,
            micro_batch: 64,
            recompute: Recompute::default(),
            base_dtype: BaseDtype::default(),
            num_iterations: 1,
            learning_rate: 1e-4,
            schedule: ScheduleKind::Constant,
            warmup_steps: 0,
            warmup_ratio: 0.0,
            total_steps: 0,
            min_learning_rate: 0.0,
            schedule_power: 1.0,
            optimizer: OptimizerKind::default(),
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            ema_decay: 0.0,
            swa_start: 0,
            beta: 0.01,
            clip_low: 0.2,
            clip_high: 0.2,
            loss: LossKind::default(),
            importance_sampling_level: RatioLevel::default(),
            delta: 0.0,
            dual_clip: 0.0,
            sapo_tau_pos: 1.0,
            sapo_tau_neg: 1.05,
            top_entropy_quantile: 1.0,
            off_policy_mask_threshold: 0.0,
            mask_truncated_completions: false,
            advantage_scale: AdvantageScale::default(),
            advantage_baseline: AdvantageBaseline::default(),
            reward_aggregation: RewardAggregation::default(),
            zero_variance_groups: ZeroVariance::default(),
            baseline_window: 256.0,
            max_staleness: 8,
            max_sampler_difference: 0.05,
            threads: 0,
            priority: BackgroundPriority::default(),
            keep_checkpoints: 2,
            vespo: VespoConfig::default(),
            kl: KlConfig::default(),
            entropy: EntropyConfig::default(),
            sampler_correction: CorrectionConfig::default(),
            lora: LoraConfig::default(),
        }
    }
}

fn optimizer(c: &TrainConfig) -> Checked {
    below("train.warmup_ratio", c.warmup_ratio, 0.0, 1.0)?;
    if c.warmup_ratio > 0.0 && c.warmup_steps > 0 {
        let allowed = format!("0 where train.warmup_ratio ({}) is set", c.warmup_ratio);
        return Err(Problem::value("train.warmup_steps", c.warmup_steps, &allowed));
    }
    at_least("train.min_learning_rate", c.min_learning_rate, 0.0)?;
    if c.min_learning_rate > c.learning_rate {
        let allowed = format!("at most train.learning_rate ({})", c.learning_rate);
        return Err(Problem::value("train.min_learning_rate", c.min_learning_rate, &allowed));
    }
    if c.min_learning_rate > 0.0
        && !matches!(c.schedule, ScheduleKind::Cosine | ScheduleKind::Polynomial)
    {
        let allowed = "0 unless train.schedule is \"cosine\" or \"polynomial\"";
        return Err(Problem::value("train.min_learning_rate", c.min_learning_rate, allowed));
    }
    above("train.schedule_power", c.schedule_power, 0.0)?;
    below("train.ema_decay", c.ema_decay, 0.0, 1.0)?;
    if c.ema_decay > 0.0 && c.swa_start > 0 {
        let allowed = format!("0 where train.ema_decay ({}) is set", c.ema_decay);
        return Err(Problem::value("train.swa_start", c.swa_start, &allowed));
    }
    schedule(c)
}

/// Schedules that end must know where.
fn schedule(c: &TrainConfig) -> Checked {
    let ends = !matches!(c.schedule, ScheduleKind::Constant | ScheduleKind::InverseSqrt);
    if (ends || c.warmup_ratio > 0.0) && c.schedule_steps() == 0 {
        let why = if ends { "schedule" } else { "warmup_ratio" };
        let allowed = format!("at least 1 with train.{why} set and no train.max_steps");
        return Err(Problem::value("train.total_steps", c.total_steps, &allowed));
    }
    if ends && c.warmup_steps >= c.schedule_steps() {
        let allowed = format!("less than the schedule's steps ({})", c.schedule_steps());
        return Err(Problem::value("train.warmup_steps", c.warmup_steps, &allowed));
    }
    Ok(())
}
