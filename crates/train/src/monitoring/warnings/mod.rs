//! Warnings about runs that go wrong, each with advice.
//!
//! An episode begins, and its warning is raised, when its condition has held for some steps in a row. It ends
//! when a stricter condition (hysteresis) has held for some steps, so that a metric near its limit raises one
//! warning. A missing metric neither begins nor ends an episode.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr, VariantArray};

use hone_core::config::Checked;
use hone_core::config::describe::not_a_key;
use hone_core::config::section::Parameters;
use hone_core::metrics::Metrics;
use hone_core::types::StepRecord;
use hone_reward::routes::{RouteConfig, RouteList};

use crate::monitoring::metric_names::{self, finite};

/// What batches without a learning signal have in common; their number precedes it in messages.
pub(crate) const EQUAL_REWARDS: &str = "had no group with different rewards";

/// A way in which a run goes wrong.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    Display,
    IntoStaticStr,
    VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum WarningKind {
    /// The completions of a group have equal rewards, so nothing is learned from them.
    Collapse,
    /// The policy moves away from the reference policy.
    KlExplosion,
    /// The reward does not rise although completions differ.
    FlatReward,
    /// A part that rewards a format stays near 0 or missing.
    FormatIgnored,
    /// Completions grow, and the reward with them, but correctness does not or is unknown; or most are truncated.
    LengthHacking,
    /// The policy has become nearly deterministic.
    EntropyCollapse,
    /// Many importance ratios are clipped: updates are too large.
    ClipRatioHigh,
}

impl WarningKind {
    /// All kinds.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The value of the label `kind` in metrics, and the key in `run.warnings.actions`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// What to change, in one sentence with configuration keys in backquotes.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Collapse => {
                "Raise `rollout.temperature` or `rollout.group_size`, use easier or harder prompts, \
                 or add a graded reward part that gives partial credit."
            }
            Self::KlExplosion => {
                "Lower `train.learning_rate`, raise `train.beta`, or lower `train.max_grad_norm`, \
                 and continue from a version published before the rise."
            }
            Self::FlatReward => {
                "Raise `train.learning_rate` or `rollout.group_size`, or add a part with partial \
                 credit (`route.reward.kind`), so that better completions earn more."
            }
            Self::FormatIgnored => {
                "Show the format in the system prompt, reward it step by step with \
                 `route.reward.kind` \"format_incremental\" before the answer counts, or raise its \
                 `route.reward.weight`."
            }
            Self::LengthHacking => {
                "Lower the `route.reward.weight` of the parts that grow with length, add one of \
                 `route.reward.kind` \"length\", or set `rollout.max_tokens` to what an answer needs."
            }
            Self::EntropyCollapse => {
                "Lower `train.learning_rate`, raise `train.clip_high` or `train.beta`, or raise \
                 `rollout.temperature`."
            }
            Self::ClipRatioHigh => {
                "Lower `train.learning_rate` or `train.num_iterations`, or lower \
                 `train.max_staleness`, so that samples stay close to the current policy."
            }
        }
    }
}

/// The beginning of an episode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// The kind of the episode.
    pub kind: WarningKind,
    /// The step at which it began.
    pub step: u64,
    /// The observation with its numbers, a clause without a period.
    pub message: String,
    /// The kind's advice.
    pub advice: String,
}

// The keys of `[run.warnings]`.

/// What the daemon does when a warning begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarningAction {
    /// Log it, as always.
    #[default]
    Log,
    /// Halve the learning rate until the warning's condition ends or training is resumed.
    LowerRate,
    /// Pause training until it is resumed.
    Pause,
    /// Roll the active version back to its parent.
    RollBack,
}

hone_core::parameters! {
    /// What is normal for a run, and what the daemon does otherwise.
    pub struct WarningConfig {
        /// The reward of a perfect completion. A reward within a tenth of it is neither flat nor collapsed.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reward_max: Option<f64> = None => finite_if_any(),
        /// The actions of warnings in the daemon, other than `log`. A run on a dataset only logs.
        pub actions: BTreeMap<String, WarningAction> = BTreeMap::new(),
    }
}

