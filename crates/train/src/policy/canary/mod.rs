//! The canary: a share of the live traffic gets a candidate until its ratings decide.
//!
//! Requests are assigned by a hash of their session or user, so that one user meets one version. Ratings of
//! both versions, scaled to their part's range, feed a sequential test ([`sequential`]). The first share is
//! small, so that a bad version reaches few users; the last is large, because equal groups decide with the
//! fewest ratings.

mod key_shares;
mod sequential;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Notify;

use hone_core::digest::Digest;
use hone_core::metrics::Metrics;
use hone_core::types::{PolicyCheck, PolicyVersion, UnixMillis, now_ms};

use hone_store::AnswerCounts;

use crate::policy::config::{CanaryConfig, CanaryLimit};
use key_shares::KeyShares;
use sequential::{BettingWealth, CanaryVerdict, PairedArms, SequentialTest};

pub use key_shares::VersionRating;

/// How often a canary without new ratings looks at its time limit.
const TICK: Duration = Duration::from_millis(200);

/// A canary and its beginning, which a restart does not change.
#[derive(Clone, Copy, Debug)]
pub(super) struct BegunCanary {
    pub version: PolicyVersion,
    /// The active version.
    pub control: PolicyVersion,
    pub began: UnixMillis,
    /// Bounds the probability of each wrong verdict.
    pub alpha: f64,
}

// The error budget of all canaries.

/// Canaries whose `policy.canary.alpha` adds up to a full budget.
const BUDGET: f64 = 50.0;

/// Milliseconds in which an empty budget is full again.
const BUDGET_MILLIS: f64 = 365.0 * 86_400_000.0;

/// The share of `policy.canary.alpha` that a canary gets, from the times at which earlier ones and it began: that of
/// the budget that is left. Each canary spends a fiftieth of the rest, and a year fills the budget. The sum of what
/// canaries get is at most 50 alpha and 50 alpha more for each year, so any year has at most `100 alpha` expected
/// wrong verdicts of each kind, however many canaries it has (alpha spending, after Foster & Stine 2008).
#[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
pub(super) fn alpha_share(begins: impl IntoIterator<Item = UnixMillis>) -> f64 {
    let (mut left, mut last) = (1.0, None);
    for begin in begins {
        if let Some(last) = last.replace(begin) {
            let filled = begin.saturating_sub(last) as f64 / BUDGET_MILLIS;
            left = (left * (1.0 - 1.0 / BUDGET) + filled).min(1.0_f64);
        }
    }
    left
}

pub(super) struct Canary {
    config: CanaryConfig,
    /// Routes that users rate.
    routes: usize,
    metrics: Arc<Metrics>,
    running: Mutex<Option<CanaryEvidence>>,
    /// A canary that another process decides about, and its share.
    followed: Mutex<Option<(PolicyVersion, f64)>>,
    /// Requests during a canary that another process decides about.
    answers: Mutex<BTreeMap<PolicyVersion, AnswerCounts>>,
    changed: Notify,
}

