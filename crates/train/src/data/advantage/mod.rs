//! Advantages, part by part, each against a baseline that does not depend on the sample itself.
//!
//! A reward is a set of named, weighted parts, and a part may be missing, which is not zero. For a
//! member i of a group, `A_i = sum over parts p of weight_p * a_ip`, where
//!
//! - *group baseline* (GRPO, Shao et al. 2024): where every trained member of a group of two or
//!   more has the part, `a_ip = (x_ip - mean_p) / (s_p + 1e-4)`. `s_p` is the group's standard
//!   deviation with the sample correction (n - 1), as TRL has it; or the standard deviation (n - 1)
//!   of the part over the route's values of this batch; or the division is left out (Dr. GRPO, Liu
//!   et al. 2025). Equal values give 0.
//! - *leave-one-out running baseline* (not GRPO): any other value is compared with the mean and
//!   deviation of that part on that route over an exponential window of the past joined with the
//!   *other* values of this batch; never with itself. It is 0 where there is nothing to compare
//!   with, and bounded by [`RUNNING_LIMIT`], since the deviation of a few equal values is 0.
//!
//! A member without any value has no advantage and is no part of any statistic.
//!
//! [`AdvantageRules`] change what happens within a group, for the parts that all its members have:
//!
//! - *leave-one-out* (RLOO, Ahmadian et al. 2024): `mean_p` is that of the other members, which
//!   multiplies every advantage by `n / (n - 1)`
//! - *sum, then normalise* (TRL's `sum_then_normalize`): the weighted sum of those parts is compared
//!   and scaled as one value; its advantage counts the least share that a member has of any of them
//! - *GDPO* (Liu et al. 2026; TRL's `normalize_then_sum`): the summed advantages are then standardised
//!   over all members of the batch
//! - groups in which no member differs may be dropped, as in DAPO's dynamic sampling: no KL, no bonus
//!   and no place in the normaliser

mod batch;
mod compare;
mod moments;
mod sums;

use std::collections::BTreeMap;

use batch::{Summary, ValueBatch};
use compare::{running_advantages, standardise};
use serde::{Deserialize, Serialize};
use sums::Sums;

use crate::config::{
    AdvantageBaseline, AdvantageScale, RewardAggregation, TrainConfig, ZeroVariance,
};

pub use moments::Moments;

/// Added to a standard deviation before dividing by it.
const EPSILON: f64 = 1e-4;

/// Bound on a standardised advantage from a running baseline. A group's own standardised values
/// are bounded by their number; a lone value against its history is not.
pub const RUNNING_LIMIT: f64 = 5.0;

/// Values beyond this are taken as this, so that finite rewards never overflow.
pub const VALUE_LIMIT: f64 = 1e9;

/// How rewards become advantages: `train.advantage_scale`, `train.advantage_baseline`,
/// `train.reward_aggregation` and `train.zero_variance_groups`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdvantageRules {
    /// What they are divided by.
    pub scale: AdvantageScale,
    /// What a group's rewards are compared with.
    pub baseline: AdvantageBaseline,
    /// How parts become one.
    pub aggregation: RewardAggregation,
    /// What happens to groups without a difference.
    pub zero_variance: ZeroVariance,
}

impl From<&TrainConfig> for AdvantageRules {
    fn from(config: &TrainConfig) -> Self {
        Self {
            scale: config.advantage_scale,
            baseline: config.advantage_baseline,
            aggregation: config.reward_aggregation,
            zero_variance: config.zero_variance_groups,
        }
    }
}

impl From<AdvantageScale> for AdvantageRules {
    fn from(scale: AdvantageScale) -> Self {
        Self { scale, ..Self::default() }
    }
}

/// One named part of the rewards of one group.
#[derive(Clone, Debug, PartialEq)]
pub struct PartRewards {
    /// The part's name.
    pub name: String,
    /// What a unit of its advantage adds.
    pub weight: f64,
    /// One value per member; `None`, and whatever is not finite, is missing.
    pub values: Vec<Option<f64>>,
    /// What each value counts, in (0, 1]: its advantage is multiplied by it, and so is its weight
    /// in running baselines. Less than 1 where one key gave more than its share of the batch.
    pub shares: Vec<f64>,
}

