//! The report of a demo, as text and as JSON.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use hone_core::memory;
use hone_rollout::SamplerKind;

use super::dir::SERVE_FILE;
use super::eval::{DemoEvaluation, ScoredAnswer};
use super::options::RewardsMode;
use super::tally::{Latency, UserTally};
use crate::progress::clock;
use crate::runs::table;

/// Held-out questions whose answers are shown: always the first ones.
const SAMPLES_SHOWN: usize = 3;
/// Width of the first column.
const LABEL: usize = 24;
/// Columns of an answer.
const ANSWER_WIDTH: usize = 88;

/// The measurements of a demo, as `--report` writes them. Rewards are means over the held-out
/// questions. The users measure the times to the first token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DemoReport {
    /// The maximum reward of an answer.
    pub reward_max: f64,
    /// Reward before the first step.
    pub reward_before: f64,
    /// Reward after the last step.
    pub reward_after: f64,
    /// Optimizer steps taken.
    pub steps: u64,
    /// From the users' first question until the mean reward of about 64 answers reached nine tenths
    /// of the maximum.
    pub seconds_to_nine_tenths: Option<f64>,
    /// Published versions.
    pub swaps: u64,
    /// Chat completions requested, including those of the evaluations.
    pub requests: u64,
    /// Chat completions and feedback posts that failed.
    pub failed_requests: u64,
    /// Acknowledged thumbs.
    pub feedback: u64,
    /// KL to the base model at the last step, in nats per token.
    pub kl: Option<f64>,
    /// From the start of the demo to its last answer.
    pub wall_seconds: f64,
    /// Median time to the first token.
    pub ttft_p50_ms: Option<f64>,
    /// 99th percentile of the time to the first token.
    pub ttft_p99_ms: Option<f64>,
    /// The median while the trainer was idle.
    pub ttft_idle_p50_ms: Option<f64>,
    /// The 99th percentile while the trainer was idle.
    pub ttft_idle_p99_ms: Option<f64>,
    /// The median while the trainer was computing.
    pub ttft_busy_p50_ms: Option<f64>,
    /// The 99th percentile while the trainer was computing.
    pub ttft_busy_p99_ms: Option<f64>,
    /// Median time from a thumb to the first served version trained on it.
    pub feedback_to_policy_p50_seconds: Option<f64>,
    /// Peak resident memory; `None` without `/proc`.
    pub peak_rss_mib: Option<f64>,
    /// `--seed`.
    pub seed: u64,
    /// `--rewards`.
    pub rewards: RewardsMode,
    /// `--sampler`.
    pub sampler: SamplerKind,
}

/// Everything that the report contains.
pub struct Findings {
    /// The measurements.
    pub report: DemoReport,
    /// The held-out answers before the first step.
    pub before: DemoEvaluation,
    /// The held-out answers after the last step.
    pub after: DemoEvaluation,
    /// The users' requests.
    pub tally: UserTally,
    /// Why the demo ended before `--steps`, if it did.
    pub cut_short: Option<String>,
}

/// Commands that continue from the demo.
pub struct NextSteps {
    /// The data directory, if it is kept.
    pub kept: Option<PathBuf>,
    /// The daemon's URL, if it continues to serve.
    pub serving: Option<String>,
}

impl Findings {
    /// Whether the held-out reward rose.
    pub fn improved(&self) -> bool {
        self.report.reward_after > self.report.reward_before
    }

    /// The report as text, with a line end.
    pub fn render(&self, next: &NextSteps) -> String {
        let (table, samples, facts) = (self.table(), self.samples(), self.facts());
        format!("{table}\n{samples}{facts}\n{}", next.render())
    }

    fn table(&self) -> String {
        let questions = self.before.answers.len();
        let mut text = String::new();
        let mut row = |label: &str, before: &str, after: &str, rest: &str| {
            let line = format!("  {label:<LABEL$}{before:>10}{after:>10}  {rest}");
            let _ = writeln!(text, "{}", line.trim_end());
        };
        let max = format!("of {:.2}", self.report.reward_max);
        let (before, after) = (&self.before, &self.after);
        row(&format!("{questions} held-out questions"), "before", "after", "");
        row(&"─".repeat(LABEL), &"─".repeat(8), &"─".repeat(8), "");
        let two = |value: f64| format!("{value:.2}");
        row("mean reward", &two(before.reward()), &two(after.reward()), &max);
        row("right", &percent(before.right()), &percent(after.right()), "");
        row("well formed", &percent(before.well_formed()), &percent(after.well_formed()), "");
        row("policy version", &before.version.to_string(), &after.version.to_string(), "");
        text
    }

