//! The monitor: detects the warnings of a run and reports them to the log and to Prometheus.

use hone_core::metrics::Metrics;
use hone_core::types::StepRecord;
use hone_reward::routes::{RouteConfig, RouteList};

use super::warning::{EQUAL_REWARDS, Warning, WarningKind};
use super::{MonitorState, PATIENCE, RewardRoles, Signal, WINDOW, WarningConfig};
use crate::monitoring::metric_names;

/// An episode ends only if the metric is within its limit by this share of the limit.
const HYSTERESIS: f64 = 0.2;
/// Collapse: maximum share of groups with equal rewards.
const MAX_ZERO_STD_GROUPS: f64 = 0.8;
/// Exploding KL: maximum in nats per token. One token that became unlikely can raise a step's estimate
/// far, so it takes [`PATIENCE`] steps; a value that is not finite takes one.
pub const MAX_KL: f64 = 0.5;
/// Flat reward: minimum rise over the window, in standard deviations of the reward.
const MIN_RISE: f64 = 0.1;
/// Format ignored: minimum of the part's mean.
const MIN_FORMAT: f64 = 0.05;
/// Format ignored: consecutive steps that begin an episode.
const FORMAT_PATIENCE: u64 = 20;
/// Length hacking: maximum growth of completions over the window, as a share of their length.
const MAX_LENGTH_GROWTH: f64 = 0.25;
/// Length hacking: maximum share of completions that end at the token limit.
const MAX_TRUNCATED: f64 = 0.5;
/// Entropy collapse: minimum share of the mean entropy of the first [`PATIENCE`] steps.
const MIN_ENTROPY_SHARE: f64 = 0.1;
/// Clip ratio high: maximum share of clipped ratios, both bounds together.
const MAX_CLIP_RATIO: f64 = 0.3;

/// Watches the recorded steps of one run.
#[derive(Clone, Debug)]
pub struct HealthMonitor {
    config: WarningConfig,
    roles: RewardRoles,
    state: MonitorState,
}

impl HealthMonitor {
    /// Continues from `state`. Reward parts have the roles that they have in the route named `only`,
    /// or in any route if `only` is `None`.
    pub fn new(
        config: &WarningConfig,
        routes: &RouteList,
        only: Option<&str>,
        state: MonitorState,
    ) -> Self {
        let routes = routes.0.iter().filter(|route| only.is_none_or(|name| name == route.name));
        let parts: Vec<_> = routes.flat_map(RouteConfig::parts).collect();
        let parts = parts.iter().map(|part| (part.name.as_str(), part.kind.name()));
        Self::with_roles(config.clone(), RewardRoles::of(parts), state)
    }

    pub(super) fn with_roles(
        config: WarningConfig,
        roles: RewardRoles,
        state: MonitorState,
    ) -> Self {
        Self { config, roles, state }
    }

    /// The state from which a resumed run continues.
    pub fn state(&self) -> &MonitorState {
        &self.state
    }

    /// The kinds whose episode has not ended.
    pub(super) fn active(&self) -> impl Iterator<Item = WarningKind> {
        self.state.episodes.iter().filter(|(_, episode)| episode.active).map(|(kind, _)| *kind)
    }

    /// Adds a step; logs, counts and returns the warnings that it raises.
    pub fn observe(&mut self, record: &StepRecord, metrics: &Metrics) -> Vec<Warning> {
        let raised = self.check(record, metrics);
        for Warning { kind, step, message, advice } in &raised {
            tracing::warn!(kind = kind.as_str(), step, advice, "{message}");
        }
        raised
    }

    /// As [`Self::observe`] without the log, for callers that display the warnings.
    pub fn check(&mut self, record: &StepRecord, metrics: &Metrics) -> Vec<Warning> {
        let raised = self.detect(record);
        for Warning { kind, .. } in &raised {
            metrics.train.warnings.with_label_values(&[kind.as_str()]).inc();
        }
        let active: Vec<WarningKind> = self.active().collect();
        for kind in WarningKind::ALL {
            let active = i64::from(active.contains(&kind));
            metrics.train.warning_active.with_label_values(&[kind.as_str()]).set(active);
        }
        raised
    }

