//! Decisions about canaries, with simulated users, and their error budget.

mod simulation;

use super::sequential::Uniform;
use super::*;
use crate::testing::version_rating as rating;

fn config() -> CanaryConfig {
    CanaryConfig { stage_ratings: 5, margin: 0.1, ..CanaryConfig::default() }
}

fn evidence(config: &CanaryConfig) -> CanaryEvidence {
    CanaryEvidence::new(config, begun(config, now_ms()), 1)
}

fn begun(config: &CanaryConfig, began: UnixMillis) -> BegunCanary {
    let (version, control) = (PolicyVersion(2), PolicyVersion(1));
    BegunCanary { version, control, began, served: began, alpha: config.alpha, is_recall: false }
}

/// Rates both versions in turn until the decision; returns it with the number of ratings.
fn run(config: &CanaryConfig, values: impl Fn(u64) -> (f64, f64)) -> (PolicyCheck, u64) {
    let mut evidence = evidence(config);
    for n in 0..100_000 {
        let (canary, active) = values(n);
        evidence.rate(config, &rating(1, active));
        evidence.rate(config, &rating(2, canary));
        if let Some((check, _)) = evidence.decide(config, now_ms()) {
            return (check, 2 * n + 2);
        }
    }
    panic!("no decision");
}

#[test]
fn ratings_decide() {
    let up = |share: u64| move |n: u64| f64::from(u8::from(n.wrapping_mul(7) % 10 < share));
    let (equal, _) = run(&config(), |n| (up(7)(n), up(7)(n + 3)));
    assert!(equal.passed && equal.detail.starts_with("not worse"), "{equal:?}");
    let (worse, ratings) = run(&config(), |n| (up(2)(n), up(8)(n + 3)));
    assert!(!worse.passed && worse.detail.starts_with("worse"), "{worse:?}");
    assert!(ratings < 100, "{ratings}");
}

#[test]
fn the_share_rises_with_ratings_that_are_not_worse() {
    let config = config();
    let mut evidence = evidence(&config);
    assert_eq!(evidence.share(&config), 0.05);
    for _ in 0..5 {
        evidence.rate(&config, &rating(1, 1.0));
        evidence.rate(&config, &rating(2, 1.0));
    }
    assert!(evidence.decide(&config, now_ms()).is_none());
    assert_eq!(evidence.share(&config), 0.25);
    // The same user again, and another version, do not count.
    let twice = rating(2, 0.0);
    let other_part = VersionRating { part: "stars".to_owned(), ..twice.clone() };
    let early = VersionRating { sampled: 0, ..rating(1, 0.0) };
    for rating in [&twice, &twice, &other_part, &rating(7, 0.0), &early] {
        evidence.rate(&config, rating);
    }
    assert_eq!((evidence.canary_counts.ratings, evidence.control_counts.ratings), (6, 5));
}

/// Key `a` rates both versions `ratings` times, the canary 0 and the active version 1 or the reverse;
/// after each five of its ratings key `b` rates each version 1 once, if it rates at all.
fn attack(max_key_share: f64, keys: usize, canary: f64, second: bool) -> Option<PolicyCheck> {
    let config = CanaryConfig { max_seconds: 1 << 20, ..config() };
    let mut evidence = evidence(&config);
    for n in 0..400 {
        let rated = |version, value, key: &str| VersionRating {
            key: Some(key.to_owned()),
            max_key_share,
            keys,
            ..rating(version, value)
        };
        evidence.rate(&config, &rated(2, canary, "a"));
        evidence.rate(&config, &rated(1, 1.0 - canary, "a"));
        if second && n % 5 == 0 {
            let [of_canary, of_active] = if canary > 0.5 { [0.0, 1.0] } else { [1.0, 1.0] };
            evidence.rate(&config, &rated(2, of_canary, "b"));
            evidence.rate(&config, &rated(1, of_active, "b"));
        }
        if let Some((check, _)) = evidence.decide(&config, now_ms()) {
            return Some(check);
        }
    }
    None
}

