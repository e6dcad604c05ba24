//! A group's rewards as far as all its members have them.

use super::batch::ValueBatch;
use super::compare::group_advantages;
use super::{AdvantageRules, GroupRewards, Moments};
use crate::config::{AdvantageScale, RewardAggregation};

/// The members that are trained on and what they all have.
pub(super) struct Sums {
    /// Members that have any value.
    pub(super) members: Vec<usize>,
    /// Parts that all of them have.
    pub(super) parts: Vec<usize>,
    /// The weighted sum of those parts by trained member; empty without such parts.
    pub(super) values: Vec<f64>,
    /// The least share of those parts by trained member.
    shares: Vec<f64>,
}

impl Sums {
    pub(super) fn of(group: &GroupRewards) -> Self {
        let members = group.trained();
        let (mut parts, mut values) = (Vec::new(), vec![0.0; members.len()]);
        let mut shares = vec![1.0_f64; members.len()];
        for (index, part) in group.parts.iter().enumerate() {
            let Some(complete) = group.complete(part, &members) else { continue };
            parts.push(index);
            for (place, x) in complete.iter().enumerate() {
                values[place] += part.weight * x;
                shares[place] = shares[place].min(GroupRewards::share(part, members[place]));
            }
        }
        if parts.is_empty() {
            values.clear();
        }
        Self { members, parts, values, shares }
    }

    /// The standard deviation (n - 1) of the sums of all groups of two or more of a route.
    pub(super) fn deviation(all: &[Self], groups: &[GroupRewards], route: &str) -> Option<f64> {
        let own = all
            .iter()
            .zip(groups)
            .filter(|(own, group)| group.route == route && own.members.len() > 1);
        let values: Vec<f64> = own.flat_map(|(own, _)| own.values.iter().copied()).collect();
        Moments::of(values.into_iter()).deviation()
    }

    /// What each member gains by comparison within the group; `None` where nothing is compared.
    /// `deviation` is of the sums over the batch.
    pub(super) fn gains(
        &self,
        group: &GroupRewards,
        batch: &ValueBatch,
        deviation: Option<f64>,
        rules: &AdvantageRules,
    ) -> Vec<Option<f64>> {
        let mut out = vec![None; group.members];
        if self.members.len() < 2 || self.parts.is_empty() {
            return out;
        }
        if rules.aggregation == RewardAggregation::SumThenNormalize {
            let gains = group_advantages(&self.values, deviation, rules);
            for ((member, gain), share) in self.members.iter().zip(gains).zip(&self.shares) {
                out[*member] = Some(share * gain);
            }
            return out;
        }
        for index in &self.parts {
            let part = &group.parts[*index];
            let Some(complete) = group.complete(part, &self.members) else { continue };
            let spread = match rules.scale {
                AdvantageScale::Batch => {
                    let list = batch.part(&group.route, &part.name);
                    Moments::of(list.iter().map(|entry| entry.value)).deviation()
                }
                _ => None,
            };
            let gains = group_advantages(&complete, spread, rules);
            for (member, gain) in self.members.iter().zip(gains) {
                let gain = part.weight * GroupRewards::share(part, *member) * gain;
                *out[*member].get_or_insert(0.0) += gain;
            }
        }
        out
    }
}
