//! The keys of `[policy]`.

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::range::{above, between};

/// When versions are published, and how many keep their files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    /// Optimizer steps between published versions.
    pub publish_every: u64,
    /// Adapter directories to keep. The active and the previous version always keep theirs.
    pub keep_versions: usize,
    /// Mean absolute difference, in nats, of served and trained log-probabilities above which a
    /// version is rejected.
    pub parity_tolerance: f64,
    /// Tokens that the parity probe samples.
    pub probe_tokens: u32,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self { publish_every: 1, keep_versions: 20, parity_tolerance: 1e-3, probe_tokens: 16 }
    }
}

impl PolicyConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("policy.publish_every", self.publish_every, 1, u64::MAX)?;
        between("policy.keep_versions", self.keep_versions, 2, 1 << 20)?;
        above("policy.parity_tolerance", self.parity_tolerance, 0.0)?;
        between("policy.probe_tokens", self.probe_tokens, 1, 4096)
    }
}
