//! The keys of `[train]`.

use hone_core::threads::BackgroundPriority;
use hone_model::adapter::{BaseDtype, LoraConfig};
use hone_model::kernels::compute::Compute;

use super::PeakRate;
use super::objective::{
    AdvantageScale, CorrectionConfig, EntropyConfig, KlConfig, Loss, RatioLevel, RewardAggregation,
    ZeroVariance,
};
use super::timetable::TrainWhen;
use super::{AverageConfig, OptimizerConfig, Recompute, Schedule};

/// Warm-up steps where no key sets them: about as many as Adam's second moments need at first.
const DEFAULT_WARMUP: u64 = 10;

hone_core::parameters! {
    /// Settings of the trainer.
    pub struct TrainConfig {
        /// Whether to train at all.
        pub enabled: bool = true,
        /// Seed of initialization, dropout and batch order.
        pub seed: u64 = 0,
        /// Stop after this many optimizer steps; 0 never stops.
        pub max_steps: u64 = 0,
        /// Passes over the prompts to train on, instead of `max_steps`; 0 is off. `hone train`, which knows
        /// the number of prompts, replaces it by `max_steps`.
        pub epochs: f64 = 0.0 => between(0.0, 1e6),
        /// Trainable samples per optimizer step. A quarter of them is enough if they are rated.
        pub samples_per_step: usize = 64 => between(1, 1 << 20),
        /// Samples that are split into shards together; gradients accumulate over all shards of a step. No key, because
        /// the memory plan bounds the tokens of shards.
        #[serde(skip)]
        pub micro_batch: usize = 64,
        /// Which layers the backward pass recomputes.
        pub recompute: Recompute = Recompute::default(),
        /// Data type of the frozen base in memory.
        pub base_dtype: BaseDtype = BaseDtype::default(),
        /// Arithmetic of the trainer's products with the frozen base. It exists because products take most of
        /// a step, and some processors are several times as fast in bf16.
        pub compute: Compute = Compute::default(),
        /// Optimizer updates per step, all on the same samples.
        pub num_iterations: usize = 1 => between(1, 64),
        /// Peak learning rate: a number, or `"auto"` for one that follows the model's size.
        pub learning_rate: PeakRate = PeakRate::Auto,
        /// How the learning rate changes after warm-up.
        pub schedule: Schedule = Schedule::default(),
        /// Steps over which the learning rate rises linearly to its peak, or below 1 their share of
        /// [`Self::schedule_steps`], as in transformers 5; `None` is the default of [`Self::warmup`], so that a
        /// key that contradicts only the default is no error.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub warmup_steps: Option<f64> = None => steps_or_share(),
        /// The optimizer.
        pub optimizer: OptimizerConfig = OptimizerConfig::default(),
        /// Decoupled weight decay: each step takes the rate times this from each value of the adapter, so that the noise
        /// of many thousand steps does not add up.
        pub weight_decay: f64 = 1.0 => at_least(0.0),
        /// Maximum of the global gradient norm; 0 is no maximum.
        pub max_grad_norm: f64 = 1.0 => at_least(0.0),
        /// What is served and saved instead of the adapter's last values.
        pub average: AverageConfig = AverageConfig::default(),
        /// Coefficient of the KL to the reference policy.
        pub beta: f64 = 0.04 => at_least(0.0),
        /// The lower clip bound of the importance ratio is 1 minus this.
        pub clip_low: f64 = 0.2 => between(0.0, 1.0),
        /// The upper clip bound of the importance ratio is 1 plus this.
        pub clip_high: f64 = 0.2 => at_least(0.0),
        /// The surrogate, and how token losses are combined.
        pub loss: Loss = Loss::default(),
        /// Whether a sequence has one importance ratio or one per token.
        pub importance_sampling_level: RatioLevel = RatioLevel::default(),
        /// Upper bound of the unclipped ratio in the clipped surrogate's minimum; 0 is no bound.
        pub delta: f64 = 0.0 => at_least(0.0),
        /// For a negative advantage A, the loss is at most -A times this; 0 is no bound. Without effect where
        /// `loss` does not clip, and where `delta` sets the bound.
        pub dual_clip: f64 = 3.0 => at_least(0.0),
        /// Only this share of the step's tokens, those of the highest entropy, has a surrogate.
        pub top_entropy_quantile: f64 = 1.0 => share(),
        /// A sequence of negative advantage has no surrogate if its recorded log-probabilities exceed
        /// the policy's by more than this in the mean; 0 keeps all.
        pub off_policy_mask_threshold: f64 = 0.0 => at_least(0.0),
        /// Leave out completions that ended at their token limit.
        pub mask_truncated_completions: bool = false,
        /// The divisor of group advantages.
        pub advantage_scale: AdvantageScale = AdvantageScale::default(),
        /// How several reward parts become one advantage.
        pub reward_aggregation: RewardAggregation = RewardAggregation::default(),
        /// The treatment of groups whose rewards are all equal.
        pub zero_variance_groups: ZeroVariance = ZeroVariance::default(),
        /// Drop groups with a member that is more versions old than this, or more than 64 steps; 0 allows only the
        /// current one.
        pub max_staleness: u64 = 8,
        /// Longest sample, prompt and completion together in tokens; 0 is what the memory plan permits.
        /// Groups with a longer one are dropped.
        pub max_tokens: usize = 0 => between(0, 1 << 24),
        /// When steps may be taken.
        pub when: TrainWhen = TrainWhen::default(),
        /// Largest number of steps in a day (UTC); 0 is no limit.
        pub max_steps_per_day: u64 = 0,
        /// The same for groups of which users' feedback alone decides: ratings may come late.
        pub feedback_max_staleness: u64 = 512,
        /// Weight of the negative log-likelihood of clients' corrections in the loss; 0 trains on none.
        pub correction_weight: f64 = 0.0 => between(0.0, 100.0),
        /// Refuse a sample whose recorded and recomputed log-probabilities of the same version differ by
        /// more than this in the mean, in nats; 0 never refuses.
        #[serde(skip)]
        pub max_sampler_difference: f64 = 0.05,
        /// Rated samples that a step takes at most, as a multiple of those that it computes, and the share of them of which
        /// a step is worth its time: many small steps learn more from each rating than few large ones.
        #[serde(skip)]
        pub rated_factor: usize = 4,
        /// Threads of the trainer's pool; 0 is one per core.
        #[serde(skip)]
        pub threads: usize = 0,
        /// Processor priority of background threads: the trainer's, the native sampler's, rollouts'.
        pub priority: BackgroundPriority = BackgroundPriority::default(),
        /// The share of the time that the native engine leaves to training while clients keep it busy, if there is
        /// something to train on. It exists because a saturated server would otherwise never learn.
        pub min_share: f64 = 0.15 => between(0.0, 0.9),
        /// `[train.kl]`
        pub kl: KlConfig = KlConfig::default(),
        /// `[train.entropy]`
        pub entropy: EntropyConfig = EntropyConfig::default(),
        /// Importance weights of the trainer's policy over the sampler's.
        pub sampler_correction: CorrectionConfig = CorrectionConfig::default(),
        /// `[train.replay]`
        pub replay: ReplayConfig = ReplayConfig::default(),
        /// `[train.lora]`
        pub lora: LoraConfig = LoraConfig::default(),
    }
}

