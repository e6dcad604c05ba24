//! Advantages, computed part by part, each against a baseline that is independent of the sample.
//!
//! A reward is a set of named, weighted parts. A part may be missing, which is not zero. The advantage
//! of member i of a group is `A_i = g_i + sum over the other parts p of weight_p * a_ip`, where
//!
//! - *group baseline* (GRPO, Shao et al. 2024): `x_i` is the weighted sum of the parts that two or more members
//!   have, with the mean of the others in place of a missing value, so that a judge that fails once changes nothing, and
//!   `g_i = (x_i - mean) / (s + 1e-4)`. `s` is the standard deviation with Bessel's correction
//!   (n - 1), as in TRL, either of the group or of the route's sums of this batch; without scaling
//!   (Dr. GRPO, Liu et al. 2025) the division is left out. Equal sums have advantage 0.
//! - *leave-one-out running baseline* (not GRPO): every other value `a_ip` is compared with the mean
//!   and deviation of that part on that route, over an exponential window of past batches joined with
//!   the *other* values of this batch, those of other turns of the same conversation excluded. Without anything to compare with it is 0. The divisor is at
//!   least half the range of the values, since the deviation of equal values is 0; so the advantage
//!   is at most 2. In groups of ratings alone the mean is that of the group's other ratings, so that the difficulty of the
//!   prompt cancels; the divisor stays, so that a rating and the part's weight count as those of a single rating.
//!   A single rating's mean moves by half of what its rater's earlier ratings differed from the others', shrunk toward 0:
//!   what a strict rater always takes away says little about the answer.
//!
//! The parts are summed before they are compared, as in TRL (`sum_then_normalize`): compared one by one, a
//! difference of 0.005 in one member would count as much as a right answer. `g_i` is multiplied by the member's
//! smallest cap weight among the parts. A member without any value has no advantage and does not enter any statistic.
//!
//! `train.reward_aggregation` and `train.zero_variance_groups` change the
//! comparison within a group, for the parts that two or more of its members have:
//!
//! - *normalize, then sum*: each of those parts is compared and scaled by itself, and the results are
//!   summed by weight
//! - *GDPO* (Liu et al. 2026; TRL's `normalize_then_sum`): these sums are then standardized over all
//!   members of the batch
//! - groups without any difference may be dropped, as in DAPO's dynamic sampling: they then
//!   contribute no KL and no bonus, and do not count in the loss's normalizer

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::{AdvantageScale, RewardAggregation, TrainConfig, ZeroVariance};
use crate::learning::float_bits;

// The rewards of a group, by part and member.

/// Values are clamped to this magnitude, so that finite rewards never overflow.
const VALUE_LIMIT: f64 = 1e9;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PartRewards {
    /// The part's name, which selects its running baseline.
    pub name: String,
    /// Factor of its advantage in the sum over parts.
    pub weight: f64,
    /// One value per member; `None` and values that are not finite are missing.
    pub values: Vec<Option<f64>>,
    /// Weight of each value in (0, 1], below 1 where `max_key_share` capped a key's feedback.
    pub cap_weights: Vec<f64>,
    /// Who rated, for values that are ratings.
    pub raters: Vec<Option<String>>,
}

impl PartRewards {
    /// The clamped value of a member; `None` if missing.
    fn value(&self, member: usize) -> Option<f64> {
        let value = (*self.values.get(member)?)?;
        value.is_finite().then(|| value.clamp(-VALUE_LIMIT, VALUE_LIMIT))
    }

    fn cap_weight(&self, member: usize) -> f64 {
        self.cap_weights.get(member).copied().unwrap_or(1.0)
    }

