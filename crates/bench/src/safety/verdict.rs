//! Whether the runs meet what is promised for canaries, and the report of all runs.

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, json};

use hone_core::types::{PolicyRecord, PolicyState};
use hone_train::policy::Promotion;

use super::crowd::{CrowdCounts, LearnedTrace};
use super::scenario::SafetyScenario;
use super::windows::WorstWindow;
use crate::measure::BenchOutcome;

/// Largest shortfall of a canary's worst window under sabotage.
const MAX_SHORTFALL: f64 = 0.05;
/// Least final satisfaction of a canary in an honest scenario, as a share of that of direct publication.
const MIN_FINAL: f64 = 0.97;
/// Most ratings after a change of taste until a learned part predicts the new one.
const MOST_TO_FOLLOW: u64 = 500;

/// A verdict on one run.
fn run_verdict(
    run: &SafetyRun,
    check: &str,
    value: impl Into<Value>,
    bound: impl Into<Value>,
    passed: bool,
) -> Value {
    let (value, bound): (Value, Value) = (value.into(), bound.into());
    json!({
        "scenario": run.scenario, "seed": run.seed, "check": check,
        "value": value, "bound": bound, "passed": passed,
    })
}

/// The verdicts on canaries: that the shortfall of the worst window of each run with sabotage is at most a bound,
/// and that the final satisfaction in each honest scenario is at least a share of that of direct publication.
/// The latter compares means over the seeds that also ran with direct publication, because the ends of single
/// runs differ by chance as much as the bound allows.
fn verdicts(runs: &[SafetyRun]) -> Vec<Value> {
    // Comparisons with NaN fail.
    let sabotage = runs.iter().filter(|run| run.scenario.is_judged_by_windows(run.mode));
    let mut all: Vec<Value> = sabotage
        .map(|run| {
            let value = run.worst_window.shortfall;
            run_verdict(run, "worst_window", value, MAX_SHORTFALL, value <= MAX_SHORTFALL)
        })
        .collect();
    let learned = runs.iter().filter(|run| run.scenario == SafetyScenario::LearnedTaste);
    all.extend(learned.filter(|run| run.mode == Promotion::Canary).flat_map(|run| {
        let (loss, followed) = (run.largest_loss, run.learned.regained_after);
        let follows = followed.is_some_and(|after| after <= MOST_TO_FOLLOW);
        [
            run_verdict(run, "largest_loss", loss, MAX_SHORTFALL, loss <= MAX_SHORTFALL),
            run_verdict(run, "learned_follows", followed, MOST_TO_FOLLOW, follows),
        ]
    }));
    for &scenario in SafetyScenario::value_variants() {
        let of =
            |mode: Promotion| runs.iter().filter(move |r| (r.scenario, r.mode) == (scenario, mode));
        let canaries = of(Promotion::Canary).filter(|_| scenario.plan(0).is_honest);
        let ends = canaries.filter_map(|run| {
            let direct = of(Promotion::Direct).find(|direct| direct.seed == run.seed)?;
            Some([run.final_satisfaction, direct.final_satisfaction])
        });
        let sums = ends.reduce(|[a, b], [canary, direct]| [a + canary, b + direct]);
        if let Some([canary, direct]) = sums {
            let value = canary / direct;
            all.push(json!({
                "scenario": scenario, "seed": null, "check": "final",
                "value": value, "bound": MIN_FINAL, "passed": value >= MIN_FINAL,
            }));
        }
    }
    all
}

/// In how many seeds late feedback moved the policy in the right direction, for each mode with runs of
/// [`SafetyScenario::LateFeedback`]: those whose final satisfaction is above the base's. The p-value is the
/// probability of as many or more if both directions were equally likely (sign test).
fn late_feedback(runs: &[SafetyRun]) -> Vec<Value> {
    let late = |run: &&SafetyRun| run.scenario == SafetyScenario::LateFeedback;
    let test = |mode: Promotion| {
        let of: Vec<&SafetyRun> = runs.iter().filter(late).filter(|run| run.mode == mode).collect();
        let improved = of.iter().filter(|run| run.final_satisfaction > run.base).count();
        let sum = |of_run: fn(&CrowdCounts) -> u64| -> u64 {
            of.iter().map(|run| of_run(&run.counts)).sum()
        };
        (!of.is_empty()).then(|| {
            json!({
                "mode": mode, "seeds": of.len(), "improved": improved,
                "p_value": sign_test(improved, of.len()), "ratings": sum(|counts| counts.ratings),
                "not_trained": sum(|counts| counts.ratings_not_trained),
            })
        })
    };
    MODES.into_iter().filter_map(test).collect()
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

/// The report of all runs, in the order of execution. `is_check` lets a verdict fail the benchmark.
pub(crate) fn report(runs: &[SafetyRun], is_check: bool) -> BenchOutcome {
    let verdicts = verdicts(runs);
    let failed = verdicts.iter().filter(|verdict| verdict["passed"] == false).count();
    let count = format!("{failed} of {} verdicts failed", verdicts.len());
    BenchOutcome {
        report: json!({"runs": runs, "verdicts": verdicts, "late_feedback": late_feedback(runs)}),
        failure: Some(count).filter(|_| is_check && failed > 0),
    }
}

// The measurements of one run.

/// One run: a scenario, a seed, and how versions are published. Satisfaction is from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct SafetyRun {
    pub scenario: SafetyScenario,
    pub mode: Promotion,
    /// The seed of users and trainer.
    pub seed: u64,
    /// Satisfaction with the base model, under the taste that users had at the end.
    pub base: f64,
    /// Mean satisfaction with the last quarter of the answers.
    pub final_satisfaction: f64,
    /// The worst window of 300 answers, each valued by its version's mean satisfaction.
    pub worst_window: WorstWindow,
    /// The largest loss of satisfaction by one promotion.
    pub largest_loss: f64,
    /// What became of the trust in the learned part.
    pub learned: LearnedTrace,
    #[serde(flatten)]
    pub versions: VersionCounts,
    #[serde(flatten)]
    pub counts: CrowdCounts,
    pub minutes: f64,
}

