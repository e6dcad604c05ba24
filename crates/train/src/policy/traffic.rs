//! Live traffic: which version a request gets, and what its ratings and failures decide.

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

    /// Adds a client's rating to the evidence of a canary in progress, and to that of the rules that roll
    /// the active version back.
    pub fn rate(&self, rating: &VersionRating) {
        self.canary.rate(rating);
        self.guard.rate(self.active(), rating);
    }

    /// Adds the end of a request to the same evidence: whether a version failed to answer it.
    pub fn answered(&self, version: PolicyVersion, failed: bool) {
        self.canary.answered(version, failed);
        self.guard.answered(self.active(), version, failed);
    }

    /// Rolls the active version back whenever `policy.rollback` finds it worse. Runs until the process
    /// ends.
    pub async fn enforce(&self) {
        loop {
            let (version, reason) = self.guard.finding().await;
            tracing::error!(%version, reason, "the active version is rolled back");
            if let Err(error) = self.withdraw(version, &reason).await {
                tracing::error!(%version, %error, "the version cannot be rolled back");
            }
        }
    }
}
