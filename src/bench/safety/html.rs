//! The measurements as one HTML page with inline plots.

use std::fmt;
use std::fmt::Write as _;

use serde::Serialize;

use super::run::{COLUMNS, SafetyRun, mode_name};
use super::verdict::{LateFeedbackTest, SafetyCheck, SafetyVerdict};
use super::windows::WINDOW;
use crate::runs::report::svg::{Chart, Series, render};

/// Page head. Colors follow the viewer's preference, as in the plots.
const HEAD: &str = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
<meta name=\"viewport\" content=\"width=device-width\"><title>hone bench safety</title>\n<style>\n\
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;\n\
max-width: 64rem; padding: 0 1rem } table { border-collapse: collapse } td, th { padding: .2rem .6rem;\n\
text-align: right } td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left } tr:nth-child(even)\n\
{ background: #8882 } .table { overflow-x: auto } svg { max-width: 100%; height: auto }\n\
.failed { font-weight: 600 }\n</style></head><body>\n<h1>hone bench safety</h1>\n";

impl SafetyReport {
    /// The page.
    pub fn html(&self) -> String {
        let mut page = HEAD.to_owned();
        let _ = writeln!(
            page,
            "<p>True satisfaction of simulated users, from 0 to 1. Worst window: the mean over {WINDOW} \
             consecutive answers that is furthest below the better of the base and the last good \
             version.</p>\n<h2>Runs</h2>\n<div class=\"table\"><table>"
        );
        let row = |page: &mut String, tag: &str, cells: &[String], minutes: &str| {
            let cells = cells.iter().map(String::as_str).chain([minutes]);
            let cells: String = cells.map(|cell| format!("<{tag}>{cell}</{tag}>")).collect();
            let _ = writeln!(page, "<tr>{cells}</tr>");
        };
        row(&mut page, "th", &COLUMNS.map(|(name, _)| name.to_owned()), "minutes");
        for run in &self.runs {
            row(&mut page, "td", &run.cells(), &format!("{:.1}", run.minutes));
        }
        page.push_str("</table></div>\n<h2>Verdicts</h2>\n<ul>\n");
        for verdict in &self.verdicts {
            let (class, mark) = if verdict.passed { ("passed", "✓") } else { ("failed", "✗") };
            let _ = writeln!(page, "<li class=\"{class}\">{mark} {}</li>", verdict.sentence());
        }
        for test in &self.late_feedback {
            let _ = writeln!(page, "<li>{}</li>", test.sentence());
        }
        page.push_str("</ul>\n<h2>Satisfaction over answers</h2>\n");
        for runs in self.runs.chunk_by(|a, b| (a.scenario, a.seed) == (b.scenario, b.seed)) {
            page.extend(render(&chart(runs)));
        }
        page.push_str("</body></html>\n");
        page
    }
}

/// The runs of one scenario and seed.
fn chart(runs: &[SafetyRun]) -> Chart {
    let title = runs.first().map(|run| format!("{}, seed {}", run.scenario, run.seed));
    let series = |run: &SafetyRun| Series {
        name: mode_name(run.mode).to_owned(),
        points: run.curve.clone(),
        band: Vec::new(),
        dots: false,
    };
    Chart {
        title: title.unwrap_or_default(),
        x_label: "answers".to_owned(),
        y_label: format!("mean of {WINDOW} answers"),
        limit: runs.first().map(|run| (run.base, "base".to_owned())),
        series: runs.iter().map(series).collect(),
    }
}

// The measurements of all runs as text.

/// The measurements of all runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SafetyReport {
    /// Every run, in the order of execution.
    pub runs: Vec<SafetyRun>,
    /// The verdicts on the runs with a canary.
    pub verdicts: Vec<SafetyVerdict>,
    /// Whether late feedback moved the policy in the right direction.
    pub late_feedback: Vec<LateFeedbackTest>,
}

impl SafetyVerdict {
    /// The verdict in words.
    pub(super) fn sentence(&self) -> String {
        let what = match self.check {
            SafetyCheck::WorstWindow => "worst window below the reference by",
            SafetyCheck::Final => "final satisfaction over that of direct",
        };
        let relation = match self.check {
            SafetyCheck::WorstWindow => "at most",
            SafetyCheck::Final => "at least",
        };
        let Self { scenario, value, bound, .. } = self;
        let seed = self.seed.map_or("mean of the seeds".to_owned(), |seed| format!("seed {seed}"));
        format!("{scenario}, {seed}: {what} {value:.3}, {relation} {bound}")
    }
}

impl LateFeedbackTest {
    /// The result in words.
    pub(super) fn sentence(&self) -> String {
        let mode = mode_name(self.mode);
        let Self { seeds, improved, p_value, ratings, not_trained, .. } = self;
        format!(
            "late feedback, {mode}: better than the base in {improved} of {seeds} seeds (p = \
             {p_value:.3}), {not_trained} of {ratings} ratings answered as not trained"
        )
    }
}

