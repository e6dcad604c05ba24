//! Which step was best on held-out prompts, and when to give up waiting for a better one.

use serde::{Deserialize, Serialize};

pub use crate::config::EarlyStopConfig;

/// The best evaluation so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The optimiser step that was evaluated; 0 is the policy that the run began with.
    pub step: u64,
    /// Its mean held-out reward.
    pub reward: f64,
}

/// What an evaluation means for the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopDecision {
    /// The best so far: keep its checkpoint.
    Improved,
    /// No better; this many evaluations in a row now.
    Waiting(u64),
    /// No better for as long as patience lasts: end the run.
    Stop,
}

/// Follows the held-out reward. Its state is all of it but the configuration, which a resumed run
/// passes anew.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BestTracker {
    best: Option<Best>,
    waited: u64,
    last_step: Option<u64>,
}

impl BestTracker {
    /// Takes the evaluation of a step. A reward that is not finite improves nothing. A step that
    /// is not after the last one (a resumed run evaluates it again) changes nothing.
    ///
    /// As in Keras and the Hugging Face trainer, an improvement is more than `min_delta` above the
    /// best, and patience counts evaluations, not steps.
    pub fn observe(&mut self, config: &EarlyStopConfig, step: u64, reward: f64) -> StopDecision {
        let seen = self.last_step.is_some_and(|last| step <= last);
        if !seen {
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
        // The same step again, as after a resume, is not counted twice.
        assert_eq!(tracker.observe(&config, 40, 9.0), StopDecision::Stop);
        assert_eq!(tracker.best(), Some(Best { step: 20, reward: 0.7 }));
    }

    #[test]
    fn without_patience_it_never_stops() {
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
                let verdict = whole.observe(&config, step as u64, *reward);
                prop_assert_eq!(verdict, resumed.observe(&config, step as u64, *reward));
            }
            let best = whole.best().unwrap().reward;
            prop_assert!(rewards.iter().all(|r| *r <= best + config.min_delta));
        }
    }
}
