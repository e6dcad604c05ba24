//! The parts that all trained members of a group have, and their weighted sum.

use super::BatchValues;
use super::GroupRewards;
use super::group_advantages;
use super::moments::Moments;
use crate::config::{RewardAggregation, TrainConfig};

/// The trained members of a group and the parts that all of them have.
pub(super) struct GroupSums {
    /// Members that have any value.
    pub(super) members: Vec<usize>,
    /// Indices of the parts that all of these members have.
    pub(super) parts: Vec<usize>,
    /// The weighted sum of those parts by trained member; empty without such parts.
    pub(super) values: Vec<f64>,
    /// The smallest cap weight of those parts by trained member.
    cap_weights: Vec<f64>,
}

impl GroupSums {
    pub(super) fn new(group: &GroupRewards) -> Self {
        let members = group.trained();
        let (mut parts, mut values) = (Vec::new(), vec![0.0; members.len()]);
        let mut cap_weights = vec![1.0_f64; members.len()];
        for (index, part) in group.parts.iter().enumerate() {
            let Some(complete) = part.complete(&members) else { continue };
            parts.push(index);
            for (place, x) in complete.iter().enumerate() {
                values[place] += part.weight * x;
                cap_weights[place] = cap_weights[place].min(part.cap_weight(members[place]));
            }
        }
        if parts.is_empty() {
            values.clear();
        }
        Self { members, parts, values, cap_weights }
    }

    /// Whether there are members to compare with each other and a part to compare them by.
    pub(super) fn is_compared(&self) -> bool {
        self.members.len() > 1 && !self.parts.is_empty()
    }

    /// The standard deviation (n - 1) of the sums of a route's groups of two or more members.
    fn route_deviation(all: &[Self], groups: &[GroupRewards], route: &str) -> Option<f64> {
        let compared =
            all.iter().zip(groups).filter(|(own, group)| group.route == route && own.is_compared());
        let values: Vec<f64> = compared.flat_map(|(own, _)| own.values.iter().copied()).collect();
        Moments::of(values.into_iter()).deviation()
    }

    /// The advantage of each member of group `index` within its group; `None` for members that are
    /// not compared. `all` are the sums of all `groups`, and `values` their values.
    pub(super) fn advantages(
        all: &[Self],
        index: usize,
        groups: &[GroupRewards],
        values: &BatchValues,
        config: &TrainConfig,
    ) -> Vec<Option<f64>> {
        let (own, group) = (&all[index], &groups[index]);
        let mut advantages = vec![None; group.members];
        if !own.is_compared() {
            return advantages;
        }
        if config.reward_aggregation == RewardAggregation::SumThenNormalize {
            let deviation = || Self::route_deviation(all, groups, &group.route);
            let compared = group_advantages(&own.values, deviation, config);
            for ((member, advantage), weight) in
                own.members.iter().zip(compared).zip(&own.cap_weights)
            {
                advantages[*member] = Some(weight * advantage);
            }
            return advantages;
        }
        for part in own.parts.iter().map(|index| &group.parts[*index]) {
            let Some(complete) = part.complete(&own.members) else { continue };
            let deviation = || {
                let route = values.part(&group.route, &part.name);
                Moments::of(route.iter().map(|v| v.value)).deviation()
            };
            let compared = group_advantages(&complete, deviation, config);
            for (member, advantage) in own.members.iter().zip(compared) {
                *advantages[*member].get_or_insert(0.0) +=
                    part.weight * part.cap_weight(*member) * advantage;
            }
        }
        advantages
    }
}
