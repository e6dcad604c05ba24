//! The evidence for and against a canary.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyCheck, PolicyVersion, SampleId, UnixMillis, now_ms};

use super::rating::VersionRating;
use super::sequential::{CanaryVerdict, PairedArms, SequentialTest};
use crate::policy::config::{CanaryConfig, CanaryLimit};

/// Failed requests of a canary below which they may be a coincidence.
const MIN_FAILURES: u64 = 3;

/// Requests and ratings of one version.
#[derive(Clone, Copy, Debug, Default)]
struct ArmCounts {
    ratings: u64,
    requests: u64,
    failures: u64,
}

impl ArmCounts {
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    fn failed_share(self) -> f64 {
        self.failures as f64 / self.requests.max(1) as f64
    }
}

/// What is known about a canary so far.
pub(super) struct CanaryEvidence {
    pub version: PolicyVersion,
    control: PolicyVersion,
    /// Index of the current share.
    stage: usize,
    /// Pairs of ratings by route and part.
    arms: BTreeMap<(String, String), PairedArms>,
    test: SequentialTest,
    rated: HashSet<SampleId>,
    canary_counts: ArmCounts,
    control_counts: ArmCounts,
    started: Instant,
    /// The same in the time of records.
    began: UnixMillis,
}

impl CanaryEvidence {
    pub fn new(config: &CanaryConfig, version: PolicyVersion, control: PolicyVersion) -> Self {
        Self {
            version,
            control,
            stage: 0,
            arms: BTreeMap::new(),
            test: SequentialTest::new(config.alpha, config.margin),
            rated: HashSet::new(),
            canary_counts: ArmCounts::default(),
            control_counts: ArmCounts::default(),
            started: Instant::now(),
            began: now_ms(),
        }
    }

    /// The current share of the traffic.
    pub fn share(&self, config: &CanaryConfig) -> f64 {
        config.shares.get(self.stage).or(config.shares.last()).copied().unwrap_or_default()
    }

    /// Ratings of other versions, of completions from before the canary, and later ratings of a completion
    /// do not count.
    pub fn rate(&mut self, rating: &VersionRating) {
        let is_canary = rating.version == self.version;
        if !is_canary && (rating.version != self.control || rating.sampled < self.began) {
            return;
        }
        if !self.rated.insert(rating.sample) {
            return;
        }
        let arms = self.arms.entry((rating.route.clone(), rating.part.clone())).or_default();
        let difference = if is_canary {
            self.canary_counts.ratings += 1;
            arms.push_canary(rating.value)
        } else {
            self.control_counts.ratings += 1;
            arms.push_control(rating.value)
        };
        if let Some(difference) = difference {
            self.test.observe(difference);
        }
    }

    pub fn answered(&mut self, version: PolicyVersion, failed: bool) {
        let counts = if version == self.version {
            &mut self.canary_counts
        } else if version == self.control {
            &mut self.control_counts
        } else {
            return;
        };
        counts.requests += 1;
        counts.failures += u64::from(failed);
    }

    /// The decision, if the evidence permits one. Otherwise, the canary may get its next share.
    pub fn decide(&mut self, config: &CanaryConfig) -> Option<PolicyCheck> {
        let rise = self.canary_counts.failed_share() - self.control_counts.failed_share();
        if self.canary_counts.failures >= MIN_FAILURES && rise > config.max_error_rise {
            let detail = format!(
                "{} of {} requests failed, of the active version {} of {}",
                self.canary_counts.failures,
                self.canary_counts.requests,
                self.control_counts.failures,
                self.control_counts.requests
            );
            return Some(self.check("canary/errors", false, Some(config.max_error_rise), detail));
        }
        let ratings = self.canary_counts.ratings + self.control_counts.ratings;
        match self.test.verdict() {
            CanaryVerdict::NotWorse => Some(self.by_ratings(config, true, "not worse")),
            CanaryVerdict::Worse => Some(self.by_ratings(config, false, "worse")),
            CanaryVerdict::Continue => {
                let time = Duration::from_secs(config.max_seconds);
                let is_over = config.max_ratings > 0 && ratings >= config.max_ratings;
                if is_over || self.started.elapsed() >= time {
                    return Some(self.at_limit(config));
                }
                self.next_share(config);
                None
            }
        }
    }

    /// Raises the share once it has its ratings, unless they rather show that the canary is worse.
    fn next_share(&mut self, config: &CanaryConfig) {
        let stages = u64::try_from(self.stage + 1).unwrap_or(u64::MAX);
        let has_ratings = self.canary_counts.ratings >= config.stage_ratings.saturating_mul(stages);
        let looks_worse = self.test.evidence_worse() > 0.0;
        if has_ratings && !looks_worse && self.stage + 1 < config.shares.len() {
            self.stage += 1;
            let share = self.share(config);
            tracing::info!(version = %self.version, share, "the canary gets a larger share");
        }
    }

