//! Rules that roll the active version back: its ratings fall, or its requests fail.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use hone_core::types::PolicyVersion;

use super::canary::{
    CanaryVerdict, KeyShares, RatingSum, RequestCounts, SequentialTest, VersionRating,
};
use super::config::RollbackConfig;

/// A value that the expected rating exceeds with probability `1 - alpha` (Hoeffding 1963).
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn lower_bound(ratings: RatingSum, alpha: f64) -> f64 {
    ratings.mean() - (-alpha.ln() / (2.0 * ratings.count.max(1) as f64)).sqrt()
}

/// What is known about one version while it is active.
#[derive(Clone, Debug, Default)]
struct ServedRecord {
    /// By route and part.
    ratings: BTreeMap<(String, String), RatingSum>,
    requests: RequestCounts,
}

impl ServedRecord {
    fn rated(&self) -> u64 {
        self.ratings.values().map(|sum| sum.count).sum()
    }
}

struct GuardState {
    active: PolicyVersion,
    own: ServedRecord,
    /// The ratings of each API key, and which of them count.
    shares: KeyShares<SequentialTest>,
    /// The last version before the active one with enough ratings or requests.
    reference: ServedRecord,
    test: SequentialTest,
    /// Why the active version must be rolled back.
    finding: Option<String>,
}

/// Compares the active version with the one before it. Their ratings are of different times, unlike a canary's,
/// so a change of taste looks like a worse version: the bounds are wider, and the rules are off by default.
pub(super) struct ActiveGuard {
    config: RollbackConfig,
    state: Mutex<GuardState>,
    changed: Notify,
}

impl ActiveGuard {
    pub fn new(config: &RollbackConfig) -> Self {
        let state = GuardState {
            active: PolicyVersion::BASE,
            own: ServedRecord::default(),
            shares: KeyShares::default(),
            reference: ServedRecord::default(),
            test: SequentialTest::only_worse(config.alpha),
            finding: None,
        };
        Self { config: config.clone(), state: Mutex::new(state), changed: Notify::new() }
    }

    /// Adds a rating. Only those of the active version count.
    pub fn rate(&self, active: PolicyVersion, rating: &VersionRating) {
        let mut state = self.state.lock();
        state.follow(active, &self.config);
        if rating.version != active || self.config.rating_drop <= 0.0 {
            return;
        }
        let observation =
            |state: &GuardState, rating: &VersionRating| state.observation(&self.config, rating);
        let own = observation(&state, rating);
        let counting = state.shares.add(
            rating,
            || SequentialTest::only_worse(self.config.alpha),
            |test| own.into_iter().for_each(|value| test.observe(value)),
        );
        for rating in &counting {
            let key = (rating.route.clone(), rating.part.clone());
            state.own.ratings.entry(key).or_default().push(rating.value);
            if let Some(value) = observation(&state, rating) {
                state.test.observe(value);
            }
        }
        // Against the ratings of all other keys, it would be the finding of one key.
        let others = state.shares.of_the_others(SequentialTest::evidence_worse);
        if state.test.verdict() == CanaryVerdict::Worse && others >= 0.0 && state.finding.is_none()
        {
            let change = 2.0 * state.test.mean().unwrap_or_default() - self.config.rating_drop;
            state.finding = Some(format!(
                "the ratings changed by {change:+.3} of their range, more than \
                 policy.rollback.rating_drop {}",
                self.config.rating_drop
            ));
            self.changed.notify_one();
        }
    }

    /// Adds the end of a request.
    pub fn answered(&self, active: PolicyVersion, version: PolicyVersion, failed: bool) {
        let mut state = self.state.lock();
        state.follow(active, &self.config);
        if version != active || self.config.error_rise <= 0.0 {
            return;
        }
        state.own.requests.add(failed);
        let (own, before) = (state.own.requests, state.reference.requests);
        if own.fails_more(before, self.config.error_rise) && state.finding.is_none() {
            state.finding = Some(format!(
                "{} of {} requests failed, more than policy.rollback.error_rise {} above the version \
                 before",
                own.failures, own.requests, self.config.error_rise
            ));
            self.changed.notify_one();
        }
    }

    /// Waits for a finding; returns the version and the reason.
    pub async fn finding(&self) -> (PolicyVersion, String) {
        loop {
            let found = {
                let mut state = self.state.lock();
                let active = state.active;
                state.finding.take().map(|finding| (active, finding))
            };
            if let Some(found) = found {
                return found;
            }
            self.changed.notified().await;
        }
    }
}

