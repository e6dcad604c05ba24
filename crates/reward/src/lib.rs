//! Named, weighted parts of a sample's reward, and the routes that choose them.
//!
//! [`Routes`] is built once from the configuration. A [`Route`] has parts: graders
//! ([`RewardFn`]) that score any completion, and feedback parts whose values clients post.
//!
//! Invariants: a part that cannot be scored is `None`, never zero; a value is always finite; a
//! grader that panics loses its own values only.

mod adaptive;
pub mod catalogue;
pub mod code;
pub mod config;
pub mod grader;
pub mod judge;
pub mod library;
pub mod raters;
mod registry;
mod remote;
pub mod sandbox;
pub mod script;
mod stats;
pub mod text;
pub mod tools;
pub mod webhook;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, TokenId};

pub use adaptive::{AdaptiveState, AdaptiveWeight};
pub use catalogue::{KindEntry, catalogue};
pub use registry::{Part, RewardError, Route, Routes};
pub use remote::CallError;
pub use stats::{PartStats, PartSummary};
pub use tools::{GraderEndpoint, LazySandbox, Tools};

/// What a reward function may look at.
#[derive(Clone, Debug)]
pub struct ScoreInput {
    /// The conversation that was asked.
    pub messages: Arc<Vec<Message>>,
    /// The request's `metadata` or the dataset's columns.
    pub metadata: Arc<BTreeMap<String, String>>,
    /// The completion's text.
    pub text: String,
    /// The completion's ids.
    pub ids: Vec<TokenId>,
}

/// One part of the reward.
#[async_trait]
pub trait RewardFn: Send + Sync {
    /// Scores each sample of a batch (usually one group); `None` where it cannot say.
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>>;
}

/// Counts the values of one part, missing ones apart: the one place that feeds
/// `hone_reward_value` and `hone_reward_missing_total`. `route` and `part` must come from the
/// configuration, so that labels stay bounded.
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
