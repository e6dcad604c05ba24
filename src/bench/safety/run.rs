//! The measurements of one run.

use serde::Serialize;

use hone_core::types::{PolicyRecord, PolicyState};
use hone_train::policy::Promotion;

use super::scenario::SafetyScenario;
use super::windows::WorstWindow;

/// One run: a scenario, a seed, and how versions are published.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SafetyRun {
    /// The scenario.
    pub scenario: SafetyScenario,
    /// How versions were published.
    pub mode: Promotion,
    /// The seed of users and trainer.
    pub seed: u64,
    /// Satisfaction with the base model, from 0 to 1, under the taste that users had at the end.
    pub base: f64,
    /// Mean satisfaction with the last quarter of the answers.
    pub final_satisfaction: f64,
    /// The worst window of 300 answers, each valued by its version's mean satisfaction.
    pub worst_window: WorstWindow,
    /// The worst window of 300 answers, each valued by itself.
    pub worst_window_observed: WorstWindow,
    /// Versions that all traffic got at some time, without the base.
    pub promoted: usize,
    /// Versions that the gate rejected.
    pub rejected: usize,
    /// Versions that were withdrawn as a canary or as the active version.
    pub rolled_back: usize,
    /// Optimizer steps.
    pub steps: u64,
    /// Chat completions requested.
    pub requests: u64,
    /// Chat completions and ratings that failed.
    pub failed_requests: u64,
    /// The messages of the first failures.
    pub failures: Vec<String>,
    /// Acknowledged ratings.
    pub ratings: u64,
    /// Those whose acknowledgment says that they are not trained on.
    pub ratings_not_trained: u64,
    /// Why training paused, if it did.
    pub hold: Option<String>,
    /// Duration in minutes.
    pub minutes: f64,
    /// `(answer, satisfaction)`: the mean satisfaction with the 300 answers up to this one.
    pub curve: Vec<(f64, f64)>,
}

impl SafetyRun {
    /// A run without any request.
    pub(super) fn empty(scenario: SafetyScenario, mode: Promotion, seed: u64) -> Self {
        Self {
            scenario,
            mode,
            seed,
            base: 0.0,
            final_satisfaction: 0.0,
            worst_window: WorstWindow::default(),
            worst_window_observed: WorstWindow::default(),
            promoted: 0,
            rejected: 0,
            rolled_back: 0,
            steps: 0,
            requests: 0,
            failed_requests: 0,
            failures: Vec::new(),
            ratings: 0,
            ratings_not_trained: 0,
            hold: None,
            minutes: 0.0,
            curve: Vec::new(),
        }
    }
}

/// Whether all traffic got a version at some time. A version that was withdrawn as a canary has a failed
/// check.
pub(super) fn was_active(record: &PolicyRecord) -> bool {
    let withdrawn = record.state == PolicyState::RolledBack;
    record.state.was_promoted() || withdrawn && record.checks.iter().all(|check| check.passed)
}

/// The name of a mode in tables and on the command line.
pub(super) fn mode_name(mode: Promotion) -> &'static str {
    match mode {
        Promotion::Direct => "direct",
        Promotion::Gate => "gate",
        Promotion::Canary => "canary",
    }
}

/// The columns of the table, with their widths; text first.
pub(super) const COLUMNS: [(&str, usize); 12] = [
    ("scenario", 16),
    ("mode", 7),
    ("seed", 5),
    ("base", 7),
    ("final", 7),
    ("worst", 7),
    ("below", 7),
    ("versions", 9),
    ("rejected", 9),
    ("rolled", 7),
    ("requests", 9),
    ("failed", 7),
];

impl SafetyRun {
    /// The cells of [`COLUMNS`].
    pub(super) fn cells(&self) -> [String; 12] {
        let satisfaction = |value: f64| format!("{value:.3}");
        [
            self.scenario.to_string(),
            mode_name(self.mode).to_owned(),
            self.seed.to_string(),
            satisfaction(self.base),
            satisfaction(self.final_satisfaction),
            satisfaction(self.worst_window.satisfaction),
            satisfaction(self.worst_window.shortfall),
            self.promoted.to_string(),
            self.rejected.to_string(),
            self.rolled_back.to_string(),
            self.requests.to_string(),
            self.failed_requests.to_string(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use hone_core::types::{PolicyCheck, PolicyVersion};

    use super::*;

    fn record(state: PolicyState, passed: &[bool]) -> PolicyRecord {
        let check = |passed: &bool| PolicyCheck {
            name: "canary/ratings".to_owned(),
            passed: *passed,
            value: None,
            bound: None,
            detail: String::new(),
        };
        PolicyRecord {
            version: PolicyVersion(1),
            parent: None,
            step: 1,
            adapter: None,
            sha256: None,
            metrics: Default::default(),
            state,
            reason: None,
            created: 0,
            pinned: false,
            checks: passed.iter().map(check).collect(),
        }
    }

    #[test]
    fn a_withdrawn_canary_was_never_active() {
        assert!(was_active(&record(PolicyState::Active, &[true])));
        assert!(was_active(&record(PolicyState::Retired, &[])));
        assert!(was_active(&record(PolicyState::RolledBack, &[true, true])));
        assert!(!was_active(&record(PolicyState::RolledBack, &[true, false])));
        assert!(!was_active(&record(PolicyState::Rejected, &[false])));
        assert!(!was_active(&record(PolicyState::Canary, &[true])));
    }
}
