//! Where a step's time goes.

use std::time::{Duration, Instant};

use serde::Serialize;

/// Seconds of one step by part, on the wall. Shards that run beside each other share the wall time of
/// their pass by what each of their parts took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTiming {
    /// Forward passes with the adapter on, and the loss.
    pub forward: f64,
    /// Forward passes of the reference.
    pub reference: f64,
    /// Backward passes, with what they compute again.
    pub backward: f64,
    /// Clipping and the update.
    pub optimizer: f64,
}

impl StepTiming {
    /// Seconds of all parts.
    pub fn total(&self) -> f64 {
        self.forward + self.reference + self.backward + self.optimizer
    }

    /// Adds the parts of another one.
    pub fn add(&mut self, other: &Self) {
        self.forward += other.forward;
        self.reference += other.reference;
        self.backward += other.backward;
        self.optimizer += other.optimizer;
    }

    /// The same shares of another total.
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

/// Runs `f` and adds what it took to `seconds`.
pub(crate) fn timed<R>(seconds: &mut f64, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    *seconds += Duration::as_secs_f64(&start.elapsed());
    result
}

#[cfg(test)]
mod tests {
    use super::StepTiming;

    #[test]
    fn scaling_keeps_shares() {
        let split = StepTiming { forward: 1.0, reference: 0.5, backward: 2.0, optimizer: 0.5 };
        let half = split.scaled(2.0);
        assert_eq!(
            half,
            StepTiming { forward: 0.5, reference: 0.25, backward: 1.0, optimizer: 0.25 }
        );
        assert_eq!(StepTiming::default().scaled(1.0), StepTiming::default());
    }
}
