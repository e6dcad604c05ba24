//! Logs and counts judges' calls, tokens, costs and cache lookups.

use std::sync::Arc;

use hone_core::metrics::Metrics;

use super::model::JudgeReply;
use super::params::JudgeParams;
use crate::remote::CallEvents;

/// Logs and counts the events of one part.
pub(super) struct JudgeEvents {
    pub(super) calls: Arc<CallEvents>,
    metrics: Arc<Metrics>,
    /// Price of a prompt token.
    prompt_price: f64,
    /// Price of a completion token.
    completion_price: f64,
}

impl JudgeEvents {
    pub(super) fn new(
        params: &JudgeParams,
        route: &str,
        part: &str,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let calls = metrics.reward_judge.calls.clone();
        Self {
            calls: Arc::new(CallEvents::new("judge", route, part, calls)),
            metrics: Arc::clone(metrics),
            prompt_price: params.prompt_price / 1e6,
            completion_price: params.completion_price / 1e6,
        }
    }

    /// A judgement was looked up in the cache.
    pub(super) fn cache_lookup(&self, hit: bool) {
        let labels =
            [self.calls.route.as_str(), &self.calls.part, if hit { "hit" } else { "miss" }];
        self.metrics.reward_judge.cache.with_label_values(&labels).inc();
    }

    /// A judge answered.
    pub(super) fn answered(&self, reply: &JudgeReply) {
        let (route, part) = (self.calls.route.as_str(), self.calls.part.as_str());
        let JudgeReply { prompt_tokens, completion_tokens, .. } = *reply;
        let tokens = &self.metrics.reward_judge.tokens;
        tokens.with_label_values(&[route, part, "prompt"]).inc_by(prompt_tokens);
        tokens.with_label_values(&[route, part, "completion"]).inc_by(completion_tokens);
        let cost = prompt_tokens as f64 * self.prompt_price
            + completion_tokens as f64 * self.completion_price;
        self.metrics.reward_judge.cost.with_label_values(&[route, part]).inc_by(cost);
        tracing::debug!(route, part, prompt_tokens, completion_tokens, cost, "a judge answered");
    }

    /// `count` judgements are missing for one reason.
    pub(super) fn missing(&self, reason: &'static str, count: usize, detail: &str) {
        // The detail may be a judge's whole answer.
        let detail: String = detail.chars().take(200).collect();
        self.calls.missing(reason, count, &detail);
    }
}
