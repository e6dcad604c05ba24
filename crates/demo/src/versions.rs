//! The decisions about policy versions, as `/admin/policies` reports them.

use std::collections::BTreeMap;

use serde::Serialize;

use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion};

/// A decision about a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionKind {
    /// All traffic gets it.
    Promoted,
    /// A check of the gate failed.
    Rejected,
    /// It was withdrawn as a canary or as the active version.
    RolledBack,
}

/// A decision about a version, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VersionDecision {
    /// The version.
    pub version: u64,
    /// The decision.
    pub decision: DecisionKind,
    /// The last check in words, or the reason of a version that is not served.
    pub detail: String,
    /// Whether it was trained on the rewards of a sabotaged grader.
    pub sabotaged: bool,
}

impl VersionDecision {
    /// The decision on a record; `None` for the base and for a version that is not decided.
    fn of(record: &PolicyRecord) -> Option<Self> {
        let decision = match record.state {
            _ if record.version == PolicyVersion::BASE => return None,
            PolicyState::Candidate | PolicyState::Canary => return None,
            PolicyState::Active | PolicyState::Retired => DecisionKind::Promoted,
            PolicyState::Rejected => DecisionKind::Rejected,
            PolicyState::RolledBack => DecisionKind::RolledBack,
        };
        let last = record.checks.last().map(|check| format!("{}: {}", check.name, check.detail));
        let detail = match decision {
            DecisionKind::Promoted => last,
            DecisionKind::Rejected | DecisionKind::RolledBack => record.reason.clone().or(last),
        };
        let detail = detail.unwrap_or_default();
        Some(Self { version: record.version.0, decision, detail, sabotaged: false })
    }

    /// Its line on the terminal, after the label.
    pub fn text(&self) -> String {
        let kind = if self.sabotaged { "sabotaged version" } else { "version" };
        format!("{kind} {} · {}", self.version, self.detail)
    }

    /// The label of its line on the terminal.
    pub fn label(&self) -> &'static str {
        match self.decision {
            DecisionKind::Promoted => "promoted",
            DecisionKind::Rejected => "rejected",
            DecisionKind::RolledBack => "rolled back",
        }
    }
}

/// Decisions of a demo with a gate or a canary.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VersionHistory {
    /// Versions that all traffic got at some time.
    pub promoted: usize,
    /// Versions that the gate rejected.
    pub rejected: usize,
    /// Versions that were withdrawn.
    pub rolled_back: usize,
    /// The first version that was trained on sabotaged rewards.
    pub sabotaged_from: Option<u64>,
    /// Every decision in its order. A version that was promoted may be rolled back later.
    pub decisions: Vec<VersionDecision>,
    /// The last decision on each version.
    #[serde(skip)]
    pub(super) known: BTreeMap<u64, DecisionKind>,
    /// Whether a version is being checked.
    #[serde(skip)]
    pub is_pending: bool,
    /// Reads in a row without a version that is being checked.
    #[serde(skip)]
    pub(super) polls_at_rest: u32,
    /// The newest version.
    #[serde(skip)]
    pub newest: u64,
}

impl VersionHistory {
    /// Reads the current records and returns the decisions since the last call.
    pub fn observe(&mut self, records: &[PolicyRecord]) -> Vec<VersionDecision> {
        let pending = [PolicyState::Candidate, PolicyState::Canary];
        self.newest = records.iter().map(|record| record.version.0).max().unwrap_or_default();
        self.is_pending = records.iter().any(|record| pending.contains(&record.state));
        let mut new = Vec::new();
        for mut decision in records.iter().filter_map(VersionDecision::of) {
            decision.sabotaged = self.sabotaged_from.is_some_and(|from| decision.version >= from);
            if self.known.insert(decision.version, decision.decision) == Some(decision.decision) {
                continue;
            }
            match decision.decision {
                DecisionKind::Promoted => self.promoted += 1,
                DecisionKind::Rejected => self.rejected += 1,
                DecisionKind::RolledBack => self.rolled_back += 1,
            }
            new.push(decision);
        }
        self.decisions.extend(new.iter().cloned());
        new
    }

    /// Whether users' ratings withdrew a sabotaged version as worse, and none was promoted.
    pub fn caught_sabotage(&self) -> bool {
        let mut sabotaged = self.decisions.iter().filter(|decision| decision.sabotaged);
        let is_promoted = |decision: &VersionDecision| decision.decision == DecisionKind::Promoted;
        !sabotaged.clone().any(is_promoted)
            && sabotaged.any(|decision| decision.detail.starts_with("canary/ratings: worse"))
    }
}

#[cfg(test)]
mod tests {
    use hone_core::testing::policy;
    use hone_core::types::PolicyCheck;

    use super::*;

    fn record(version: u64, state: PolicyState, reason: Option<&str>) -> PolicyRecord {
        let check = PolicyCheck {
            name: "canary/ratings".to_owned(),
            passed: reason.is_none(),
            value: None,
            bound: None,
            detail: "not worse".to_owned(),
        };
        let reason = reason.map(str::to_owned);
        PolicyRecord { state, reason, checks: vec![check], ..policy(version, 0) }
    }

    #[test]
    fn every_decision_is_reported_once() {
        let mut history = VersionHistory::default();
        let base = record(0, PolicyState::Active, None);
        assert!(history.observe(&[base.clone(), record(1, PolicyState::Canary, None)]).is_empty());
        assert!(history.is_pending);
        let records = [record(0, PolicyState::Retired, None), record(1, PolicyState::Active, None)];
        let new = history.observe(&records);
        assert_eq!(new.len(), 1);
        assert_eq!((new[0].version, new[0].label()), (1, "promoted"));
        assert_eq!(new[0].detail, "canary/ratings: not worse");
        assert!(history.observe(&records).is_empty() && !history.is_pending);
        let new = history.observe(&[
            record(1, PolicyState::Retired, None),
            record(2, PolicyState::RolledBack, Some("canary/ratings: worse")),
            record(3, PolicyState::Rejected, Some("drift/length: longer")),
        ]);
        let lines: Vec<_> = new.iter().map(|d| (d.label(), d.detail.as_str())).collect();
        assert_eq!(
            lines,
            [("rolled back", "canary/ratings: worse"), ("rejected", "drift/length: longer")]
        );
        assert_eq!((history.promoted, history.rejected, history.rolled_back), (1, 1, 1));
        assert_eq!(history.decisions.len(), 3);
        // A rule withdraws the version that was served.
        let new = history.observe(&[record(1, PolicyState::RolledBack, Some("reward fell"))]);
        assert_eq!((new[0].label(), history.rolled_back), ("rolled back", 2));
    }

    #[test]
    fn a_sabotage_is_caught_by_ratings_that_are_worse() {
        let caught = |decisions: &[(u64, PolicyState, Option<&str>)]| {
            let mut history = VersionHistory { sabotaged_from: Some(5), ..Default::default() };
            let records: Vec<_> = decisions.iter().map(|(v, s, r)| record(*v, *s, *r)).collect();
            history.observe(&records);
            history.caught_sabotage()
        };
        let (promoted, back) = (PolicyState::Retired, PolicyState::RolledBack);
        let worse = Some("canary/ratings: worse: mean difference -0.4");
        let undecided = Some("canary/ratings: undecided at the limit");
        assert!(caught(&[(4, promoted, None), (5, back, worse)]));
        assert!(!caught(&[(4, back, worse), (5, back, undecided)]));
        assert!(!caught(&[(5, back, worse), (6, promoted, None)]));
    }
}
