//! Whether the next group takes a live prompt or one of the dataset.

use serde::{Deserialize, Serialize};

/// Parts of a share: decisions are counted in whole numbers, so that they never drift.
const WHOLE: u32 = 1_000_000;

/// Shares contested groups out evenly (Bresenham's error term), without randomness: among any `n`
/// decisions in a row, live prompts get between `floor(n share)` and `ceil(n share)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveMix {
    share: u32,
    credit: u32,
}

impl LiveMix {
    /// `share` from 0 (never while the dataset has a prompt) to 1 (always); to a millionth.
    pub fn new(share: f64) -> Self {
        Self { share: (share.clamp(0.0, 1.0) * f64::from(WHOLE)).round() as u32, credit: 0 }
    }

    /// Decides for one group. Only decisions between the two count: where a side has nothing the
    /// other one gets the group, and nothing is owed for it later.
    pub fn takes_live(&mut self, live_waits: bool, dataset_has: bool) -> bool {
        if !(live_waits && dataset_has) {
            return live_waits;
        }
        self.credit += self.share;
        let live = self.credit >= WHOLE;
        if live {
            self.credit -= WHOLE;
        }
        live
    }

    /// Takes up the count of a saved one; the share stays.
    pub(super) fn resume(&mut self, saved: Self) {
        self.credit = saved.credit.min(WHOLE - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uncontested_groups_go_to_whoever_waits_and_owe_nothing() {
        let mut mix = LiveMix::new(0.5);
        for _ in 0..10 {
            assert!(mix.takes_live(true, false));
            assert!(!mix.takes_live(false, true));
            assert!(!mix.takes_live(false, false));
        }
        assert_eq!(mix, LiveMix::new(0.5));
        let always = [LiveMix::new(1.0); 1].map(|mut m| (0..9).all(|_| m.takes_live(true, true)));
        let never = [LiveMix::new(0.0); 1].map(|mut m| (0..9).any(|_| m.takes_live(true, true)));
        assert_eq!((always, never), ([true], [false]));
    }

    proptest::proptest! {
        #[test]
        fn every_window_holds_its_share(millionths in 0_u32..=WHOLE, skip in 0_usize..50, n in 1_usize..200) {
            let share = f64::from(millionths) / f64::from(WHOLE);
            let mut mix = LiveMix::new(share);
            let taken: Vec<bool> = (0..skip + n).map(|_| mix.takes_live(true, true)).collect();
            let live = taken[skip..].iter().filter(|live| **live).count() as f64;
            let exact = n as f64 * share;
            proptest::prop_assert!(live >= (exact - 1e-9).floor() && live <= (exact + 1e-9).ceil());
        }
    }
}
