//! A part that learns users' taste: the trainer predicts their ratings of completions that no user saw.

use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::RwLock;

use hone_core::types::TokenId;

use crate::kinds::prelude::*;
use crate::{RewardFn, ScoreInput};

define_kind! {
    pub struct LearnedParams {
        /// The feedback part of the route whose values it predicts.
        pub of: String,
        /// Standard deviations of the prediction by which a value is below its mean.
        pub pessimism: f64 = 1.0 => at_least(0.0),
    }
    kind: "learned",
    range: "that of the feedback part",
    typical_weight: "0.5 to 1.0",
    example: "of = \"feedback\"",
    bounds: [f64::NEG_INFINITY, f64::INFINITY],
    calls_out: true,
    formula: "the expected value of the feedback part (of), less pessimism times its standard deviation, in steps of a \
              fifth of the part's range; missing while it predicts ratings badly",
}

impl Kind for LearnedParams {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        Ok(Some(Arc::new(LearnedPart::new(self.clone()))))
    }
}

/// What scores completions by their tokens. It may take as long as a forward pass of the model.
pub trait TokenScorer: Send + Sync {
    /// One value per completion of a prompt, in order; `None` for one that cannot be scored.
    fn score(&self, prompt: &[TokenId], completions: &[Vec<TokenId>]) -> Vec<Option<f64>>;
}

/// A learned part. The trainer sets its scorer while it predicts ratings well, and removes it otherwise.
pub struct LearnedPart {
    params: LearnedParams,
    scorer: RwLock<Option<Arc<dyn TokenScorer>>>,
}

impl LearnedPart {
    pub(crate) fn new(params: LearnedParams) -> Self {
        Self { params, scorer: RwLock::default() }
    }

    /// Its parameters.
    pub fn params(&self) -> &LearnedParams {
        &self.params
    }

    /// Replaces the scorer; without one, all values are missing.
    pub fn set_scorer(&self, scorer: Option<Arc<dyn TokenScorer>>) {
        *self.scorer.write() = scorer;
    }

    /// Whether it has a scorer.
    pub fn is_ready(&self) -> bool {
        self.scorer.read().is_some()
    }

    /// One value per completion of a prompt, in order, computed on a thread of its own.
    pub(crate) async fn score_tokens(
        &self,
        prompt: &[TokenId],
        samples: &[ScoreInput],
    ) -> Vec<Option<f64>> {
        let Some(scorer) = self.scorer.read().clone() else { return vec![None; samples.len()] };
        let prompt = prompt.to_vec();
        let completions: Vec<_> = samples.iter().map(|sample| sample.ids.clone()).collect();
        let score = move || scorer.score(&prompt, &completions);
        tokio::task::spawn_blocking(score).await.unwrap_or_default()
    }
}

/// Without the prompt's tokens nothing can be predicted: exams and tests of rewards leave the part out.
#[async_trait]
impl RewardFn for LearnedPart {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        vec![None; samples.len()]
    }
}
