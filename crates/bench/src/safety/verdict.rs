//! Whether the runs meet what is promised for canaries, and the report of all runs.

use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;

use hone_core::types::{PolicyRecord, PolicyState};
use hone_train::policy::Promotion;

use super::crowd::CrowdCounts;
use super::scenario::SafetyScenario;
use super::windows::WorstWindow;
use crate::measure::BenchOutcome;
use hone_report::terminal::{shown, table};

/// Largest shortfall of a canary's worst window under sabotage.
const MAX_SHORTFALL: f64 = 0.05;
/// Least final satisfaction of a canary in an honest scenario, as a share of that of direct publication.
const MIN_FINAL: f64 = 0.97;

/// What a verdict is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum SafetyCheck {
    /// The shortfall of the worst window, at most `bound`.
    WorstWindow,
    /// The final satisfaction over that of direct publication with half as many requests, at least `bound`.
    Final,
}

/// A verdict on canaries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct SafetyVerdict {
    scenario: SafetyScenario,
    /// `None` for the mean of all seeds.
    seed: Option<u64>,
    check: SafetyCheck,
    value: f64,
    bound: f64,
    passed: bool,
}

/// The verdicts on canaries: on the worst window of each run with sabotage, and on the final satisfaction in
/// each honest scenario. The latter compares means over the seeds that also ran with direct publication,
/// because the ends of single runs differ by chance as much as the bound allows.
fn verdicts(runs: &[SafetyRun]) -> Vec<SafetyVerdict> {
    let canaries = || runs.iter().filter(|run| run.mode == Promotion::Canary);
    let sabotage = runs.iter().filter(|run| run.scenario.is_judged_by_windows(run.mode));
    let sabotage = sabotage.map(|run| {
        let (scenario, value) = (run.scenario, run.worst_window.shortfall);
        let (check, bound) = (SafetyCheck::WorstWindow, MAX_SHORTFALL);
        // NaN fails.
        let passed = value <= bound;
        SafetyVerdict { scenario, seed: Some(run.seed), check, value, bound, passed }
    });
    let mut all: Vec<SafetyVerdict> = sabotage.collect();
    for &scenario in SafetyScenario::value_variants() {
        let ends = canaries().filter(|run| run.scenario == scenario && scenario.plan(0).is_honest);
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
struct LateFeedbackTest {
    mode: Promotion,
    seeds: usize,
    /// Those whose final satisfaction is above the base's.
    improved: usize,
    /// Probability of as many or more if both directions were equally likely (sign test).
    p_value: f64,
    ratings: u64,
    not_trained: u64,
}

/// The test for each mode with runs of [`SafetyScenario::LateFeedback`].
fn late_feedback(runs: &[SafetyRun]) -> Vec<LateFeedbackTest> {
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
            ratings: of.iter().map(|run| run.counts.ratings).sum(),
            not_trained: of.iter().map(|run| run.counts.ratings_not_trained).sum(),
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

/// The columns of the table, text first.
const COLUMNS: [&str; 13] = [
    "scenario", "mode", "seed", "base", "final", "worst", "below", "versions", "rejected",
    "rolled", "requests", "failed", "minutes",
];

/// The cells of [`COLUMNS`].
fn cells(run: &SafetyRun) -> [String; 13] {
    let WorstWindow { satisfaction, shortfall, .. } = run.worst_window;
    let [base, last, worst, below] =
        [run.base, run.final_satisfaction, satisfaction, shortfall].map(|v| format!("{v:.3}"));
    let VersionCounts { promoted, rejected, rolled_back, .. } = &run.versions;
    let versions = [promoted, rejected, rolled_back].map(ToString::to_string);
    let [promoted, rejected, rolled] = versions;
    let requests = [run.counts.requests, run.counts.failed_requests].map(|n| n.to_string());
    let [requests, failed] = requests;
    let (scenario, mode) = (run.scenario.to_string(), mode_name(run.mode).to_owned());
    let (seed, minutes) = (run.seed.to_string(), format!("{:.1}", run.minutes));
    [
        scenario, mode, seed, base, last, worst, below, promoted, rejected, rolled, requests,
        failed, minutes,
    ]
}

/// The report of all runs, in the order of execution. `is_check` lets a verdict fail the benchmark.
pub(crate) fn report(runs: &[SafetyRun], is_check: bool) -> BenchOutcome {
    let (verdicts, late) = (verdicts(runs), late_feedback(runs));
    let failed = verdicts.iter().filter(|verdict| !verdict.passed).count();
    let count = format!("{failed} of {} verdicts failed", verdicts.len());
    let mut text = shown(&table(COLUMNS, runs.iter().map(cells), 2));
    for run in runs.iter().filter(|run| !run.counts.failures.is_empty()) {
        let (mode, failures) = (mode_name(run.mode), run.counts.failures.join("; "));
        text += &format!("failure in {}, {mode}, seed {}: {failures}\n", run.scenario, run.seed);
    }
    for SafetyVerdict { scenario, seed, check, value, bound, passed } in &verdicts {
        let mark = if *passed { "passed" } else { "FAILED" };
        let seed = seed.map_or("mean of the seeds".to_owned(), |seed| format!("seed {seed}"));
        let (what, relation) = match check {
            SafetyCheck::WorstWindow => ("worst window below the reference by", "at most"),
            SafetyCheck::Final => ("final satisfaction over that of direct", "at least"),
        };
        text += &format!("{mark}  {scenario}, {seed}: {what} {value:.3}, {relation} {bound}\n");
    }
    for LateFeedbackTest { mode, seeds, improved, p_value, ratings, not_trained } in &late {
        text += &format!(
            "late feedback, {}: better than the base in {improved} of {seeds} seeds (p = {p_value:.3}), \
             {not_trained} of {ratings} ratings answered as not trained\n",
            mode_name(*mode)
        );
    }
    BenchOutcome {
        report: json!({"runs": runs, "verdicts": verdicts, "late_feedback": late}),
        text: Some(format!("{text}{count}")),
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

/// The name of a mode in tables and on the command line.
pub(crate) fn mode_name(mode: Promotion) -> &'static str {
    match mode {
        Promotion::Direct => "direct",
        Promotion::Gate => "gate",
        Promotion::Canary => "canary",
    }
}

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

    #[test]
    fn the_text_has_a_row_per_run_and_every_verdict() {
        let late = SafetyScenario::LateFeedback;
        let mut runs =
            vec![run(late, Promotion::Direct, 0.9, 0.0), run(late, Promotion::Canary, 0.8, 0.0)];
        (runs[0].counts, runs[1].counts) = Default::default();
        (runs[0].counts.requests, runs[1].counts.requests) = (3000, 6000);
        runs[1].counts.failures.push("feedback: HTTP 500: no".to_owned());
        (runs[1].counts.failed_requests, runs[1].minutes, runs[1].versions.promoted) = (1, 0.75, 7);
        assert!(report(&runs, false).failure.is_none());
        let report = report(&runs, true);
        assert_eq!(report.failure.as_deref(), Some("1 of 1 verdicts failed"));
        insta::assert_snapshot!(report.text.unwrap(), @r"
        scenario       mode    seed   base  final  worst  below  versions  rejected  rolled  requests  failed  minutes
        late-feedback  direct     1  0.400  0.900  0.000  0.000         0         0       0      3000       0      0.0
        late-feedback  canary     1  0.400  0.800  0.000  0.000         7         0       0      6000       1      0.8
        failure in late-feedback, canary, seed 1: feedback: HTTP 500: no
        FAILED  late-feedback, mean of the seeds: final satisfaction over that of direct 0.889, at least 0.97
        late feedback, direct: better than the base in 1 of 1 seeds (p = 0.500), 0 of 0 ratings answered as not trained
        late feedback, canary: better than the base in 1 of 1 seeds (p = 0.500), 0 of 0 ratings answered as not trained
        1 of 1 verdicts failed
        ");
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