impl GuardState {
    /// How much better a rating is than the reference permits, halved to -1 to 1; `None` without enough to
    /// compare.
    fn observation(&self, config: &RollbackConfig, rating: &VersionRating) -> Option<f64> {
        let key = (rating.route.clone(), rating.part.clone());
        let reference = self.reference.ratings.get(&key)?;
        let before = lower_bound(*reference, config.alpha);
        (reference.count >= config.min_ratings)
            .then(|| (rating.value - before + config.rating_drop) / 2.0)
    }

    /// Begins with a new active version. The one before becomes the reference if enough is known of it.
    fn follow(&mut self, active: PolicyVersion, config: &RollbackConfig) {
        if self.active == active {
            return;
        }
        let own = std::mem::take(&mut self.own);
        if own.rated() >= config.min_ratings || own.requests.requests >= config.min_ratings {
            self.reference = own;
        }
        self.active = active;
        self.shares = KeyShares::default();
        self.test = SequentialTest::only_worse(config.alpha);
        self.finding = None;
    }
}

#[cfg(test)]
mod tests {
    use hone_core::types::SampleId;

    use super::*;

    fn guard() -> ActiveGuard {
        ActiveGuard::new(&RollbackConfig {
            rating_drop: 0.2,
            error_rise: 0.1,
            ..RollbackConfig::default()
        })
    }

    fn rate(guard: &ActiveGuard, version: u64, value: f64, count: u64) {
        rate_by(guard, None, version, value, count);
    }

    fn rate_by(guard: &ActiveGuard, key: Option<&str>, version: u64, value: f64, count: u64) {
        for _ in 0..count {
            let version = PolicyVersion(version);
            let rating = VersionRating {
                version,
                sample: SampleId::new(),
                sampled: 0,
                route: "chat".to_owned(),
                part: "thumbs".to_owned(),
                value,
                key: key.map(str::to_owned),
                max_key_share: 1.0,
                keys: 2,
            };
            guard.rate(version, &rating);
        }
    }

    fn found(guard: &ActiveGuard) -> Option<String> {
        guard.state.lock().finding.clone()
    }

    #[test]
    fn falling_ratings_are_a_finding() {
        let guard = guard();
        rate(&guard, 1, 0.9, 400);
        rate(&guard, 2, 0.8, 500);
        assert_eq!(found(&guard), None, "within the bound");
        rate(&guard, 3, 0.2, 200);
        let finding = found(&guard).unwrap();
        assert!(finding.contains("rating_drop 0.2"), "{finding}");
        // Another version begins without it.
        rate(&guard, 4, 0.8, 1);
        assert_eq!(found(&guard), None);
        // The mean of few ratings says little about the version before.
        let uncertain = self::guard();
        rate(&uncertain, 1, 0.9, 30);
        rate(&uncertain, 2, 0.5, 500);
        assert_eq!(found(&uncertain), None);
    }

    #[test]
    fn one_key_does_not_roll_back_against_another() {
        let guard = guard();
        rate_by(&guard, Some("b"), 1, 1.0, 400);
        for _ in 0..40 {
            rate_by(&guard, Some("b"), 2, 1.0, 1);
            rate_by(&guard, Some("a"), 2, 0.0, 10);
        }
        assert_eq!(found(&guard), None);
        rate_by(&guard, Some("b"), 2, 0.0, 100);
        assert!(found(&guard).is_some(), "now both keys find it worse");
    }

    #[test]
    fn a_version_with_few_ratings_is_no_reference() {
        let guard = guard();
        rate(&guard, 1, 0.9, 400);
        rate(&guard, 2, 0.1, 5);
        rate(&guard, 3, 0.2, 200);
        assert!(found(&guard).is_some(), "version 1 is still the reference");
        let first = self::guard();
        rate(&first, 1, 0.1, 500);
        assert_eq!(found(&first), None, "nothing to compare with");
    }

    #[test]
    fn failed_requests_are_a_finding() {
        let guard = guard();
        let (one, two) = (PolicyVersion(1), PolicyVersion(2));
        (0..100).for_each(|n| guard.answered(one, one, n == 3));
        assert_eq!(found(&guard), None);
        (0..20).for_each(|n| guard.answered(two, two, n % 5 == 0));
        assert!(found(&guard).unwrap().contains("requests failed"));
    }
}