    /// The values of `members`, with the mean of the others in place of a missing one; `None` of fewer than two.
    fn compared(&self, members: &[usize]) -> Option<Vec<f64>> {
        let known = Moments::of(members.iter().filter_map(|member| self.value(*member)));
        // Within the range, because the mean of equal values is rounded.
        let mean = if known.count > 0.0 { known.mean.clamp(known.min, known.max) } else { 0.0 };
        let filled = members.iter().map(|member| self.value(*member).unwrap_or(mean));
        (known.count >= 2.0).then(|| filled.collect())
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GroupRewards {
    /// The route, which selects the running baselines.
    pub route: String,
    /// Number of members; every part has as many values.
    pub members: usize,
    pub parts: Vec<PartRewards>,
    /// The conversation of each member that a client received.
    pub conversations: Vec<Option<[u8; 16]>>,
    /// Whether all values are ratings by clients.
    pub is_rated: bool,
}

impl GroupRewards {
    /// Members that have at least one value.
    fn trained(&self) -> Vec<usize> {
        let has_value = |member: &usize| self.parts.iter().any(|p| p.value(*member).is_some());
        (0..self.members).filter(has_value).collect()
    }
}

// All values of a batch by route and part.

#[derive(Clone, Copy, Debug)]
struct BatchValue {
    group: usize,
    part: usize,
    member: usize,
    value: f64,
    /// Weight in running baselines.
    cap_weight: f64,
    conversation: Option<[u8; 16]>,
}

impl BatchValue {
    fn moments(self) -> Moments {
        Moments::weighted(self.value, self.cap_weight)
    }
}

struct BatchValues(BTreeMap<(String, String), Vec<BatchValue>>);

impl BatchValues {
    fn new(groups: &[GroupRewards]) -> Self {
        let mut parts: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (group_index, group) in groups.iter().enumerate() {
            for (part_index, part) in group.parts.iter().enumerate() {
                for member in 0..group.members {
                    let Some(value) = part.value(member) else { continue };
                    let key = (group.route.clone(), part.name.clone());
                    parts.entry(key).or_default().push(BatchValue {
                        group: group_index,
                        part: part_index,
                        member,
                        value,
                        cap_weight: part.cap_weight(member),
                        conversation: group.conversations.get(member).copied().flatten(),
                    });
                }
            }
        }
        Self(parts)
    }

    fn part(&self, route: &str, part: &str) -> &[BatchValue] {
        self.0.get(&(route.to_owned(), part.to_owned())).map_or(&[], Vec::as_slice)
    }
}

// Comparison of values within their group, and with a running baseline.

/// Added to a standard deviation before dividing by it.
const EPSILON: f64 = 1e-4;

/// `(x - mean) / (s + 1e-4)` within one group; `batch_deviation` computes s at batch scale.
fn group_advantages(
    values: &[f64],
    batch_deviation: impl FnOnce() -> Option<f64>,
    config: &TrainConfig,
) -> Vec<f64> {
    if values.iter().all(|x| *x == values[0]) {
        return vec![0.0; values.len()];
    }
    let group = Moments::of(values.iter().copied());
    let divisor = match config.advantage_scale {
        AdvantageScale::None => 1.0,
        AdvantageScale::Group => group.deviation().unwrap_or(0.0) + EPSILON,
        AdvantageScale::Batch => batch_deviation().unwrap_or(0.0) + EPSILON,
    };
    values.iter().map(|x| (x - group.mean) / divisor).collect()
}

/// Standardizes all values of a batch together: `(x - mean) / (s + 1e-4)`.
fn standardize(groups: &mut [Vec<Option<f64>>]) {
    let known: Vec<f64> = groups.iter().flatten().flatten().copied().collect();
    let all = Moments::of(known.iter().copied());
    let divisor = all.deviation().unwrap_or(0.0) + EPSILON;
    for value in groups.iter_mut().flatten().flatten() {
        *value = (*value - all.mean) / divisor;
    }
}

/// A value with what it is compared with.
struct ValueComparison {
    own: BatchValue,
    /// The past joined with all other values of the batch, except those of the same conversation: the reward of a
    /// session is the value of all its turns.
    others: Moments,
    /// The mean of the other ratings of the prompt, if there are any.
    siblings: Option<f64>,
}

impl ValueComparison {
    /// By the mean of the siblings, else by that of the others plus the rater's usual difference, within their range;
    /// the divisor is that of a single rating in either case.
    fn advantage(&self, usual: f64, scale: AdvantageScale) -> f64 {
        let Moments { mean, min, max, .. } = self.others;
        let moved = if usual == 0.0 { mean } else { (mean + usual).clamp(min, max) };
        let mean = self.siblings.unwrap_or(moved);
        running_advantage(self.own.value, Moments { mean, ..self.others }, scale)
    }
}

/// The values of one part of one group, which `(group, part)` selects from `batch`.
fn comparisons(
    selected: (usize, usize),
    batch: &[BatchValue],
    past: Moments,
) -> Vec<ValueComparison> {
    // The moments before and after each value are joined, so that it never enters its own baseline.
    let mut after = vec![Moments::default(); batch.len() + 1];
    for (i, value) in batch.iter().enumerate().rev() {
        after[i] = after[i + 1].joined(value.moments());
    }
    let mut before = past;
    let mut found = Vec::new();
    for (i, value) in batch.iter().enumerate() {
        if (value.group, value.part) == selected {
            let others = if batch.iter().any(|other| are_turns_of_one(value, other)) {
                let others = batch.iter().enumerate();
                let others = others.filter(|(k, other)| *k != i && !are_turns_of_one(value, other));
                others.fold(past, |all, (_, other)| all.joined(other.moments()))
            } else {
                before.joined(after[i + 1])
            };
            let siblings = batch.iter().enumerate();
            let siblings = siblings.filter(|(k, v)| *k != i && (v.group, v.part) == selected);
            let siblings = siblings.fold(Moments::default(), |all, (_, v)| all.joined(v.moments()));
            let siblings = (siblings.count > 0.0).then_some(siblings.mean);
            found.push(ValueComparison { own: *value, others, siblings });
        }
        before = before.joined(value.moments());
    }
    found
}

/// Whether two values are of different turns of one conversation, not answers to one prompt, which form a
/// group.
fn are_turns_of_one(value: &BatchValue, other: &BatchValue) -> bool {
    value.conversation.is_some()
        && value.conversation == other.conversation
        && value.group != other.group
}

/// `(value - mean) / (max(s, half) + 1e-4)` with the mean and deviation s of the other values, and
/// half of the range of all values including this one. Without scaling only `value - mean`.
///
/// A deviation alone makes the first exception after many equal values an extreme: s is then 0. The half range
/// is a lower bound, and the largest possible deviation, so beyond a few values it is the divisor. Then no
/// advantage exceeds 2, and the divisor is the same for all values, so the advantages of a stationary stream
/// have mean 0, which a clamp would not keep.
fn running_advantage(value: f64, others: Moments, scale: AdvantageScale) -> f64 {
    if others.count <= 0.0 {
        return 0.0;
    }
    let difference = value - others.mean;
    match (scale, others.deviation()) {
        (AdvantageScale::None, _) => difference,
        (_, Some(deviation)) => {
            difference / (deviation.max(others.half_range_with(value)) + EPSILON)
        }
        // A single other value has no deviation.
        (_, None) => 0.0,
    }
}

// Count, mean, variance and range of weighted values, updated without the values.

/// Windows over which the range forgets, for each window of the mean: a rare value, such as a thumbs-down among
/// a hundred thumbs-up, keeps its place, and an outlier does not stay forever.
const RANGE_WINDOWS: f64 = 8.0;

/// Values from which on a value far outside of their range is limited.
const LEAST_KNOWN: f64 = 8.0;

/// Statistics of a set of weighted values; a part of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moments {
    /// Sum of the weights.
    #[serde(with = "float_bits")]
    pub count: f64,
    #[serde(with = "float_bits")]
    pub mean: f64,
    /// Weighted sum of squared distances from the mean.
    #[serde(with = "float_bits")]
    pub squares: f64,
    /// The smallest value, which [`Self::decayed`] moves toward the mean; infinite without values.
    #[serde(with = "float_bits")]
    pub min: f64,
    /// The largest value, as [`Self::min`].
    #[serde(with = "float_bits")]
    pub max: f64,
}

impl Default for Moments {
    fn default() -> Self {
        Self { count: 0.0, mean: 0.0, squares: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY }
    }
}

impl Moments {
    pub fn weighted(value: f64, weight: f64) -> Self {
        Self { count: weight, mean: value, squares: 0.0, min: value, max: value }
    }

