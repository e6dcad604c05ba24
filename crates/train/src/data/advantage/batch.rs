//! All values of a batch, and what they amount to as a whole.

use std::collections::BTreeMap;

use super::{Advantages, GroupRewards, Moments};

/// One value and where it stands: group, part within the group, member.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupValue {
    pub(super) group: usize,
    pub(super) part: usize,
    pub(super) member: usize,
    pub(super) value: f64,
    pub(super) share: f64,
}

impl GroupValue {
    pub(super) fn moments(self) -> Moments {
        Moments::one(self.value).decayed(self.share)
    }
}

/// All values of a batch by route and part.
#[derive(Default)]
pub(super) struct ValueBatch {
    pub(super) parts: BTreeMap<(String, String), Vec<GroupValue>>,
}

impl ValueBatch {
    pub(super) fn collect(groups: &[GroupRewards]) -> Self {
        let mut parts: BTreeMap<(String, String), Vec<GroupValue>> = BTreeMap::new();
        for (group_index, group) in groups.iter().enumerate() {
            for (part_index, part) in group.parts.iter().enumerate() {
                for member in 0..group.members {
                    if let Some(value) = group.value(part, member) {
                        parts.entry((group.route.clone(), part.name.clone())).or_default().push(
                            GroupValue {
                                group: group_index,
                                part: part_index,
                                member,
                                value,
                                share: GroupRewards::share(part, member),
                            },
                        );
                    }
                }
            }
        }
        Self { parts }
    }

    pub(super) fn part(&self, route: &str, part: &str) -> &[GroupValue] {
        self.parts.get(&(route.to_owned(), part.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// Means of parts, and of the reward as a whole.
    pub(super) fn describe(&self, groups: &[GroupRewards], out: &mut Advantages) {
        let mut weights: BTreeMap<(&str, &str), f64> = BTreeMap::new();
        let mut members: BTreeMap<&str, f64> = BTreeMap::new();
        for group in groups {
            *members.entry(&group.route).or_default() += group.trained().len() as f64;
            for part in &group.parts {
                weights.entry((&group.route, &part.name)).or_insert(part.weight);
            }
        }
        let mut by_route: BTreeMap<&str, f64> = BTreeMap::new();
        for (key, entries) in &self.parts {
            let own = Moments::of(entries.iter().map(|e| e.value));
            let mean = own.mean;
            let weight = weights.get(&(key.0.as_str(), key.1.as_str())).copied().unwrap_or(0.0);
            *by_route.entry(&key.0).or_default() += weight * mean;
            out.part_means.insert(key.clone(), mean);
            if let Some(deviation) = own.deviation() {
                out.part_stds.insert(key.clone(), deviation);
            }
        }
        let total: f64 = members.values().sum();
        if total > 0.0 {
            let sum: f64 = by_route
                .iter()
                .map(|(route, reward)| reward * members.get(route).copied().unwrap_or(0.0))
                .sum();
            out.reward_mean = Some(sum / total);
        }
    }
}

/// Spread of the rewards within groups.
#[derive(Default)]
pub(super) struct Summary {
    groups: f64,
    equal: f64,
    deviations: f64,
    rewards: Vec<f64>,
}

impl Summary {
    /// Adds the rewards of members that may have no group to be compared in.
    pub(super) fn add_rewards(&mut self, sums: &[f64]) {
        self.rewards.extend(sums);
    }

    pub(super) fn add_group(&mut self, sums: &[f64]) {
        let all_equal = sums.iter().all(|x| (x - sums[0]).abs() <= 1e-12 * x.abs().max(1.0));
        self.groups += 1.0;
        self.equal += f64::from(u8::from(all_equal));
        self.deviations += Moments::of(sums.iter().copied()).deviation().unwrap_or(0.0);
    }

    pub(super) fn finish(self, out: &mut Advantages) {
        if self.groups > 0.0 {
            out.zero_std_groups_ratio = Some(self.equal / self.groups);
            out.reward_std = Some(self.deviations / self.groups);
        }
        out.reward_batch_std = Moments::of(self.rewards.iter().copied()).deviation();
    }
}