/// The rewards of one group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupRewards {
    /// The route, which keys the running baselines.
    pub route: String,
    /// How many members it has; every part has as many values.
    pub members: usize,
    /// Its parts.
    pub parts: Vec<PartRewards>,
}

impl GroupRewards {
    fn value(&self, part: &PartRewards, member: usize) -> Option<f64> {
        let value = (*part.values.get(member)?)?;
        value.is_finite().then(|| value.clamp(-VALUE_LIMIT, VALUE_LIMIT))
    }

    fn share(part: &PartRewards, member: usize) -> f64 {
        part.shares.get(member).copied().unwrap_or(1.0)
    }

    /// Members that have at least one value.
    fn trained(&self) -> Vec<usize> {
        (0..self.members)
            .filter(|m| self.parts.iter().any(|p| self.value(p, *m).is_some()))
            .collect()
    }

    /// The values of a part that every trained member has.
    fn complete(&self, part: &PartRewards, trained: &[usize]) -> Option<Vec<f64>> {
        trained.iter().map(|m| self.value(part, *m)).collect()
    }
}

/// What a batch of rewards amounts to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Advantages {
    /// Per group, per member; `None` for a member without any value: not to be trained on.
    pub values: Vec<Vec<Option<f64>>>,
    /// Values compared within their group.
    pub group_count: u64,
    /// Values compared with a running baseline.
    pub running_count: u64,
    /// Groups of two or more trained members whose rewards were all equal, as a share; `None`
    /// without such groups.
    pub zero_std_groups_ratio: Option<f64>,
    /// `sum over parts of weight * mean of the part`, averaged over routes by trained members.
    pub reward_mean: Option<f64>,
    /// Mean over groups of the standard deviation (n - 1) of the weighted sum of the parts that
    /// all their members have; `None` without a group that has one.
    pub reward_std: Option<f64>,
    /// The standard deviation (n - 1) of that sum over all trained members of the batch (TRL's
    /// `reward_std`); `None` below two.
    pub reward_batch_std: Option<f64>,
    /// Groups that are not trained on because nothing in them was better than the rest.
    pub dropped_groups: u64,
    /// Mean of each `(route, part)` over the samples that have it.
    pub part_means: BTreeMap<(String, String), f64>,
    /// Their standard deviations (n - 1); absent below two values.
    pub part_stds: BTreeMap<(String, String), f64>,
}

impl Advantages {
    /// [`Self::part_means`] under `part/NAME` and [`Self::part_stds`] under `part_std/NAME` (TRL's
    /// `rewards/NAME/mean` and `std`), or `part/ROUTE/NAME` and so on where several routes of the step
    /// have a part of that name.
    pub fn part_figures(&self) -> impl Iterator<Item = (String, f64)> {
        let figures = [("part", &self.part_means), ("part_std", &self.part_stds)];
        figures.into_iter().flat_map(move |(prefix, map)| {
            map.iter().map(move |((route, part), value)| {
                let alone = self.part_means.keys().filter(|(_, other)| other == part).count() == 1;
                let name = if alone {
                    format!("{prefix}/{part}")
                } else {
                    format!("{prefix}/{route}/{part}")
                };
                (name, *value)
            })
        })
    }
}

/// The running baselines of every part of every route.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baselines {
    /// Samples that count: each one weighs `1 - 1 / window` times the one after it.
    window: f64,
    /// route -> part -> statistics of the past.
    routes: BTreeMap<String, BTreeMap<String, Moments>>,
}

impl Baselines {
    /// Empty baselines that remember about `window` samples (at least 1).
    pub fn new(window: f64) -> Self {
        Self { window: if window >= 1.0 { window } else { 1.0 }, routes: BTreeMap::new() }
    }

    /// Changes how much is remembered, as a changed configuration does after a restart.
    pub fn set_window(&mut self, window: f64) {
        self.window = if window >= 1.0 { window } else { 1.0 };
    }

