//! The keys of `[policy]`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::range::{above, between};

/// When versions are published, and how many keep their files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    /// Optimizer steps between published versions.
    pub publish_every: u64,
    /// Newest adapter directories to keep. The active and the previous version always keep theirs,
    /// and so do ancestors of the active version at exponentially growing distances.
    pub keep_versions: usize,
    /// Seconds for which training pauses after an operator activated a version; 0 until it is
    /// resumed. Otherwise the next step would undo the activation.
    pub hold_seconds: u64,
    /// Mean absolute difference, in nats, of served and trained log-probabilities above which a
    /// version is rejected.
    pub parity_tolerance: f64,
    /// Tokens that the parity probe samples.
    pub probe_tokens: u32,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            publish_every: 1,
            keep_versions: 20,
            hold_seconds: 0,
            parity_tolerance: 1e-3,
            probe_tokens: 16,
        }
    }
}

impl PolicyConfig {
    /// The pause of training after an activation; `None` until it is resumed.
    pub fn hold(&self) -> Option<Duration> {
        (self.hold_seconds > 0).then(|| Duration::from_secs(self.hold_seconds))
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("policy.publish_every", self.publish_every, 1, u64::MAX)?;
        between("policy.keep_versions", self.keep_versions, 2, 1 << 20)?;
        between("policy.hold_seconds", self.hold_seconds, 0, 1 << 32)?;
        above("policy.parity_tolerance", self.parity_tolerance, 0.0)?;
        between("policy.probe_tokens", self.probe_tokens, 1, 4096)
    }
}
