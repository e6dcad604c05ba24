//! The tree of policy versions.

use std::collections::{BTreeMap, BTreeSet};

use super::ids::PolicyVersion;
use super::records::{PolicyRecord, PolicyState};

/// The parent of each policy version, the canary, and what checks or ratings withdrew.
///
/// Version numbers grow with time, so they do not order versions after a rollback: if version 10 is
/// activated again after version 30, its next child is version 31, of which 11 to 30 are no
/// ancestors. Whatever depends on how old a version is follows the parents instead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lineage {
    parents: BTreeMap<PolicyVersion, PolicyVersion>,
    canary: Option<PolicyVersion>,
    withdrawn: BTreeSet<PolicyVersion>,
}

impl Lineage {
    /// Adds a version, or its new state. A parent that is not older than its child is ignored.
    pub fn add(&mut self, record: &PolicyRecord) {
        if record.state == PolicyState::Canary {
            self.canary = Some(record.version);
        } else if self.canary == Some(record.version) {
            self.canary = None;
        }
        if record.state == PolicyState::RolledBack {
            self.withdrawn.insert(record.version);
        } else {
            self.withdrawn.remove(&record.version);
        }
        if let Some(parent) = record.parent.filter(|parent| *parent < record.version) {
            self.parents.insert(record.version, parent);
        }
    }

    /// The version that a share of the traffic gets until it is promoted or withdrawn.
    pub fn canary(&self) -> Option<PolicyVersion> {
        self.canary
    }

    /// The number of steps from `head` to its ancestor `version` along the parents; 0 if they are
    /// the same. `None` if `version` is not an ancestor of `head`.
    pub fn age(&self, head: PolicyVersion, version: PolicyVersion) -> Option<u64> {
        // Parents are older than their children, so the search can end at the first older version.
        let mut ancestors = (0..).zip(self.chain(head)).skip_while(|(_, v)| *v > version);
        ancestors.next().filter(|(_, found)| *found == version).map(|(age, _)| age)
    }

    /// The number of steps between `head` and `version`: up to an ancestor that both have, and down from it. `None` unless
    /// all versions on the way down were withdrawn; an operator's activation abandons versions instead.
    pub fn distance(&self, head: PolicyVersion, version: PolicyVersion) -> Option<u64> {
        let down = self.chain(version).take_while(|v| self.withdrawn.contains(v)).count();
        let mut places = (0..).zip(self.chain(version)).take(down + 1);
        places.find_map(|(down, ancestor): (u64, _)| Some(self.age(head, ancestor)? + down))
    }

    /// `head`, its parent, and so on.
    pub fn chain(&self, head: PolicyVersion) -> impl Iterator<Item = PolicyVersion> + '_ {
        std::iter::successors(Some(head), |version| self.parents.get(version).copied())
    }
}

impl<'a> FromIterator<&'a PolicyRecord> for Lineage {
    fn from_iter<T: IntoIterator<Item = &'a PolicyRecord>>(records: T) -> Self {
        let mut lineage = Self::default();
        records.into_iter().for_each(|record| lineage.add(record));
        lineage
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::policy;

    fn tree(parents: &[u64]) -> Lineage {
        let children = parents.iter().zip(1..).map(|(parent, child)| policy(child, *parent));
        let records: Vec<_> = std::iter::once(policy(0, 0)).chain(children).collect();
        records.iter().collect()
    }

    #[test]
    fn abandoned_branches_and_damaged_parents_have_no_age() {
        // Version 10 is activated again after version 30, and trained further to 31 and 32.
        let mut parents: Vec<u64> = (0..30).collect();
        parents.extend([10, 31]);
        let lineage = tree(&parents);
        let age = |version| lineage.age(PolicyVersion(32), PolicyVersion(version));
        assert_eq!([age(32), age(31), age(10), age(0)], [Some(0), Some(1), Some(2), Some(12)]);
        assert_eq!([age(11), age(30), age(33)], [None, None, None]);
        assert_eq!(lineage.age(PolicyVersion(30), PolicyVersion(10)), Some(20));
        assert_eq!(lineage.age(PolicyVersion(99), PolicyVersion(10)), None, "an unknown version");
        let lineage: Lineage = [&policy(1, 2), &policy(2, 2)].into_iter().collect();
        assert_eq!(lineage.chain(PolicyVersion(2)).count(), 1);
    }

    #[test]
    fn withdrawn_versions_have_a_distance() {
        let record = |version, parent, state| PolicyRecord { state, ..policy(version, parent) };
        let (retired, back) = (PolicyState::Retired, PolicyState::RolledBack);
        // 2 and its child 3 were withdrawn, then 4 followed 1. An operator left 5 for 4, of which 6 was a canary.
        let records = [
            record(1, 0, retired),
            record(2, 1, back),
            record(3, 2, back),
            record(4, 1, PolicyState::Active),
            record(5, 4, retired),
            record(6, 5, back),
        ];
        let lineage: Lineage = records.iter().collect();
        let distance = |version| lineage.distance(PolicyVersion(4), PolicyVersion(version));
        assert_eq!([4, 1, 2, 3].map(distance), [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!([5, 6, 7].map(distance), [None; 3]);
    }

    #[test]
    fn the_canary_is_known_until_its_state_changes() {
        let record = |version, state| PolicyRecord { state, ..policy(version, 0) };
        let mut lineage: Lineage = [&record(1, PolicyState::Canary)].into_iter().collect();
        assert_eq!(lineage.canary(), Some(PolicyVersion(1)));
        lineage.add(&record(2, PolicyState::Rejected));
        assert_eq!(lineage.canary(), Some(PolicyVersion(1)));
        lineage.add(&record(1, PolicyState::RolledBack));
        assert_eq!(lineage.canary(), None);
    }

    proptest! {
        /// In a random tree, the versions with an age are those on the path to the root, in order.
        #[test]
        fn ages_count_the_path_to_the_root(
            choices in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
        ) {
            let parents: Vec<u64> =
                choices.iter().enumerate().map(|(i, at)| at.index(i + 1) as u64).collect();
            let lineage = tree(&parents);
            let head = parents.len() as u64;
            let mut path = vec![head];
            while let Some(parent) = path.last().and_then(|v| parents.get((*v as usize).wrapping_sub(1))) {
                path.push(*parent);
            }
            for version in 0..=head + 1 {
                let expected = path.iter().position(|on_path| *on_path == version);
                let age = lineage.age(PolicyVersion(head), PolicyVersion(version));
                prop_assert_eq!(age, expected.map(|age| age as u64));
            }
        }
    }
}