    /// All values, each of weight 1, in two passes.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let count = values.clone().count() as f64;
        if count == 0.0 {
            return Self::default();
        }
        let mean = values.clone().sum::<f64>() / count;
        let squares = values.clone().map(|x| (x - mean) * (x - mean)).sum();
        let min = values.clone().fold(f64::INFINITY, f64::min);
        let max = values.fold(f64::NEG_INFINITY, f64::max);
        Self { count, mean, squares, min, max }
    }

    /// The union of both sets (Chan, Golub & LeVeque 1979).
    #[must_use]
    pub fn joined(self, other: Self) -> Self {
        if self.count <= 0.0 {
            return other;
        }
        if other.count <= 0.0 {
            return self;
        }
        let count = self.count + other.count;
        let distance = other.mean - self.mean;
        Self {
            count,
            mean: self.mean + distance * (other.count / count),
            squares: self.squares
                + other.squares
                + distance * distance * (self.count * (other.count / count)),
            min: self.min.min(other.min),
            max: self.max.max(other.max),
        }
    }

    /// The same values with weights multiplied by `factor`. The distances of minimum and maximum from
    /// the mean are multiplied by the eighth root of `factor`.
    #[must_use]
    pub fn decayed(self, factor: f64) -> Self {
        let range_factor = factor.powf(1.0 / RANGE_WINDOWS);
        Self {
            count: self.count * factor,
            mean: self.mean,
            squares: self.squares * factor,
            min: self.mean - (self.mean - self.min) * range_factor,
            max: self.mean + (self.max - self.mean) * range_factor,
        }
    }

