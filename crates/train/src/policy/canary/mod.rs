//! The canary: a share of the live traffic gets a candidate until its ratings decide.
//!
//! Requests are assigned by a hash of their session or user, so that one user meets one version.
//! Clients' ratings of both versions, scaled to their part's range, feed a sequential test that remains
//! valid although it is evaluated after every rating ([`sequential`]). The first
//! share is small, so that a bad version reaches few users; the last one is large, because a test
//! between equally large groups decides with the fewest ratings.

mod evidence;
mod key_shares;
mod rating;
mod sequential;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use hone_core::digest::Digest;
use hone_core::metrics::Metrics;
use hone_core::types::{PolicyCheck, PolicyVersion, UnixMillis};

use super::config::CanaryConfig;
use evidence::CanaryEvidence;

pub(super) use key_shares::KeyShares;
pub use rating::VersionRating;
pub(super) use sequential::{CanaryVerdict, SequentialTest};

/// How often a canary without new ratings looks at its time limit.
const TICK: Duration = Duration::from_millis(200);

/// The canary in progress, if there is one.
pub(super) struct Canary {
    config: CanaryConfig,
    metrics: Arc<Metrics>,
    running: Mutex<Option<CanaryEvidence>>,
    changed: Notify,
}

impl Canary {
    pub fn new(config: &CanaryConfig, metrics: Arc<Metrics>) -> Self {
        Self { config: config.clone(), metrics, running: Mutex::default(), changed: Notify::new() }
    }

    fn running(&self) -> MutexGuard<'_, Option<CanaryEvidence>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a share of the traffic until the decision. `created` is when the version was.
    pub async fn run(
        &self,
        version: PolicyVersion,
        control: PolicyVersion,
        created: UnixMillis,
    ) -> PolicyCheck {
        tracing::info!(%version, %control, "canary begins");
        *self.running() = Some(CanaryEvidence::new(&self.config, version, control, created));
        loop {
            let decision = self.running().as_mut().and_then(|evidence| {
                let decision = evidence.decide(&self.config);
                evidence.report(&self.config, &self.metrics);
                decision
            });
            if let Some(check) = decision {
                tracing::info!(%version, promoted = check.passed, detail = check.detail, "canary ends");
                let outcome = if check.passed { "promoted" } else { "rolled_back" };
                self.metrics.policy_canaries.with_label_values(&[outcome]).inc();
                return check;
            }
            let _tick = tokio::time::timeout(TICK, self.changed.notified()).await;
        }
    }

    /// Ends the canary: all requests get the active version.
    pub fn end(&self) {
        *self.running() = None;
        self.metrics.policy_canary_share.set(0.0);
    }
}

impl Canary {
    /// The version of the canary in progress.
    pub fn version(&self) -> Option<PolicyVersion> {
        self.running().as_ref().map(|evidence| evidence.version)
    }

    /// The version that a request with this key must get; `None` is the active one. Requests with the
    /// same key get the same version throughout a canary, except that further keys join when its share
    /// rises.
    pub fn assign(&self, key: &str) -> Option<PolicyVersion> {
        let running = self.running();
        let evidence = running.as_ref()?;
        let digest = Digest::new().bytes(evidence.version.0.to_le_bytes()).field(key).prefix();
        #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 52 bits")]
        let place = u64::from_le_bytes(digest) as f64 / u64::MAX as f64;
        (place < evidence.share(&self.config)).then_some(evidence.version)
    }

    /// Adds a client's rating to the evidence of a canary in progress.
    pub fn rate(&self, rating: &VersionRating) {
        if let Some(evidence) = self.running().as_mut() {
            evidence.rate(&self.config, rating);
        }
        self.changed.notify_one();
    }

    /// Adds the end of a request to the evidence of a canary in progress: whether a version failed to
    /// answer it.
    pub fn answered(&self, version: PolicyVersion, failed: bool) {
        if let Some(evidence) = self.running().as_mut() {
            evidence.answered(version, failed);
        }
        if failed {
            self.changed.notify_one();
        }
    }
}
