//! One value against others.

use super::batch::GroupValue;
use super::{AdvantageRules, EPSILON, Moments, RUNNING_LIMIT};
use crate::config::{AdvantageBaseline, AdvantageScale};

/// `(x - baseline) / (s + 1e-4)` within one group; `batch` is the standard deviation over the batch.
/// The baseline is the mean, or that of the other members: `x - (S - x) / (n - 1)` is
/// `n / (n - 1) (x - mean)`.
pub(super) fn group_advantages(
    values: &[f64],
    batch: Option<f64>,
    rules: &AdvantageRules,
) -> Vec<f64> {
    if values.iter().all(|x| *x == values[0]) {
        return vec![0.0; values.len()];
    }
    let own = Moments::of(values.iter().copied());
    let divisor = match rules.scale {
        AdvantageScale::None => 1.0,
        AdvantageScale::Group => own.deviation().unwrap_or(0.0) + EPSILON,
        AdvantageScale::Batch => batch.unwrap_or(0.0) + EPSILON,
    };
    let factor = match rules.baseline {
        AdvantageBaseline::Mean => 1.0,
        AdvantageBaseline::LeaveOneOut => own.count / (own.count - 1.0),
    };
    values.iter().map(|x| factor * (x - own.mean) / divisor).collect()
}

/// Standardises all values of a batch together: `(x - mean) / (s + 1e-4)`.
pub(super) fn standardise(groups: &mut [Vec<Option<f64>>]) {
    let known: Vec<f64> = groups.iter().flatten().flatten().copied().collect();
    let all = Moments::of(known.iter().copied());
    let divisor = all.deviation().unwrap_or(0.0) + EPSILON;
    for value in groups.iter_mut().flatten().flatten() {
        *value = (*value - all.mean) / divisor;
    }
}

/// Advantages of the values of one part of one group (`key`: their place in the batch), each
/// against the past joined with all other values of the batch. `(member, advantage)`.
pub(super) fn running_advantages(
    key: (usize, usize),
    batch: &[GroupValue],
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