    /// The same values as if those outside of a range had been its ends.
    #[must_use]
    pub fn within(self, [low, high]: [f64; 2]) -> Self {
        if self.count <= 0.0 {
            return self;
        }
        let most_squares = self.count * (0.5 * (high - low)).powi(2);
        Self {
            count: self.count,
            mean: self.mean.clamp(low, high),
            squares: self.squares.min(most_squares),
            min: self.min.max(low),
            max: self.max.min(high),
        }
    }

    /// What is plausible beside these: as far out of their range as half of it. `None` of few or equal values.
    pub fn plausible(self) -> Option<[f64; 2]> {
        let span = self.max - self.min;
        let known = self.count >= LEAST_KNOWN && span.is_finite() && span > 0.0;
        known.then_some([self.min - 0.5 * span, self.max + 0.5 * span])
    }

    /// Standard deviation with Bessel's correction (n - 1); `None` below a count of 2.
    pub fn deviation(self) -> Option<f64> {
        (self.count >= 2.0).then(|| (self.squares / (self.count - 1.0)).max(0.0).sqrt())
    }

    /// Half of the range, `value` and the mean included: the largest standard deviation in it (Popoviciu 1935).
    pub fn half_range_with(self, value: f64) -> f64 {
        let least = self.min.min(self.mean).min(value);
        let most = self.max.max(self.mean).max(value);
        0.5 * (most - least)
    }
}

// The parts that two or more members of a group have, and their weighted sum.

/// The trained members of a group and the parts that two or more of them have.
struct GroupSums {
    members: Vec<usize>,
    /// Indices of the parts that two or more of these members have.
    parts: Vec<usize>,
    /// The weighted sum of those parts by trained member; empty without such parts.
    values: Vec<f64>,
    /// The smallest cap weight of those parts by trained member.
    cap_weights: Vec<f64>,
}

impl GroupSums {
    fn new(group: &GroupRewards) -> Self {
        let members = group.trained();
        let (mut parts, mut values) = (Vec::new(), vec![0.0; members.len()]);
        let mut cap_weights = vec![1.0_f64; members.len()];
        for (index, part) in group.parts.iter().enumerate() {
            let Some(compared) = part.compared(&members) else { continue };
            parts.push(index);
            for (place, x) in compared.iter().enumerate() {
                values[place] += part.weight * x;
                if part.value(members[place]).is_some() {
                    cap_weights[place] = cap_weights[place].min(part.cap_weight(members[place]));
                }
            }
        }
        if parts.is_empty() {
            values.clear();
        }
        Self { members, parts, values, cap_weights }
    }