    fn samples(&self) -> String {
        let mut text = String::new();
        for before in self.before.answers.iter().take(SAMPLES_SHOWN) {
            let question = &before.question;
            let _ = writeln!(text, "  {}", shortened(&question.text()));
            let after = self.after.answers.iter().find(|after| after.question == *question);
            for (label, answer) in [("before", Some(before)), ("after", after)] {
                if let Some(answer) = answer {
                    let shown = shortened(&answer.text);
                    let _ = writeln!(text, "    {label:<7}{} {shown}", mark(answer));
                }
            }
            text.push('\n');
        }
        text
    }

    fn facts(&self) -> String {
        let (report, tally) = (&self.report, &self.tally);
        let mut text = String::new();
        let mut fact = |label: &str, value: String| {
            let _ = writeln!(text, "  {label:<LABEL$}{value}");
        };
        let kl = report.kl.map(|kl| format!(" · KL {kl:.3}")).unwrap_or_default();
        fact(
            "learning",
            format!(
                "{} in {} · {}{kl}",
                count(report.steps, "step"),
                clock(Duration::from_secs_f64(report.wall_seconds)),
                count(report.swaps, "swap"),
            ),
        );
        if let Some(seconds) = report.seconds_to_nine_tenths {
            fact("90 % of the maximum", format!("after {seconds:.1} s"));
        }
        let mut traffic =
            format!("{} · {} failed", count(report.requests, "request"), tally.failed);
        if tally.feedback > 0 {
            let _ = write!(traffic, " · {}", count(tally.feedback, "thumb"));
            let _ = write!(traffic, " · {} up", tally.thumbs_up);
        }
        fact("traffic", traffic);
        fact("first token, idle", latency(tally.idle()));
        fact("first token, training", latency(tally.busy()));
        if let Some(seconds) = report.feedback_to_policy_p50_seconds {
            fact("thumb to new policy", format!("p50 {seconds:.1} s"));
        }
        if let Some(mib) = report.peak_rss_mib {
            fact("peak memory", format!("{mib:.0} MiB"));
        }
        for failure in &tally.failures {
            fact("failure", shortened(failure));
        }
        if let Some(reason) = &self.cut_short {
            fact("ended early", reason.clone());
        }
        if !self.improved() {
            fact("result", "the held-out reward did not rise".to_owned());
        }
        text
    }
}

impl NextSteps {
    fn render(&self) -> String {
        let mut text = String::new();
        let mut row = |command: &str, comment: &str| {
            let _ = writeln!(text, "  {command:<50} {comment}");
        };
        if let Some(url) = &self.serving {
            row(url, "serving the last version until Ctrl-C");
            row(&format!("curl {url}/admin/policies"), "every version and its origin");
            row(&format!("curl {url}/metrics"), "the metrics of dashboards/hone.json");
        }
        match &self.kept {
            Some(dir) => {
                let dir = dir.display();
                row(&format!("hone db stats --data {dir}"), "the contents of the ledger");
                row(
                    &format!("hone serve --config {dir}/{SERVE_FILE}"),
                    "continue to serve and learn",
                );
            }
            None => row("hone demo --data DIR --keep-serving", "keep the data and the daemon"),
        }
        text
    }
}

/// Writes the measurements as JSON.
///
/// # Errors
/// If the file cannot be written.
pub fn write_json(report: &DemoReport, file: &Path) -> std::io::Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    std::fs::write(file, text)
}

/// Peak resident memory of this process in MiB; `None` without `/proc`.
pub fn peak_rss_mib() -> Option<f64> {
    let bytes = memory::peak_resident();
    (bytes > 0).then(|| bytes as f64 / f64::from(1 << 20))
}