impl TrainConfig {
    /// Number of steps of the whole schedule; 0 if it has no end.
    pub fn schedule_steps(&self) -> u64 {
        if self.schedule.steps > 0 { self.schedule.steps } else { self.max_steps }
    }

    /// Whether `warmup_steps` is a share of the schedule.
    pub fn warms_up_by_share(&self) -> bool {
        self.warmup_steps.is_some_and(|steps| steps > 0.0 && steps < 1.0)
    }

    /// Warm-up steps by `warmup_steps`, a share of the schedule rounded up; `None` where it is not set.
    pub fn configured_warmup(&self) -> Option<u64> {
        let of_all = if self.warms_up_by_share() { self.schedule_steps() as f64 } else { 1.0 };
        self.warmup_steps.map(|steps| (steps * of_all).ceil() as u64)
    }

    /// Number of warm-up steps: as configured, else 10, and at most a tenth of a schedule that ends.
    pub fn warmup(&self) -> u64 {
        self.configured_warmup().unwrap_or_else(|| match self.schedule_steps() {
            0 => DEFAULT_WARMUP,
            steps => DEFAULT_WARMUP.min(steps / 10),
        })
    }
}

// How much of a step is drawn from earlier steps.

hone_core::parameters! {
    /// Groups of earlier steps that a step trains on again.
    pub struct ReplayConfig {
        /// Largest share of replayed samples in a step, at most 0.5; 0 replays none.
        pub share: f64 = 0.0 => between(0.0, 0.5),
    }
}

impl ReplayConfig {
    /// The most samples that a step with `fresh` new ones may replay.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at most `fresh`, which is not negative"
    )]
    pub(crate) fn most(&self, fresh: usize) -> usize {
        (fresh as f64 * self.share / (1.0 - self.share)) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn replayed_samples_are_at_most_their_share(share in 0.0..=0.5, fresh in 0..10_000_usize) {
            let most = ReplayConfig { share }.most(fresh);
            let of_all = |replayed: usize| replayed as f64 / (fresh + replayed).max(1) as f64;
            prop_assert!(of_all(most) <= share + 1e-12);
            prop_assert!(fresh == 0 || of_all(most + 1) > share - 1e-12);
        }
    }
}