    /// Adds a step and returns the warnings that it raises. A step that was added before, which a
    /// resumed run repeats, changes nothing.
    pub(super) fn detect(&mut self, record: &StepRecord) -> Vec<Warning> {
        if record.step <= self.state.last_step {
            return Vec::new();
        }
        self.state.last_step = record.step;
        self.state.add(&self.roles, record);
        let context =
            StepContext { config: &self.config, roles: &self.roles, state: &self.state, record };
        let signals = WarningKind::ALL.map(|kind| (kind, context.signal(kind)));
        let mut raised = Vec::new();
        for (kind, signal) in signals {
            let raise_after = match kind {
                WarningKind::FormatIgnored => FORMAT_PATIENCE,
                _ => PATIENCE,
            };
            let episode = self.state.episodes.entry(kind).or_default();
            if let Some(message) = episode.update(signal, raise_after, PATIENCE) {
                let advice = kind.advice().to_owned();
                raised.push(Warning { kind, step: record.step, message, advice });
            }
        }
        raised
    }
}

// The conditions of the warnings, evaluated on one step and the steps before it.

/// The inputs of every condition. `state` already includes `record`.
pub(super) struct StepContext<'a> {
    pub(super) config: &'a WarningConfig,
    pub(super) roles: &'a RewardRoles,
    pub(super) state: &'a MonitorState,
    pub(super) record: &'a StepRecord,
}