impl Canary {
    pub fn new(config: &CanaryConfig, routes: usize, metrics: Arc<Metrics>) -> Self {
        Self {
            config: config.clone(),
            routes,
            metrics,
            running: Mutex::default(),
            followed: Mutex::default(),
            answers: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Serves a share of the traffic until the decision. The evidence begins with the ratings since the beginning that
    /// the ledger has, in their order, which are those of earlier processes.
    pub async fn run(&self, begun: BegunCanary, recorded: Vec<VersionRating>) -> PolicyCheck {
        let BegunCanary { version, control, alpha, .. } = begun;
        tracing::info!(%version, %control, alpha, recorded = recorded.len(), "canary begins");
        let mut evidence = CanaryEvidence::new(&self.config, begun, self.routes);
        for rating in &recorded {
            evidence.rate(&self.config, rating);
            evidence.next_share(&self.config, rating.rated);
        }
        *self.running.lock() = Some(evidence);
        loop {
            let decision = self.running.lock().as_mut().and_then(|evidence| {
                let decision = evidence.decide(&self.config);
                evidence.report(&self.config, &self.metrics);
                decision
            });
            if let Some((check, is_limit)) = decision {
                tracing::info!(%version, promoted = check.passed, detail = check.detail, "canary ends");
                let outcome = match (check.passed, is_limit) {
                    (true, false) => "promoted",
                    (true, true) => "promoted_at_limit",
                    (false, false) => "rolled_back",
                    (false, true) => "rolled_back_at_limit",
                };
                self.metrics.policy_canaries.with_label_values(&[outcome]).inc();
                return check;
            }
            let _tick = tokio::time::timeout(TICK, self.changed.notified()).await;
        }
    }

    /// Ends the canary: all requests get the active version.
    pub fn end(&self) {
        *self.running.lock() = None;
        self.metrics.policy_canary_share.set(0.0);
    }

    /// Serves a share of the traffic until another process decides; `None` ends that.
    pub fn follow(&self, canary: Option<(PolicyVersion, f64)>) {
        *self.followed.lock() = canary;
        self.metrics.policy_canary_share.set(canary.map_or(0.0, |(_, share)| share));
    }

    pub fn version(&self) -> Option<PolicyVersion> {
        self.arm().map(|(version, _)| version)
    }

    /// The version and its share.
    fn arm(&self) -> Option<(PolicyVersion, f64)> {
        let running = self.running.lock();
        let own = running.as_ref().map(|evidence| (evidence.version, evidence.share(&self.config)));
        own.or(*self.followed.lock())
    }

    /// As [`super::Policies::canary_status`].
    pub fn status(&self) -> Option<CanaryStatus> {
        Some(self.running.lock().as_ref()?.status(&self.config))
    }

    /// As [`super::Policies::assign`].
    pub fn assign(&self, key: &str) -> Option<PolicyVersion> {
        let (version, share) = self.arm()?;
        let digest = Digest::new().bytes(version.0.to_le_bytes()).field(key).prefix();
        #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 52 bits")]
        let place = u64::from_le_bytes(digest) as f64 / u64::MAX as f64;
        (place < share).then_some(version)
    }

    /// Adds a client's rating to the evidence of a canary in progress.
    pub fn rate(&self, rating: &VersionRating) {
        if let Some(evidence) = self.running.lock().as_mut() {
            evidence.rate(&self.config, rating);
        }
        self.changed.notify_one();
    }

    /// As [`super::Policies::take_answers`].
    pub fn take_answers(&self) -> BTreeMap<PolicyVersion, AnswerCounts> {
        std::mem::take(&mut self.answers.lock())
    }

    /// Adds the end of a request to the evidence: whether a version failed to answer it.
    pub fn answered(&self, version: PolicyVersion, failed: bool) {
        if let Some(evidence) = self.running.lock().as_mut() {
            evidence.answered(version, failed);
        } else if self.followed.lock().is_some() {
            let mut answers = self.answers.lock();
            let counts = answers.entry(version).or_default();
            counts.requests += 1;
            counts.failures += u64::from(failed);
        }
        if failed {
            self.changed.notify_one();
        }
    }
}

// The evidence for and against a canary.

/// Largest share of failed requests of the canary beyond that of the active version.
const MAX_ERROR_RISE: f64 = 0.05;

/// What is known of one of the two versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ArmCounts {
    /// Ratings that count: the first one of each session, or else of each user, or else of each completion.
    pub ratings: u64,
    /// Requests that ended.
    pub requests: u64,
    /// Requests that failed.
    pub failures: u64,
}

/// The evidence of a canary after a rating.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CanaryPoint {
    /// When.
    pub at: UnixMillis,
    /// Ratings of both versions until then.
    pub ratings: u64,
    /// Natural logarithm of the evidence for "not worse by more than the margin".
    pub not_worse: f64,
    /// Natural logarithm of the evidence for "worse".
    pub worse: f64,
}

