//! Comparison of values within their group, and with a running baseline.

use super::moments::Moments;
use super::values::BatchValue;
use crate::config::{AdvantageBaseline, AdvantageScale, TrainConfig};

/// Added to a standard deviation before dividing by it.
const EPSILON: f64 = 1e-4;

/// Bound on a standardized advantage from a running baseline. The standardized values of a group
/// are bounded by the number of its members; a single value compared with the past is not.
pub(super) const RUNNING_LIMIT: f64 = 5.0;

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
/// `batch`. Each value is compared with `past` joined with all other values of the batch.
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
            let others = before.joined(after[i + 1]);
            advantages.push((value.member, running_advantage(value.value, others, scale)));
        }
        before = before.joined(value.moments());
    }
    advantages
}

fn running_advantage(value: f64, others: Moments, scale: AdvantageScale) -> f64 {
    if others.count <= 0.0 {
        return 0.0;
    }
    let difference = value - others.mean;
    match (scale, others.deviation()) {
        (AdvantageScale::None, _) => difference,
        (_, Some(deviation)) => {
            (difference / (deviation + EPSILON)).clamp(-RUNNING_LIMIT, RUNNING_LIMIT)
        }
        // A single other value has no deviation.
        (_, None) => 0.0,
    }
}
