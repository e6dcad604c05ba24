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

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::AdvantageScale;

mod moments;
#[cfg(test)]
mod tests;

pub use moments::Moments;

/// Added to a standard deviation before dividing by it.
const EPSILON: f64 = 1e-4;

/// Bound on a standardised advantage from a running baseline. A group's own standardised values
/// are bounded by their number; a lone value against its history is not.
pub const RUNNING_LIMIT: f64 = 5.0;

/// Values beyond this are taken as this, so that finite rewards never overflow.
pub const VALUE_LIMIT: f64 = 1e9;

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

    /// The values of a part that every trained member of two or more has.
    fn complete(&self, part: &PartRewards, trained: &[usize]) -> Option<Vec<f64>> {
        if trained.len() < 2 {
            return None;
        }
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
    /// Mean of each `(route, part)` over the samples that have it.
    pub part_means: BTreeMap<(String, String), f64>,
}

impl Advantages {
    /// [`Self::part_means`] under `part/NAME`, or `part/ROUTE/NAME` where several routes of the step
    /// have a part of that name.
    pub fn part_figures(&self) -> impl Iterator<Item = (String, f64)> {
        self.part_means.iter().map(|((route, part), mean)| {
            let alone = self.part_means.keys().filter(|(_, other)| other == part).count() == 1;
            let name = if alone { format!("part/{part}") } else { format!("part/{route}/{part}") };
            (name, *mean)
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
    pub fn advantages(&mut self, groups: &[GroupRewards], scale: AdvantageScale) -> Advantages {
        let batch = Batch::collect(groups);
        let mut out = Advantages::default();
        let mut summary = Summary::default();
        for (index, group) in groups.iter().enumerate() {
            let trained = group.trained();
            let mut values: Vec<Option<f64>> = vec![None; group.members];
            for member in &trained {
                values[*member] = Some(0.0);
            }
            let mut sums = vec![0.0; trained.len()];
            let mut complete_parts = 0_usize;
            for (part_index, part) in group.parts.iter().enumerate() {
                let list = batch.part(&group.route, &part.name);
                let gains = if let Some(complete) = group.complete(part, &trained) {
                    complete_parts += 1;
                    out.group_count += complete.len() as u64;
                    for (sum, x) in sums.iter_mut().zip(&complete) {
                        *sum += part.weight * x;
                    }
                    let gains = group_advantages(&complete, list, scale);
                    trained.iter().copied().zip(gains).collect()
                } else {
                    let past = self.get(&group.route, &part.name).copied().unwrap_or_default();
                    let gains = running_advantages((index, part_index), list, past, scale);
                    out.running_count += gains.len() as u64;
                    gains
                };
                for (member, gain) in gains {
                    if let Some(total) = values[member].as_mut() {
                        *total += part.weight * GroupRewards::share(part, member) * gain;
                    }
                }
            }
            if complete_parts > 0 {
                summary.add_group(&sums);
            }
            out.values.push(values);
        }
        summary.finish(&mut out);
        batch.describe(groups, &mut out);
        self.remember(&batch);
        out
    }

    fn remember(&mut self, batch: &Batch) {
        let keep = 1.0 - 1.0 / self.window;
        for ((route, part), entries) in &batch.parts {
            let past =
                self.routes.entry(route.clone()).or_default().entry(part.clone()).or_default();
            let new = entries.iter().fold(Moments::default(), |all, e| all.joined(e.moments()));
            *past = past.decayed(keep.powf(new.count)).joined(new);
        }
    }
}

/// One value and where it stands: group, part within the group, member.
#[derive(Clone, Copy, Debug)]
struct Entry {
    group: usize,
    part: usize,
    member: usize,
    value: f64,
    share: f64,
}

impl Entry {
    fn moments(self) -> Moments {
        Moments::one(self.value).decayed(self.share)
    }
}

/// All values of a batch by route and part.
#[derive(Default)]
struct Batch {
    parts: BTreeMap<(String, String), Vec<Entry>>,
}

impl Batch {
    fn collect(groups: &[GroupRewards]) -> Self {
        let mut parts: BTreeMap<(String, String), Vec<Entry>> = BTreeMap::new();
        for (group_index, group) in groups.iter().enumerate() {
            for (part_index, part) in group.parts.iter().enumerate() {
                for member in 0..group.members {
                    if let Some(value) = group.value(part, member) {
                        parts.entry((group.route.clone(), part.name.clone())).or_default().push(
                            Entry {
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

    fn part(&self, route: &str, part: &str) -> &[Entry] {
        self.parts.get(&(route.to_owned(), part.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// Means of parts, and of the reward as a whole.
    fn describe(&self, groups: &[GroupRewards], out: &mut Advantages) {
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
            let mean = Moments::of(entries.iter().map(|e| e.value)).mean;
            let weight = weights.get(&(key.0.as_str(), key.1.as_str())).copied().unwrap_or(0.0);
            *by_route.entry(&key.0).or_default() += weight * mean;
            out.part_means.insert(key.clone(), mean);
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
struct Summary {
    groups: f64,
    equal: f64,
    deviations: f64,
}

impl Summary {
    fn add_group(&mut self, sums: &[f64]) {
        let all_equal = sums.iter().all(|x| (x - sums[0]).abs() <= 1e-12 * x.abs().max(1.0));
        self.groups += 1.0;
        self.equal += f64::from(u8::from(all_equal));
        self.deviations += Moments::of(sums.iter().copied()).deviation().unwrap_or(0.0);
    }

    fn finish(self, out: &mut Advantages) {
        if self.groups > 0.0 {
            out.zero_std_groups_ratio = Some(self.equal / self.groups);
            out.reward_std = Some(self.deviations / self.groups);
        }
    }
}

/// `(x - mean) / (s + 1e-4)` within one group.
fn group_advantages(values: &[f64], route: &[Entry], scale: AdvantageScale) -> Vec<f64> {
    if values.iter().all(|x| *x == values[0]) {
        return vec![0.0; values.len()];
    }
    let own = Moments::of(values.iter().copied());
    let divisor = match scale {
        AdvantageScale::None => 1.0,
        AdvantageScale::Group => own.deviation().unwrap_or(0.0) + EPSILON,
        AdvantageScale::Batch => {
            Moments::of(route.iter().map(|e| e.value)).deviation().unwrap_or(0.0) + EPSILON
        }
    };
    values.iter().map(|x| (x - own.mean) / divisor).collect()
}

/// Advantages of the values of one part of one group (`key`: their place in the batch), each
/// against the past joined with all other values of the batch. `(member, advantage)`.
fn running_advantages(
    key: (usize, usize),
    batch: &[Entry],
    past: Moments,
    scale: AdvantageScale,
) -> Vec<(usize, f64)> {
    // Moments of everything before and after each entry, so that its own value enters nowhere.
    let mut after = vec![Moments::default(); batch.len() + 1];
    for (i, entry) in batch.iter().enumerate().rev() {
        after[i] = after[i + 1].joined(entry.moments());
    }
    let mut before = past;
    let mut out = Vec::new();
    for (i, entry) in batch.iter().enumerate() {
        if (entry.group, entry.part) == key {
            let others = before.joined(after[i + 1]);
            out.push((entry.member, running_advantage(entry.value, others, scale)));
        }
        before = before.joined(entry.moments());
    }
    out
}

fn running_advantage(value: f64, others: Moments, scale: AdvantageScale) -> f64 {
    if others.count <= 0.0 {
        return 0.0;
    }
    let centred = value - others.mean;
    match (scale, others.deviation()) {
        (AdvantageScale::None, _) => centred,
        (_, Some(deviation)) => {
            (centred / (deviation + EPSILON)).clamp(-RUNNING_LIMIT, RUNNING_LIMIT)
        }
        // One value says nothing of how far values lie apart.
        (_, None) => 0.0,
    }
}
