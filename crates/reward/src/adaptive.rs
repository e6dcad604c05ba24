//! Weights that follow a part's success rate.

use serde::{Deserialize, Serialize};

use crate::config::AdaptiveConfig;

/// What a checkpoint keeps of an [`AdaptiveWeight`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveState {
    /// The weight now.
    pub weight: f64,
    /// Successes since it last could change.
    pub successes: u32,
    /// Values since it last could change.
    pub seen: u32,
}

/// A part's weight: after every `every` values, multiplied by `up` where fewer than `low` of them
/// were successes, by `down` where more than `high` were, and kept within its bounds.
///
/// Deterministic: it depends on the values in their order, not on how they came in batches.
/// Missing values count for nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptiveWeight {
    rule: AdaptiveConfig,
    low: f64,
    high: f64,
    state: AdaptiveState,
}

impl AdaptiveWeight {
    /// Begins at the part's weight, which is above 0.
    pub fn new(weight: f64, rule: &AdaptiveConfig) -> Self {
        let (low, high) = rule.bounds(weight);
        let state = AdaptiveState { weight, successes: 0, seen: 0 };
        Self { rule: *rule, low, high, state }
    }

    /// The weight now.
    pub fn weight(&self) -> f64 {
        self.state.weight
    }

    /// What to keep.
    pub fn state(&self) -> AdaptiveState {
        self.state
    }

    /// Goes on from a checkpoint; a weight outside the bounds, which a changed configuration may
    /// have moved, is brought within, and one that is no number is ignored.
    pub fn restore(&mut self, state: AdaptiveState) {
        if state.weight.is_finite() {
            let weight = state.weight.max(self.low).min(self.high);
            let seen = state.seen.min(self.rule.every.saturating_sub(1));
            self.state = AdaptiveState { weight, seen, successes: state.successes.min(seen) };
        }
    }

    /// Counts values as the part computed them.
    pub fn observe(&mut self, values: impl IntoIterator<Item = Option<f64>>) {
        for value in values.into_iter().flatten() {
            self.state.seen += 1;
            self.state.successes += u32::from(value >= self.rule.success_at);
            if self.state.seen >= self.rule.every {
                self.change();
            }
        }
    }

    fn change(&mut self) {
        let rate = f64::from(self.state.successes) / f64::from(self.state.seen.max(1));
        let factor = if rate < self.rule.low {
            self.rule.up
        } else if rate > self.rule.high {
            self.rule.down
        } else {
            1.0
        };
        let weight = (self.state.weight * factor).max(self.low).min(self.high);
        self.state = AdaptiveState { weight, successes: 0, seen: 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> AdaptiveWeight {
        AdaptiveWeight::new(1.0, &AdaptiveConfig { every: 10, ..AdaptiveConfig::default() })
    }

    /// Ten values, `successes` of them at 1.
    fn ten(successes: usize) -> impl Iterator<Item = Option<f64>> {
        (0..10).map(move |i| Some(if i < successes { 1.0 } else { 0.5 }))
    }

    #[test]
    fn seldom_raises_often_lowers_and_between_stays() {
        for (successes, weight) in [(0, 1.2), (2, 1.2), (3, 1.0), (8, 1.0), (9, 0.9), (10, 0.9)] {
            let mut machine = machine();
            machine.observe(ten(successes));
            assert!((machine.weight() - weight).abs() < 1e-12, "{successes}");
        }
    }

    #[test]
    fn the_weight_stays_within_its_bounds() {
        let (mut up, mut down) = (machine(), machine());
        for _ in 0..100 {
            up.observe(ten(0));
            down.observe(ten(10));
        }
        assert_eq!((up.weight(), down.weight()), (4.0, 0.25));
    }

    #[test]
    fn missing_values_count_for_nothing() {
        let mut machine = machine();
        machine.observe(std::iter::repeat_n(None, 1000));
        assert_eq!(machine.state(), AdaptiveState { weight: 1.0, successes: 0, seen: 0 });
    }

    #[test]
    fn batches_make_no_difference_and_a_checkpoint_goes_on() {
        let values: Vec<Option<f64>> = (0..997)
            .map(|i| (i % 11 != 0).then_some(f64::from(u8::from(i % 7 < i / 200))))
            .collect();
        let mut whole = machine();
        whole.observe(values.iter().copied());
        for size in [1, 3, 64, 500] {
            let mut parts = machine();
            for chunk in values.chunks(size) {
                parts.observe(chunk.iter().copied());
                let kept = serde_json::to_string(&parts.state()).unwrap();
                parts = machine();
                parts.restore(serde_json::from_str(&kept).unwrap());
            }
            assert_eq!(parts, whole, "{size}");
        }
        assert_ne!(whole.weight(), 1.0);
    }

    #[test]
    fn a_state_from_elsewhere_is_brought_within_bounds() {
        let mut machine = machine();
        machine.restore(AdaptiveState { weight: f64::NAN, successes: 1, seen: 2 });
        assert_eq!(machine.state(), AdaptiveState { weight: 1.0, successes: 0, seen: 0 });
        machine.restore(AdaptiveState { weight: 99.0, successes: 400, seen: 300 });
        assert_eq!(machine.state(), AdaptiveState { weight: 4.0, successes: 9, seen: 9 });
    }
}
