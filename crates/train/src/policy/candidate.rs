//! New weights before their publication, and its outcome.

use std::path::Path;

use hone_core::types::{PolicyRecord, TokenId};
use hone_model::kernels::compute::Compute;

use crate::error::Result;

/// The policy that scores tokens.
#[derive(Clone, Copy, Debug)]
pub enum ScoredBy<'a> {
    /// The new weights.
    Candidate,
    /// The base model.
    Base,
    /// The adapter in a PEFT directory.
    Adapter(&'a Path),
}

/// Weights that [`Policies::publish`](super::Policies::publish) can make a version of.
pub trait Candidate: Send + Sync {
    /// Writes `adapter_config.json` and `adapter_model.safetensors` into an existing directory.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn write(&self, dir: &Path) -> Result<()>;

    /// The arithmetic of [`Self::score`], which decides how far an engine's log-probabilities may differ.
    fn compute(&self) -> Compute {
        Compute::F32
    }

    /// Natural-log probabilities of `ids` after `prompt_ids` under a policy at `temperature`, one for
    /// each of `ids`. Blocks while it computes.
    ///
    /// # Errors
    /// If the forward pass fails or the adapter cannot be read.
    fn score(
        &self,
        policy: ScoredBy<'_>,
        prompt_ids: &[TokenId],
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>>;
}

/// Result of a publication that did not fail.
#[derive(Clone, Debug)]
pub enum PublishOutcome {
    /// New requests get the version.
    Published(PolicyRecord),
    /// A check failed, or the canary was rolled back; `checks` and `reason` in its record explain why.
    Rejected(PolicyRecord),
    /// Another version than the candidate's parent is active.
    Superseded,
    /// The process ends during the canary, which the next start continues.
    Suspended,
}
