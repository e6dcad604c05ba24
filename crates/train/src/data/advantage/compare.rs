//! Comparison of values within their group, and with a running baseline.

use super::moments::Moments;
use super::values::BatchValue;
use crate::config::{AdvantageBaseline, AdvantageScale, TrainConfig};

/// Added to a standard deviation before dividing by it.
const EPSILON: f64 = 1e-4;

/// `(x - baseline) / (s + 1e-4)` within one group; `batch_deviation` computes s at batch scale.
///
/// The baseline is the mean of the group or of the other members. With the sum S of n values,
/// `x - (S - x) / (n - 1) = n / (n - 1) (x - mean)`.
pub(super) fn group_advantages(
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
pub(super) fn standardize(groups: &mut [Vec<Option<f64>>]) {
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
pub(super) fn running_advantages(
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
