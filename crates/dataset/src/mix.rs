//! Shares groups between live prompts and dataset prompts.

use serde::{Deserialize, Serialize};

/// Credit for one group. Credits are integers, so that rounding errors do not accumulate.
const WHOLE: u32 = 1_000_000;

/// Decides which prompt the next group uses while both kinds wait, without randomness: among any
/// `n` consecutive decisions, `floor(n share)` to `ceil(n share)` use a live prompt (the error term
/// of Bresenham's line algorithm).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveMix {
    share: u32,
    credit: u32,
}

impl LiveMix {
    /// `share` is the fraction of live prompts, from 0 to 1, rounded to a millionth.
    pub fn new(share: f64) -> Self {
        Self { share: (share.clamp(0.0, 1.0) * f64::from(WHOLE)).round() as u32, credit: 0 }
    }

    /// Decides one group; true for a live prompt. If only one kind has a prompt, that kind gets the
    /// group and the share of later groups does not change.
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

    /// Continues from the credit of a saved mix, with the configured share.
    pub(crate) fn resume(&mut self, saved: Self) {
        self.credit = saved.credit.min(WHOLE - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_without_a_choice_do_not_change_the_share() {
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
        fn every_window_contains_its_share(millionths in 0_u32..=WHOLE, skip in 0_usize..50, n in 1_usize..200) {
            let share = f64::from(millionths) / f64::from(WHOLE);
            let mut mix = LiveMix::new(share);
            let taken: Vec<bool> = (0..skip + n).map(|_| mix.takes_live(true, true)).collect();
            let live = taken[skip..].iter().filter(|live| **live).count() as f64;
            let exact = n as f64 * share;
            proptest::prop_assert!(live >= (exact - 1e-9).floor() && live <= (exact + 1e-9).ceil());
        }
    }
}