    /// The past of one part, if it has any.
    pub fn get(&self, route: &str, part: &str) -> Option<&Moments> {
        self.routes.get(route)?.get(part)
    }

    /// Turns a batch of rewards into advantages, then adds the batch to the past.
    pub fn advantages(
        &mut self,
        groups: &[GroupRewards],
        rules: impl Into<AdvantageRules>,
    ) -> Advantages {
        let rules = rules.into();
        let batch = ValueBatch::collect(groups);
        let sums: Vec<Sums> = groups.iter().map(Sums::of).collect();
        let mut out = Advantages::default();
        let mut summary = Summary::default();
        // What members gain within their groups, and against the past.
        let (mut within, mut past) = (Vec::new(), Vec::new());
        for (index, group) in groups.iter().enumerate() {
            let own = &sums[index];
            if own.members.len() > 1 && !own.parts.is_empty() {
                summary.add_group(&own.values);
                out.group_count += (own.members.len() * own.parts.len()) as u64;
            }
            summary.add_rewards(&own.values);
            let deviation = match rules.scale {
                AdvantageScale::Batch => Sums::deviation(&sums, groups, &group.route),
                _ => None,
            };
            within.push(own.gains(group, &batch, deviation, &rules));
            let (gains, count) = self.against_the_past(index, group, own, &batch, rules.scale);
            out.running_count += count;
            past.push(gains);
        }
        let gains_nothing = |gain: Option<f64>| gain.is_none_or(|gain| gain == 0.0);
        let equal: Vec<bool> = sums
            .iter()
            .zip(&within)
            .map(|(own, within)| {
                rules.zero_variance == ZeroVariance::Drop
                    && own.members.len() > 1
                    && within.iter().copied().all(gains_nothing)
            })
            .collect();
        if rules.aggregation == RewardAggregation::Gdpo {
            standardise(&mut within);
        }
        for (index, own) in sums.iter().enumerate() {
            let mut values = vec![None; groups[index].members];
            for &member in &own.members {
                let gains = [within[index][member], past[index][member]];
                // Feedback on one of equals still tells that one apart.
                let says_something = !equal[index] || !gains_nothing(past[index][member]);
                values[member] = says_something.then(|| gains.into_iter().flatten().sum());
            }
            let dropped = equal[index] && values.iter().all(Option::is_none);
            out.dropped_groups += u64::from(dropped);
            out.values.push(values);
        }
        summary.finish(&mut out);
        batch.describe(groups, &mut out);
        self.remember(&batch);
        out
    }

    /// Gains by member from the parts that are not compared within the group, and how many values
    /// those are.
    fn against_the_past(
        &self,
        index: usize,
        group: &GroupRewards,
        sums: &Sums,
        batch: &ValueBatch,
        scale: AdvantageScale,
    ) -> (Vec<Option<f64>>, u64) {
        let mut out = vec![None; group.members];
        let mut count = 0;
        for (part_index, part) in group.parts.iter().enumerate() {
            if sums.members.len() > 1 && sums.parts.contains(&part_index) {
                continue;
            }
            let list = batch.part(&group.route, &part.name);
            let past = self.get(&group.route, &part.name).copied().unwrap_or_default();
            for (member, gain) in running_advantages((index, part_index), list, past, scale) {
                count += 1;
                let gain = part.weight * GroupRewards::share(part, member) * gain;
                *out[member].get_or_insert(0.0) += gain;
            }
        }
        (out, count)
    }

    fn remember(&mut self, batch: &ValueBatch) {
        let keep = 1.0 - 1.0 / self.window;
        for ((route, part), entries) in &batch.parts {
            let past =
                self.routes.entry(route.clone()).or_default().entry(part.clone()).or_default();
            let new = entries.iter().fold(Moments::default(), |all, e| all.joined(e.moments()));
            *past = past.decayed(keep.powf(new.count)).joined(new);
        }
    }
}

#[cfg(test)]
mod tests;
