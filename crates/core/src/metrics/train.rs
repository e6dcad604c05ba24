//! Metrics of the trainer.

use super::registry::{SLOW, metric_set};

metric_set! {
    /// The trainer's metrics. Gauges show the last optimizer step; a gauge that a step does not
    /// compute keeps its previous value.
    TrainMetrics {
        steps: IntCounter("hone_train_steps_total", "Optimizer steps."),
        step_duration: Histogram("hone_train_step_duration_seconds",
            "Time of one optimizer step.", SLOW),
        state: IntGaugeVec("hone_train_state",
            "1 for the trainer's current state, 0 for the others.", &["state"]),
        reward_mean: Gauge("hone_train_reward_mean",
            "Mean weighted reward of the last step's samples."),
        reward_std: Gauge("hone_train_reward_std",
            "Standard deviation of the weighted reward within a group, mean over the last step's \
             groups."),
        reward_batch_std: Gauge("hone_train_reward_batch_std",
            "Standard deviation of the weighted reward over all samples of the last step."),
        reward_part: GaugeVec("hone_train_reward_part_mean",
            "Mean of each reward part over the last step's samples that have a value for it.",
            &["route", "part"]),
        reward_part_std: GaugeVec("hone_train_reward_part_std",
            "Standard deviation of each reward part over the last step's samples that have a value \
             for it.", &["route", "part"]),
        zero_std_groups: Gauge("hone_train_zero_std_groups_ratio",
            "Fraction of the last step's groups whose rewards are all equal."),
        advantages: IntCounterVec("hone_train_advantages_total",
            "Reward parts turned into advantages, by baseline.", &["baseline"]),
        loss: Gauge("hone_train_loss", "Loss of the last step."),
        kl: Gauge("hone_train_kl",
            "Estimate of KL(policy || reference policy), mean over tokens, in nats."),
        beta: Gauge("hone_train_beta",
            "Coefficient of the KL term in the loss, if it is adaptive."),
        entropy: Gauge("hone_train_entropy",
            "Entropy of the policy's next-token distribution, mean over tokens, in nats."),
        entropy_coefficient: Gauge("hone_train_entropy_coefficient",
            "Coefficient of the entropy bonus, if there is one."),
        clip_ratio: GaugeVec("hone_train_clip_ratio",
            "Fraction of importance ratios whose gradient was clipped, by side; `low_min` and \
             `high_max` are the extremes over sequences.", &["side"]),
        importance_ratio: GaugeVec("hone_train_importance_ratio",
            "Importance ratio exp(logp - old logp) over the last step's tokens, by statistic.",
            &["stat"]),
        sampler_difference: GaugeVec("hone_train_sampler_logprob_difference",
            "Absolute difference between recorded and recomputed log-probabilities of samples of \
             the current version, by statistic.", &["stat"]),
        sampler_ratio: GaugeVec("hone_train_sampler_ratio",
            "Weights of the sampler correction, if it is enabled, by statistic.", &["stat"]),
        off_policy: Gauge("hone_train_off_policy_ratio",
            "Fraction of the last step's sequences masked because they are too far off policy, if \
             masking is enabled."),
        staleness: Gauge("hone_train_staleness_versions",
            "Mean number of versions between sampling and training."),
        grad_norm: Gauge("hone_train_grad_norm", "Global gradient norm before clipping."),
        learning_rate: Gauge("hone_train_learning_rate", "Current learning rate."),
        completion_length: GaugeVec("hone_train_completion_length_tokens",
            "Length of the last step's completions, by statistic.", &["stat"]),
        terminated_length: GaugeVec("hone_train_terminated_length_tokens",
            "Length of the last step's completions that ended before the token limit, by \
             statistic.",
            &["stat"]),
        truncated: Gauge("hone_train_truncated_ratio",
            "Fraction of the last step's completions that ended at the token limit."),
        tokens: IntCounter("hone_train_tokens_total", "Completion tokens trained on."),
        seen_tokens: Gauge("hone_train_seen_tokens",
            "Prompt and completion tokens of all steps so far."),
        loss_token_fraction: Gauge("hone_train_loss_token_fraction",
            "Completion tokens divided by all tokens that the forward pass computed."),
        ready_groups: IntGauge("hone_train_ready_groups", "Groups that wait for the trainer."),
        skipped_steps: IntCounterVec("hone_train_skipped_steps_total",
            "Steps skipped, by reason.", &["reason"]),
        dropped_groups: IntCounterVec("hone_train_dropped_groups_total",
            "Groups that were ready but will not be trained on, by reason.", &["reason"]),
        restarts: IntCounter("hone_train_restarts_total",
            "Restarts of the trainer from its checkpoint."),
        warnings: IntCounterVec("hone_train_warnings_total",
            "Warnings raised about the run, by kind.", &["kind"]),
        warning_active: IntGaugeVec("hone_train_warning_active",
            "1 while a warning's condition holds, else 0, by kind.", &["kind"]),
    }
}
