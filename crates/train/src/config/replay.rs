//! How much of a step is drawn from earlier steps.

use serde::{Deserialize, Serialize};

/// Groups of earlier steps that a step trains on again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReplayConfig {
    /// Largest share of replayed samples in a step, at most 0.5; 0 replays none.
    pub share: f64,
    /// Number of the newest steps whose groups may be drawn.
    pub window_steps: u64,
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self { share: 0.0, window_steps: 50 }
    }
}

impl ReplayConfig {
    /// The most samples that a step with `fresh` new ones may replay.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at most `fresh`, which is not negative"
    )]
    pub(crate) fn most(&self, fresh: usize) -> usize {
        (fresh as f64 * self.share / (1.0 - self.share)) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn replayed_samples_are_at_most_their_share(share in 0.0..=0.5, fresh in 0..10_000_usize) {
            let most = ReplayConfig { share, ..ReplayConfig::default() }.most(fresh);
            let of_all = |replayed: usize| replayed as f64 / (fresh + replayed).max(1) as f64;
            prop_assert!(of_all(most) <= share + 1e-12);
            prop_assert!(fresh == 0 || of_all(most + 1) > share - 1e-12);
        }
    }
}