impl WarningConfig {
    /// Collapse: minimum of the reward's standard deviation within groups, or over the completions of a step that has
    /// single ones only. It is in units of the weighted reward.
    fn least_reward_std(&self) -> f64 {
        MIN_REWARD_STD * self.reward_max.map_or(1.0, |most| most.abs().min(1.0))
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        self.check_in("run.warnings.")?;
        let kinds: Vec<&str> = WarningKind::ALL.iter().map(|kind| kind.as_str()).collect();
        match self.actions.keys().find(|name| !kinds.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => Err(not_a_key("run.warnings.actions", name, &kinds)),
        }
    }
}

// The limits of healthy runs. Guides to GRPO call a KL below 0.5 healthy; the others are estimates.

/// Of rewards whose maximum is 1 or more, or not known.
const MIN_REWARD_STD: f64 = 0.1;
/// Consecutive steps that begin an episode, and that end it.
const PATIENCE: u64 = 5;
/// Steps over which trends of reward and length are measured.
const WINDOW: usize = 40;

/// An episode ends only if the metric is within its limit by this share of the limit.
const HYSTERESIS: f64 = 0.2;
/// Collapse: maximum share of groups with equal rewards.
const MAX_ZERO_STD_GROUPS: f64 = 0.8;
/// Exploding KL: maximum in nats per token. One token that became unlikely can raise a step's estimate
/// far, so it takes [`PATIENCE`] steps; a value that is not finite takes one.
const MAX_KL: f64 = 0.5;
/// Flat reward: minimum rise over the window, in standard deviations of the reward.
const MIN_RISE: f64 = 0.1;
/// Format ignored: minimum of the part's mean.
const MIN_FORMAT: f64 = 0.05;
/// Format ignored: consecutive steps that begin an episode.
const FORMAT_PATIENCE: u64 = 20;
/// Length hacking: maximum growth of completions over the window, as a share of their length.
const MAX_LENGTH_GROWTH: f64 = 0.25;
/// Length hacking without a part for correctness: maximum length, as a multiple of that of the first [`PATIENCE`] steps.
const MAX_LENGTH_RATIO: f64 = 1.5;
/// Length hacking: maximum share of completions that end at the token limit.
const MAX_TRUNCATED: f64 = 0.5;
/// Entropy collapse: minimum share of the mean entropy of the first [`PATIENCE`] steps.
const MIN_ENTROPY_SHARE: f64 = 0.1;
/// Clip ratio high: maximum share of clipped ratios, both bounds together.
const MAX_CLIP_RATIO: f64 = 0.3;

// The meaning of reward parts.

/// Names of the reward parts that measure format and correctness.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RewardRoles {
    /// Parts that reward a format.
    pub format: Vec<String>,
    /// Parts that reward a right answer.
    pub correctness: Vec<String>,
}

impl RewardRoles {
    /// Sorts parts, given as `(name, kind)`, by words in their kind. A kind without such a word (a
    /// function in Python, a webhook) leaves it to the name. A part may have neither role.
    pub fn of<'a>(parts: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        const FORMAT: [&str; 8] =
            ["format", "xml", "json", "schema", "think", "tags", "regex", "syntax"];
        const CORRECT: [&str; 8] =
            ["match", "math", "numeric", "choice", "code", "correct", "accuracy", "right"];
        let has = |text: &str, words: &[&str]| {
            let text = text.to_ascii_lowercase();
            words.iter().any(|word| text.contains(word))
        };
        let mut roles = Self::default();
        for (name, kind) in parts {
            match [kind, name].iter().find(|t| has(t, &FORMAT) || has(t, &CORRECT)) {
                Some(text) if has(text, &FORMAT) => roles.format.push(name.to_owned()),
                Some(_) => roles.correctness.push(name.to_owned()),
                None => {}
            }
        }
        roles
    }
}

// The monitor's state: recent metrics, and episodes driven by signals.

/// Whether a step is evidence for or against one kind of warning.
#[derive(Clone, Debug, PartialEq)]
enum Signal {
    /// The condition holds; the message describes the observation.
    Bad(String),
    /// The condition holds and one step is enough to warn.
    Certain(String),
    /// The metric is within its limit by more than the hysteresis.
    Good,
    /// The metric is within its limit, but not by enough to end an episode.
    Near,
    /// The metrics that the condition needs are missing.
    Unknown,
}