    fn at_limit(&self, config: &CanaryConfig) -> PolicyCheck {
        let estimate = self.test.mean();
        let promote = match config.on_limit {
            CanaryLimit::Promote => true,
            CanaryLimit::RollBack => false,
            CanaryLimit::Estimate => estimate.is_some_and(|mean| mean >= -config.margin),
        };
        self.by_ratings(config, promote, "undecided at the limit")
    }

    fn by_ratings(&self, config: &CanaryConfig, passed: bool, finding: &str) -> PolicyCheck {
        let mean = self.test.mean().map_or_else(|| "unknown".to_owned(), |m| format!("{m:+.3}"));
        let detail = format!(
            "{finding}: mean difference {mean} of the range, {} ratings of the canary and {} of the \
             active version",
            self.canary_counts.ratings, self.control_counts.ratings
        );
        self.check("canary/ratings", passed, Some(-config.margin), detail)
    }

    fn check(&self, name: &str, passed: bool, bound: Option<f64>, detail: String) -> PolicyCheck {
        PolicyCheck { name: name.to_owned(), passed, value: self.test.mean(), bound, detail }
    }

    /// Exports the state of the test.
    pub fn report(&self, config: &CanaryConfig, metrics: &Metrics) {
        metrics.policy_canary_share.set(self.share(config));
        for (version, counts) in [("canary", self.canary_counts), ("active", self.control_counts)] {
            let gauge = metrics.policy_canary_ratings.with_label_values(&[version]);
            gauge.set(i64::try_from(counts.ratings).unwrap_or(i64::MAX));
        }
        for (finding, evidence) in
            [("not_worse", self.test.evidence_not_worse()), ("worse", self.test.evidence_worse())]
        {
            metrics.policy_canary_evidence.with_label_values(&[finding]).set(evidence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> CanaryConfig {
        CanaryConfig { stage_ratings: 5, margin: 0.1, ..CanaryConfig::default() }
    }

    fn evidence(config: &CanaryConfig) -> CanaryEvidence {
        CanaryEvidence::new(config, PolicyVersion(2), PolicyVersion(1))
    }

    fn rating(version: u64, value: f64) -> VersionRating {
        VersionRating {
            version: PolicyVersion(version),
            sample: SampleId::new(),
            sampled: now_ms(),
            route: "chat".to_owned(),
            part: "thumbs".to_owned(),
            value,
        }
    }

    /// Rates both versions in turn until the decision; returns it with the number of ratings.
    fn run(config: &CanaryConfig, values: impl Fn(u64) -> (f64, f64)) -> (PolicyCheck, u64) {
        let mut evidence = evidence(config);
        for n in 0..100_000 {
            let (canary, active) = values(n);
            evidence.rate(&rating(1, active));
            evidence.rate(&rating(2, canary));
            if let Some(check) = evidence.decide(config) {
                return (check, 2 * n + 2);
            }
        }
        panic!("no decision");
    }

    #[test]
    fn ratings_decide() {
        let up = |share: u64| move |n: u64| f64::from(u8::from(n.wrapping_mul(7) % 10 < share));
        let (equal, _) = run(&config(), |n| (up(7)(n), up(7)(n + 3)));
        assert!(equal.passed && equal.detail.starts_with("not worse"), "{equal:?}");
        let (worse, ratings) = run(&config(), |n| (up(2)(n), up(8)(n + 3)));
        assert!(!worse.passed && worse.detail.starts_with("worse"), "{worse:?}");
        assert!(ratings < 100, "{ratings}");
    }

    #[test]
    fn the_share_rises_with_ratings_that_are_not_worse() {
        let config = config();
        let mut evidence = evidence(&config);
        assert_eq!(evidence.share(&config), 0.05);
        for _ in 0..5 {
            evidence.rate(&rating(1, 1.0));
            evidence.rate(&rating(2, 1.0));
        }
        assert!(evidence.decide(&config).is_none());
        assert_eq!(evidence.share(&config), 0.25);
        // The same completion again, and another version, do not count.
        let twice = rating(2, 0.0);
        let other_part = VersionRating { part: "stars".to_owned(), ..twice.clone() };
        let early = VersionRating { sampled: 0, ..rating(1, 0.0) };
        for rating in [&twice, &twice, &other_part, &rating(7, 0.0), &early] {
            evidence.rate(rating);
        }
        assert_eq!((evidence.canary_counts.ratings, evidence.control_counts.ratings), (6, 5));
    }

    #[test]
    fn failed_requests_roll_back() {
        let config = config();
        let mut evidence = evidence(&config);
        for n in 0..40 {
            evidence.answered(PolicyVersion(1), n == 7);
            evidence.answered(PolicyVersion(2), n % 10 == 0);
        }
        let check = evidence.decide(&config).unwrap();
        assert!(!check.passed, "{check:?}");
        assert_eq!(check.name, "canary/errors");
    }

    #[test]
    fn a_canary_without_ratings_is_not_promoted_at_its_limit() {
        let config = CanaryConfig { max_seconds: 0, ..config() };
        assert!(!evidence(&config).decide(&config).unwrap().passed);
        let promote = CanaryConfig { on_limit: CanaryLimit::Promote, ..config };
        assert!(evidence(&promote).decide(&promote).unwrap().passed);
    }
}
