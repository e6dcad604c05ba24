//! A sequence from its admission to its end.

use std::sync::Arc;

use hone_core::threads::pause_point;
use hone_engine::run::{CancelFlag, GenerationRun};
use hone_engine::sampling::TokenSampler;
use hone_engine::{EngineError, Priority};

use crate::engine::adapters::PolicyWeights;
use crate::kv_cache::SequencePages;

/// A sequence that computes its prompt or decodes.
pub(super) struct EngineSequence {
    pub policy: PolicyWeights,
    pub pages: SequencePages,
    pub sampler: TokenSampler,
    pub run: GenerationRun,
    pub priority: Priority,
    pub cancel: Arc<CancelFlag>,
    /// Sequences that were admitted before it.
    pub order: u64,
    /// Whether it leaves the engine before the next step.
    pub finished: bool,
}

impl EngineSequence {
    pub fn is_live(&self) -> bool {
        self.priority == Priority::Live
    }

    pub fn is_over(&self) -> bool {
        self.finished || self.run.is_over()
    }

    pub fn same_weights(&self, other: &Self) -> bool {
        self.policy.id == other.policy.id
    }

    /// Whether one pass can compute it with sequences of other weights that share passes. Only a broken adapter
    /// does not.
    pub fn shares_passes(&self) -> bool {
        self.policy.adapter.as_ref().is_none_or(|adapter| adapter.is_finite)
    }

    /// Samples and reports the next token.
    pub fn sample(&mut self, logits: &[f32]) {
        if self.run.is_over() {
            self.finished = true;
            return;
        }
        pause_point();
        match self.sampler.draw(logits) {
            Ok(drawn) => {
                self.pages.push(drawn.id);
                self.finished = self.run.push(drawn);
            }
            Err(error) => self.fail(error.into()),
        }
    }

    pub fn fail(&mut self, error: EngineError) {
        self.run.fail(error);
        self.finished = true;
    }
}