/// `1 step`, `2 steps`.
pub fn count(n: u64, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// `42 %`.
pub fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// `8 ms`, `0.8 ms`.
pub fn ms(value: Option<f64>) -> String {
    match value {
        Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
        Some(ms) => format!("{ms:.0} ms"),
        None => "–".to_owned(),
    }
}

fn latency(latency: Latency) -> String {
    format!("p50 {:<9} p99 {}", ms(latency.p50), ms(latency.p99))
}

fn mark(answer: &ScoredAnswer) -> char {
    match (answer.right, answer.well_formed) {
        (true, true) => '✓',
        (false, false) => '✗',
        _ => '~',
    }
}

/// One visible line of at most [`ANSWER_WIDTH`] columns.
fn shortened(text: &str) -> String {
    table::cut(&table::one_line(text), ANSWER_WIDTH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::tally::SharedTally;
    use crate::demo::{eval, task};

    fn evaluation(text: &str, good: bool, version: u64) -> DemoEvaluation {
        let scored = |question| ScoredAnswer {
            question,
            text: text.to_owned(),
            right: good,
            well_formed: good,
            reward: if good { task::REWARD_MAX } else { 0.0 },
        };
        DemoEvaluation {
            answers: eval::held_out(4).into_iter().map(scored).collect(),
            version: hone_core::types::PolicyVersion(version),
        }
    }

    fn findings() -> Findings {
        let tally = SharedTally::default();
        for up in [true, true, false] {
            tally.add_request();
            tally.add_answer(1.0, Duration::from_millis(8), up);
            tally.add_thumb(up);
        }
        let report = DemoReport {
            reward_max: 1.5,
            reward_before: 0.0,
            reward_after: 1.5,
            steps: 60,
            seconds_to_nine_tenths: Some(41.5),
            swaps: 60,
            requests: 1203,
            failed_requests: 0,
            feedback: 3,
            kl: Some(0.084),
            wall_seconds: 108.0,
            ttft_p50_ms: Some(8.0),
            ttft_p99_ms: Some(8.0),
            ttft_idle_p50_ms: Some(8.0),
            ttft_idle_p99_ms: Some(8.0),
            ttft_busy_p50_ms: Some(8.0),
            ttft_busy_p99_ms: Some(8.0),
            feedback_to_policy_p50_seconds: Some(2.25),
            peak_rss_mib: Some(412.4),
            seed: 1,
            rewards: RewardsMode::Both,
            sampler: SamplerKind::Auto,
        };
        Findings {
            report,
            before: evaluation("about\n40", false, 0),
            after: evaluation("<reasoning>sum</reasoning><answer>1</answer>", true, 60),
            tally: tally.read(),
            cut_short: None,
        }
    }

    #[test]
    fn the_json_has_exactly_these_keys() {
        let json = serde_json::to_string_pretty(&findings().report).unwrap();
        insta::assert_snapshot!(json, @r#"
        {
          "reward_max": 1.5,
          "reward_before": 0.0,
          "reward_after": 1.5,
          "steps": 60,
          "seconds_to_nine_tenths": 41.5,
          "swaps": 60,
          "requests": 1203,
          "failed_requests": 0,
          "feedback": 3,
          "kl": 0.084,
          "wall_seconds": 108.0,
          "ttft_p50_ms": 8.0,
          "ttft_p99_ms": 8.0,
          "ttft_idle_p50_ms": 8.0,
          "ttft_idle_p99_ms": 8.0,
          "ttft_busy_p50_ms": 8.0,
          "ttft_busy_p99_ms": 8.0,
          "feedback_to_policy_p50_seconds": 2.25,
          "peak_rss_mib": 412.4,
          "seed": 1,
          "rewards": "both",
          "sampler": "auto"
        }
        "#);
    }

    #[test]
    fn the_report_as_text() {
        let findings = findings();
        let next = NextSteps { kept: Some("/data/demo".into()), serving: None };
        insta::assert_snapshot!([findings.table(), findings.facts(), next.render()].join("\n"), @r"
        4 held-out questions        before     after
        ────────────────────────  ────────  ────────
        mean reward                   0.00      1.50  of 1.50
        right                          0 %     100 %
        well formed                    0 %     100 %
        policy version                   0        60

        learning                60 steps in 1:48 · 60 swaps · KL 0.084
        90 % of the maximum     after 41.5 s
        traffic                 1203 requests · 0 failed · 3 thumbs · 2 up
        first token, idle       p50 8.0 ms    p99 8.0 ms
        first token, training   p50 8.0 ms    p99 8.0 ms
        thumb to new policy     p50 2.2 s
        peak memory             412 MiB

        hone db stats --data /data/demo                    the contents of the ledger
        hone serve --config /data/demo/hone.toml           continue to serve and learn
        ");
        let samples = findings.samples();
        assert_eq!(samples.matches("✓ <reasoning>").count(), SAMPLES_SHOWN);
        assert_eq!(samples.matches("✗ about⏎40").count(), SAMPLES_SHOWN);
    }

    #[test]
    fn an_equal_reward_is_no_improvement() {
        let mut findings = findings();
        assert!(findings.improved());
        findings.report.reward_after = findings.report.reward_before;
        assert!(!findings.improved());
        assert!(findings.facts().contains("did not rise"));
    }

    #[test]
    fn long_answers_are_shortened() {
        assert_eq!(shortened(" a\nb "), "a⏎b");
        let long = shortened(&"é".repeat(500));
        assert_eq!(long.chars().count(), ANSWER_WIDTH);
        assert!(long.ends_with('…'));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn peak_memory_is_known_on_linux() {
        assert!(peak_rss_mib().unwrap() > 1.0);
    }
}