    /// Whether there are members to compare with each other and a part to compare them by.
    fn is_compared(&self) -> bool {
        self.members.len() > 1 && !self.parts.is_empty()
    }

    /// The standard deviation (n - 1) of the sums of a route's groups of two or more members.
    fn route_deviation(all: &[Self], groups: &[GroupRewards], route: &str) -> Option<f64> {
        let compared =
            all.iter().zip(groups).filter(|(own, group)| group.route == route && own.is_compared());
        let values: Vec<f64> = compared.flat_map(|(own, _)| own.values.iter().copied()).collect();
        Moments::of(values.into_iter()).deviation()
    }

    /// The advantage of each member of group `index` of `groups`; `None` for members that are not compared.
    fn advantages(
        all: &[Self],
        index: usize,
        groups: &[GroupRewards],
        values: &BatchValues,
        config: &TrainConfig,
    ) -> Vec<Option<f64>> {
        let (own, group) = (&all[index], &groups[index]);
        let mut advantages = vec![None; group.members];
        if !own.is_compared() || group.is_rated {
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
            let Some(values_of_part) = part.compared(&own.members) else { continue };
            let deviation = || {
                let route = values.part(&group.route, &part.name);
                Moments::of(route.iter().map(|v| v.value)).deviation()
            };
            let compared = group_advantages(&values_of_part, deviation, config);
            for (member, advantage) in own.members.iter().zip(compared) {
                *advantages[*member].get_or_insert(0.0) +=
                    part.weight * part.cap_weight(*member) * advantage;
            }
        }
        advantages
    }
}

// The running baselines, and the computation of a batch's advantages.

/// The running baselines of every part of every route; a part of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Baselines {
    /// Length of the exponential window in samples, at least 1: the decay for each sample is `1 - 1 / window`.
    window: f64,
    /// route -> part -> moments of past values.
    routes: BTreeMap<String, BTreeMap<String, Moments>>,
    /// route -> part -> the raters known best, at most [`MOST_RATERS`].
    #[serde(default)]
    raters: BTreeMap<String, BTreeMap<String, BTreeMap<String, Severity>>>,
}

/// The mean difference of a rater's values from those of all; a part of the checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Severity {
    /// Sum of the values' weights, which decay.
    #[serde(with = "float_bits")]
    count: f64,
    #[serde(with = "float_bits")]
    mean: f64,
}

impl Severity {
    /// Half of the mean, shrunk toward 0 as if the rater had given further [`RATER_PRIOR`] values that are like those of
    /// all. Half removes three quarters of the variance, and leaves half of what users say who rate only what they like,
    /// or only what they do not.
    fn usual(self) -> f64 {
        0.5 * self.mean * self.count / (self.count + RATER_PRIOR)
    }
}

/// A value's difference from the others', which its rater's [`Severity`] learns after the batch.
struct RaterDifference<'a> {
    /// Route, part and rater.
    key: (&'a str, &'a str, &'a str),
    difference: f64,
    weight: f64,
}

/// Largest number of raters of a part whose severity is kept.
const MOST_RATERS: usize = 1024;

/// Weight of the assumption that a rater is like all others, in ratings.
const RATER_PRIOR: f64 = 4.0;

/// Effective number of a rater's latest ratings that count.
const RATER_WINDOW: f64 = 64.0;

/// Effective number of samples in a running baseline.
const BASELINE_WINDOW: f64 = 256.0;

impl Default for Baselines {
    fn default() -> Self {
        Self::new(BASELINE_WINDOW)
    }
}

impl Baselines {
    /// Empty baselines with a window of `window` samples (at least 1).
    fn new(window: f64) -> Self {
        Self { window: window.max(1.0), routes: BTreeMap::new(), raters: BTreeMap::new() }
    }

    pub fn get(&self, route: &str, part: &str) -> Option<&Moments> {
        self.routes.get(route)?.get(part)
    }