/// A canary in progress.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CanaryStatus {
    /// The version that a share of the traffic gets.
    pub version: PolicyVersion,
    /// The active version, which it is compared with.
    pub control: PolicyVersion,
    /// The share.
    pub share: f64,
    /// When each share began, the current one last.
    pub stages: Vec<UnixMillis>,
    /// When the canary ends without a decision.
    pub deadline: UnixMillis,
    /// Ratings after which it ends without a decision; 0 is no limit.
    pub max_ratings: u64,
    /// What happens at these limits.
    pub on_limit: &'static str,
    /// The evidence at which the test decides, as a natural logarithm.
    pub needed: f64,
    /// Difference of the mean rating by which the canary may be worse, as a share of the range.
    pub margin: f64,
    /// The mean difference, canary minus active version; null without a pair of ratings.
    pub mean: Option<f64>,
    /// The canary's ratings and requests.
    pub canary: ArmCounts,
    /// Those of the active version.
    pub active: ArmCounts,
    /// API keys that rated.
    pub raters: usize,
    /// The evidence over time, thinned to some hundred points.
    pub evidence: Vec<CanaryPoint>,
}

/// Most points of [`CanaryStatus::evidence`].
const MAX_POINTS: usize = 512;

struct VersionComparison {
    /// Pairs of ratings by stage, route and part. The versions' shares are constant within a stage only: just
    /// after a change, the test would take a difference in speed for one in quality.
    arms: BTreeMap<(usize, String, String), PairedArms>,
    test: SequentialTest,
}

impl VersionComparison {
    fn new(test: SequentialTest) -> Self {
        Self { arms: BTreeMap::new(), test }
    }

    /// Adds a rating. Returns the difference of the pair that it completes.
    fn observe(&mut self, stage: usize, is_canary: bool, rating: &VersionRating) -> Option<f64> {
        let key = (stage, rating.route.clone(), rating.part.clone());
        let difference = self.arms.entry(key).or_default().push(is_canary, rating.value)?;
        self.test.observe(difference);
        Some(difference)
    }
}

struct CanaryEvidence {
    pub version: PolicyVersion,
    control: PolicyVersion,
    alpha: f64,
    /// When each stage began, in the time of records. The last one is the current stage.
    stages: Vec<UnixMillis>,
    /// The ratings of each key, and which of them count.
    shares: KeyShares<VersionComparison>,
    /// The ratings that count.
    all: VersionComparison,
    /// The differences of each route, if there are several: one test of all would hide the loss of a small one.
    by_route: BTreeMap<String, SequentialTest>,
    routes: usize,
    /// The sessions and users that rated. One that rates many times, always the same version, is one opinion.
    rated: HashSet<[u8; 16]>,
    /// Which requests failed, in pairs, so that an outage of both versions cancels.
    failed: PairedArms,
    /// Against "the canary fails no more often than the active version, up to [`MAX_ERROR_RISE`]".
    fails_more: BettingWealth,
    canary_counts: ArmCounts,
    control_counts: ArmCounts,
    trail: Vec<CanaryPoint>,
    /// Ratings between two points.
    stride: u64,
    started: Instant,
    /// How long the canary ran in earlier processes. Otherwise restarts would postpone its limit for ever.
    before: Duration,
}

impl CanaryEvidence {
    /// Nothing is known yet.
    pub fn new(config: &CanaryConfig, begun: BegunCanary, routes: usize) -> Self {
        let BegunCanary { version, control, began, alpha } = begun;
        Self {
            version,
            control,
            alpha,
            stages: vec![began],
            shares: KeyShares::default(),
            all: VersionComparison::new(SequentialTest::new(alpha, config.margin)),
            by_route: BTreeMap::new(),
            routes,
            rated: HashSet::new(),
            failed: PairedArms::default(),
            fails_more: BettingWealth::new(MAX_ERROR_RISE, -1.0 - MAX_ERROR_RISE),
            canary_counts: ArmCounts::default(),
            control_counts: ArmCounts::default(),
            trail: Vec::new(),
            stride: 1,
            started: Instant::now(),
            before: Duration::from_millis(now_ms().saturating_sub(began)),
        }
    }

    pub fn share(&self, config: &CanaryConfig) -> f64 {
        let share = config.shares.get(self.stages.len() - 1).or(config.shares.last());
        share.copied().unwrap_or_default()
    }