impl Signal {
    /// The most severe signal; unknown ones count least.
    fn worst(signals: impl IntoIterator<Item = Self>) -> Self {
        let severity = |signal: &Self| match signal {
            Self::Certain(_) => 4,
            Self::Bad(_) => 3,
            Self::Near => 2,
            Self::Good => 1,
            Self::Unknown => 0,
        };
        let first_worst = |worst: Self, signal: Self| {
            if severity(&signal) > severity(&worst) { signal } else { worst }
        };
        signals.into_iter().fold(Self::Unknown, first_worst)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Episode {
    active: bool,
    /// Consecutive steps that are evidence for changing `active`.
    streak: u64,
}

impl Episode {
    /// Adds a step's signal; so many in a row begin and end the episode. Returns the message if it begins.
    fn update(&mut self, signal: Signal, raise_after: u64, end_after: u64) -> Option<String> {
        let needed = if self.active { end_after } else { raise_after };
        match (&signal, self.active) {
            (Signal::Unknown, _) => return None,
            (Signal::Bad(_), false) | (Signal::Good, true) => self.streak += 1,
            (Signal::Certain(_), false) => self.streak = needed,
            _ => self.streak = 0,
        }
        if self.streak < needed {
            return None;
        }
        self.streak = 0;
        self.active = !self.active;
        match signal {
            Signal::Bad(message) | Signal::Certain(message) => Some(message),
            _ => None,
        }
    }
}

/// What a resumed run needs in order to warn as if it had not been interrupted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MonitorState {
    last_step: u64,
    episodes: BTreeMap<WarningKind, Episode>,
    rewards: Vec<f64>,
    stds: Vec<f64>,
    lengths: Vec<f64>,
    /// Of the run's first steps.
    #[serde(default)]
    first_lengths: Vec<f64>,
    correctness: Vec<f64>,
    /// Of the run's first steps; later entropies are compared with their mean.
    entropies: Vec<f64>,
    entropy_known: bool,
}

impl MonitorState {
    /// The warnings in progress.
    pub fn active(&self) -> impl Iterator<Item = WarningKind> {
        self.episodes.iter().filter(|(_, episode)| episode.active).map(|(kind, _)| *kind)
    }

    /// The last step that was added.
    pub fn last_step(&self) -> u64 {
        self.last_step
    }

    /// The mean entropy of the first [`PATIENCE`] steps, once there are as many.
    fn first_entropy(&self) -> Option<f64> {
        let count = self.entropies.len() as f64;
        self.entropy_known.then(|| self.entropies.iter().sum::<f64>() / count)
    }

    /// Adds a step's metrics and forgets those that are outside the window.
    fn add(&mut self, roles: &RewardRoles, record: &StepRecord) {
        let parts = roles.correctness.iter().filter_map(|part| metric_names::part(record, part));
        let correctness = parts.reduce(|sum, mean| sum + mean);
        for (values, value) in [
            (&mut self.rewards, finite(record, metric_names::REWARD_MEAN)),
            (&mut self.stds, metric_names::reward_std(record)),
            (&mut self.lengths, finite(record, metric_names::LENGTH)),
            (&mut self.correctness, correctness),
        ] {
            values.extend(value);
            let surplus = values.len().saturating_sub(WINDOW);
            values.drain(..surplus);
        }
        if (self.first_lengths.len() as u64) < PATIENCE {
            self.first_lengths.extend(finite(record, metric_names::LENGTH));
        }
        if !self.entropy_known {
            self.entropies.extend(finite(record, metric_names::ENTROPY));
            self.entropy_known = self.entropies.len() as u64 >= PATIENCE;
        }
    }
}

// The monitor, which reports the warnings of a run to the log and to Prometheus.

/// Watches the recorded steps of one run.
#[derive(Clone, Debug)]
pub struct HealthMonitor {
    config: WarningConfig,
    roles: RewardRoles,
    state: MonitorState,
}

impl HealthMonitor {
    /// Continues from `state`. Reward parts have the roles of the route named `only`, or of any route.
    pub fn new(
        config: &WarningConfig,
        routes: &RouteList,
        only: Option<&str>,
        state: MonitorState,
    ) -> Self {
        let routes = routes.0.iter().filter(|route| only.is_none_or(|name| name == route.name));
        let parts: Vec<_> = routes.flat_map(RouteConfig::parts).collect();
        let parts = parts.iter().map(|part| (part.name.as_str(), part.kind.name()));
        Self { config: config.clone(), roles: RewardRoles::of(parts), state }
    }

