//! What judges cost and save: each event's log line and metric together.

use std::sync::Arc;

use hone_core::metrics::Metrics;

use super::JudgeReply;
use super::params::JudgeParams;
use crate::remote::Events;

/// Counts for one part.
pub(super) struct JudgeCost {
    calls: Arc<Events>,
    metrics: Arc<Metrics>,
    /// Prices of one token.
    prompt_price: f64,
    completion_price: f64,
}

impl JudgeCost {
    pub(super) fn new(
        params: &JudgeParams,
        route: &str,
        part: &str,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let calls = metrics.reward_judge.calls.clone();
        Self {
            calls: Arc::new(Events::new("judge", route, part, calls)),
            metrics: Arc::clone(metrics),
            prompt_price: params.prompt_price / 1e6,
            completion_price: params.completion_price / 1e6,
        }
    }

    pub(super) fn calls(&self) -> Arc<Events> {
        Arc::clone(&self.calls)
    }

    /// A judgement was looked up.
    pub(super) fn cached(&self, hit: bool) {
        let labels = [self.calls.route(), self.calls.part(), if hit { "hit" } else { "miss" }];
        self.metrics.reward_judge.cache.with_label_values(&labels).inc();
    }

    /// A judge answered.
    pub(super) fn used(&self, reply: &JudgeReply) {
        let (route, part) = (self.calls.route(), self.calls.part());
        let JudgeReply { prompt_tokens, completion_tokens, .. } = *reply;
        let tokens = &self.metrics.reward_judge.tokens;
        tokens.with_label_values(&[route, part, "prompt"]).inc_by(prompt_tokens);
        tokens.with_label_values(&[route, part, "completion"]).inc_by(completion_tokens);
        let cost = prompt_tokens as f64 * self.prompt_price
            + completion_tokens as f64 * self.completion_price;
        self.metrics.reward_judge.cost.with_label_values(&[route, part]).inc_by(cost);
        tracing::debug!(route, part, prompt_tokens, completion_tokens, cost, "a judge answered");
    }

    /// Judgements that could not be had.
    pub(super) fn missing(&self, reason: &'static str, count: usize, detail: &str) {
        // A judge may answer at length.
        let detail: String = detail.chars().take(200).collect();
        self.calls.missing(reason, count, &detail);
    }
}