    /// Ratings of other versions and of earlier completions, and further ones of a session or user, do not count.
    pub fn rate(&mut self, config: &CanaryConfig, rating: &VersionRating) {
        let is_canary = |rated: &VersionRating| rated.version == self.version;
        if !is_canary(rating) && rating.version != self.control {
            return;
        }
        let stage_of = |sampled| self.stages.partition_point(|begin| *begin <= sampled);
        if stage_of(rating.sampled) == 0 || !self.rated.insert(rating.unit) {
            return;
        }
        let (alpha, margin) = (self.alpha, config.margin);
        let new = || VersionComparison::new(SequentialTest::new(alpha, margin));
        let counting = self.shares.add(rating, new, |own| {
            own.observe(stage_of(rating.sampled), is_canary(rating), rating);
        });
        for rating in &counting {
            let difference = self.all.observe(stage_of(rating.sampled), is_canary(rating), rating);
            if let Some(difference) = difference.filter(|_| self.routes > 1) {
                #[expect(clippy::cast_precision_loss, reason = "a small number")]
                let new = || SequentialTest::new(alpha / self.routes as f64, margin);
                let test = self.by_route.entry(rating.route.clone()).or_insert_with(new);
                test.observe(difference);
            }
            let counts =
                if is_canary(rating) { &mut self.canary_counts } else { &mut self.control_counts };
            counts.ratings += 1;
        }
        self.add_point(rating.rated);
    }

    /// Adds the evidence at this time to the trail, and thins it when it is long.
    fn add_point(&mut self, at: UnixMillis) {
        let ratings = self.canary_counts.ratings + self.control_counts.ratings;
        if self.trail.last().is_some_and(|last| ratings < last.ratings + self.stride) {
            return;
        }
        let test = &self.all.test;
        let (not_worse, worse) = (test.evidence_not_worse(), test.evidence_worse());
        self.trail.push(CanaryPoint { at, ratings, not_worse, worse });
        if self.trail.len() >= MAX_POINTS {
            let mut keeps = false;
            self.trail.retain(|_| {
                keeps = !keeps;
                keeps
            });
            self.stride *= 2;
        }
    }