/// What the daemon reports at the end of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct VersionCounts {
    /// The promoted versions that were not withdrawn.
    #[serde(skip)]
    pub good: Vec<u64>,
    /// Versions that all traffic got at some time, without the base.
    pub promoted: usize,
    pub rejected: usize,
    /// Versions that were withdrawn as a canary or as the active version.
    pub rolled_back: usize,
    /// Optimizer steps.
    pub steps: u64,
    /// Why training paused, if it did.
    pub hold: Option<String>,
}

/// Whether all traffic got a version at some time. A version that was withdrawn as a canary has a failed
/// check.
pub(crate) fn was_active(record: &PolicyRecord) -> bool {
    let withdrawn = record.state == PolicyState::RolledBack;
    record.state.was_promoted() || withdrawn && record.checks.iter().all(|check| check.passed)
}

/// The ways to publish versions.
pub(crate) const MODES: [Promotion; 3] = [Promotion::Direct, Promotion::Gate, Promotion::Canary];

#[cfg(test)]
mod tests {
    use hone_core::testing::policy;
    use hone_core::types::PolicyCheck;

    use super::*;

    fn run(scenario: SafetyScenario, mode: Promotion, last: f64, shortfall: f64) -> SafetyRun {
        let mut run = SafetyRun { scenario, mode, seed: 1, ..SafetyRun::default() };
        (run.base, run.final_satisfaction, run.worst_window.shortfall) = (0.4, last, shortfall);
        (run.counts.ratings, run.counts.ratings_not_trained) = (10, 4);
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
        let checks: Vec<_> =
            found.iter().map(|v| json!([v["scenario"], v["check"], v["passed"]])).collect();
        assert_eq!(json!(checks), json!([[rate, "worst_window", false], [honest, "final", true]]));
        let worse = [runs[0].clone(), run(honest, Promotion::Canary, 0.87, 0.0)];
        assert_eq!(verdicts(&worse)[0]["passed"], false);
        // Ends are compared in the mean of the seeds that ran in both modes.
        let mut seeds = worse.to_vec();
        for (mode, last) in [(Promotion::Direct, 0.9), (Promotion::Canary, 0.93)] {
            seeds.push(SafetyRun { seed: 2, ..run(honest, mode, last, 0.0) });
        }
        seeds.push(SafetyRun { seed: 3, ..run(honest, Promotion::Canary, 0.1, 0.0) });
        let found = verdicts(&seeds);
        assert_eq!((found.len(), &found[0]["passed"]), (1, &json!(true)));
        assert!((found[0]["value"].as_f64().unwrap() - 1.0).abs() < 1e-12);
        assert!(verdicts(&runs[1..2]).is_empty(), "nothing to compare the end with");
        let unknown = [
            run(honest, Promotion::Direct, 0.0, 0.0),
            run(honest, Promotion::Canary, 0.0, 0.0),
            run(rate, Promotion::Canary, 0.0, f64::NAN),
        ];
        let report = report(&unknown, true);
        assert_eq!(report.failure.as_deref(), Some("2 of 2 verdicts failed"));
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
        assert_eq!(
            json!(late_feedback(&runs)),
            json!([{
                "mode": "canary", "seeds": 3, "improved": 2, "p_value": 0.5, "ratings": 30,
                "not_trained": 12,
            }])
        );
    }

    #[test]
    fn a_withdrawn_canary_was_never_active() {
        for (state, passed, expected) in [
            (PolicyState::Active, &[true][..], true),
            (PolicyState::Retired, &[], true),
            (PolicyState::RolledBack, &[true, true], true),
            (PolicyState::RolledBack, &[true, false], false),
            (PolicyState::Rejected, &[false], false),
            (PolicyState::Canary, &[true], false),
        ] {
            let check = |passed: &bool| PolicyCheck {
                name: "canary/ratings".to_owned(),
                passed: *passed,
                value: None,
                bound: None,
                detail: String::new(),
            };
            let checks = passed.iter().map(check).collect();
            let record = PolicyRecord { state, checks, ..policy(1, 0) };
            assert_eq!(was_active(&record), expected, "{state:?}, {passed:?}");
        }
    }
}
