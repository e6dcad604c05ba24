//! Durations of a step's parts.

use std::time::Instant;

use serde::Serialize;

/// Wall time of one step's parts, in seconds. Shards run in parallel, so a pass's wall time is
/// divided in proportion to the sums of its shards' parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTiming {
    /// Forward passes with the adapter, and the loss.
    pub forward: f64,
    /// Forward passes of the reference policy.
    pub reference: f64,
    /// Backward passes, with the layers that they recompute.
    pub backward: f64,
    /// Gradient clipping and AdamW.
    pub optimizer: f64,
}

impl StepTiming {
    /// Sum of all parts, in seconds.
    pub fn total(&self) -> f64 {
        self.forward + self.reference + self.backward + self.optimizer
    }

    /// Adds the parts of `other`.
    pub fn add(&mut self, other: &Self) {
        self.forward += other.forward;
        self.reference += other.reference;
        self.backward += other.backward;
        self.optimizer += other.optimizer;
    }

    /// Scales all parts so that they sum to `total` seconds.
    pub(crate) fn scaled(self, total: f64) -> Self {
        let factor = if self.total() > 0.0 { total / self.total() } else { 0.0 };
        Self {
            forward: self.forward * factor,
            reference: self.reference * factor,
            backward: self.backward * factor,
            optimizer: self.optimizer * factor,
        }
    }
}

/// Runs `f` and adds its duration to `seconds`.
pub(crate) fn timed<R>(seconds: &mut f64, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    *seconds += start.elapsed().as_secs_f64();
    result
}

#[cfg(test)]
mod tests {
    use super::StepTiming;

    #[test]
    fn scaling_keeps_proportions() {
        let timing = StepTiming { forward: 1.0, reference: 0.5, backward: 2.0, optimizer: 0.5 };
        let half = timing.scaled(2.0);
        assert_eq!(
            half,
            StepTiming { forward: 0.5, reference: 0.25, backward: 1.0, optimizer: 0.25 }
        );
        assert_eq!(StepTiming::default().scaled(1.0), StepTiming::default());
    }
}
