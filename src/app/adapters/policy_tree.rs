//! The tree of policy versions as text.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hone_core::types::{Lineage, PolicyRecord, PolicyState, PolicyVersion};

/// One line for each version, with a header. A version follows its parent. Branches that the active
/// version does not descend from are indented below the version at which they begin.
pub fn render(records: &[PolicyRecord], data: &Path) -> String {
    let [version, step, state, files, reward] = ["version", "step", "state", "files", "reward"];
    let mut text = format!("{version:<14} {step:>8}  {state:<11} {files:<5} {reward:>7}\n");
    for (depth, record) in in_order(records) {
        let version = format!("{:1$}{2}", "", 2 * depth, record.version.0);
        let reward = record.metrics.get("reward_mean");
        let reward = reward.map_or_else(|| "-".to_owned(), |reward| format!("{reward:.3}"));
        let state = record.state.as_str();
        let files = match &record.adapter {
            None => "base",
            Some(adapter) if data.join(adapter).exists() => "yes",
            Some(_) => "no",
        };
        let step = record.step;
        let pinned = if record.pinned { "  pinned" } else { "" };
        text += format!("{version:<14} {step:>8}  {state:<11} {files:<5} {reward:>7}{pinned}\n")
            .as_str();
    }
    text
}

/// Every version with the number of abandoned branches that contain it.
fn in_order(records: &[PolicyRecord]) -> Vec<(usize, &PolicyRecord)> {
    let lineage: Lineage = records.iter().collect();
    let active = records.iter().rev().find(|record| record.state == PolicyState::Active);
    let active = active.map_or(PolicyVersion::BASE, |record| record.version);
    let main: BTreeSet<PolicyVersion> = lineage.chain(active).collect();
    let mut children: BTreeMap<Option<PolicyVersion>, Vec<&PolicyRecord>> = BTreeMap::new();
    for record in records {
        children.entry(record.parent).or_default().push(record);
    }
    let mut waiting: Vec<(usize, &PolicyRecord)> =
        children.remove(&None).unwrap_or_default().into_iter().map(|record| (0, record)).collect();
    let mut ordered = Vec::with_capacity(records.len());
    while let Some((depth, record)) = waiting.pop() {
        ordered.push((depth, record));
        let mut branches = children.remove(&Some(record.version)).unwrap_or_default();
        let straight = branches.iter().position(|child| main.contains(&child.version));
        // In an abandoned branch, the newest child continues it.
        let straight = straight.or_else(|| branches.len().checked_sub(1));
        if let Some(at) = straight {
            waiting.push((depth, branches.remove(at)));
        }
        waiting.extend(branches.into_iter().rev().map(|child| (depth + 1, child)));
    }
    ordered
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use hone_core::testing::policy;

    use super::*;

    fn record(version: u64, parent: u64, state: PolicyState) -> PolicyRecord {
        PolicyRecord {
            adapter: (version > 0).then(|| format!("adapters/v{version:06}")),
            metrics: [("reward_mean".to_owned(), version as f64 / 8.0)].into(),
            state,
            ..policy(version, parent)
        }
    }

    #[test]
    fn abandoned_branches_are_below_their_first_parent() {
        use PolicyState::{Active, Rejected, Retired, RolledBack};
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("adapters/v000006")).unwrap();
        let versions = [
            (0, 0, Retired),
            (1, 0, Retired),
            (2, 1, Retired),
            (3, 2, Retired),
            (4, 1, Rejected),
            (5, 2, RolledBack),
            (6, 1, Active),
        ];
        let mut records = versions.map(|(version, parent, state)| record(version, parent, state));
        records[2].pinned = true;
        assert_snapshot!(render(&records, dir.path()), @r"
        version            step  state       files  reward
        0                     0  retired     base    0.000
        1                     1  retired     no      0.125
          2                   2  retired     no      0.250  pinned
            3                 3  retired     no      0.375
          5                   5  rolled_back no      0.625
          4                   4  rejected    no      0.500
        6                     6  active      yes     0.750
        ");
    }
}