#[test]
fn one_key_does_not_decide_against_another() {
    for canary in [0.0, 1.0] {
        for share in [0.2, 1.0] {
            assert!(attack(share, 2, canary, true).is_none(), "{share} {canary}");
        }
        assert!(attack(0.2, 2, canary, false).is_none(), "its share is a half at most");
        // No other key may rate, or none does and the part permits any share.
        for (share, keys) in [(0.2, 1), (0.2, 0), (1.0, 2)] {
            let check = attack(share, keys, canary, false).unwrap();
            assert_eq!(check.passed, canary > 0.5, "{check:?}");
            assert!(check.detail.ends_with("by one API key"), "{check:?}");
        }
    }
}

#[test]
fn several_keys_that_agree_decide() {
    let config = config();
    for (canary, passed) in [(0.0, false), (1.0, true)] {
        let mut evidence = evidence(&config);
        let decided = (0..200).find_map(|n: u32| {
            for (version, value) in [(1, 1.0), (2, canary)] {
                let key = Some((n % 3).to_string());
                let rating =
                    VersionRating { key, max_key_share: 0.4, keys: 3, ..rating(version, value) };
                evidence.rate(&config, &rating);
            }
            evidence.decide(&config, now_ms())
        });
        let (check, _) = decided.unwrap();
        assert_eq!(check.passed, passed, "{check:?}");
        assert!(check.detail.ends_with("by 3 API keys"), "{check:?}");
    }
}

/// Of two equal versions, thumbs down arrive at once and thumbs up later, so that just after a change of
/// the share the arms of what arrives depend on its value.
#[test]
fn a_new_share_does_not_mix_with_the_ratings_of_the_one_before() {
    let config = config();
    let mut evidence = evidence(&config);
    evidence.stages = vec![100, 200];
    let at = |version, value, sampled| VersionRating { sampled, ..rating(version, value) };
    for rating in [at(1, 0.0, 250), at(2, 1.0, 150), at(2, 1.0, 99), at(1, 1.0, 99)] {
        evidence.rate(&config, &rating);
    }
    assert_eq!(evidence.all.test.mean(), None, "no pair of the same stage");
    evidence.rate(&config, &at(2, 1.0, 260));
    assert_eq!(evidence.all.test.mean(), Some(1.0));
    assert_eq!((evidence.canary_counts.ratings, evidence.control_counts.ratings), (2, 1));
}

#[test]
fn the_time_of_earlier_processes_counts() {
    let config = CanaryConfig { max_seconds: 60, ..config() };
    let old = now_ms() - 61_000;
    let mut resumed = CanaryEvidence::new(&config, begun(&config, old), 1);
    assert!(resumed.decide(&config, now_ms()).is_some());
    assert!(evidence(&config).decide(&config, now_ms()).is_none());
}

/// Whether failed requests withdraw a canary, whose requests and failures `next` draws.
fn fails(requests: u64, mut next: impl FnMut(u64) -> (bool, bool)) -> bool {
    let config = config();
    let mut evidence = evidence(&config);
    (0..requests).any(|n| {
        let (is_canary, failed) = next(n);
        evidence.answered(PolicyVersion(if is_canary { 2 } else { 1 }), failed);
        let check = evidence.decide(&config, now_ms()).map(|(check, _)| check);
        assert!(check.as_ref().is_none_or(|check| check.name == "canary/errors"), "{check:?}");
        check.is_some()
    })
}

#[test]
fn failed_requests_roll_back() {
    assert!(fails(60, |n| (n % 2 == 0, n % 2 == 0)), "each of the canary");
    assert!(fails(2_000, |n| (n % 2 == 0, n % 4 == 0)), "half of the canary's");
    assert!(!fails(2_000, |n| (n % 2 == 0, n % 4 < 2)), "half of both versions'");
}

#[test]
fn failures_of_both_versions_rarely_roll_back() {
    let mut random = Uniform(11);
    for (name, rate, outage) in
        [("2 %", 0.02, 0..0), ("5 %", 0.05, 0..0), ("an outage", 0.0, 100..160)]
    {
        let runs = 200;
        let wrong = (0..runs).filter(|_| {
            fails(1_500, |n| {
                let is_canary = random.next() < 0.05;
                (is_canary, random.next() < rate || outage.contains(&n))
            })
        });
        let share = wrong.count() as f64 / f64::from(runs);
        assert!(share <= 0.08, "{name}: {share}");
    }
}

