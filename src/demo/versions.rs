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
        Some(Self { version: record.version.0, decision, detail: detail.unwrap_or_default() })
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
    /// Every decision in its order. A version that was promoted may be rolled back later.
    pub decisions: Vec<VersionDecision>,
    /// The last decision on each version.
    #[serde(skip)]
    pub(super) known: BTreeMap<u64, DecisionKind>,
    /// Whether a version is being checked.
    #[serde(skip)]
    pub is_pending: bool,
}

impl VersionHistory {
    /// Reads the current records and returns the decisions since the last call.
    pub fn observe(&mut self, records: &[PolicyRecord]) -> Vec<VersionDecision> {
        let pending = [PolicyState::Candidate, PolicyState::Canary];
        self.is_pending = records.iter().any(|record| pending.contains(&record.state));
        let mut new = Vec::new();
        for decision in records.iter().filter_map(VersionDecision::of) {
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
}

#[cfg(test)]
mod tests {
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
        PolicyRecord {
            version: PolicyVersion(version),
            parent: None,
            step: version,
            adapter: None,
            sha256: None,
            metrics: BTreeMap::new(),
            state,
            reason: reason.map(str::to_owned),
            created: 0,
            pinned: false,
            checks: vec![check],
        }
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
}