    fn status(&self, config: &CanaryConfig) -> CanaryStatus {
        let left = Duration::from_secs(config.max_seconds)
            .saturating_sub(self.before + self.started.elapsed());
        let left = UnixMillis::try_from(left.as_millis()).unwrap_or(UnixMillis::MAX);
        CanaryStatus {
            version: self.version,
            control: self.control,
            share: self.share(config),
            stages: self.stages.clone(),
            deadline: now_ms().saturating_add(left),
            max_ratings: config.max_ratings,
            on_limit: match config.on_limit {
                CanaryLimit::Promote => "promote",
                CanaryLimit::RollBack => "roll_back",
                CanaryLimit::Estimate => "estimate",
            },
            needed: -self.alpha.ln(),
            margin: config.margin,
            mean: self.all.test.mean(),
            canary: self.canary_counts,
            active: self.control_counts,
            raters: self.shares.raters(),
            evidence: self.trail.clone(),
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
        let is_canary = version == self.version;
        if let Some(difference) = self.failed.push(is_canary, f64::from(u8::from(failed))) {
            self.fails_more.observe(difference - MAX_ERROR_RISE);
        }
    }

    /// The decision, if the evidence permits one, and whether it is that at a limit. Otherwise, the canary may get its
    /// next share.
    pub fn decide(&mut self, config: &CanaryConfig) -> Option<(PolicyCheck, bool)> {
        let (canary, control) = (self.canary_counts, self.control_counts);
        if self.fails_more.log() >= -self.alpha.ln() {
            let detail = format!(
                "{} of {} requests failed, of the active version {} of {}",
                canary.failures, canary.requests, control.failures, control.requests
            );
            let check = self.check("canary/errors", false, Some(MAX_ERROR_RISE), detail);
            return Some((check, false));
        }
        let worse = |(_, test): &(&String, &SequentialTest)| test.verdict() == CanaryVerdict::Worse;
        if let Some((route, _)) = self.by_route.iter().find(worse) {
            let finding = format!("worse on route {route}");
            return Some((self.by_ratings(config, false, &finding), false));
        }
        let ratings = canary.ratings + control.ratings;
        let no_route_leans = self.by_route.values().all(|test| test.evidence_worse() <= 0.0);
        match self.all.test.verdict() {
            CanaryVerdict::NotWorse if self.others_lean() <= 0.0 && no_route_leans => {
                Some((self.by_ratings(config, true, "not worse"), false))
            }
            CanaryVerdict::Worse if self.others_lean() >= 0.0 => {
                Some((self.by_ratings(config, false, "worse"), false))
            }
            _ => {
                let time = Duration::from_secs(config.max_seconds);
                let is_over = config.max_ratings > 0 && ratings >= config.max_ratings;
                if is_over || self.before + self.started.elapsed() >= time {
                    return Some((self.at_limit(config), true));
                }
                self.next_share(config, now_ms());
                None
            }
        }
    }

    /// Above 0 if the ratings of all keys but the busiest one show that the canary is worse rather than not. A
    /// verdict against them would be that of one key.
    fn others_lean(&self) -> f64 {
        let lean = |test: &SequentialTest| test.evidence_worse() - test.evidence_not_worse();
        self.shares.of_the_others(|own| lean(&own.test))
    }

    /// Raises the share once it has its ratings, unless they rather show that the canary is worse.
    fn next_share(&mut self, config: &CanaryConfig, now: UnixMillis) {
        let stages = u64::try_from(self.stages.len()).unwrap_or(u64::MAX);
        let has_ratings = self.canary_counts.ratings >= config.stage_ratings.saturating_mul(stages);
        let looks_worse = self.all.test.evidence_worse() > 0.0;
        if has_ratings && !looks_worse && self.stages.len() < config.shares.len() {
            self.stages.push(now);
            let share = self.share(config);
            tracing::info!(version = %self.version, share, "the canary gets a larger share");
        }
    }

    fn at_limit(&self, config: &CanaryConfig) -> PolicyCheck {
        let estimate = self.all.test.mean();
        let promote = match config.on_limit {
            CanaryLimit::Promote => true,
            CanaryLimit::RollBack => false,
            CanaryLimit::Estimate => {
                self.others_lean() <= 0.0 && estimate.is_some_and(|mean| mean >= -config.margin)
            }
        };
        self.by_ratings(config, promote, "undecided at the limit")
    }

    fn by_ratings(&self, config: &CanaryConfig, passed: bool, finding: &str) -> PolicyCheck {
        let mean =
            self.all.test.mean().map_or_else(|| "unknown".to_owned(), |m| format!("{m:+.3}"));
        let detail = format!(
            "{finding}: mean difference {mean} of the range, {} ratings of the canary and {} of the \
             active version, by {}",
            self.canary_counts.ratings,
            self.control_counts.ratings,
            match self.shares.raters() {
                1 => "one API key".to_owned(),
                raters => format!("{raters} API keys"),
            }
        );
        self.check("canary/ratings", passed, Some(-config.margin), detail)
    }

    fn check(&self, name: &str, passed: bool, bound: Option<f64>, detail: String) -> PolicyCheck {
        PolicyCheck { name: name.to_owned(), passed, value: self.all.test.mean(), bound, detail }
    }

    pub fn report(&self, config: &CanaryConfig, metrics: &Metrics) {
        metrics.policy_canary_share.set(self.share(config));
        for (version, counts) in [("canary", self.canary_counts), ("active", self.control_counts)] {
            let gauge = metrics.policy_canary_ratings.with_label_values(&[version]);
            gauge.set(i64::try_from(counts.ratings).unwrap_or(i64::MAX));
        }
        for (finding, evidence) in [
            ("not_worse", self.all.test.evidence_not_worse()),
            ("worse", self.all.test.evidence_worse()),
        ] {
            metrics.policy_canary_evidence.with_label_values(&[finding]).set(evidence);
        }
    }
}

#[cfg(test)]
mod tests;