/// Canaries that are promoted or rolled back, of 200. `rate` returns arm, user, route and value.
fn decided(
    config: &CanaryConfig,
    (routes, ratings): (usize, u64),
    mut rate: impl FnMut() -> (bool, u64, &'static str, f64),
) -> [f64; 2] {
    let mut counts = [0.0; 2];
    for _ in 0..200 {
        let mut evidence = CanaryEvidence::new(config, begun(config, 0), routes);
        for _ in 0..ratings {
            let (is_canary, user, route, value) = rate();
            let mut unit = [0; 16];
            unit[..8].copy_from_slice(&user.to_le_bytes());
            let route = route.to_owned();
            let rating = rating(if is_canary { 2 } else { 1 }, value);
            evidence.rate(config, &VersionRating { unit, route, ..rating });
            if let Some((check, _)) = evidence.decide(config, now_ms()) {
                counts[usize::from(!check.passed)] += 1.0 / 200.0;
                break;
            }
        }
    }
    counts
}

fn long() -> CanaryConfig {
    CanaryConfig { max_seconds: 1 << 32, shares: vec![0.5], ..config() }
}

/// Of two equal versions, thumbs down arrive after three minutes and thumbs up after an hour, in the mean. Each
/// rise of the share makes the first ratings after it depend on the arm, unless pairs are within a share.
#[test]
fn the_delay_of_ratings_does_not_matter() {
    let config = long_with(vec![0.05, 0.25]);
    let mut random = Uniform(3);
    let runs = 100;
    let wrong = (0..runs).filter(|_| {
        let mut evidence = CanaryEvidence::new(&config, begun(&config, 1), 1);
        let mut arriving = BTreeMap::new();
        for n in 1..3_000_u64 {
            // 400 answers in an hour.
            let now = 9_000 * n;
            let later = arriving.split_off(&(now, 0));
            for ((rated, _), rating) in std::mem::replace(&mut arriving, later) {
                evidence.rate(&config, &rating);
                evidence.next_share(&config, rated);
            }
            let version = if random.next() < evidence.share(&config) { 2 } else { 1 };
            let value = random.thumb(0.7);
            let mean = if value > 0.5 { 3.6e6 } else { 1.8e5 };
            let rated = now + (-mean * (1.0 - random.next()).ln()) as u64;
            let rating = VersionRating { sampled: now, rated, ..rating(version, value) };
            arriving.insert((rated, n), rating);
        }
        evidence.all.test.verdict() == CanaryVerdict::Worse
    });
    let share = wrong.count() as f64 / f64::from(runs);
    assert!(share <= 0.12, "{share}");
}

fn long_with(shares: Vec<f64>) -> CanaryConfig {
    CanaryConfig { shares, stage_ratings: 20, ..long() }
}

/// Sixty users, half of whom always like what they get, rate two equal versions a hundred times each. As
/// independent ratings they would decide most canaries wrongly.
#[test]
fn a_user_who_rates_often_is_one_opinion() {
    let (mut random, mut n) = (Uniform(5), 0_u64);
    let mut seed = 0;
    let found = decided(&long(), (1, 6_000), || {
        if n % 6_000 == 0 {
            seed = n;
        }
        n += 1;
        let user = seed + (random.next() * 60.0) as u64;
        // Arm and taste of a user stay.
        let mut own = Uniform(user.wrapping_mul(0x1234_5679));
        (own.next() < 0.5, user, "chat", own.thumb(0.5))
    });
    assert!(found[1] <= 0.08, "{found:?}");
}

#[test]
fn a_loss_on_a_small_route_is_not_hidden() {
    for (large, small) in [(0.05, -0.4), (0.02, -0.3), (0.0, -0.2)] {
        let config = CanaryConfig { margin: 0.05, ..long() };
        let (mut random, mut user) = (Uniform(9), 0);
        let found = decided(&config, (2, 12_000), || {
            user += 1;
            let (is_canary, is_small) = (random.next() < 0.5, random.next() < 0.1);
            let change = if is_small { small } else { large };
            let up = 0.7 + if is_canary { change } else { 0.0 };
            (is_canary, user, if is_small { "small" } else { "large" }, random.thumb(up))
        });
        assert!(found[0] < 0.15, "{large} {small}: {found:?}");
    }
}

/// The process ends in the middle: the evidence is made again from the recorded ratings.
#[test]
fn evidence_made_again_equals_that_without_an_interruption() {
    let config = CanaryConfig { margin: 0.02, max_seconds: 1 << 32, ..config() };
    let mut random = Uniform(1);
    let mut whole = CanaryEvidence::new(&config, begun(&config, 1_000), 1);
    let mut recorded = Vec::new();
    for n in 0..600 {
        let share = whole.share(&config);
        let version = if random.next() < share { 2 } else { 1 };
        let (rated, sampled) = (1_010 + 10 * n, 1_000 + 10 * n);
        let rating = VersionRating { rated, sampled, ..rating(version, random.thumb(0.7)) };
        whole.rate(&config, &rating);
        whole.next_share(&config, rated);
        recorded.push(rating);
    }
    let mut again = CanaryEvidence::new(&config, begun(&config, 1_000), 1);
    for rating in &recorded {
        again.rate(&config, rating);
        again.next_share(&config, rating.rated);
    }
    assert!(whole.stages.len() > 1);
    assert_eq!(again.status(&config).evidence, whole.status(&config).evidence);
    assert_eq!((&again.stages, again.all.test), (&whole.stages, whole.all.test));
}

#[test]
fn canaries_share_an_error_budget() {
    let (day, year) = (86_400_000, 365);
    let daily: Vec<f64> = (1..=3 * year).map(|n| alpha_share((0..n).map(|k| k * day))).collect();
    assert_eq!(alpha_share([7]), 1.0);
    for from in 0..2 * year as usize {
        let sum: f64 = daily[from..from + year as usize].iter().sum();
        assert!(sum <= 2.0 * BUDGET, "{sum} from day {from}");
    }
    let last = daily[3 * year as usize - 1];
    assert!((last - BUDGET / year as f64).abs() < 0.01, "{last}");
    let weekly = alpha_share((0..100).map(|k| 7 * k * day));
    assert!(weekly > 0.9, "{weekly}");
    // As fast as possible.
    let sum: f64 = (1..5_000).map(|n| alpha_share(0..n)).sum();
    assert!(sum <= 2.0 * BUDGET, "{sum}");
}

#[test]
fn a_limit_ends_a_canary_without_a_decision() {
    for (on_limit, promoted) in [(CanaryLimit::Promote, true), (CanaryLimit::RollBack, false)] {
        let config = CanaryConfig { max_ratings: 6, on_limit, ..config() };
        let mut evidence = evidence(&config);
        for version in [1, 2, 1, 1, 2] {
            evidence.rate(&config, &rating(version, 0.5));
            assert!(evidence.decide(&config, now_ms()).is_none());
        }
        evidence.rate(&config, &rating(1, 0.5));
        let (check, is_limit) = evidence.decide(&config, now_ms()).unwrap();
        assert_eq!((check.passed, is_limit), (promoted, true));
    }
}

#[test]
fn an_undecided_canary_is_promoted_only_if_the_operator_wants_it() {
    let at_limit = |on_limit, ratings: u64| {
        let config = CanaryConfig { max_seconds: 0, on_limit, ..config() };
        let mut evidence = evidence(&config);
        for _ in 0..ratings {
            evidence.rate(&config, &rating(1, 1.0));
            evidence.rate(&config, &rating(2, 1.0));
        }
        evidence.decide(&config, now_ms()).unwrap().0.passed
    };
    assert!(!at_limit(CanaryConfig::default().on_limit, 9));
    assert!(!at_limit(CanaryLimit::Estimate, 0) && at_limit(CanaryLimit::Estimate, 9));
    assert!(at_limit(CanaryLimit::Promote, 0));
}
