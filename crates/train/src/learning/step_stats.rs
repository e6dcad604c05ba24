//! What an optimiser step tells.

use std::collections::BTreeMap;

/// What a step did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepStats {
    /// Where TRL has a figure of the same meaning, its name follows the arrow.
    ///
    /// - `loss` (with KL and entropy bonus), `grad_norm` (before clipping), `learning_rate`
    /// - `num_tokens`: prompt and completion tokens of all steps so far
    /// - `kl`: mean of the KL's estimator over tokens; absent when `train.beta` is 0, as it is not
    ///   computed then; `beta` where it is adaptive
    /// - `entropy`: of the policy at the sample's temperature, mean over tokens, in nats;
    ///   `entropy_coef` where there is a bonus, as it has come to be after the step
    /// - `clip_low`, `clip_high`, `clip_region` -> `clip_ratio/{low,high,region}_mean`: share of ratios
    ///   (of tokens, or of sequences) whose gradient a bound cut; `clip_low_min`, `clip_high_max` ->
    ///   `clip_ratio/{low_min,high_max}`: the least and greatest share of one sequence. For `cispo`,
    ///   `clip_high` -> `cispo_clip_ratio`; absent for losses without bounds
    /// - `ratio_min`, `ratio_mean`, `ratio_max`: the surrogate's ratio
    /// - `sampler_ratio_min`, `_mean`, `_max` -> `sampling/importance_sampling_ratio/*`: the sampler
    ///   correction's weights; absent without one
    /// - `vespo_phi` -> `vespo/phi_seq_mean`: mean weight of a sequence, with that loss only
    /// - `sampler_difference_mean`, `_max` -> `sampling/sampling_logp_difference/*`: |recorded -
    ///   recomputed| log-probability over tokens of samples of the current version, before the update,
    ///   dropout off; absent without such samples
    /// - `off_policy_ratio`: share of sequences without surrogate for `train.off_policy_mask_threshold`
    /// - `completion_length`, `completion_length_min`, `_max` -> `completions/{mean,min,max}_length`;
    ///   `terminated_length`, `_min`, `_max` -> `completions/{mean,min,max}_terminated_length`;
    ///   `truncated_ratio` -> `completions/clipped_ratio`: of all samples given, trained on or not
    /// - `tokens`: completion tokens trained on; `samples` trained on
    /// - `loss_token_fraction`: completion tokens per token that the forward pass computed, prompts
    ///   included; above 1 where many short completions share a prompt
    ///
    /// All figures of the passes but the sampler difference are over the step's
    /// `train.num_iterations` passes.
    pub metrics: BTreeMap<String, f64>,
    /// Why nothing was changed: a loss or gradient that is not finite, or no sample left.
    pub skipped: Option<String>,
    /// Samples left out because recorded and recomputed log-probabilities of the same version
    /// differ by more than `train.max_sampler_difference` in the mean.
    pub refused: Vec<usize>,
}
