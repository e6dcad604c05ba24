//! The canary: a share of the live traffic gets a candidate until its ratings decide.
//!
//! Requests are assigned by a hash of their session or user, so that one user meets one version. Ratings of
//! both versions, scaled to their part's range, feed a sequential test ([`sequential`]). The first share is
//! small, so that a bad version reaches few users; the last is large, because equal groups decide with the
//! fewest ratings.

mod key_shares;
mod rates;
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
use rates::{MAX_RATE_DROP, RatingRates};
use sequential::{BettingWealth, CanaryVerdict, PairedArms, SequentialTest};

pub use key_shares::VersionRating;

/// How often a canary without new ratings looks at its time limit.
const TICK: Duration = Duration::from_millis(200);

/// A canary and its beginning, which a restart does not change.
#[derive(Clone, Copy, Debug)]
pub(super) struct BegunCanary {
    pub version: PolicyVersion,
    /// What it is compared with: the active version, or its anchor.
    pub control: PolicyVersion,
    pub began: UnixMillis,
    /// Since when this process serves it. A restart interrupts a canary: all requests get the active version meanwhile.
    pub served: UnixMillis,
    /// Bounds the probability of each wrong verdict.
    pub alpha: f64,
    /// Whether the share of the traffic gets `control`, and `version` is the active one.
    pub is_recall: bool,
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
        let BegunCanary { version, control, alpha, is_recall, .. } = begun;
        tracing::info!(%version, %control, alpha, is_recall, recorded = recorded.len(), "canary begins");
        let mut evidence = CanaryEvidence::new(&self.config, begun, self.routes);
        for rating in &recorded {
            evidence.rate(&self.config, rating);
            evidence.next_share(&self.config, rating.rated);
        }
        *self.running.lock() = Some(evidence);
        loop {
            let decision = self.running.lock().as_mut().and_then(|evidence| {
                let decision = evidence.decide(&self.config, now_ms());
                evidence.report(&self.config, &self.metrics);
                decision
            });
            if let Some((check, is_limit)) = decision {
                tracing::info!(%version, passed = check.passed, detail = check.detail, "canary ends");
                let outcome = match (check.passed, is_limit, is_recall) {
                    (true, false, false) => "promoted",
                    (true, true, false) => "promoted_at_limit",
                    (false, false, false) => "rolled_back",
                    (false, true, false) => "rolled_back_at_limit",
                    (true, false, true) => "kept",
                    (_, true, true) => "kept_at_limit",
                    (false, false, true) => "returned",
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
        let own =
            running.as_ref().map(|evidence| (evidence.staged(), evidence.share(&self.config)));
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

    pub fn is_running(&self) -> bool {
        self.running.lock().is_some()
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

/// Milliseconds after a change of the share whose answers do not count for the rates of ratings: some requests began before
/// it, and the servers of a fleet follow later.
const SETTLING: UnixMillis = 60_000;

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

/// A canary in progress, or a recall: a share of the traffic gets an earlier version, and the evidence is about the active
/// one.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CanaryStatus {
    /// The version that a share of the traffic gets.
    pub version: PolicyVersion,
    /// The active version.
    pub control: PolicyVersion,
    /// Whether the evidence, `mean` and `rating_rate` are those of the active version, compared with `version`.
    pub is_recall: bool,
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
    /// How often the canary is rated, as a multiple of the active version's rate; null while it is unknown.
    pub rating_rate: Option<f64>,
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
    rates: RatingRates,
}

/// What a rating is of.
#[derive(Clone, Copy)]
struct RatedArm {
    is_canary: bool,
    stage: usize,
    /// The canary's share of the requests that the rated one is from; `None` if it is uncertain.
    share: Option<f64>,
}

impl VersionComparison {
    fn new(test: SequentialTest) -> Self {
        Self { arms: BTreeMap::new(), test, rates: RatingRates::default() }
    }

    /// Adds a rating. Returns the difference of the pair that it completes.
    fn observe(&mut self, arm: RatedArm, rating: &VersionRating) -> Option<f64> {
        if let Some(share) = arm.share {
            self.rates.observe(arm.is_canary, share);
        }
        let key = (arm.stage, rating.route.clone(), rating.part.clone());
        let difference = self.arms.entry(key).or_default().push(arm.is_canary, rating.value)?;
        self.test.observe(difference);
        Some(difference)
    }
}

struct CanaryEvidence {
    pub version: PolicyVersion,
    control: PolicyVersion,
    alpha: f64,
    served: UnixMillis,
    is_recall: bool,
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
        let BegunCanary { version, control, began, served, alpha, is_recall } = begun;
        Self {
            version,
            control,
            alpha,
            served,
            is_recall,
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

    /// The version that a share of the traffic gets.
    fn staged(&self) -> PolicyVersion {
        if self.is_recall { self.control } else { self.version }
    }

    /// Ratings of other versions and of earlier completions, and further ones of a session or user, do not count.
    pub fn rate(&mut self, config: &CanaryConfig, rating: &VersionRating) {
        let Some(arm) = self.arm_of(config, rating) else { return };
        if !self.rated.insert(rating.unit) {
            return;
        }
        let (alpha, margin) = (self.alpha, config.margin);
        let new = || VersionComparison::new(SequentialTest::new(alpha, margin));
        let counting = self.shares.add(rating, new, |own| {
            own.observe(arm, rating);
        });
        for rating in &counting {
            let Some(arm) = self.arm_of(config, rating) else { continue };
            let difference = self.all.observe(arm, rating);
            if let Some(difference) = difference.filter(|_| self.routes > 1) {
                #[expect(clippy::cast_precision_loss, reason = "a small number")]
                let new = || SequentialTest::new(alpha / self.routes as f64, margin);
                let test = self.by_route.entry(rating.route.clone()).or_insert_with(new);
                test.observe(difference);
            }
            let counts =
                if arm.is_canary { &mut self.canary_counts } else { &mut self.control_counts };
            counts.ratings += 1;
        }
        self.add_point(rating.rated);
    }

    fn arm_of(&self, config: &CanaryConfig, rating: &VersionRating) -> Option<RatedArm> {
        let is_canary = rating.version == self.version;
        if !is_canary && rating.version != self.control {
            return None;
        }
        let stage = self.stages.partition_point(|begin| *begin <= rating.sampled);
        let begin = self.stages.get(stage.checked_sub(1)?)?;
        let is_settled = rating.sampled >= (*begin).max(self.served).saturating_add(SETTLING);
        let share = config.shares.get(stage - 1).filter(|_| is_settled);
        let share = share.map(|share| if self.is_recall { 1.0 - share } else { *share });
        Some(RatedArm { is_canary, stage, share })
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
        let (mut version, mut control) = (self.version, self.control);
        let (mut canary, mut active) = (self.canary_counts, self.control_counts);
        if self.is_recall {
            (version, control) = (control, version);
            (canary, active) = (active, canary);
        }
        CanaryStatus {
            version,
            control,
            is_recall: self.is_recall,
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
            rating_rate: self.all.rates.ratio(),
            canary,
            active,
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
    /// next share, from `now` on.
    pub fn decide(
        &mut self,
        config: &CanaryConfig,
        now: UnixMillis,
    ) -> Option<(PolicyCheck, bool)> {
        let (canary, control) = (self.canary_counts, self.control_counts);
        if self.fails_more.log() >= -self.alpha.ln() {
            let [own, other] = self.arm_names();
            let detail = format!(
                "{} of {} requests of {own} failed, and {} of {} of {other}",
                canary.failures, canary.requests, control.failures, control.requests
            );
            let check = self.check("canary/errors", false, Some(MAX_ERROR_RISE), detail);
            return Some((check, false));
        }
        if self.all.rates.evidence() >= -self.alpha.ln()
            && self.shares.of_the_others(|own| own.rates.evidence()) >= 0.0
        {
            let detail = format!("{}, {}", self.rating_rate(), self.rating_counts());
            let (value, bound) = (self.all.rates.ratio(), Some(1.0 - MAX_RATE_DROP));
            let check = self.check("canary/rating_rate", false, bound, detail);
            return Some((PolicyCheck { value, ..check }, false));
        }
        let worse = |(_, test): &(&String, &SequentialTest)| test.verdict() == CanaryVerdict::Worse;
        if let Some((route, _)) = self.by_route.iter().find(worse) {
            let finding = format!("worse on route {route}");
            return Some((self.by_ratings(config, false, &finding), false));
        }
        let ratings = canary.ratings + control.ratings;
        let no_route_leans = self.by_route.values().all(|test| test.evidence_worse() <= 0.0);
        match self.all.test.verdict() {
            CanaryVerdict::NotWorse
                if self.others_lean() <= 0.0 && no_route_leans && self.is_rated_as_often() =>
            {
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
                self.next_share(config, now);
                None
            }
        }
    }

    /// Whether the ratings rather show that the canary is rated as often as the active version. Without the estimate, which
    /// is above half of the permitted drop, a canary with few but better ratings would be promoted before the test decides.
    fn is_rated_as_often(&self) -> bool {
        let rates = &self.all.rates;
        let least = 1.0 - MAX_RATE_DROP / 2.0;
        rates.evidence() <= 0.0 && rates.ratio().is_none_or(|ratio| ratio >= least)
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
        let fewer = self.canary_counts.ratings.min(self.control_counts.ratings);
        let has_ratings = fewer >= config.stage_ratings.saturating_mul(stages);
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
            // It was promoted by evidence before.
            _ if self.is_recall => true,
            CanaryLimit::Promote => true,
            CanaryLimit::RollBack => false,
            CanaryLimit::Estimate => {
                self.others_lean() <= 0.0
                    && self.is_rated_as_often()
                    && estimate.is_some_and(|mean| mean >= -config.margin)
            }
        };
        self.by_ratings(config, promote, "undecided at the limit")
    }

    fn by_ratings(&self, config: &CanaryConfig, passed: bool, finding: &str) -> PolicyCheck {
        let mean =
            self.all.test.mean().map_or_else(|| "unknown".to_owned(), |m| format!("{m:+.3}"));
        let detail = format!(
            "{finding}: mean difference {mean} of the range, {}, {}, by {}",
            self.rating_rate(),
            self.rating_counts(),
            match self.shares.raters() {
                1 => "one API key".to_owned(),
                raters => format!("{raters} API keys"),
            }
        );
        self.check("canary/ratings", passed, Some(-config.margin), detail)
    }

    fn rating_rate(&self) -> String {
        let rate = self.all.rates.ratio().map_or("unknown".to_owned(), |rate| format!("{rate:.2}"));
        format!("rated {rate} times as often as {}", self.arm_names()[1])
    }

    fn rating_counts(&self) -> String {
        let [canary, control] = [self.canary_counts.ratings, self.control_counts.ratings];
        let [own, other] = self.arm_names();
        format!("{canary} ratings of {own} and {control} of {other}")
    }

    fn arm_names(&self) -> [String; 2] {
        if self.is_recall {
            [self.version, self.control].map(|version| format!("version {version}"))
        } else {
            ["the canary", "the active version"].map(str::to_owned)
        }
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
            ("rated_less", self.all.rates.evidence()),
        ] {
            metrics.policy_canary_evidence.with_label_values(&[finding]).set(evidence);
        }
    }
}

#[cfg(test)]
mod tests;
