//! Wrong findings in simulated populations, whose share docs/safety.md promises.

use super::*;
use crate::policy::recall;
use crate::testing::version_rating;

const RUNS: u32 = 200;

/// Milliseconds between two requests.
const PACE: u64 = 9_000;

/// Users of a service, and what a canary changes for them.
#[derive(Clone, Copy)]
struct Population {
    /// Added to each user's probability of a thumb up.
    effect: f64,
    /// The canary's rate of ratings, as a multiple of the active version's.
    rate: f64,
    users: u64,
    /// Requests of each session; 0 if requests name users only.
    session: u64,
    /// Whether each rating counts as if it were of a user of its own.
    is_naive: bool,
}

const EQUAL: Population =
    Population { effect: 0.0, rate: 1.0, users: 5_000, session: 0, is_naive: false };

fn config() -> CanaryConfig {
    CanaryConfig { margin: 0.1, max_seconds: 1 << 32, ..CanaryConfig::default() }
}

impl Population {
    /// One canary: the check that decides, if 25,000 requests are enough.
    ///
    /// A tenth of the users makes nearly half of the requests, and each user or session has one version while the share
    /// stays. A fifth likes everything, a tenth nearly nothing, and the others deviate from each other. Busy users rate
    /// more of what they get. Thumbs down come after three minutes in the mean, and thumbs up after half an hour.
    fn canary(&self, random: &mut Uniform) -> Option<PolicyCheck> {
        let config = config();
        let (version, control) = (PolicyVersion(2), PolicyVersion(1));
        let begun = BegunCanary {
            version,
            control,
            began: 1,
            served: 1,
            alpha: config.alpha,
            is_recall: false,
        };
        let mut evidence = CanaryEvidence::new(&config, begun, 1);
        let salt = random.next();
        let mut arriving: BTreeMap<(u64, u64), VersionRating> = BTreeMap::new();
        for n in 1..25_000_u64 {
            let now = PACE * n;
            while let Some(first) = arriving.first_entry().filter(|first| first.key().0 <= now) {
                let rating = first.remove();
                let counted = evidence.rated.len();
                evidence.rate(&config, &rating);
                if evidence.rated.len() > counted {
                    let decided = evidence.decide(&config, rating.rated);
                    if decided.is_some() {
                        return decided.map(|(check, _)| check);
                    }
                }
            }
            let draw = |id: u64| Uniform(id.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ salt.to_bits());
            let visit = n.checked_div(self.session).map(|visit| visit | 1 << 40);
            let place = visit.map_or_else(|| random.next(), |visit| draw(visit | 1 << 41).next());
            let user = (self.users as f64 * place.powi(3)) as u64;
            let key = visit.unwrap_or(user);
            let is_canary = draw(key).next() < evidence.share(&config);
            let mut own = draw(user | 1 << 42);
            let up = match own.next() {
                taste if taste < 0.2 => 1.0,
                taste if taste < 0.3 => 0.15,
                _ => 0.45 + 0.5 * own.next(),
            };
            let (effect, rate) = if is_canary { (self.effect, self.rate) } else { (0.0, 1.0) };
            if random.next() >= rate * if user < self.users / 10 { 0.6 } else { 0.3 } {
                continue;
            }
            let value = random.thumb(up + effect);
            let delay = if value > 0.5 { 1.8e6 } else { 1.8e5 };
            let rated = now + (-delay * (1.0 - random.next()).ln()) as u64;
            let mut unit = [0; 16];
            unit[..8].copy_from_slice(&(if self.is_naive { n } else { key }).to_le_bytes());
            let rating = version_rating(if is_canary { 2 } else { 1 }, value);
            arriving.insert((rated, n), VersionRating { unit, sampled: now, rated, ..rating });
        }
        None
    }

    /// Canaries, of [`RUNS`], that end by the check `name` with this result.
    fn count(&self, seed: u64, name: &str, passed: bool) -> u32 {
        let mut random = Uniform(seed);
        let ends = (0..RUNS).filter_map(|_| self.canary(&mut random));
        ends.filter(|check| check.name == name && check.passed == passed).count() as u32
    }
}

/// The 95 % interval of a probability after `hits` of `n` runs (Clopper & Pearson 1934).
fn interval(hits: u32, n: u32) -> [f64; 2] {
    // The probability of at most `k` hits.
    let below = |k: u32, p: f64| {
        let mut term = f64::from(n) * (1.0 - p).ln();
        let mut sum = 0.0;
        for i in 0..=k {
            sum += term.exp();
            term += (f64::from(n - i) / f64::from(i + 1)).ln() + (p / (1.0 - p)).ln();
        }
        sum
    };
    let solve = |rises: &dyn Fn(f64) -> bool| {
        let (mut low, mut high) = (1e-9, 1.0 - 1e-9);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            *(if rises(middle) { &mut high } else { &mut low }) = middle;
        }
        low
    };
    let lower = if hits == 0 { 0.0 } else { solve(&|p| 1.0 - below(hits - 1, p) > 0.025) };
    let upper = if hits == n { 1.0 } else { solve(&|p| below(hits, p) < 0.025) };
    [lower, upper]
}

#[test]
fn exact_intervals_agree_with_tables() {
    for (hits, n, expected) in
        [(0, 10, [0.0, 0.3085]), (3, 10, [0.0667, 0.6525]), (5, 200, [0.0082, 0.0574])]
    {
        let found = interval(hits, n);
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{hits} of {n}: {found} {expected}");
        }
    }
}

