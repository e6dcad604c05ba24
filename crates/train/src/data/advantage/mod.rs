//! Advantages, computed part by part, each against a baseline that is independent of the sample.
//!
//! A reward is a set of named, weighted parts. A part may be missing, which is not zero. The advantage
//! of member i of a group is `A_i = g_i + sum over the other parts p of weight_p * a_ip`, where
//!
//! - *group baseline* (GRPO, Shao et al. 2024): if the group has two or more members with a reward,
//!   `x_i` is the weighted sum of the parts that all of them have, and
//!   `g_i = (x_i - mean) / (s + 1e-4)`. `s` is the standard deviation with Bessel's correction
//!   (n - 1), as in TRL, either of the group or of the route's sums of this batch; without scaling
//!   (Dr. GRPO, Liu et al. 2025) the division is left out. Equal sums have advantage 0.
//! - *leave-one-out running baseline* (not GRPO): every other value `a_ip` is compared with the mean
//!   and deviation of that part on that route, over an exponential window of past batches joined with
//!   the *other* values of this batch, those of other turns of the same conversation excluded. Without anything to compare with it is 0. The divisor is at
//!   least half the range of the values, since the deviation of equal values is 0; so the advantage
//!   is at most 2.
//!
//! The parts are summed before they are compared, as in TRL (`sum_then_normalize`): their weights and
//! units decide their influence. Compared one by one, a difference of 0.005 in one member would count as
//! much as a right answer. `g_i` is multiplied by the member's smallest cap weight among the parts.
//!
//! A member without any value has no advantage and does not enter any statistic.
//!
//! `train.advantage_baseline`, `train.reward_aggregation` and `train.zero_variance_groups` change the
//! comparison within a group, for the parts that all its members have:
//!
//! - *leave-one-out* (RLOO, Ahmadian et al. 2024): `mean_p` is that of the other members, which
//!   multiplies every advantage by `n / (n - 1)`
//! - *normalize, then sum*: each of those parts is compared and scaled by itself, and the results are
//!   summed by weight
//! - *GDPO* (Liu et al. 2026; TRL's `normalize_then_sum`): these sums are then standardized over all
//!   members of the batch
//! - groups without any difference may be dropped, as in DAPO's dynamic sampling: they then
//!   contribute no KL and no bonus, and do not count in the loss's normalizer
//!
//! `Baselines::advantages` is the entry point. It collects all values of a batch by route and part,
//! sums the complete parts of each group (`sums`), compares them, and adds metrics (`statistics`).

mod baselines;
mod moments;
mod statistics;
mod sums;

use std::collections::BTreeMap;

use crate::config::{AdvantageBaseline, AdvantageScale, TrainConfig};
use moments::Moments;

pub(crate) use baselines::Baselines;
pub(crate) use statistics::Advantages;

// The rewards of a group, by part and member.

/// Values are clamped to this magnitude, so that finite rewards never overflow.
const VALUE_LIMIT: f64 = 1e9;

/// One named part of the rewards of one group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PartRewards {
    /// The part's name, which selects its running baseline.
    pub name: String,
    /// Factor of its advantage in the sum over parts.
    pub weight: f64,
    /// One value per member; `None` and values that are not finite are missing.
    pub values: Vec<Option<f64>>,
    /// Weight of each value in (0, 1], below 1 where `max_key_share` capped a key's feedback. It
    /// multiplies the value's advantage and its weight in running baselines.
    pub cap_weights: Vec<f64>,
}

impl PartRewards {
    /// The clamped value of a member; `None` if missing.
    fn value(&self, member: usize) -> Option<f64> {
        let value = (*self.values.get(member)?)?;
        value.is_finite().then(|| value.clamp(-VALUE_LIMIT, VALUE_LIMIT))
    }

    /// The cap weight of a member's value.
    fn cap_weight(&self, member: usize) -> f64 {
        self.cap_weights.get(member).copied().unwrap_or(1.0)
    }

    /// The values of `members`; `None` if one is missing.
    fn complete(&self, members: &[usize]) -> Option<Vec<f64>> {
        members.iter().map(|member| self.value(*member)).collect()
    }
}

/// The rewards of one group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GroupRewards {
    /// The route, which selects the running baselines.
    pub route: String,
    /// Number of members; every part has as many values.
    pub members: usize,
    /// The group's reward parts.
    pub parts: Vec<PartRewards>,
    /// The conversation of each member that a client received.
    pub conversations: Vec<Option<[u8; 16]>>,
}

