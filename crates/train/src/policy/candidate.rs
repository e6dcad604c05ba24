//! New weights before their publication, and its outcome.

use std::path::Path;

use hone_core::types::{PolicyRecord, TokenId};

use crate::error::Result;

/// Weights that [`Policies::publish`](super::Policies::publish) can make a version of.
pub trait Candidate {
    /// Writes `adapter_config.json` and `adapter_model.safetensors` into an existing directory.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn write(&self, dir: &Path) -> Result<()>;

    /// Natural-log probabilities of `ids` after `prompt_ids` under these weights at `temperature`,
    /// one for each of `ids`.
    ///
    /// # Errors
    /// If the forward pass fails.
    fn score(&self, prompt_ids: &[TokenId], ids: &[TokenId], temperature: f32) -> Result<Vec<f32>>;
}

/// Result of a publication that did not fail.
#[derive(Clone, Debug)]
pub enum PublishOutcome {
    /// New requests get the version.
    Published(PolicyRecord),
    /// The parity gate rejected the version; `reason` in its record has the difference.
    Rejected(PolicyRecord),
    /// Another version than the candidate's parent is active, so nothing was written.
    Superseded,
}
