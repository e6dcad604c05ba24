//! The interface of functions that score completions.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt;

use hone_core::config::Checked;
use hone_core::metrics::Metrics;
use hone_core::types::{Message, Role, TokenId};

/// A completion to score, with its context.
#[derive(Clone, Debug)]
pub struct ScoreInput {
    /// The conversation that the completion answers.
    pub messages: Arc<Vec<Message>>,
    /// The request's `metadata` or the dataset row's columns: references come from here.
    pub metadata: Arc<BTreeMap<String, String>>,
    /// The completion's text.
    pub text: String,
    /// The completion's token ids, including the stop token.
    pub ids: Vec<TokenId>,
}

impl ScoreInput {
    /// The last user message.
    pub(crate) fn prompt(&self) -> Option<&str> {
        let message = self.messages.iter().rfind(|message| message.role == Role::User);
        message.map(|message| message.content.as_str())
    }
}

/// A function that scores completions.
#[async_trait]
pub trait RewardFn: Send + Sync {
    /// Returns one value per sample, in order; `None` for a sample that cannot be scored.
    ///
    /// The samples of one call are one group: all completions of one prompt that are scored
    /// together, with equal `messages` and `metadata`. So a value may depend on the other samples,
    /// as that of a judge that compares them. In training the group may contain a completion that
    /// was served, with its own temperature; in an evaluation it has `run.eval_samples` members.
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>>;

    /// Finds errors in the configuration that only running something shows, such as a syntax error
    /// in Python. It is called once, before the first use.
    /// Errors: the parameter with the error, its key relative to the part.
    async fn probe(&self) -> Checked {
        Ok(())
    }
}

/// 1 for true, 0 for false.
pub(crate) fn indicator(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

/// Runs a function and returns as many values as samples, all finite. A function that panics, or
/// that returns NaN or too few values, leaves `None` in their places. `route` and `part` are for
/// the log.
pub(crate) async fn score_guarded(
    function: &dyn RewardFn,
    samples: &[ScoreInput],
    route: &str,
    part: &str,
) -> Vec<Option<f64>> {
    let scored = AssertUnwindSafe(async { function.score(samples).await }).catch_unwind().await;
    let mut values = scored.unwrap_or_else(|_| {
        tracing::error!(route, part, "a grader panicked; its values are missing");
        Vec::new()
    });
    values.resize(samples.len(), None);
    values.into_iter().map(|value| value.filter(|v| v.is_finite())).collect()
}

/// Counts a part's values in `hone_reward_value` and its missing ones in
/// `hone_reward_missing_total`. `route` and `part` must come from the configuration, so that the
/// labels stay bounded.
pub fn record(
    metrics: &Metrics,
    route: &str,
    part: &str,
    values: impl IntoIterator<Item = Option<f64>>,
) {
    for value in values {
        match value {
            Some(value) => metrics.reward_value.with_label_values(&[route, part]).observe(value),
            None => metrics.reward_missing.with_label_values(&[route, part]).inc(),
        }
    }
}
