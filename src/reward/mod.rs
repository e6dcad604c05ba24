//! Named, weighted parts of a sample's reward, and the routes that choose them.
//!
//! Invariant: a part that cannot be scored is `None`, never zero.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::types::{Message, TokenId};

pub mod builtin;
mod registry;

pub use registry::{Part, RewardError, Route, Routes, builtin_kinds};

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
