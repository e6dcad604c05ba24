//! Live traffic during a canary.

use hone_core::types::PolicyVersion;

use super::canary::VersionRating;
use super::registry::Policies;

impl Policies {
    /// The version of the canary in progress.
    pub fn canary(&self) -> Option<PolicyVersion> {
        self.canary.version()
    }

    /// The version that a request with this key must get; `None` is the active one. Requests with the
    /// same key get the same version throughout a canary, except that further keys join when its share
    /// rises.
    pub fn assign(&self, key: &str) -> Option<PolicyVersion> {
        self.canary.assign(key)
    }

    /// Adds a client's rating to the evidence of a canary in progress.
    pub fn rate(&self, rating: &VersionRating) {
        self.canary.rate(rating);
    }

    /// Adds the end of a request to the evidence of a canary in progress: whether a version failed to
    /// answer it.
    pub fn answered(&self, version: PolicyVersion, failed: bool) {
        self.canary.answered(version, failed);
    }
}
