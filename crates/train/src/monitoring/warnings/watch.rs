//! The state machine: episodes and the figures of the last steps.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use hone_core::types::StepRecord;

use super::detect::{Scene, Signal};
use super::{Roles, Warning, WarningConfig, WarningKind};
use crate::monitoring::metric_names;

/// One kind's episode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Episode {
    active: bool,
    /// Steps in a row that speak for a change of `active`.
    streak: u64,
}

/// What a resumed run needs to go on warning as if it had never stopped.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WatchState {
    last_step: u64,
    episodes: BTreeMap<WarningKind, Episode>,
    pub(super) rewards: Vec<f64>,
    pub(super) stds: Vec<f64>,
    pub(super) lengths: Vec<f64>,
    pub(super) correctness: Vec<f64>,
    /// Of the run's first steps; what later entropies are compared with.
    entropies: Vec<f64>,
    entropy_known: bool,
}

impl WatchState {
    /// The mean entropy of the first steps, once they are over.
    pub(super) fn first_entropy(&self) -> Option<f64> {
        let n = self.entropies.len();
        self.entropy_known.then(|| self.entropies.iter().sum::<f64>() / n as f64)
    }

    fn remember(&mut self, config: &WarningConfig, roles: &Roles, record: &StepRecord) {
        let window = config.window.max(4);
        let right: Vec<f64> =
            roles.correctness.iter().filter_map(|part| metric_names::part(record, part)).collect();
        let right = (!right.is_empty()).then(|| right.iter().sum::<f64>());
        for (values, value) in [
            (&mut self.rewards, metric_names::finite(record, metric_names::REWARD_MEAN)),
            (&mut self.stds, metric_names::finite(record, metric_names::REWARD_STD)),
            (&mut self.lengths, metric_names::finite(record, metric_names::LENGTH)),
            (&mut self.correctness, right),
        ] {
            values.extend(value);
            let surplus = values.len().saturating_sub(window);
            values.drain(..surplus);
        }
        if !self.entropy_known {
            self.entropies.extend(metric_names::finite(record, metric_names::ENTROPY));
            self.entropy_known = self.entropies.len() as u64 >= config.patience.max(1);
        }
    }
}

/// Watches one run.
#[derive(Clone, Debug)]
pub struct Watch {
    config: WarningConfig,
    roles: Roles,
    state: WatchState,
}

impl Watch {
    /// Begins with [`WatchState::default`], or goes on from what [`Self::state`] gave.
    pub fn new(config: WarningConfig, roles: Roles, state: WatchState) -> Self {
        Self { config, roles, state }
    }

    /// What to store in a checkpoint.
    pub fn state(&self) -> &WatchState {
        &self.state
    }

    /// The episodes that have not ended.
    pub fn active(&self) -> impl Iterator<Item = WarningKind> {
        self.state.episodes.iter().filter(|(_, episode)| episode.active).map(|(kind, _)| *kind)
    }

    /// Takes a step's figures and returns the warnings that it raises. A step that is not after
    /// the last one (a resumed run takes it again) changes nothing.
    pub fn observe(&mut self, record: &StepRecord) -> Vec<Warning> {
        if record.step <= self.state.last_step {
            return Vec::new();
        }
        self.state.last_step = record.step;
        self.state.remember(&self.config, &self.roles, record);
        let scene = Scene { config: &self.config, roles: &self.roles, state: &self.state, record };
        let signals = WarningKind::ALL.map(|kind| (kind, scene.signal(kind)));
        let mut raised = Vec::new();
        for (kind, signal) in signals {
            let needed = self.needed(kind);
            let episode = self.state.episodes.entry(kind).or_default();
            if let Some(message) = episode.take(signal, needed, self.config.patience.max(1)) {
                let advice = kind.advice().to_owned();
                raised.push(Warning { kind, step: record.step, message, advice });
            }
        }
        raised
    }

    /// Steps in a row that raise a warning.
    fn needed(&self, kind: WarningKind) -> u64 {
        match kind {
            WarningKind::FormatIgnored => self.config.format_patience.max(1),
            _ => self.config.patience.max(1),
        }
    }
}

impl Episode {
    /// The message, if this step begins the episode.
    fn take(&mut self, signal: Signal, to_raise: u64, to_lift: u64) -> Option<String> {
        let needed = if self.active { to_lift } else { to_raise };
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
