//! Metrics of the trainer.

use prometheus::{Gauge, GaugeVec, Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::SLOW;
use crate::metrics::registry::Maker;

/// What the trainer tells. The figures of a step are those of its last one; one that a step does
/// not compute keeps its value.
#[expect(missing_docs, reason = "the help texts below are the documentation")]
pub struct TrainMetrics {
    pub steps: IntCounter,
    pub step_duration: Histogram,
    pub state: IntGaugeVec,
    pub reward_mean: Gauge,
    pub reward_std: Gauge,
    pub reward_batch_std: Gauge,
    pub reward_part: GaugeVec,
    pub reward_part_std: GaugeVec,
    pub zero_std_groups: Gauge,
    pub advantages: IntCounterVec,
    pub loss: Gauge,
    pub kl: Gauge,
    pub beta: Gauge,
    pub entropy: Gauge,
    pub entropy_coefficient: Gauge,
    pub clip_ratio: GaugeVec,
    pub importance_ratio: GaugeVec,
    pub sampler_difference: GaugeVec,
    pub sampler_ratio: GaugeVec,
    pub off_policy: Gauge,
    pub staleness: Gauge,
    pub grad_norm: Gauge,
    pub learning_rate: Gauge,
    pub completion_length: GaugeVec,
    pub terminated_length: GaugeVec,
    pub truncated: Gauge,
    pub tokens: IntCounter,
    pub seen_tokens: Gauge,
    pub loss_token_fraction: Gauge,
    pub ready_groups: IntGauge,
    pub skipped_steps: IntCounterVec,
    pub restarts: IntCounter,
    pub warnings: IntCounterVec,
    pub warning_active: IntGaugeVec,
}

pub(super) fn train(m: &mut Maker) -> Option<TrainMetrics> {
    Some(TrainMetrics {
        steps: m.counter("hone_train_steps_total", "Optimiser steps taken.")?,
        step_duration: m.histogram(
            "hone_train_step_duration_seconds",
            "Time of one optimiser step.",
            SLOW,
        )?,
        state: m.int_gauges(
            "hone_train_state",
            "1 for the trainer's current state, 0 for the others.",
            &["state"],
        )?,
        reward_mean: m
            .gauge("hone_train_reward_mean", "Mean weighted reward of the last step's samples.")?,
        reward_std: m.gauge(
            "hone_train_reward_std",
            "Mean within-group standard deviation of the weighted reward.",
        )?,
        reward_batch_std: m.gauge(
            "hone_train_reward_batch_std",
            "Standard deviation of the weighted reward over all of the step's samples.",
        )?,
        reward_part: m.gauges(
            "hone_train_reward_part_mean",
            "Mean of each reward part over the last step's samples that have it.",
            &["route", "part"],
        )?,
        reward_part_std: m.gauges(
            "hone_train_reward_part_std",
            "Standard deviation of each reward part over the last step's samples that have it.",
            &["route", "part"],
        )?,
        zero_std_groups: m.gauge(
            "hone_train_zero_std_groups_ratio",
            "Share of groups whose rewards were all equal.",
        )?,
        advantages: m.counters(
            "hone_train_advantages_total",
            "Reward parts turned into advantages, by baseline.",
            &["baseline"],
        )?,
        loss: m.gauge("hone_train_loss", "Loss of the last step.")?,
        kl: m.gauge(
            "hone_train_kl",
            "Estimate of KL(policy || reference), mean over tokens, in nats.",
        )?,
        beta: m.gauge("hone_train_beta", "Factor of the KL in the loss, where it is adaptive.")?,
        entropy: m
            .gauge("hone_train_entropy", "Mean entropy of the policy's next token, in nats.")?,
        entropy_coefficient: m.gauge(
            "hone_train_entropy_coefficient",
            "Factor of the entropy bonus, where there is one.",
        )?,
        clip_ratio: m.gauges(
            "hone_train_clip_ratio",
            "Share of ratios whose gradient a bound cut, by side; `low_min` and `high_max` are the \
             least and greatest share of one sequence.",
            &["side"],
        )?,
        importance_ratio: m.gauges(
            "hone_train_importance_ratio",
            "The surrogate's ratio, exp(logp - old logp), over the step's tokens.",
            &["stat"],
        )?,
        sampler_difference: m.gauges(
            "hone_train_sampler_logprob_difference",
            "|recorded - recomputed| log-probability of samples of the current version.",
            &["stat"],
        )?,
        sampler_ratio: m.gauges(
            "hone_train_sampler_ratio",
            "Weights of the sampler correction, where it is on.",
            &["stat"],
        )?,
        off_policy: m.gauge(
            "hone_train_off_policy_ratio",
            "Share of sequences masked as too far off policy, where that is on.",
        )?,
        staleness: m.gauge(
            "hone_train_staleness_versions",
            "Mean number of versions between sampling and training.",
        )?,
        grad_norm: m.gauge("hone_train_grad_norm", "Global gradient norm before clipping.")?,
        learning_rate: m.gauge("hone_train_learning_rate", "Current learning rate.")?,
        completion_length: m.gauges(
            "hone_train_completion_length_tokens",
            "Completion length of the last step's samples.",
            &["stat"],
        )?,
        terminated_length: m.gauges(
            "hone_train_terminated_length_tokens",
            "Length of the last step's completions that ended by themselves.",
            &["stat"],
        )?,
        truncated: m.gauge(
            "hone_train_truncated_ratio",
            "Share of the last step's completions that ended at the token limit.",
        )?,
        tokens: m.counter("hone_train_tokens_total", "Completion tokens trained on.")?,
        seen_tokens: m
            .gauge("hone_train_seen_tokens", "Prompt and completion tokens of all steps so far.")?,
        loss_token_fraction: m.gauge(
            "hone_train_loss_token_fraction",
            "Completion tokens per token that the forward pass computed.",
        )?,
        ready_groups: m.int_gauge("hone_train_ready_groups", "Groups waiting for the trainer.")?,
        skipped_steps: m.counters(
            "hone_train_skipped_steps_total",
            "Steps skipped, by reason.",
            &["reason"],
        )?,
        restarts: m.counter(
            "hone_train_restarts_total",
            "Times the trainer was restarted from its checkpoint.",
        )?,
        warnings: m.counters(
            "hone_train_warnings_total",
            "Warnings about the run raised, by kind.",
            &["kind"],
        )?,
        warning_active: m.int_gauges(
            "hone_train_warning_active",
            "1 while a warning's condition lasts, else 0, by kind.",
            &["kind"],
        )?,
    })
}
