//! The best step on held-out prompts, and the decision to stop early.

use serde::{Deserialize, Serialize};

use crate::config::EarlyStopConfig;

/// The best evaluation so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The optimizer step that was evaluated; 0 is the policy at the start of the run.
    pub step: u64,
    /// The mean held-out reward.
    pub reward: f64,
}

/// The consequence of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopDecision {
    /// The best evaluation: its adapter is copied.
    Improved,
    /// Not an improvement, for this many evaluations in a row.
    Waiting(u64),
    /// Patience is exhausted: the run ends.
    Stop,
}

/// Tracks the held-out reward. It is serialized between processes, without the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BestTracker {
    best: Option<Best>,
    waited: u64,
    last_step: Option<u64>,
}

impl BestTracker {
    /// Adds the evaluation of a step. A reward that is not finite is no improvement. A step that is not
    /// after the last one changes nothing: a resumed run repeats it.
    ///
    /// As in Keras and the Hugging Face trainer, an improvement is more than `min_delta` above the
    /// best, and patience counts evaluations, not steps.
    pub fn observe(&mut self, config: &EarlyStopConfig, step: u64, reward: f64) -> StopDecision {
        if self.last_step.is_none_or(|last| step > last) {
            self.last_step = Some(step);
            let better = self.best.is_none_or(|best| reward > best.reward + config.min_delta);
            if reward.is_finite() && better {
                self.best = Some(Best { step, reward });
                self.waited = 0;
                return StopDecision::Improved;
            }
            self.waited += 1;
        }
        if config.patience > 0 && self.waited >= config.patience {
            StopDecision::Stop
        } else {
            StopDecision::Waiting(self.waited)
        }
    }

    /// The best evaluation, if any had a finite reward.
    pub fn best(&self) -> Option<Best> {
        self.best
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn patience_counts_evaluations_without_an_improvement() {
        let config = EarlyStopConfig { patience: 2, min_delta: 0.1 };
        let mut tracker = BestTracker::default();
        assert_eq!(tracker.observe(&config, 0, 0.5), StopDecision::Improved);
        assert_eq!(tracker.observe(&config, 10, 0.59), StopDecision::Waiting(1));
        assert_eq!(tracker.observe(&config, 20, 0.7), StopDecision::Improved);
        assert_eq!(tracker.observe(&config, 30, f64::NAN), StopDecision::Waiting(1));
        assert_eq!(tracker.observe(&config, 40, 0.75), StopDecision::Stop);
        assert_eq!(tracker.best(), Some(Best { step: 20, reward: 0.7 }));
        // A resumed run repeats a step, which is not counted twice.
        assert_eq!(tracker.observe(&config, 40, 9.0), StopDecision::Stop);
        assert_eq!(tracker.best(), Some(Best { step: 20, reward: 0.7 }));
    }

    #[test]
    fn zero_patience_never_stops() {
        let (config, mut tracker) = (EarlyStopConfig::default(), BestTracker::default());
        tracker.observe(&config, 0, 1.0);
        for step in 1..1000 {
            assert_eq!(tracker.observe(&config, step, 1.0), StopDecision::Waiting(step));
        }
    }

    proptest! {
        #[test]
        fn resuming_anywhere_changes_nothing(
            rewards in prop::collection::vec(-2.0..2.0f64, 1..30), cut in 0usize..30,
        ) {
            let config = EarlyStopConfig { patience: 3, min_delta: 0.05 };
            let (mut whole, mut resumed) = (BestTracker::default(), BestTracker::default());
            for (step, reward) in rewards.iter().enumerate() {
                if step == cut {
                    let text = serde_json::to_string(&resumed).unwrap();
                    resumed = serde_json::from_str(&text).unwrap();
                }
                let decision = whole.observe(&config, step as u64, *reward);
                prop_assert_eq!(decision, resumed.observe(&config, step as u64, *reward));
            }
            let best = whole.best().unwrap().reward;
            prop_assert!(rewards.iter().all(|r| *r <= best + config.min_delta));
        }
    }
}
