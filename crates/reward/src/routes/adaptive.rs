//! Weights that follow a part's success rate.

use serde::{Deserialize, Serialize};

use hone_core::config::{Checked, above, between};

use crate::kinds::KindParameters;

hone_core::parameters! {
    /// The rule of a weight that follows the part's success rate: it grows while successes are rare and
    /// shrinks when nearly every value is one.
    #[derive(Copy)]
    pub struct AdaptiveConfig {
        /// A value of at least this is a success.
        pub success_at: f64 = 1.0 => finite(),
        /// Below this success rate the weight is multiplied by `up`.
        pub low: f64 = 0.3,
        /// Above this success rate the weight is multiplied by `down`.
        pub high: f64 = 0.8 => between(0.0, 1.0),
        /// Factor of growth.
        pub up: f64 = 1.2 => between(1.0, 1000.0),
        /// Factor of shrinking.
        pub down: f64 = 0.9 => between(0.0, 1.0),
        /// Least weight; absent: a quarter of the part's weight.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub min: Option<f64> = None,
        /// Greatest weight; absent: four times the part's weight.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub max: Option<f64> = None,
        /// Scored completions between two changes of the weight.
        pub every: u32 = 64 => between(1, 1 << 20),
    }
}

impl AdaptiveConfig {
    /// Least and greatest weight of a part that starts with `weight`.
    pub fn bounds(&self, weight: f64) -> (f64, f64) {
        (self.min.unwrap_or(weight / 4.0), self.max.unwrap_or(weight * 4.0))
    }

    pub(super) fn check(&self, weight: f64) -> Checked {
        above("weight", weight, 0.0)?;
        self.check_ranges().map_err(|problem| problem.prefixed("adaptive."))?;
        between("adaptive.low", self.low, 0.0, self.high)?;
        above("adaptive.down", self.down, 0.0)?;
        let (min, max) = self.bounds(weight);
        above("adaptive.min", min, 0.0)?;
        between("adaptive.min", min, 0.0, weight)?;
        between("adaptive.max", max, weight, f64::MAX)
    }
}

/// The state of an [`AdaptiveWeight`], as checkpoints store it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveState {
    /// The current weight.
    pub weight: f64,
    /// Successes since the last possible change.
    pub successes: u32,
    /// Values since the last possible change.
    pub seen: u32,
}

/// A part's weight under an [`AdaptiveConfig`]: after each `every` values it may change, within its
/// bounds.
///
/// It is deterministic: it depends on the values and their order, not on how they were batched.
/// Missing values do not count.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptiveWeight {
    rule: AdaptiveConfig,
    low: f64,
    high: f64,
    state: AdaptiveState,
}

impl AdaptiveWeight {
    /// Starts at the part's weight, which is above 0.
    pub fn new(weight: f64, rule: &AdaptiveConfig) -> Self {
        let (low, high) = rule.bounds(weight);
        let state = AdaptiveState { weight, successes: 0, seen: 0 };
        Self { rule: *rule, low, high, state }
    }

    /// The current weight.
    pub fn weight(&self) -> f64 {
        self.state.weight
    }

    /// The state for a checkpoint.
    pub fn state(&self) -> AdaptiveState {
        self.state
    }

    /// Continues from a checkpoint. A weight outside the bounds, which a changed configuration may
    /// have moved, is clamped; one that is not a number is ignored.
    pub fn restore(&mut self, state: AdaptiveState) {
        if state.weight.is_finite() {
            let weight = state.weight.max(self.low).min(self.high);
            let seen = state.seen.min(self.rule.every.saturating_sub(1));
            self.state = AdaptiveState { weight, seen, successes: state.successes.min(seen) };
        }
    }

    /// Counts the part's values, as computed.
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

    fn start() -> AdaptiveWeight {
        AdaptiveWeight::new(1.0, &AdaptiveConfig { every: 10, ..AdaptiveConfig::default() })
    }

    fn ten(successes: usize) -> impl Iterator<Item = Option<f64>> {
        (0..10).map(move |i| Some(if i < successes { 1.0 } else { 0.5 }))
    }

    #[test]
    fn the_weight_follows_success_within_its_bounds() {
        for (successes, weight) in [(0, 1.2), (2, 1.2), (3, 1.0), (8, 1.0), (9, 0.9), (10, 0.9)] {
            let mut adaptive = start();
            adaptive.observe(ten(successes));
            assert!((adaptive.weight() - weight).abs() < 1e-12, "{successes}");
        }
        let (mut up, mut down) = (start(), start());
        for _ in 0..100 {
            up.observe(ten(0));
            down.observe(ten(10));
        }
        assert_eq!((up.weight(), down.weight()), (4.0, 0.25));
        let mut adaptive = start();
        adaptive.observe(std::iter::repeat_n(None, 1000));
        assert_eq!(adaptive.state(), AdaptiveState { weight: 1.0, successes: 0, seen: 0 });
        let mut adaptive = start();
        adaptive.restore(AdaptiveState { weight: f64::NAN, successes: 1, seen: 2 });
        assert_eq!(adaptive.state(), AdaptiveState { weight: 1.0, successes: 0, seen: 0 });
        adaptive.restore(AdaptiveState { weight: 99.0, successes: 400, seen: 300 });
        assert_eq!(adaptive.state(), AdaptiveState { weight: 4.0, successes: 9, seen: 9 });
    }

    #[test]
    fn batches_make_no_difference_and_a_checkpoint_continues() {
        let values: Vec<Option<f64>> = (0..997)
            .map(|i| (i % 11 != 0).then_some(f64::from(u8::from(i % 7 < i / 200))))
            .collect();
        let mut whole = start();
        whole.observe(values.iter().copied());
        for size in [1, 3, 64, 500] {
            let mut parts = start();
            for chunk in values.chunks(size) {
                parts.observe(chunk.iter().copied());
                let kept = serde_json::to_string(&parts.state()).unwrap();
                parts = start();
                parts.restore(serde_json::from_str(&kept).unwrap());
            }
            assert_eq!(parts, whole, "{size}");
        }
        assert_ne!(whole.weight(), 1.0);
    }
}
