//! Metrics of external services that score samples: webhooks and judges.

use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec, Result};

use super::registry::{MetricRegistry, REQUEST, metric_set, new_metric};

/// Calls to one kind of service.
#[derive(Clone)]
pub struct CallMetrics {
    /// Requests by outcome, retries included.
    pub requests: IntCounterVec,
    /// Time of one request.
    pub duration: HistogramVec,
    /// 1 while a circuit breaker blocks requests after repeated failures.
    pub circuit_open: IntGaugeVec,
    /// Samples without a value, by reason.
    pub missing: IntCounterVec,
}

metric_set! {
    /// Calls to judges, and their costs.
    JudgeMetrics {
        cache: IntCounterVec("hone_reward_judge_cache_total",
            "Lookups in the cache of judgments, by result.", &["route", "part", "result"]),
        tokens: IntCounterVec("hone_reward_judge_tokens_total",
            "Tokens that judges read and wrote, by kind.", &["route", "part", "kind"]),
        cost: CounterVec("hone_reward_judge_cost_total",
            "Cost of judges' tokens, in the currency of the configured prices.",
            &["route", "part"]),
    }
    with {
        /// Calls to judges.
        pub calls: CallMetrics = judge_calls,
    }
}

pub(super) fn webhook_calls(registry: &mut MetricRegistry) -> Result<CallMetrics> {
    Ok(CallMetrics {
        requests: registry.add(new_metric!(
            IntCounterVec,
            "hone_reward_webhook_requests_total",
            "Requests to reward webhooks, retries included, by outcome.",
            &["route", "part", "outcome"]
        ))?,
        duration: registry.add(new_metric!(
            HistogramVec,
            "hone_reward_webhook_duration_seconds",
            "Time of one request to a reward webhook.",
            REQUEST,
            &["route", "part"]
        ))?,
        circuit_open: registry.add(new_metric!(
            IntGaugeVec,
            "hone_reward_webhook_circuit_open",
            "1 while a reward webhook is not called because it kept failing, else 0.",
            &["route", "part"]
        ))?,
        missing: registry.add(new_metric!(
            IntCounterVec,
            "hone_reward_webhook_missing_total",
            "Samples that a reward webhook did not score, by reason.",
            &["route", "part", "reason"]
        ))?,
    })
}

fn judge_calls(registry: &mut MetricRegistry) -> Result<CallMetrics> {
    Ok(CallMetrics {
        requests: registry.add(new_metric!(
            IntCounterVec,
            "hone_reward_judge_requests_total",
            "Requests to judges, retries included, by outcome.",
            &["route", "part", "outcome"]
        ))?,
        duration: registry.add(new_metric!(
            HistogramVec,
            "hone_reward_judge_duration_seconds",
            "Time of one request to a judge.",
            REQUEST,
            &["route", "part"]
        ))?,
        circuit_open: registry.add(new_metric!(
            IntGaugeVec,
            "hone_reward_judge_circuit_open",
            "1 while a judge is not called because it kept failing, else 0.",
            &["route", "part"]
        ))?,
        missing: registry.add(new_metric!(
            IntCounterVec,
            "hone_reward_judge_missing_total",
            "Samples that a judge did not score, by reason.",
            &["route", "part", "reason"]
        ))?,
    })
}
