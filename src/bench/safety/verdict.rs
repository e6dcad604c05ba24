//! Whether the runs meet what is promised for canaries.

use clap::ValueEnum;
use serde::Serialize;

use hone_train::policy::Promotion;

use super::run::SafetyRun;
use super::scenario::SafetyScenario;

/// Largest shortfall of a canary's worst window under sabotage.
const MAX_SHORTFALL: f64 = 0.05;
/// Least final satisfaction of a canary in an honest scenario, as a share of that of direct publication.
const MIN_FINAL: f64 = 0.97;

/// What a verdict is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SafetyCheck {
    /// The shortfall of the worst window, at most `bound`.
    WorstWindow,
    /// The final satisfaction over that of direct publication with half as many requests, at least `bound`.
    Final,
}

/// A verdict on canaries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SafetyVerdict {
    /// The scenario.
    pub scenario: SafetyScenario,
    /// The seed; `None` for the mean of all seeds.
    pub seed: Option<u64>,
    /// What the verdict is about.
    pub check: SafetyCheck,
    /// The measurement.
    pub value: f64,
    /// Its bound.
    pub bound: f64,
    /// Whether the bound holds.
    pub passed: bool,
}

/// Whether the worst window of such runs is bounded.
pub(super) fn is_judged_by_windows(scenario: SafetyScenario, mode: Promotion) -> bool {
    mode == Promotion::Canary && !scenario.is_honest()
}

/// The verdicts on canaries: on the worst window of each run with sabotage, and on the final satisfaction in
/// each honest scenario. The latter compares means over the seeds that also ran with direct publication,
/// because the ends of single runs differ by chance as much as the bound allows.
pub(super) fn verdicts(runs: &[SafetyRun]) -> Vec<SafetyVerdict> {
    let canaries = || runs.iter().filter(|run| run.mode == Promotion::Canary);
    let sabotage = runs.iter().filter(|run| is_judged_by_windows(run.scenario, run.mode));
    let sabotage = sabotage.map(|run| {
        let (scenario, value) = (run.scenario, run.worst_window.shortfall);
        let (check, bound) = (SafetyCheck::WorstWindow, MAX_SHORTFALL);
        // NaN fails.
        let passed = value <= bound;
        SafetyVerdict { scenario, seed: Some(run.seed), check, value, bound, passed }
    });
    let mut all: Vec<SafetyVerdict> = sabotage.collect();
    for &scenario in SafetyScenario::value_variants() {
        let ends = canaries().filter(|run| run.scenario == scenario && scenario.is_honest());
        let ends = ends.filter_map(|run| {
            let is_direct = |other: &&SafetyRun| {
                (other.scenario, other.seed, other.mode) == (scenario, run.seed, Promotion::Direct)
            };
            let direct = runs.iter().find(is_direct)?;
            Some([run.final_satisfaction, direct.final_satisfaction])
        });
        let sums = ends.reduce(|[a, b], [canary, direct]| [a + canary, b + direct]);
        if let Some([canary, direct]) = sums {
            let (check, value, bound) = (SafetyCheck::Final, canary / direct, MIN_FINAL);
            // NaN fails.
            let passed = value >= bound;
            all.push(SafetyVerdict { scenario, seed: None, check, value, bound, passed });
        }
    }
    all
}

/// In how many seeds late feedback moved the policy in the right direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LateFeedbackTest {
    /// How versions were published.
    pub mode: Promotion,
    /// Seeds.
    pub seeds: usize,
    /// Those whose final satisfaction is above the base's.
    pub improved: usize,
    /// Probability of as many or more if both directions were equally likely (sign test).
    pub p_value: f64,
    /// Posted ratings.
    pub ratings: u64,
    /// Those that were answered as not trained on.
    pub not_trained: u64,
}

/// The test for each mode with runs of [`SafetyScenario::LateFeedback`].
pub(super) fn late_feedback(runs: &[SafetyRun]) -> Vec<LateFeedbackTest> {
    let modes = [Promotion::Direct, Promotion::Gate, Promotion::Canary];
    let test = |mode: Promotion| {
        let is_one =
            |run: &&SafetyRun| run.scenario == SafetyScenario::LateFeedback && run.mode == mode;
        let of: Vec<&SafetyRun> = runs.iter().filter(is_one).collect();
        let improved = of.iter().filter(|run| run.final_satisfaction > run.base).count();
        (!of.is_empty()).then(|| LateFeedbackTest {
            mode,
            seeds: of.len(),
            improved,
            p_value: sign_test(improved, of.len()),
            ratings: of.iter().map(|run| run.ratings).sum(),
            not_trained: of.iter().map(|run| run.ratings_not_trained).sum(),
        })
    };
    modes.into_iter().filter_map(test).collect()
}

