//! The advantages of a batch, and metrics of its rewards.

use std::collections::BTreeMap;

use super::BatchValues;
use super::GroupRewards;
use super::moments::Moments;
use super::sums::GroupSums;

/// The advantages of a batch, and metrics of its rewards.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Advantages {
    /// By group and member; `None` for members that are not trained on.
    pub values: Vec<Vec<Option<f64>>>,
    /// Number of values compared within their group.
    pub group_count: u64,
    /// Number of values compared with a running baseline.
    pub running_count: u64,
    /// Fraction of groups whose rewards are all equal, among groups of two or more trained members;
    /// `None` without such groups.
    pub zero_std_groups_ratio: Option<f64>,
    /// `sum over parts of weight * mean of the part`, averaged over routes by trained members.
    pub reward_mean: Option<f64>,
    /// Standard deviation (n - 1) within a group of the weighted sum of the parts that all its
    /// members have, averaged over groups; `None` without a group that has such parts.
    pub reward_std: Option<f64>,
    /// The standard deviation (n - 1) of that sum over all trained members of the batch (TRL's
    /// `reward_std`); `None` below two.
    pub reward_batch_std: Option<f64>,
    /// Number of groups dropped because no member differed from the others.
    pub dropped_groups: u64,
    /// Mean of each `(route, part)` over the samples that have it.
    pub part_means: BTreeMap<(String, String), f64>,
    /// Their standard deviations (n - 1); absent below two values.
    pub part_stds: BTreeMap<(String, String), f64>,
}

impl Advantages {
    /// [`Self::part_means`] as `part/NAME` and [`Self::part_stds`] as `part_std/NAME` (TRL's
    /// `rewards/NAME/mean` and `std`). The name is `ROUTE/NAME` if several routes of the step have a
    /// part of that name.
    pub fn part_metrics(&self) -> impl Iterator<Item = (String, f64)> {
        let metrics = [("part", &self.part_means), ("part_std", &self.part_stds)];
        metrics.into_iter().flat_map(move |(prefix, map)| {
            map.iter().map(move |((route, part), value)| {
                let unique = self.part_means.keys().filter(|(_, other)| other == part).count() == 1;
                let name = if unique {
                    format!("{prefix}/{part}")
                } else {
                    format!("{prefix}/{route}/{part}")
                };
                (name, *value)
            })
        })
    }

    /// Adds the metrics of the weighted sums.
    pub(super) fn describe_sums(&mut self, sums: &[GroupSums]) {
        let groups: Vec<&GroupSums> = sums.iter().filter(|own| own.is_compared()).collect();
        let all_equal = |own: &GroupSums| {
            let first = own.values[0];
            own.values.iter().all(|x| (x - first).abs() <= 1e-12 * x.abs().max(1.0))
        };
        let deviation =
            |own: &GroupSums| Moments::of(own.values.iter().copied()).deviation().unwrap_or(0.0);
        if !groups.is_empty() {
            let count = groups.len() as f64;
            let equal = groups.iter().filter(|own| all_equal(own)).count() as f64;
            self.zero_std_groups_ratio = Some(equal / count);
            self.reward_std = Some(groups.iter().map(|own| deviation(own)).sum::<f64>() / count);
        }
        let compared = |own: &GroupSums| (own.members.len() * own.parts.len()) as u64;
        self.group_count = groups.into_iter().map(compared).sum();
        let all = sums.iter().flat_map(|own| own.values.iter().copied());
        self.reward_batch_std = Moments::of(all).deviation();
    }

    /// Adds the means of the parts and of the whole reward.
    pub(super) fn describe_parts(&mut self, groups: &[GroupRewards], values: &BatchValues) {
        let mut weights: BTreeMap<(&str, &str), f64> = BTreeMap::new();
        let mut members: BTreeMap<&str, f64> = BTreeMap::new();
        for group in groups {
            *members.entry(&group.route).or_default() += group.trained().len() as f64;
            for part in &group.parts {
                weights.entry((&group.route, &part.name)).or_insert(part.weight);
            }
        }
        let mut route_means: BTreeMap<&str, f64> = BTreeMap::new();
        for (key, values) in &values.0 {
            let moments = Moments::of(values.iter().map(|v| v.value));
            let weight = weights.get(&(key.0.as_str(), key.1.as_str())).copied().unwrap_or(0.0);
            *route_means.entry(&key.0).or_default() += weight * moments.mean;
            self.part_means.insert(key.clone(), moments.mean);
            self.part_stds.extend(moments.deviation().map(|std| (key.clone(), std)));
        }
        let total: f64 = members.values().sum();
        if total > 0.0 {
            let sum: f64 = route_means.iter().map(|(route, mean)| mean * members[route]).sum();
            self.reward_mean = Some(sum / total);
        }
    }
}