    /// Limits the past of each part to the bounds of its values, which an older configuration may not have had.
    pub fn limit(&mut self, bounds: impl Fn(&str, &str) -> Option<[f64; 2]>) {
        for (route, parts) in &mut self.routes {
            for (part, past) in parts {
                *past = bounds(route, part).map_or(*past, |bounds| past.within(bounds));
            }
        }
    }

    /// The values of a batch, those far outside of the past limited: one would make all others equal for long.
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
        let mut differences = Vec::new();
        for (index, own) in sums.iter().enumerate() {
            let (running, count) = self.running(
                index,
                &groups[index],
                own,
                (&known, &mut differences),
                config.advantage_scale,
            );
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
        self.remember_raters(differences);
        out
    }

    /// Advantages by member of the parts that are not compared within group `index`, and their number.
    fn running<'a>(
        &self,
        index: usize,
        group: &'a GroupRewards,
        sums: &GroupSums,
        (values, differences): (&BatchValues, &mut Vec<RaterDifference<'a>>),
        scale: AdvantageScale,
    ) -> (Vec<Option<f64>>, u64) {
        let mut advantages = vec![None; group.members];
        let mut count = 0;
        for (part_index, part) in group.parts.iter().enumerate() {
            if sums.is_compared() && !group.is_rated && sums.parts.contains(&part_index) {
                continue;
            }
            let batch = values.part(&group.route, &part.name);
            let past = self.get(&group.route, &part.name).copied().unwrap_or_default();
            let selected = (index, part_index);
            for compared in comparisons(selected, batch, past) {
                count += 1;
                let own = compared.own;
                let mut usual = 0.0;
                if let Some(Some(rater)) = part.raters.get(own.member)
                    && compared.others.count > 0.0
                {
                    let key = (group.route.as_str(), part.name.as_str(), rater.as_str());
                    usual = self.severity(key).usual();
                    let difference = own.value - compared.others.mean;
                    differences.push(RaterDifference { key, difference, weight: own.cap_weight });
                }
                let advantage = compared.advantage(usual, scale);
                *advantages[own.member].get_or_insert(0.0) +=
                    part.weight * own.cap_weight * advantage;
            }
        }
        (advantages, count)
    }

    fn severity(&self, (route, part, rater): (&str, &str, &str)) -> Severity {
        let raters = self.raters.get(route).and_then(|parts| parts.get(part));
        raters.and_then(|raters| raters.get(rater)).copied().unwrap_or_default()
    }