    /// The state from which a resumed run continues.
    pub fn state(&self) -> &MonitorState {
        &self.state
    }

    fn is_active(&self, kind: WarningKind) -> bool {
        self.state.episodes.get(&kind).is_some_and(|episode| episode.active)
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
        for kind in WarningKind::ALL {
            let gauge = metrics.train.warning_active.with_label_values(&[kind.as_str()]);
            gauge.set(i64::from(self.is_active(*kind)));
        }
        raised
    }

    /// Adds a step, unless it was added before a restart; returns the warnings that it raises.
    fn detect(&mut self, record: &StepRecord) -> Vec<Warning> {
        if record.step <= self.state.last_step {
            return Vec::new();
        }
        self.state.last_step = record.step;
        self.state.add(&self.roles, record);
        let signal = |kind: &WarningKind| (*kind, self.signal(*kind, record));
        let signals: Vec<_> = WarningKind::ALL.iter().map(signal).collect();
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

/// Bad above `limit`.
fn above(value: f64, limit: f64, message: impl FnOnce() -> String) -> Signal {
    if value > limit {
        Signal::Bad(message())
    } else if value <= limit * (1.0 - HYSTERESIS) {
        Signal::Good
    } else {
        Signal::Near
    }
}

/// Bad below `limit`.
fn below(value: f64, limit: f64, message: impl FnOnce() -> String) -> Signal {
    if value < limit {
        Signal::Bad(message())
    } else if value >= limit * (1.0 + HYSTERESIS) {
        Signal::Good
    } else {
        Signal::Near
    }
}

/// The name of what [`metric_names::reward_std`] compares.
fn compared(record: &StepRecord) -> &'static str {
    match finite(record, metric_names::REWARD_STD) {
        Some(_) => "within groups",
        None => "over single completions",
    }
}

/// The state already includes `record`.
impl HealthMonitor {
    fn signal(&self, kind: WarningKind, record: &StepRecord) -> Signal {
        match kind {
            WarningKind::Collapse => self.collapse(record),
            WarningKind::KlExplosion => self.kl_explosion(record),
            WarningKind::FlatReward => self.flat_reward(record),
            WarningKind::FormatIgnored => self.format_ignored(record),
            WarningKind::LengthHacking => self.length_hacking(record),
            WarningKind::EntropyCollapse => self.entropy_collapse(record),
            WarningKind::ClipRatioHigh => self.clip_ratio_high(record),
        }
    }

    fn collapse(&self, record: &StepRecord) -> Signal {
        // Equal rewards at the maximum are a success.
        if finite(record, metric_names::REWARD_MEAN).is_some_and(|mean| self.is_maximal(mean)) {
            return Signal::Good;
        }
        let std = metric_names::reward_std(record).map(|std| {
            below(std, self.config.least_reward_std(), || {
                format!("the reward's standard deviation {} fell to {std:.3}", compared(record))
            })
        });
        let zero = finite(record, metric_names::ZERO_STD_GROUPS).map(|share| {
            above(share, MAX_ZERO_STD_GROUPS, || match self.equal_batches() {
                0 | 1 => {
                    let percent = share * 100.0;
                    format!("in {percent:.0} % of groups all completions have equal rewards")
                }
                batches => format!("{batches} batches in a row {EQUAL_REWARDS}"),
            })
        });
        Signal::worst([zero, std].into_iter().flatten())
    }

    /// Consecutive steps, this one last, whose groups all had equal rewards.
    fn equal_batches(&self) -> usize {
        // Equal rewards deviate by rounding errors only.
        self.state.stds.iter().rev().take_while(|std| **std < 1e-9).count()
    }

    fn kl_explosion(&self, record: &StepRecord) -> Signal {
        match record.metrics.get(metric_names::KL) {
            Some(kl) if !kl.is_finite() => Signal::Certain(format!("KL to the reference is {kl}")),
            Some(&kl) => above(kl, MAX_KL, || {
                format!("KL to the reference reached {kl:.3} nats per token, above {MAX_KL}")
            }),
            None => Signal::Unknown,
        }
    }

