//! Warnings about runs that go wrong, each with advice.
//!
//! Each kind of warning has episodes. An episode begins, and its warning is raised, when its
//! condition has held for some steps in a row. It ends when a stricter condition (hysteresis) has
//! held for some steps in a row, so that a metric near its limit raises one warning, not many. A
//! missing metric neither begins nor ends an episode.

mod health_monitor;
mod warning;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use hone_core::config::{Checked, at_least, finite};
use hone_core::types::StepRecord;

use crate::monitoring::metric_names;

pub use health_monitor::HealthMonitor;
pub(crate) use warning::EQUAL_REWARDS;
pub use warning::{Warning, WarningKind};

// The keys of `[run.warnings]`.

/// What the daemon does when a warning begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarningAction {
    /// Log it, as always.
    #[default]
    Log,
    /// Halve the learning rate until training is resumed.
    LowerRate,
    /// Pause training until it is resumed.
    Pause,
    /// Roll the active version back to its parent.
    RollBack,
}

/// What is normal for a run, and what the daemon does otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarningConfig {
    /// Collapse: minimum of the reward's standard deviation within groups, or over the completions of a
    /// step that has single ones only. A key, because it is in units of the weighted reward.
    pub min_reward_std: f64,
    /// The reward of a perfect completion. A reward within a tenth of it is neither flat nor collapsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_max: Option<f64>,
    /// The actions of warnings in the daemon, other than `log`. A run on a dataset only logs.
    pub actions: BTreeMap<WarningKind, WarningAction>,
}

impl Default for WarningConfig {
    fn default() -> Self {
        Self { min_reward_std: 0.1, reward_max: None, actions: BTreeMap::new() }
    }
}

impl WarningConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        at_least("run.warnings.min_reward_std", self.min_reward_std, 0.0)?;
        self.reward_max.map_or(Ok(()), |most| finite("run.warnings.reward_max", most))
    }
}

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
    /// script, a webhook) leaves it to the name. A part may have neither role.
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

// The limits of healthy runs. Guides to GRPO call a KL below 0.5 healthy; the others are estimates.

/// Consecutive steps that begin an episode, and that end it.
const PATIENCE: u64 = 5;
/// Steps over which trends of reward and length are measured.
const WINDOW: usize = 40;

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

/// Whether a kind of warning is active.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Episode {
    active: bool,
    /// Consecutive steps that are evidence for changing `active`.
    streak: u64,
}

impl Episode {
    /// Adds a step's signal. `raise_after` and `end_after` are the consecutive steps that begin and
    /// end the episode. Returns the message if the episode begins.
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
    correctness: Vec<f64>,
    /// Of the run's first steps; later entropies are compared with their mean.
    entropies: Vec<f64>,
    entropy_known: bool,
}

impl MonitorState {
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
            (&mut self.rewards, metric_names::finite(record, metric_names::REWARD_MEAN)),
            (&mut self.stds, metric_names::reward_std(record)),
            (&mut self.lengths, metric_names::finite(record, metric_names::LENGTH)),
            (&mut self.correctness, correctness),
        ] {
            values.extend(value);
            let surplus = values.len().saturating_sub(WINDOW);
            values.drain(..surplus);
        }
        if !self.entropy_known {
            self.entropies.extend(metric_names::finite(record, metric_names::ENTROPY));
            self.entropy_known = self.entropies.len() as u64 >= PATIENCE;
        }
    }
}

#[cfg(test)]
mod tests;
