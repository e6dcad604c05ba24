//! How often users rate each version. A canary that makes users stop rating is not better.
//!
//! Chance decides which version a user gets: the canary with a probability equal to its share of the traffic. If users
//! rate both versions alike, each first rating is therefore one of the canary with that same probability. This holds
//! whatever time passes between an answer and its rating, also if that time depends on the rating, and however many
//! answers a user gets. So the test needs the version of each rating alone, and no count of answers.

use super::sequential::BettingWealth;

/// By how much less often the canary may be rated, as a share of the active version's rate.
pub const MAX_RATE_DROP: f64 = 0.2;

/// The smallest bet. Bets against a rate that halved gain most from 0.3 to 0.6.
const SMALLEST_BET: f64 = 0.05;

/// Tests whether a canary is rated less often than the active version, by more than [`MAX_RATE_DROP`].
#[derive(Clone, Debug, PartialEq)]
pub struct RatingRates {
    less: BettingWealth,
    /// Ratings of the canary, each weighted by the active version's share of the traffic.
    canary: f64,
    /// Ratings of the active version, each weighted by the canary's share.
    control: f64,
}

impl Default for RatingRates {
    fn default() -> Self {
        Self { less: BettingWealth::new(SMALLEST_BET, -1.0), canary: 0.0, control: 0.0 }
    }
}

impl RatingRates {
    /// Adds the first rating of a user whose version was the canary with the probability `share`.
    pub fn observe(&mut self, is_canary: bool, share: f64) {
        let kept = (1.0 - MAX_RATE_DROP) * share;
        let least = kept / (kept + 1.0 - share);
        self.less.observe(least - f64::from(u8::from(is_canary)));
        if is_canary {
            self.canary += 1.0 - share;
        } else {
            self.control += share;
        }
    }

    /// Natural logarithm of the evidence for "rated less often".
    pub fn evidence(&self) -> f64 {
        self.less.log()
    }

    /// The canary's rate of ratings divided by the active version's, over all shares together (Mantel & Haenszel
    /// 1959); `None` without ratings of the active version.
    pub fn ratio(&self) -> Option<f64> {
        (self.control > 0.0).then(|| self.canary / self.control)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sequential::Uniform;
    use super::*;

    /// Ratings until the evidence suffices, of at most `most`, and the ratio then. Of the first hundred users a
    /// twentieth get the canary, and of the others a half.
    fn run(random: &mut Uniform, relative: f64, most: u64) -> (Option<u64>, f64) {
        let (mut rates, mut ratings, mut users) = (RatingRates::default(), 0, 0);
        while ratings < most {
            users += 1;
            let share = if users < 400 { 0.05 } else { 0.5 };
            let is_canary = random.next() < share;
            if random.next() >= if is_canary { 0.4 * relative } else { 0.4 } {
                continue;
            }
            ratings += 1;
            rates.observe(is_canary, share);
            if rates.evidence() >= -0.05_f64.ln() {
                return (Some(ratings), rates.ratio().unwrap());
            }
        }
        (None, rates.ratio().unwrap())
    }

    #[test]
    fn a_rate_that_halved_is_found_and_an_equal_one_is_not() {
        let mut random = Uniform(2);
        let mut found: Vec<_> = (0..100).map(|_| run(&mut random, 0.5, 4_000).0).collect();
        found.sort_unstable();
        assert!(found[50].is_some_and(|ratings| ratings < 600), "{:?}", found[50]);
        assert!(found[0].is_some(), "each one");
        for relative in [1.0, 1.0 - MAX_RATE_DROP] {
            let wrong = (0..300).filter(|_| run(&mut random, relative, 2_000).0.is_some()).count();
            // 0.05, and three standard deviations.
            assert!(wrong <= 26, "{relative}: {wrong}");
        }
        let ratios: Vec<f64> = (0..20).map(|_| run(&mut random, 0.9, 4_000).1).collect();
        let mean = ratios.iter().sum::<f64>() / 20.0;
        assert!((mean - 0.9).abs() < 0.05, "{mean}");
    }
}
