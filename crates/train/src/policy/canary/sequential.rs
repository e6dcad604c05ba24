//! A comparison of two versions' ratings that remains valid although it is evaluated after every
//! rating: a test by betting (Shekhar & Ramdas 2023, "Nonparametric two-sample testing by betting";
//! Waudby-Smith & Ramdas 2024, "Estimating means of bounded random variables by betting").
//!
//! Each pair of ratings gives a difference d in [-1, 1]. Against the hypothesis "the mean of d is at
//! most m0", the wealth of a bet lambda is the product of `1 + lambda (d - m0)` over the pairs. If the
//! hypothesis is true, no bet gains in expectation, so the wealth ever reaches `1 / alpha` with a
//! probability of at most alpha (Ville's inequality), however often it is looked at. The mean of the
//! wealth of several bets has the same property, and grows nearly as fast as the best of them.

const BETS: usize = 12;

/// The largest bet, as a share of the one that a single difference could ruin.
const LARGEST: f64 = 0.9;

/// Whether the evidence permits a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CanaryVerdict {
    #[default]
    Continue,
    /// The canary is not worse by more than the margin.
    NotWorse,
    /// The canary is worse.
    Worse,
}

/// The wealth of several bets against "the mean is at most 0".
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BettingWealth {
    bets: Vec<f64>,
    logs: Vec<f64>,
}

impl BettingWealth {
    /// Bets from `smallest` on values of at least `least`, which is below 0.
    pub fn new(smallest: f64, least: f64) -> Self {
        let largest = LARGEST / -least;
        let ratio = largest / smallest;
        #[expect(clippy::cast_precision_loss, reason = "a small index")]
        let bet = |i: usize| smallest * ratio.powf(i as f64 / (BETS - 1) as f64);
        Self { bets: (0..BETS).map(bet).collect(), logs: vec![0.0; BETS] }
    }

    pub fn observe(&mut self, value: f64) {
        for (log, bet) in self.logs.iter_mut().zip(&self.bets) {
            *log += (bet * value).ln_1p();
        }
    }

    /// Its natural logarithm, which is the evidence.
    pub fn log(&self) -> f64 {
        let most = self.logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = self.logs.iter().map(|log| (log - most).exp()).sum();
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let count = self.logs.len() as f64;
        most + (sum / count).ln()
    }
}

/// Tests whether the mean of differences in [-1, 1] is above `-margin`, and whether it is below 0.
#[derive(Clone, Debug, PartialEq)]
pub struct SequentialTest {
    /// Evidence at which a hypothesis is rejected: ln(1 / alpha).
    needed: f64,
    margin: f64,
    /// Against "worse by more than the margin".
    not_worse: BettingWealth,
    /// Against "not worse".
    worse: BettingWealth,
    count: u64,
    sum: f64,
    verdict: CanaryVerdict,
}

impl SequentialTest {
    /// A test without data. `alpha` bounds the probability of each wrong verdict; `margin` is above 0.
    ///
    /// The margin is the smallest bet. The mean of d is at least half a margin away from one hypothesis, and
    /// its variance at most 1/2. There the margin as a bet still gains, so every version gets a verdict.
    pub fn new(alpha: f64, margin: f64) -> Self {
        Self {
            needed: -alpha.ln(),
            margin,
            not_worse: BettingWealth::new(margin, margin - 1.0),
            worse: BettingWealth::new(margin, -1.0),
            count: 0,
            sum: 0.0,
            verdict: CanaryVerdict::Continue,
        }
    }

    /// Adds a difference, canary minus active version. The first verdict stays.
    pub fn observe(&mut self, difference: f64) {
        let difference = difference.clamp(-1.0, 1.0);
        self.count += 1;
        self.sum += difference;
        self.not_worse.observe(difference + self.margin);
        self.worse.observe(-difference);
        if self.verdict == CanaryVerdict::Continue {
            if self.evidence_worse() >= self.needed {
                self.verdict = CanaryVerdict::Worse;
            } else if self.evidence_not_worse() >= self.needed {
                self.verdict = CanaryVerdict::NotWorse;
            }
        }
    }