/// Asserts that a finding is not more frequent than `bound`, by its exact interval.
fn at_most(bound: f64, name: &str, hits: u32) {
    let [low, high] = interval(hits, RUNS);
    println!("{name}: {hits} of {RUNS}, {low:.4} to {high:.4}");
    assert!(low <= bound, "{name}: {hits} of {RUNS} is more than {bound}");
}

/// Ratings of users of their own until a canary or a recall ends. Of the active version's or the anchor's thumbs, 70 %
/// are up, and of the other version's that share plus `effect`.
fn decide(random: &mut Uniform, alpha: f64, is_recall: bool, effect: f64) -> Option<PolicyCheck> {
    let config = CanaryConfig { margin: MARGIN, shares: vec![0.5], ..config() };
    let (version, control) = (PolicyVersion(2), PolicyVersion(1));
    let begun = BegunCanary { version, control, began: 1, served: 1, alpha, is_recall };
    let mut evidence = CanaryEvidence::new(&config, begun, 1);
    (0..20_000).find_map(|n| {
        let (rated, sampled) = (100_000 + n, 100_000 + n);
        let [version, up] = if random.next() < 0.5 { [2.0, 0.7 + effect] } else { [1.0, 0.7] };
        let rating = version_rating(version as u64, random.thumb(up));
        evidence.rate(&config, &VersionRating { rated, sampled, ..rating });
        evidence.decide(&config, rated).map(|(check, _)| check)
    })
}

/// The margin of the canaries of successive versions.
const MARGIN: f64 = 0.2;

/// Twenty versions, each with this effect after the one before, until training pauses: after three that were not promoted
/// in a row, or when the active version is found worse than its anchor. Returns the most versions that were promoted
/// together, and whether a recall and how many there were.
fn successive(random: &mut Uniform, effect: f64) -> (usize, bool, u32) {
    let (mut since, mut promoted, mut most, mut failed, mut recalls) = (0_usize, 0_usize, 0, 0, 0);
    let mut is_due = false;
    let mut begins: Vec<UnixMillis> = Vec::new();
    for _ in 0..20 {
        let mut alpha = || {
            begins.push(0);
            config().alpha * alpha_share(begins.iter().copied())
        };
        if std::mem::take(&mut is_due) && since >= recall::UNCONFIRMED {
            recalls += 1;
            match decide(random, alpha(), true, effect * since as f64) {
                Some(check) if !check.passed => return (most, true, recalls),
                Some(check) if recall::confirms(&check, MARGIN) => since = 0,
                _ => {}
            }
        }
        if decide(random, alpha(), false, effect).is_some_and(|check| check.passed) {
            (since, promoted, failed, is_due) = (since + 1, promoted + 1, 0, true);
            most = most.max(promoted);
        } else {
            failed += 1;
            if failed == 3 {
                break;
            }
        }
    }
    (most, false, recalls)
}

#[test]
fn successive_losses_are_stopped_before_they_exceed_the_margin() {
    let mut random = Uniform(6);
    for (name, share) in [("a half", 0.5), ("a quarter", 0.25), ("a tenth", 0.1)] {
        let runs = (0..RUNS).map(|_| successive(&mut random, -share * MARGIN).0);
        let excess = runs.filter(|most| *most as f64 * share > 1.0).count() as u32;
        at_most(0.05, &format!("each worse by {name} of the margin, loses more than it"), excess);
    }
    let runs: Vec<_> = (0..RUNS).map(|_| successive(&mut random, 0.0)).collect();
    let recalls: u32 = runs.iter().map(|(_, _, recalls)| recalls).sum();
    let returned = runs.iter().filter(|(_, returned, _)| *returned).count() as u32;
    println!("equal versions, found worse than the anchor: {returned} of {recalls} recalls");
    assert!(interval(returned, recalls)[0] <= config().alpha, "{returned} of {recalls}");
    let better: usize = (0..20).map(|_| successive(&mut random, 0.5 * MARGIN).0).sum();
    assert!(better >= 300, "{better} of 400 better versions are promoted");
}

#[test]
fn wrong_findings_are_as_rare_as_promised_among_very_different_users() {
    let alpha = config().alpha;
    let worse = Population { effect: -0.1, ..EQUAL };
    at_most(alpha, "equal, found worse", EQUAL.count(1, "canary/ratings", false));
    at_most(alpha, "equal, found rated less", EQUAL.count(1, "canary/rating_rate", false));
    at_most(alpha, "worse by the margin, promoted", worse.count(2, "canary/ratings", true));
    // Without the user as the unit, a few of them decide.
    let naive =
        Population { is_naive: true, users: 100, ..EQUAL }.count(3, "canary/ratings", false);
    println!("equal, found worse if each rating counts: {naive}");
    assert!(interval(naive, RUNS)[0] > alpha, "{naive}");
}

#[test]
fn a_canary_that_is_rated_half_as_often_is_stopped() {
    let silent = Population { rate: 0.5, effect: 0.05, session: 3, ..EQUAL };
    let stopped = silent.count(4, "canary/rating_rate", false);
    let promoted = silent.count(4, "canary/ratings", true);
    println!("rated half as often: {stopped} stopped, {promoted} promoted");
    assert!(stopped > RUNS * 9 / 10 && promoted < RUNS / 20, "{stopped} {promoted}");
    let slightly = Population { rate: 1.0 - MAX_RATE_DROP, session: 3, ..EQUAL };
    at_most(
        config().alpha,
        "rated less by the margin",
        slightly.count(5, "canary/rating_rate", false),
    );
}