impl StepContext<'_> {
    pub(super) fn signal(&self, kind: WarningKind) -> Signal {
        match kind {
            WarningKind::Collapse => self.collapse(),
            WarningKind::KlExplosion => self.kl_explosion(),
            WarningKind::FlatReward => self.flat_reward(),
            WarningKind::FormatIgnored => self.format_ignored(),
            WarningKind::LengthHacking => self.length_hacking(),
            WarningKind::EntropyCollapse => self.entropy_collapse(),
            WarningKind::ClipRatioHigh => self.clip_ratio_high(),
        }
    }

    fn metric(&self, name: &str) -> Option<f64> {
        metric_names::finite(self.record, name)
    }

    /// Bad above `limit`.
    fn above(&self, value: f64, limit: f64, message: impl FnOnce() -> String) -> Signal {
        if value > limit {
            Signal::Bad(message())
        } else if value <= limit * (1.0 - HYSTERESIS) {
            Signal::Good
        } else {
            Signal::Near
        }
    }

    /// Bad below `limit`.
    fn below(&self, value: f64, limit: f64, message: impl FnOnce() -> String) -> Signal {
        if value < limit {
            Signal::Bad(message())
        } else if value >= limit * (1.0 + HYSTERESIS) {
            Signal::Good
        } else {
            Signal::Near
        }
    }

    fn collapse(&self) -> Signal {
        // Equal rewards at the maximum are a success.
        if self.metric(metric_names::REWARD_MEAN).is_some_and(|mean| self.is_maximal(mean)) {
            return Signal::Good;
        }
        let std = metric_names::reward_std(self.record).map(|std| {
            self.below(std, self.config.min_reward_std, || {
                format!("the reward's standard deviation {} fell to {std:.3}", self.compared())
            })
        });
        let zero = self.metric(metric_names::ZERO_STD_GROUPS).map(|share| {
            self.above(share, MAX_ZERO_STD_GROUPS, || match self.equal_batches() {
                0 | 1 => {
                    let percent = share * 100.0;
                    format!("in {percent:.0} % of groups all completions have equal rewards")
                }
                batches => format!("{batches} batches in a row {EQUAL_REWARDS}"),
            })
        });
        Signal::worst([zero, std].into_iter().flatten())
    }

    /// What [`metric_names::reward_std`] compares.
    fn compared(&self) -> &'static str {
        match self.metric(metric_names::REWARD_STD) {
            Some(_) => "within groups",
            None => "over single completions",
        }
    }

    /// Consecutive steps, this one last, whose groups all had equal rewards.
    fn equal_batches(&self) -> usize {
        // Equal rewards deviate by rounding errors only.
        self.state.stds.iter().rev().take_while(|std| **std < 1e-9).count()
    }

    fn kl_explosion(&self) -> Signal {
        match self.record.metrics.get(metric_names::KL) {
            Some(kl) if !kl.is_finite() => Signal::Certain(format!("KL to the reference is {kl}")),
            Some(&kl) => self.above(kl, MAX_KL, || {
                format!("KL to the reference reached {kl:.3} nats per token, above {MAX_KL}")
            }),
            None => Signal::Unknown,
        }
    }

    fn flat_reward(&self) -> Signal {
        let (Some(rise), Some(std), Some(mean)) =
            (trend(&self.state.rewards, WINDOW), mean(&self.state.stds), mean(&self.state.rewards))
        else {
            return Signal::Unknown;
        };
        // Without a deviation there is nothing to learn from: a collapse, not a plateau.
        let is_learnable = std >= self.config.min_reward_std;
        // The right end of the line through the window.
        let current = mean + rise / 2.0;
        if !is_learnable || self.is_maximal(current) {
            return Signal::Good;
        }
        self.below(rise / std, MIN_RISE, || {
            format!(
                "the reward changed by {rise:+.3} in {} steps, at a standard deviation {} of \
                 {std:.3}",
                WINDOW,
                self.compared()
            )
        })
    }

    /// Whether a mean reward is within a tenth of the configured maximum.
    fn is_maximal(&self, mean: f64) -> bool {
        self.config.reward_max.is_some_and(|max| mean >= max - 0.1 * max.abs())
    }

    fn format_ignored(&self) -> Signal {
        // A part without a mean is bad only if the step has means at all.
        if metric_names::parts(self.record).next().is_none() {
            return Signal::Unknown;
        }
        Signal::worst(self.roles.format.iter().map(|part| {
            match metric_names::part(self.record, part) {
                Some(mean) => self.below(mean, MIN_FORMAT, || {
                    format!(
                        "the part \"{part}\" stayed near 0 for {FORMAT_PATIENCE} steps ({mean:.3})"
                    )
                }),
                None => Signal::Bad(format!(
                    "the part \"{part}\" had no value for {FORMAT_PATIENCE} steps"
                )),
            }
        }))
    }

    fn length_hacking(&self) -> Signal {
        let truncated = self.metric(metric_names::TRUNCATED).map(|share| {
            self.above(share, MAX_TRUNCATED, || {
                format!("{:.0} % of completions ended at the token limit", share * 100.0)
            })
        });
        Signal::worst([truncated, self.length_growth()].into_iter().flatten())
    }

    /// Bad if length and reward rise together without correctness.
    fn length_growth(&self) -> Option<Signal> {
        let state = self.state;
        let growth = trend(&state.lengths, WINDOW)?;
        let correctness = trend(&state.correctness, WINDOW)?;
        let reward = trend(&state.rewards, WINDOW)?;
        let (length, std) = (mean(&state.lengths)?, mean(&state.stds)?);
        // Relative to the left end of the line through the window.
        let share = if length > 0.0 { growth / (length - growth / 2.0).max(1.0) } else { 0.0 };
        let margin = MIN_RISE * std;
        if reward <= margin || correctness > margin {
            return Some(Signal::Good);
        }
        Some(self.above(share, MAX_LENGTH_GROWTH, || {
            format!(
                "in {WINDOW} steps completions grew by {growth:.0} tokens and the reward by \
                 {reward:.3}, but correctness by {correctness:+.3}"
            )
        }))
    }

    fn entropy_collapse(&self) -> Signal {
        let current = self.metric(metric_names::ENTROPY);
        let (Some(current), Some(first)) = (current, self.state.first_entropy()) else {
            return Signal::Unknown;
        };
        self.below(current, first * MIN_ENTROPY_SHARE, || {
            format!("the entropy fell from {first:.3} to {current:.3} nats per token")
        })
    }

    fn clip_ratio_high(&self) -> Signal {
        let shares = [metric_names::CLIP_LOW, metric_names::CLIP_HIGH].map(|n| self.metric(n));
        let Some(share) = shares.into_iter().flatten().reduce(|low, high| low + high) else {
            return Signal::Unknown;
        };
        self.above(share, MAX_CLIP_RATIO, || {
            format!("{:.0} % of importance ratios were clipped", share * 100.0)
        })
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The rise of the least-squares line through the values, from the first to the last of them;
/// `None` until there are `window` values.
fn trend(values: &[f64], window: usize) -> Option<f64> {
    let n = values.len();
    if n < window.max(2) {
        return None;
    }
    let center = (n - 1) as f64 / 2.0;
    let mean = mean(values)?;
    let (mut covariance, mut variance) = (0.0, 0.0);
    for (i, value) in values.iter().enumerate() {
        let x = i as f64 - center;
        covariance += x * (value - mean);
        variance += x * x;
    }
    Some(covariance / variance * (n - 1) as f64)
}