    pub fn verdict(&self) -> CanaryVerdict {
        self.verdict
    }

    /// Natural logarithm of the evidence for "not worse by more than the margin".
    pub fn evidence_not_worse(&self) -> f64 {
        self.not_worse.log()
    }

    /// Natural logarithm of the evidence for "worse".
    pub fn evidence_worse(&self) -> f64 {
        self.worse.log()
    }

    /// The mean difference; `None` without data.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RatingSum {
    count: u64,
    sum: f64,
}

impl RatingSum {
    fn push(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
    }

    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    fn mean(self) -> f64 {
        self.sum / self.count.max(1) as f64
    }
}

/// Pairs the ratings of canary and active version on one route and part, in the order of their arrival.
///
/// A rating of the version with fewer ratings is compared with the mean of the other version's since the last
/// pair, so every rating is used once, and a slow change of both versions, such as the time of day, cancels.
/// Which ratings form a pair follows from their order alone, and the test sees no value before its pair is
/// complete, so the expectation of each difference is that of the versions if ratings are independent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairedArms {
    canary: RatingSum,
    control: RatingSum,
}

impl PairedArms {
    /// Adds a rating from 0 to 1. Returns the difference of the pair that it completes.
    pub fn push(&mut self, is_canary: bool, value: f64) -> Option<f64> {
        let arm = if is_canary { &mut self.canary } else { &mut self.control };
        arm.push(value);
        (self.canary.count > 0 && self.control.count > 0).then(|| {
            let pair = std::mem::take(self);
            pair.canary.mean() - pair.control.mean()
        })
    }
}

/// A fixed stream of numbers in [0, 1) (Steele et al. 2014, splitmix64).
#[cfg(test)]
pub struct Uniform(pub u64);

