//! The running baselines, and the computation of a batch's advantages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::BatchValues;
use super::GroupRewards;
use super::moments::Moments;
use super::statistics::Advantages;
use super::sums::GroupSums;
use super::{running_advantages, standardize};
use crate::config::{AdvantageScale, RewardAggregation, TrainConfig, ZeroVariance};

/// The running baselines of every part of every route; a part of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Baselines {
    /// Length of the exponential window in samples, at least 1: each sample has `1 - 1 / window`
    /// times the weight of the next one.
    window: f64,
    /// route -> part -> moments of past values.
    routes: BTreeMap<String, BTreeMap<String, Moments>>,
}

impl Baselines {
    /// Empty baselines with a window of `window` samples (at least 1).
    pub fn new(window: f64) -> Self {
        Self { window: window.max(1.0), routes: BTreeMap::new() }
    }

    /// Changes the window, which a restored checkpoint may have from an older configuration.
    pub fn set_window(&mut self, window: f64) {
        self.window = window.max(1.0);
    }

    /// The past of one part, if it has any.
    pub fn get(&self, route: &str, part: &str) -> Option<&Moments> {
        self.routes.get(route)?.get(part)
    }

    /// Limits the past of each part to the bounds of its values, which an older configuration or version may not
    /// have had.
    pub fn limit(&mut self, bounds: impl Fn(&str, &str) -> Option<[f64; 2]>) {
        for (route, parts) in &mut self.routes {
            for (part, past) in parts {
                *past = bounds(route, part).map_or(*past, |bounds| past.within(bounds));
            }
        }
    }

    /// The values of a batch, of which those far outside of the past are limited. Otherwise one value would
    /// make all others equal for many batches.
    fn plausible(&self, mut values: BatchValues) -> BatchValues {
        for ((route, part), values) in &mut values.0 {
            let past = self.get(route, part).and_then(|past| past.plausible());
            let Some([low, high]) = past else { continue };
            values.iter_mut().for_each(|value| value.value = value.value.clamp(low, high));
        }
        values
    }

    /// Computes the advantages of a batch, then adds its values to the baselines.
    pub fn advantages(&mut self, groups: &[GroupRewards], config: &TrainConfig) -> Advantages {
        let values = BatchValues::new(groups);
        let sums: Vec<GroupSums> = groups.iter().map(GroupSums::new).collect();
        let mut out = Advantages::default();
        out.describe_sums(&sums);
        out.describe_parts(groups, &values);
        let compare = |index| GroupSums::advantages(&sums, index, groups, &values, config);
        let mut within: Vec<Vec<Option<f64>>> = (0..groups.len()).map(compare).collect();
        let known = self.plausible(BatchValues::new(groups));
        let is_zero = |advantage: &Option<f64>| advantage.is_none_or(|advantage| advantage == 0.0);
        let drops = config.zero_variance_groups == ZeroVariance::Drop;
        let tied = |(own, within): (&GroupSums, &Vec<Option<f64>>)| {
            drops && own.members.len() > 1 && within.iter().all(is_zero)
        };
        let tied: Vec<bool> = sums.iter().zip(&within).map(tied).collect();
        if config.reward_aggregation == RewardAggregation::Gdpo {
            standardize(&mut within);
        }
        for (index, own) in sums.iter().enumerate() {
            let (running, count) =
                self.running(index, &groups[index], own, &known, config.advantage_scale);
            out.running_count += count;
            let mut advantages = vec![None; groups[index].members];
            for &member in &own.members {
                let both = [within[index][member], running[member]];
                // Feedback on one member of a tied group still distinguishes that member.
                let differs = !tied[index] || !is_zero(&running[member]);
                advantages[member] = differs.then(|| both.into_iter().flatten().sum());
            }
            let dropped = tied[index] && advantages.iter().all(Option::is_none);
            out.dropped_groups += u64::from(dropped);
            out.values.push(advantages);
        }
        self.remember(&known);
        out
    }

    /// Advantages by member of the parts of group `index` that are not compared within the group,
    /// and the number of their values.
    fn running(
        &self,
        index: usize,
        group: &GroupRewards,
        sums: &GroupSums,
        values: &BatchValues,
        scale: AdvantageScale,
    ) -> (Vec<Option<f64>>, u64) {
        let mut advantages = vec![None; group.members];
        let mut count = 0;
        for (part_index, part) in group.parts.iter().enumerate() {
            if sums.is_compared() && sums.parts.contains(&part_index) {
                continue;
            }
            let batch = values.part(&group.route, &part.name);
            let past = self.get(&group.route, &part.name).copied().unwrap_or_default();
            for (member, advantage) in running_advantages((index, part_index), batch, past, scale) {
                count += 1;
                *advantages[member].get_or_insert(0.0) +=
                    part.weight * part.cap_weight(member) * advantage;
            }
        }
        (advantages, count)
    }

    /// Adds a batch's values to the past, which decays by `1 - 1 / window` for each of them.
    fn remember(&mut self, values: &BatchValues) {
        let decay = 1.0 - 1.0 / self.window;
        for ((route, part), values) in &values.0 {
            let past =
                self.routes.entry(route.clone()).or_default().entry(part.clone()).or_default();
            let new = values.iter().fold(Moments::default(), |all, v| all.joined(v.moments()));
            *past = past.decayed(decay.powf(new.count)).joined(new);
        }
    }
}