impl GroupRewards {
    /// Members that have at least one value.
    fn trained(&self) -> Vec<usize> {
        let has_value = |member: &usize| self.parts.iter().any(|p| p.value(*member).is_some());
        (0..self.members).filter(has_value).collect()
    }
}

// All values of a batch by route and part.

/// One value with its place in the batch.
#[derive(Clone, Copy, Debug)]
struct BatchValue {
    /// Index of the group.
    group: usize,
    /// Index of the part within the group.
    part: usize,
    /// Index of the member within the group.
    member: usize,
    value: f64,
    /// Weight in running baselines.
    cap_weight: f64,
    /// The conversation that the member is a turn of.
    conversation: Option<[u8; 16]>,
}

impl BatchValue {
    fn moments(self) -> Moments {
        Moments::weighted(self.value, self.cap_weight)
    }
}

/// All values of a batch by `(route, part)`.
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

    /// The values of a part on a route.
    fn part(&self, route: &str, part: &str) -> &[BatchValue] {
        self.0.get(&(route.to_owned(), part.to_owned())).map_or(&[], Vec::as_slice)
    }
}

// Comparison of values within their group, and with a running baseline.

/// Added to a standard deviation before dividing by it.
const EPSILON: f64 = 1e-4;

/// `(x - baseline) / (s + 1e-4)` within one group; `batch_deviation` computes s at batch scale.
///
/// The baseline is the mean of the group or of the other members. With the sum S of n values,
/// `x - (S - x) / (n - 1) = n / (n - 1) (x - mean)`.
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
    let factor = match config.advantage_baseline {
        AdvantageBaseline::Mean => 1.0,
        AdvantageBaseline::LeaveOneOut => group.count / (group.count - 1.0),
    };
    values.iter().map(|x| factor * (x - group.mean) / divisor).collect()
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

/// `(member, advantage)` of the values of one part of one group, which `(group, part)` selects from
/// `batch`. Each value is compared with `past` joined with all other values of the batch, except those of the
/// same conversation: the reward of a session is the value of all its turns.
fn running_advantages(
    selected: (usize, usize),
    batch: &[BatchValue],
    past: Moments,
    scale: AdvantageScale,
) -> Vec<(usize, f64)> {
    // The moments before and after each value are joined, so that it never enters its own baseline.
    let mut after = vec![Moments::default(); batch.len() + 1];
    for (i, value) in batch.iter().enumerate().rev() {
        after[i] = after[i + 1].joined(value.moments());
    }
    let mut before = past;
    let mut advantages = Vec::new();
    for (i, value) in batch.iter().enumerate() {
        if (value.group, value.part) == selected {
            let others = if batch.iter().any(|other| are_turns_of_one(value, other)) {
                let others = batch.iter().enumerate();
                let others = others.filter(|(k, other)| *k != i && !are_turns_of_one(value, other));
                others.fold(past, |all, (_, other)| all.joined(other.moments()))
            } else {
                before.joined(after[i + 1])
            };
            advantages.push((value.member, running_advantage(value.value, others, scale)));
        }
        before = before.joined(value.moments());
    }
    advantages
}

/// Whether two values are of different turns of one conversation. The answers to one prompt, which form a
/// group, are no turns.
fn are_turns_of_one(value: &BatchValue, other: &BatchValue) -> bool {
    value.conversation.is_some()
        && value.conversation == other.conversation
        && value.group != other.group
}

/// `(value - mean) / (max(s, half) + 1e-4)` with the mean and deviation s of the other values, and
/// half of the range of all values including this one. Without scaling only `value - mean`.
///
/// A deviation alone makes the first exception after many equal values an extreme: s is then 0. The
/// half range is a lower bound that does not need that exception to have occurred before. It is also
/// the largest possible standard deviation, so beyond a few values it is the divisor, and
///
/// - no advantage exceeds 2, since no value is farther from the mean than the range;
/// - the divisor is the same for all values once the range is known, so the advantages of a
///   stationary stream have mean 0, which a clamp at some bound would not keep.
///
/// | values | by deviation | by a quarter of the range | by half of it |
/// | --- | --- | --- | --- |
/// | 100 up, 1 down: down, up | -10, 0.1 | -4, 0.04 | -2, 0.02 |
/// | 50 up, 50 down | -1, 1 | -1, 1 | -1, 1 |
/// | stars of mean 4 and deviation 1: one, five | -3, 1 | -3, 1 | -1.5, 0.5 |
///
/// A quarter would leave twice the advantage to a single rare rating, which may be a mistake, and
/// would divide even and uneven ratings by different amounts. The optimizer normalizes the common
/// scale, so the smaller values of stars cost nothing.
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

#[cfg(test)]
mod tests;