impl SafetyReport {
    /// Whether every verdict is passed.
    pub fn passed(&self) -> bool {
        self.verdicts.iter().all(|verdict| verdict.passed)
    }
}

impl fmt::Display for SafetyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |cells: &[String], minutes: &str| {
            for (index, (cell, (_, width))) in cells.iter().zip(COLUMNS).enumerate() {
                match index {
                    0 | 1 => write!(f, "{cell:<width$}")?,
                    _ => write!(f, "{cell:>width$}")?,
                }
            }
            writeln!(f, "{minutes:>9}")
        };
        line(&COLUMNS.map(|(name, _)| name.to_owned()), "minutes")?;
        for run in &self.runs {
            line(&run.cells(), &format!("{:.1}", run.minutes))?;
        }
        for run in self.runs.iter().filter(|run| !run.failures.is_empty()) {
            let (scenario, mode, seed) = (run.scenario, mode_name(run.mode), run.seed);
            writeln!(f, "failure in {scenario}, {mode}, seed {seed}: {}", run.failures.join("; "))?;
        }
        for verdict in &self.verdicts {
            let mark = if verdict.passed { "passed" } else { "FAILED" };
            writeln!(f, "{mark}  {}", verdict.sentence())?;
        }
        for test in &self.late_feedback {
            writeln!(f, "{}", test.sentence())?;
        }
        let failed = self.verdicts.iter().filter(|verdict| !verdict.passed).count();
        write!(f, "{} of {} verdicts failed", failed, self.verdicts.len())
    }
}

#[cfg(test)]
mod tests {
    use hone_train::policy::Promotion;

    use super::*;
    use crate::bench::safety::scenario::SafetyScenario;
    use crate::bench::safety::verdict::verdicts;

    #[test]
    fn the_page_has_a_row_per_run_and_a_plot_per_scenario_and_seed() {
        let run = |scenario, mode, seed| {
            let curve = vec![(300.0, 0.4), (301.0, 0.5)];
            SafetyRun { curve, ..SafetyRun::empty(scenario, mode, seed) }
        };
        let (honest, rate) = (SafetyScenario::Honest, SafetyScenario::HighRate);
        let runs = vec![
            run(honest, Promotion::Direct, 1),
            run(honest, Promotion::Canary, 1),
            run(rate, Promotion::Canary, 1),
            run(rate, Promotion::Canary, 2),
        ];
        let report = SafetyReport { verdicts: verdicts(&runs), late_feedback: Vec::new(), runs };
        let page = report.html();
        assert_eq!(page.matches("<tr><td>").count(), 4);
        assert_eq!(page.matches("<svg").count(), 3);
        assert_eq!(page.matches("<li class=").count(), report.verdicts.len());
        assert!(page.contains("honest, seed 1") && page.ends_with("</body></html>\n"));
    }

    mod report {
        use hone_train::policy::Promotion;

        use super::super::*;
        use crate::bench::safety::scenario::SafetyScenario;
        use crate::bench::safety::verdict::{late_feedback, verdicts};

        #[test]
        fn the_text_has_a_row_per_run_and_every_verdict() {
            let mut runs: Vec<SafetyRun> = [Promotion::Direct, Promotion::Canary]
                .map(|mode| SafetyRun::empty(SafetyScenario::LateFeedback, mode, 1))
                .into();
            (runs[0].base, runs[0].final_satisfaction, runs[0].requests) = (0.4, 0.9, 3000);
            (runs[1].base, runs[1].final_satisfaction, runs[1].requests) = (0.4, 0.8, 6000);
            runs[1].failures.push("feedback: HTTP 500: no".to_owned());
            (runs[1].failed_requests, runs[1].minutes, runs[1].promoted) = (1, 0.75, 7);
            let report = SafetyReport {
                verdicts: verdicts(&runs),
                late_feedback: late_feedback(&runs),
                runs,
            };
            assert!(!report.passed());
            insta::assert_snapshot!(report, @r"
        scenario        mode    seed   base  final  worst  below versions rejected rolled requests failed  minutes
        late-feedback   direct     1  0.400  0.900  0.000  0.000        0        0      0     3000      0      0.0
        late-feedback   canary     1  0.400  0.800  0.000  0.000        7        0      0     6000      1      0.8
        failure in late-feedback, canary, seed 1: feedback: HTTP 500: no
        FAILED  late-feedback, mean of the seeds: final satisfaction over that of direct 0.889, at least 0.97
        late feedback, direct: better than the base in 1 of 1 seeds (p = 0.500), 0 of 0 ratings answered as not trained
        late feedback, canary: better than the base in 1 of 1 seeds (p = 0.500), 0 of 0 ratings answered as not trained
        1 of 1 verdicts failed
        ");
        }
    }
}