#[cfg(test)]
impl Uniform {
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub fn thumb(&mut self, up: f64) -> f64 {
        f64::from(u8::from(self.next() < up))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    /// Verdict and number of ratings of a canary with the share `share`.
    fn run(
        random: &mut Uniform,
        ups: [f64; 2],
        share: f64,
        margin: f64,
        most: u64,
    ) -> (CanaryVerdict, u64) {
        let (mut arms, mut test) = (PairedArms::default(), SequentialTest::new(0.05, margin));
        for n in 0..most {
            let is_canary = random.next() < share;
            let value = random.thumb(ups[usize::from(!is_canary)]);
            let difference = arms.push(is_canary, value);
            if let Some(difference) = difference {
                test.observe(difference);
            }
            if test.verdict() != CanaryVerdict::Continue {
                return (test.verdict(), n + 1);
            }
        }
        (CanaryVerdict::Continue, most)
    }

    fn share_of(wanted: CanaryVerdict, ups: [f64; 2], share: f64, margin: f64) -> f64 {
        let mut random = Uniform(7);
        let runs = 400;
        let hits = (0..runs).filter(|_| run(&mut random, ups, share, margin, 2_000).0 == wanted);
        hits.count() as f64 / f64::from(runs)
    }

    #[test]
    fn wrong_verdicts_are_rare_although_every_rating_is_looked_at() {
        // 0.05, and three standard deviations of 400 runs.
        let most = 0.083;
        for share in [0.05, 0.5] {
            let wrong = share_of(CanaryVerdict::NotWorse, [0.6, 0.7], share, 0.1);
            assert!(wrong <= most, "{wrong} of the canaries at the margin were promoted");
            let wrong = share_of(CanaryVerdict::Worse, [0.7, 0.7], share, 0.1);
            assert!(wrong <= most, "{wrong} of the equal canaries were rolled back");
        }
    }

    #[test]
    fn clear_differences_are_found_soon() {
        let mut random = Uniform(3);
        let mut ratings: Vec<u64> = Vec::new();
        for _ in 0..50 {
            let (verdict, count) = run(&mut random, [0.2, 0.7], 0.5, 0.1, 10_000);
            assert_eq!(verdict, CanaryVerdict::Worse);
            ratings.push(count);
        }
        ratings.sort_unstable();
        assert!(ratings[25] < 80, "half of them need {} ratings", ratings[25]);
        let equal = share_of(CanaryVerdict::NotWorse, [0.7, 0.7], 0.5, 0.2);
        assert!(equal > 0.9, "{equal}");
    }

    /// A smallest bet that did not follow the margin would lose here, however many ratings come.
    #[test]
    fn a_small_margin_can_be_confirmed() {
        let mut test = SequentialTest::new(0.05, 0.008);
        for n in 0..200_000 {
            test.observe(if n % 2 == 0 { 1.0 } else { -1.0 });
        }
        assert_eq!(test.verdict(), CanaryVerdict::NotWorse);
    }

    #[test]
    fn medians_are_near_those_of_the_documented_table() {
        let mut random = Uniform(5);
        let mut found = |ups| {
            let mut runs: Vec<_> =
                (0..101).map(|_| run(&mut random, ups, 0.5, 0.1, 20_000)).collect();
            runs.sort_unstable_by_key(|(_, ratings)| *ratings);
            runs[50]
        };
        let (verdict, ratings) = found([0.7, 0.7]);
        assert!(verdict == CanaryVerdict::NotWorse && ratings < 900, "{verdict:?} {ratings}");
        let (verdict, ratings) = found([0.4, 0.7]);
        assert!(verdict == CanaryVerdict::Worse && ratings < 140, "{verdict:?} {ratings}");
    }

    #[test]
    fn extreme_differences_stay_finite_and_the_first_verdict_stays() {
        for (difference, wanted) in [(1.0, CanaryVerdict::NotWorse), (-1.0, CanaryVerdict::Worse)] {
            let mut test = SequentialTest::new(0.05, 0.05);
            for _ in 0..10_000 {
                test.observe(difference);
            }
            assert_eq!(test.verdict(), wanted);
            assert!(test.evidence_worse().is_finite() && test.evidence_not_worse().is_finite());
            for _ in 0..50_000 {
                test.observe(-difference);
            }
            assert_eq!(test.verdict(), wanted);
        }
        assert_eq!(SequentialTest::new(0.05, 0.05).mean(), None);
    }

    #[derive(Deserialize)]
    struct EvidenceCase {
        name: String,
        margin: f64,
        differences: Vec<f64>,
        not_worse: f64,
        worse: f64,
    }

    #[derive(Deserialize)]
    struct EvidenceFile {
        cases: Vec<EvidenceCase>,
    }

    #[test]
    fn evidence_agrees_with_the_reference() {
        let text = include_str!("../../../../../tests/reference/canary/evidence.json");
        let file: EvidenceFile = serde_json::from_str(text).unwrap();
        assert_eq!(file.cases.len(), 12);
        for case in file.cases {
            let mut test = SequentialTest::new(0.05, case.margin);
            case.differences.iter().for_each(|d| test.observe(*d));
            let found = [test.evidence_not_worse(), test.evidence_worse()];
            for (found, expected) in found.into_iter().zip([case.not_worse, case.worse]) {
                assert!((found - expected).abs() < 1e-9, "{}: {found} {expected}", case.name);
            }
        }
    }

    #[test]
    fn each_rating_enters_one_pair() {
        let mut arms = PairedArms::default();
        assert_eq!(arms.push(true, 1.0), None);
        assert_eq!(arms.push(true, 0.0), None);
        assert_eq!(arms.push(false, 1.0), Some(-0.5));
        assert_eq!(arms.push(false, 0.0), None);
        assert_eq!(arms.push(false, 1.0), None);
        assert_eq!(arms.push(true, 1.0), Some(0.5));
        assert_eq!(arms, PairedArms::default());
    }
}