/// Probability of `successes` or more of `count` fair coins.
fn sign_test(successes: usize, count: usize) -> f64 {
    let mut term = 0.5_f64.powf(count as f64);
    let mut sum = 0.0;
    for heads in 0..=count {
        if heads >= successes {
            sum += term;
        }
        term *= (count - heads) as f64 / (heads + 1) as f64;
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(scenario: SafetyScenario, mode: Promotion, last: f64, shortfall: f64) -> SafetyRun {
        let mut run = SafetyRun::empty(scenario, mode, 1);
        (run.base, run.final_satisfaction, run.worst_window.shortfall) = (0.4, last, shortfall);
        (run.ratings, run.ratings_not_trained) = (10, 4);
        run
    }

    #[test]
    fn canaries_are_judged_by_their_worst_window_and_their_end() {
        let (honest, rate) = (SafetyScenario::Honest, SafetyScenario::HighRate);
        let runs = [
            run(honest, Promotion::Direct, 0.9, 0.3),
            run(honest, Promotion::Canary, 0.88, 0.3),
            run(rate, Promotion::Direct, 0.0, 0.9),
            run(rate, Promotion::Canary, 0.4, 0.051),
        ];
        let found = verdicts(&runs);
        let checks: Vec<_> = found.iter().map(|v| (v.scenario, v.check, v.passed)).collect();
        assert_eq!(
            checks,
            [(rate, SafetyCheck::WorstWindow, false), (honest, SafetyCheck::Final, true)]
        );
        let worse = [runs[0].clone(), run(honest, Promotion::Canary, 0.87, 0.0)];
        assert!(!verdicts(&worse)[0].passed);
        // Ends are compared in the mean of the seeds that ran in both modes.
        let mut seeds = worse.to_vec();
        for (mode, last) in [(Promotion::Direct, 0.9), (Promotion::Canary, 0.93)] {
            seeds.push(SafetyRun { seed: 2, ..run(honest, mode, last, 0.0) });
        }
        seeds.push(SafetyRun { seed: 3, ..run(honest, Promotion::Canary, 0.1, 0.0) });
        let found = verdicts(&seeds);
        assert_eq!((found.len(), found[0].seed, found[0].passed), (1, None, true));
        assert!((found[0].value - 1.0).abs() < 1e-12);
        assert!(verdicts(&runs[1..2]).is_empty(), "nothing to compare the end with");
        let unknown = [
            run(honest, Promotion::Direct, 0.0, 0.0),
            run(honest, Promotion::Canary, 0.0, 0.0),
            run(rate, Promotion::Canary, 0.0, f64::NAN),
        ];
        assert_eq!(verdicts(&unknown).len(), 2);
        assert!(verdicts(&unknown).iter().all(|verdict| !verdict.passed));
    }

    #[test]
    fn sign_tests_are_binomial() {
        assert_eq!(sign_test(3, 3), 0.125);
        assert_eq!(sign_test(2, 3), 0.5);
        assert_eq!(sign_test(0, 3), 1.0);
        assert!((sign_test(9, 10) - 11.0 / 1024.0).abs() < 1e-12);
    }

    #[test]
    fn late_feedback_is_tested_over_seeds() {
        let late = SafetyScenario::LateFeedback;
        let ends = [0.5, 0.6, 0.3];
        let mut runs: Vec<_> =
            ends.into_iter().map(|end| run(late, Promotion::Canary, end, 0.0)).collect();
        runs.push(run(SafetyScenario::Honest, Promotion::Canary, 0.9, 0.0));
        let tests = late_feedback(&runs);
        assert_eq!(tests.len(), 1);
        assert_eq!((tests[0].seeds, tests[0].improved, tests[0].p_value), (3, 2, 0.5));
        assert_eq!((tests[0].ratings, tests[0].not_trained), (30, 12));
    }
}