    /// Adds the differences of a batch, and forgets the raters known least beyond [`MOST_RATERS`].
    fn remember_raters(&mut self, differences: Vec<RaterDifference<'_>>) {
        for RaterDifference { key: (route, part, rater), difference, weight } in differences {
            let parts = self.raters.entry(route.to_owned()).or_default();
            let raters = parts.entry(part.to_owned()).or_default();
            let known = raters.entry(rater.to_owned()).or_default();
            let past = known.count * (1.0 - 1.0 / RATER_WINDOW).powf(weight);
            known.count = past + weight;
            known.mean = (known.mean * past + difference * weight) / known.count;
        }
        for raters in self.raters.values_mut().flat_map(BTreeMap::values_mut) {
            let surplus = raters.len().saturating_sub(MOST_RATERS);
            if surplus > 0 {
                let mut known: Vec<_> =
                    raters.iter().map(|(rater, known)| (known.count, rater.clone())).collect();
                known.sort_by(|a, b| a.0.total_cmp(&b.0));
                for (_, rater) in &known[..surplus] {
                    raters.remove(rater);
                }
            }
        }
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

/// The factor of `sizes`, all positive and more than `room`, with which their products, at most 1 each, have the sum `room`.
fn inclusion_factor(sizes: &[f64], room: f64) -> f64 {
    let mut sorted = sizes.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let (mut rest, mut left) = (sorted.iter().sum::<f64>(), room);
    for size in sorted {
        if left * size <= rest || left <= 1.0 {
            break;
        }
        (rest, left) = (rest - size, left - 1.0);
    }
    left / rest
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Advantages {
    /// By group and member; `None` for members that are not trained on.
    pub values: Vec<Vec<Option<f64>>>,
    pub group_count: u64,
    pub running_count: u64,
    /// Fraction of groups with equal rewards, among those of two or more trained members.
    pub zero_std_groups_ratio: Option<f64>,
    /// `sum over parts of weight * mean of the part`, averaged over routes by trained members.
    pub reward_mean: Option<f64>,
    /// Standard deviation (n - 1) within a group of the weighted sum of its complete parts, mean over groups.
    pub reward_std: Option<f64>,
    /// That of all trained members of the batch (TRL's `reward_std`); `None` below two.
    pub reward_batch_std: Option<f64>,
    /// Number of groups dropped because no member differed from the others.
    pub dropped_groups: u64,
    /// Rated members that others of the step represent.
    pub represented: u64,
    /// Mean of each `(route, part)` over the samples that have it.
    pub part_means: BTreeMap<(String, String), f64>,
    /// Their standard deviations (n - 1); absent below two values.
    pub part_stds: BTreeMap<(String, String), f64>,
}

/// What [`Advantages::select`] adds to each magnitude, as a share of the mean: members of advantage 0 have a KL.
const LEAST_SHARE: f64 = 0.1;

impl Advantages {
    /// Keeps at most `most` members: those of graded groups, and of the rated ones a sample without replacement, in which
    /// each has a probability p proportional to the magnitude of its advantage times its surprise, at most 1. A kept
    /// advantage is multiplied by `kept / (all * p)` (Horvitz & Thompson 1952), so that the expectation of the mean of
    /// advantage times gradient is that over all rated members, with less variance than of a uniform choice: where nearly
    /// all thumbs are up, the few down teach most, and an answer that the policy hardly ever gives teaches more than one
    /// that it is certain of. The others lose their advantage, so that no pass computes them. At least a quarter of
    /// `most` is left to rated members.
    ///
    /// `is_rated` has a value for each group, `surprises` one for each of its members: the norm of the gradient of the
    /// completion's log-probability with respect to the logits, up to a constant (Katharopoulos & Fleuret 2018). The
    /// choice is systematic (Madow 1949) from `random` in [0, 1).
    pub fn select(&mut self, is_rated: &[bool], surprises: &[Vec<f64>], most: usize, random: f64) {
        let all = || self.values.iter().zip(is_rated);
        let graded = all().filter(|(_, is_rated)| !**is_rated);
        let graded = graded.flat_map(|(values, _)| values.iter().flatten()).count();
        let room = most.saturating_sub(graded).max(most.div_ceil(4)) as f64;
        let rated = all().zip(surprises).filter(|((_, is_rated), _)| **is_rated);
        let members = rated.flat_map(|((values, _), surprises)| values.iter().zip(surprises));
        let sizes: Vec<f64> = members
            .filter_map(|(value, surprise)| Some(value.as_ref()?.abs() * surprise))
            .collect();
        let count = sizes.len() as f64;
        if count <= room {
            return;
        }
        let least = LEAST_SHARE * sizes.iter().sum::<f64>() / count + f64::MIN_POSITIVE;
        let sizes: Vec<f64> = sizes.iter().map(|size| size + least).collect();
        let factor = inclusion_factor(&sizes, room);
        let mut sizes = sizes.into_iter();
        let mut reached = random;
        let rated = self.values.iter_mut().zip(is_rated).filter(|(_, is_rated)| **is_rated);
        for advantage in rated.flat_map(|(values, _)| values).filter(|value| value.is_some()) {
            let probability = sizes.next().map_or(1.0, |size| (factor * size).min(1.0));
            reached += probability;
            if reached >= 1.0 {
                reached -= 1.0;
                *advantage = advantage.map(|value| value * room / (count * probability));
            } else {
                *advantage = None;
                self.represented += 1;
            }
        }
    }

    /// [`Self::part_means`] as `part/NAME` and [`Self::part_stds`] as `part_std/NAME` (TRL's
    /// `rewards/NAME/mean` and
    /// `std`), with `ROUTE/NAME` if several routes of the step have a part of that name.
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

    fn describe_sums(&mut self, sums: &[GroupSums]) {
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

    fn describe_parts(&mut self, groups: &[GroupRewards], values: &BatchValues) {
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

#[cfg(test)]
mod tests;
