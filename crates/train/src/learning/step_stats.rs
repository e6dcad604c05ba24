//! The result of an optimizer step.

use std::collections::BTreeMap;

/// The result of an optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepStats {
    /// TRL's name of the same metric, if there is one, follows the arrow.
    ///
    /// - `loss` (with KL and entropy bonus), `grad_norm` (before clipping), `learning_rate`
    /// - `num_tokens`: prompt and completion tokens of all steps so far
    /// - `kl`: mean of the KL estimator over tokens; absent if `train.beta` is 0, since it is not
    ///   computed then; `beta` if it is adaptive
    /// - `entropy`: of the policy at the sample's temperature, mean over tokens, in nats;
    ///   `entropy_coef` if there is a bonus, its value after the step
    /// - `clip_low`, `clip_high`, `clip_region` -> `clip_ratio/{low,high,region}_mean`: fraction of
    ///   ratios (of tokens, or of sequences) whose gradient a bound cut; `clip_low_min`,
    ///   `clip_high_max` -> `clip_ratio/{low_min,high_max}`: the lowest and highest fraction of one
    ///   sequence. For `cispo`, `clip_high` -> `cispo_clip_ratio`; absent for losses without bounds
    /// - `ratio_min`, `ratio_mean`, `ratio_max`: the surrogate's ratio
    /// - `sampler_ratio_min`, `_mean`, `_max` -> `sampling/importance_sampling_ratio/*`: the sampler
    ///   correction's weights; absent without one
    /// - `vespo_phi` -> `vespo/phi_seq_mean`: mean weight of a sequence, with that loss only
    /// - `sampler_difference_mean`, `_max` -> `sampling/sampling_logp_difference/*`: |recorded -
    ///   recomputed| log-probability over tokens of samples of the current version, before the update,
    ///   dropout off; absent without such samples
    /// - `off_policy_ratio`: fraction of sequences whose surrogate `train.off_policy_mask_threshold`
    ///   masked
    /// - `completion_length`, `completion_length_min`, `_max` -> `completions/{mean,min,max}_length`;
    ///   `terminated_length`, `_min`, `_max` -> `completions/{mean,min,max}_terminated_length`;
    ///   `truncated_ratio` -> `completions/clipped_ratio`: of all samples, trained on or not
    /// - `tokens`: completion tokens trained on; `samples` trained on
    /// - `joined_samples`: number of samples that are earlier turns of another one's conversation, with which
    ///   they are one sequence; absent without them
    /// - `correction/nll`: mean over the tokens of the corrections of their negative log-probability, in
    ///   nats; `correction/samples`: their number. Absent without corrections, which count in `loss`,
    ///   `num_tokens` and `loss_token_fraction` only
    /// - `loss_token_fraction`: completion tokens per token that the forward pass computed, prompts
    ///   included; above 1 if many short completions share a prompt
    ///
    /// Metrics of the loss cover the step's `train.num_iterations` updates, the sampler difference
    /// only the first one.
    pub metrics: BTreeMap<String, f64>,
    /// The reason if the step changed nothing: no sample is left to train on, or a loss, gradient
    /// or updated value is not finite.
    pub skipped: Option<String>,
    /// Indices of samples left out because their mean |recorded - recomputed| log-probability
    /// exceeds `train.max_sampler_difference` at the same policy version.
    pub refused: Vec<usize>,
    /// Indices of late samples left out because the policy has moved too far away from them.
    pub faded: Vec<usize>,
}

/// Metrics of completions from `(length in tokens, cut by the token limit)`: `completion_length`
/// (mean), `_min`, `_max`; `terminated_length` (of completions that were not cut; 0 without one),
/// `_min`, `_max`; `truncated_ratio`. Empty without completions.
pub(crate) fn completion_metrics(
    completions: impl IntoIterator<Item = (usize, bool)>,
) -> Vec<(String, f64)> {
    let (mut all, mut terminated) = (Vec::new(), Vec::new());
    for (length, truncated) in completions {
        all.push(length);
        if !truncated {
            terminated.push(length);
        }
    }
    if all.is_empty() {
        return Vec::new();
    }
    let truncated_ratio = (all.len() - terminated.len()) as f64 / all.len() as f64;
    let mut metrics = vec![("truncated_ratio".to_owned(), truncated_ratio)];
    for (name, lengths) in [("completion_length", &all), ("terminated_length", &terminated)] {
        let mean = lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64;
        let min = lengths.iter().min().copied().unwrap_or(0) as f64;
        let max = lengths.iter().max().copied().unwrap_or(0) as f64;
        metrics.push((name.to_owned(), mean));
        metrics.push((format!("{name}_min"), min));
        metrics.push((format!("{name}_max"), max));
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_metrics_cover_all_and_terminated_completions() {
        let metrics: BTreeMap<String, f64> =
            completion_metrics([(4, false), (10, true), (2, false)]).into_iter().collect();
        assert_eq!(metrics["completion_length"], 16.0 / 3.0);
        assert_eq!(
            (metrics["completion_length_min"], metrics["completion_length_max"]),
            (2.0, 10.0)
        );
        assert_eq!(metrics["terminated_length"], 3.0);
        assert_eq!(
            (metrics["terminated_length_min"], metrics["terminated_length_max"]),
            (2.0, 4.0)
        );
        assert!((metrics["truncated_ratio"] - 1.0 / 3.0).abs() < 1e-12);
        // As in TRL, lengths are 0 if every completion was cut.
        let metrics: BTreeMap<String, f64> = completion_metrics([(4, true)]).into_iter().collect();
        assert_eq!((metrics["terminated_length"], metrics["truncated_ratio"]), (0.0, 1.0));
        assert!(completion_metrics([]).is_empty());
    }
}
