//! Metrics of rewards that other services give.

use prometheus::{CounterVec, HistogramVec, IntCounterVec, IntGaugeVec};

use super::REQUEST;
use crate::metrics::registry::Maker;

/// What is counted of calls to one kind of service. Cheap to clone.
#[derive(Clone)]
#[expect(missing_docs, reason = "the help texts below are the documentation")]
pub struct CallMetrics {
    pub requests: IntCounterVec,
    pub duration: HistogramVec,
    pub circuit_open: IntGaugeVec,
    pub missing: IntCounterVec,
}

/// What is counted of judges beside their calls.
#[expect(missing_docs, reason = "the help texts below are the documentation")]
pub struct JudgeMetrics {
    pub calls: CallMetrics,
    pub cache: IntCounterVec,
    pub tokens: IntCounterVec,
    pub cost: CounterVec,
}

const PART: &[&str] = &["route", "part"];

pub(super) fn webhook(m: &mut Maker) -> Option<CallMetrics> {
    Some(CallMetrics {
        requests: m.counters(
            "hone_reward_webhook_requests_total",
            "Requests to reward webhooks, retries included, by outcome.",
            &["route", "part", "outcome"],
        )?,
        duration: m.histograms(
            "hone_reward_webhook_duration_seconds",
            "Time of one request to a reward webhook.",
            REQUEST,
            PART,
        )?,
        circuit_open: m.int_gauges(
            "hone_reward_webhook_circuit_open",
            "1 while a reward webhook is not asked because it kept failing, else 0.",
            PART,
        )?,
        missing: m.counters(
            "hone_reward_webhook_missing_total",
            "Samples that a reward webhook gave no value, by reason.",
            &["route", "part", "reason"],
        )?,
    })
}

pub(super) fn judge(m: &mut Maker) -> Option<JudgeMetrics> {
    let calls = CallMetrics {
        requests: m.counters(
            "hone_reward_judge_requests_total",
            "Questions to judges, retries included, by outcome.",
            &["route", "part", "outcome"],
        )?,
        duration: m.histograms(
            "hone_reward_judge_duration_seconds",
            "Time of one question to a judge.",
            REQUEST,
            PART,
        )?,
        circuit_open: m.int_gauges(
            "hone_reward_judge_circuit_open",
            "1 while a judge is not asked because it kept failing, else 0.",
            PART,
        )?,
        missing: m.counters(
            "hone_reward_judge_missing_total",
            "Judgements that could not be had, by reason.",
            &["route", "part", "reason"],
        )?,
    };
    Some(JudgeMetrics {
        calls,
        cache: m.counters(
            "hone_reward_judge_cache_total",
            "Judgements looked up in the cache, by result.",
            &["route", "part", "result"],
        )?,
        tokens: m.counters(
            "hone_reward_judge_tokens_total",
            "Tokens that judges read and wrote, by kind.",
            &["route", "part", "kind"],
        )?,
        cost: m.float_counters(
            "hone_reward_judge_cost_total",
            "Cost of judges' tokens, in the currency of the configured prices.",
            PART,
        )?,
    })
}