    fn flat_reward(&self, record: &StepRecord) -> Signal {
        let (Some(rise), Some(std), Some(mean)) =
            (trend(&self.state.rewards), mean(&self.state.stds), mean(&self.state.rewards))
        else {
            return Signal::Unknown;
        };
        // Without a deviation there is nothing to learn from: a collapse, not a plateau.
        let is_learnable = std >= self.config.least_reward_std();
        // The right end of the line through the window.
        let current = mean + rise / 2.0;
        if !is_learnable || self.is_maximal(current) {
            return Signal::Good;
        }
        below(rise / std, MIN_RISE, || {
            format!(
                "the reward changed by {rise:+.3} in {} steps, at a standard deviation {} of \
                 {std:.3}",
                WINDOW,
                compared(record)
            )
        })
    }

    fn is_maximal(&self, mean: f64) -> bool {
        self.config.reward_max.is_some_and(|max| mean >= max - 0.1 * max.abs())
    }

    fn format_ignored(&self, record: &StepRecord) -> Signal {
        // A part without a mean is bad only if the step has means at all.
        if metric_names::parts(record).next().is_none() {
            return Signal::Unknown;
        }
        Signal::worst(self.roles.format.iter().map(|part| match metric_names::part(record, part) {
            Some(mean) => below(mean, MIN_FORMAT, || {
                format!("the part \"{part}\" stayed near 0 for {FORMAT_PATIENCE} steps ({mean:.3})")
            }),
            None => {
                Signal::Bad(format!("the part \"{part}\" had no value for {FORMAT_PATIENCE} steps"))
            }
        }))
    }

    fn length_hacking(&self, record: &StepRecord) -> Signal {
        let truncated = finite(record, metric_names::TRUNCATED).map(|share| {
            above(share, MAX_TRUNCATED, || {
                format!("{:.0} % of completions ended at the token limit", share * 100.0)
            })
        });
        Signal::worst([truncated, self.length_growth()].into_iter().flatten())
    }

    /// Bad if length and reward rise together without correctness. Where no part measures correctness, as with ratings
    /// alone, bad if completions are far longer than at first.
    fn length_growth(&self) -> Option<Signal> {
        let state = &self.state;
        if self.roles.correctness.is_empty() {
            let is_known = state.first_lengths.len() as u64 >= PATIENCE;
            let first = mean(&state.first_lengths).filter(|_| is_known)?;
            let newest = state.lengths.len().saturating_sub(state.first_lengths.len());
            let length = mean(&state.lengths[newest..])?;
            return Some(above(length, MAX_LENGTH_RATIO * first.max(1.0), || {
                format!("completions grew from {first:.0} tokens in the first steps to {length:.0}")
            }));
        }
        let growth = trend(&state.lengths)?;
        let correctness = trend(&state.correctness)?;
        let reward = trend(&state.rewards)?;
        let (length, std) = (mean(&state.lengths)?, mean(&state.stds)?);
        // Relative to the left end of the line through the window.
        let share = if length > 0.0 { growth / (length - growth / 2.0).max(1.0) } else { 0.0 };
        let margin = MIN_RISE * std;
        if reward <= margin || correctness > margin {
            return Some(Signal::Good);
        }
        Some(above(share, MAX_LENGTH_GROWTH, || {
            format!(
                "in {WINDOW} steps completions grew by {growth:.0} tokens and the reward by \
                 {reward:.3}, but correctness by {correctness:+.3}"
            )
        }))
    }

    fn entropy_collapse(&self, record: &StepRecord) -> Signal {
        let current = finite(record, metric_names::ENTROPY);
        let (Some(current), Some(first)) = (current, self.state.first_entropy()) else {
            return Signal::Unknown;
        };
        below(current, first * MIN_ENTROPY_SHARE, || {
            format!("the entropy fell from {first:.3} to {current:.3} nats per token")
        })
    }

    fn clip_ratio_high(&self, record: &StepRecord) -> Signal {
        let shares = [metric_names::CLIP_LOW, metric_names::CLIP_HIGH].map(|n| finite(record, n));
        let Some(share) = shares.into_iter().flatten().reduce(|low, high| low + high) else {
            return Signal::Unknown;
        };
        above(share, MAX_CLIP_RATIO, || {
            format!("{:.0} % of importance ratios were clipped", share * 100.0)
        })
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The rise of the least-squares line from first to last value; `None` until there are [`WINDOW`] values.
fn trend(values: &[f64]) -> Option<f64> {
    let n = values.len();
    if n < WINDOW {
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

#[cfg(test)]
mod tests;
