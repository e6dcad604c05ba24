//! The report of a demo, as text and as JSON.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use tempfile::TempDir;

use hone_core::memory;
use hone_engine::EngineBackend;
use hone_rollout::SamplerKind;

use super::config;
use super::eval::{Decoding, DemoEvaluation, ScoredAnswer};
use super::options::{DemoUsage, RewardsMode};
use super::task::QuestionKind;
use super::users::{Latency, UserTally};
use super::versions::{DecisionKind, VersionHistory};
use hone_config::Config;
use hone_report::stats;
use hone_report::stats::{Estimate, Interval};
use hone_report::terminal::{clock, cut, one_line, shown, table};

/// Held-out questions whose answers are shown: always the first ones.
const SAMPLES_SHOWN: usize = 3;
/// Width of the first column.
const LABEL: usize = 24;
/// Seed of the bootstrap.
const STATS_SEED: u64 = 1;
/// Columns of an answer.
const ANSWER_WIDTH: usize = 88;

/// The measurements of a demo, as `--report` writes them. The users measure the times to the first token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DemoReport {
    /// The maximum reward of an answer.
    pub reward_max: f64,
    /// Mean reward of sampled answers to held-out questions of the asked kind, before the first step.
    pub reward_before: f64,
    /// The same after the last step.
    pub reward_after: f64,
    /// The held-out answers, by kind of question and decoding.
    pub held_out: Vec<HeldOutRow>,
    /// Optimizer steps taken.
    pub steps: u64,
    /// From the users' first question until the mean reward of about 64 answers reached nine tenths
    /// of the maximum.
    pub seconds_to_nine_tenths: Option<f64>,
    /// Thumbs until the mean reward of the users' last 200 answers first reached nine tenths of the maximum.
    pub ratings_to_90: Option<u64>,
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
    /// `--backend`.
    pub backend: EngineBackend,
    /// `--sampler`.
    pub sampler: SamplerKind,
    /// The decisions about versions; absent with `--promotion direct`, which promotes every version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub versions: Option<VersionHistory>,
}

/// Answers to the held-out questions of one kind with one decoding.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HeldOutRow {
    /// The kind of the questions.
    pub kind: QuestionKind,
    /// How the answers were decoded.
    pub decoding: Decoding,
    /// The answers before the first step.
    pub before: AnswerStats,
    /// The answers after the last step.
    pub after: AnswerStats,
    /// The rise of the reward over the same questions, with its 95 % interval.
    pub rise: Option<Estimate>,
}

/// Statistics of answers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AnswerStats {
    /// Mean reward, with its 95 % interval; `None` without answers.
    pub reward: Option<Estimate>,
    /// Share of right answers.
    pub right: f64,
    /// Share of well-formed answers.
    pub well_formed: f64,
}

impl AnswerStats {
    fn of(answers: &[&ScoredAnswer]) -> Self {
        let share = |of: fn(&ScoredAnswer) -> bool| {
            answers.iter().filter(|a| of(a)).count() as f64 / answers.len().max(1) as f64
        };
        let rewards: Vec<f64> = answers.iter().map(|a| a.reward).collect();
        Self {
            reward: stats::estimate(&rewards, STATS_SEED),
            right: share(|a| a.right),
            well_formed: share(|a| a.well_formed),
        }
    }
}

/// The rows of a report: each kind of question, greedy and sampled.
pub fn held_out_rows(before: &DemoEvaluation, after: &DemoEvaluation) -> Vec<HeldOutRow> {
    let row = |kind, decoding| {
        let before: Vec<_> = before.of(kind, decoding).collect();
        let after: Vec<_> = after.of(kind, decoding).collect();
        let pairs: Vec<_> = before
            .iter()
            .filter_map(|b| {
                let same = after.iter().find(|a| a.question == b.question)?;
                Some((b.reward, same.reward))
            })
            .collect();
        HeldOutRow {
            kind,
            decoding,
            before: AnswerStats::of(&before),
            after: AnswerStats::of(&after),
            rise: stats::paired_difference(&pairs, STATS_SEED),
        }
    };
    [QuestionKind::Asked, QuestionKind::Larger]
        .into_iter()
        .flat_map(|kind| [Decoding::Greedy, Decoding::Sampled].map(|d| row(kind, d)))
        .collect()
}

impl DemoReport {
    /// The row of one kind and decoding.
    pub fn row(&self, kind: QuestionKind, decoding: Decoding) -> Option<&HeldOutRow> {
        self.held_out.iter().find(|row| row.kind == kind && row.decoding == decoding)
    }

    /// Whether the reward of sampled answers to questions of the asked kind rose by more than the
    /// uncertainty of the measurement: the 95 % interval of the rise excludes 0.
    pub fn improved(&self) -> bool {
        let rise = self.row(QuestionKind::Asked, Decoding::Sampled).and_then(|row| row.rise);
        rise.and_then(|rise| rise.interval).is_some_and(|interval| interval.low > 0.0)
    }
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
    /// The report as text, with a line end.
    pub fn render(&self, next: &NextSteps) -> String {
        let (table, samples, facts) = (self.table(), self.samples(), self.facts());
        format!("{table}\n{samples}{facts}\n{}", next.render())
    }

    fn table(&self) -> String {
        let rows = self.report.held_out.iter().map(|row| {
            let kind = match row.kind {
                QuestionKind::Asked => "asked kind",
                QuestionKind::Larger => "larger numbers",
            };
            let decoding = match row.decoding {
                Decoding::Greedy => "greedy",
                Decoding::Sampled => "sampled",
            };
            let change = |of: fn(&AnswerStats) -> f64| {
                format!("{} → {}", percent(of(&row.before)), percent(of(&row.after)))
            };
            let rewards = [&row.before, &row.after].map(reward).join(" → ");
            let (right, formed) = (change(|s| s.right), change(|s| s.well_formed));
            [kind.to_owned(), decoding.to_owned(), rewards, right, formed]
        });
        let reward = format!("reward, at most {} (95 %)", self.report.reward_max);
        let table = table(["held out", "", reward.as_str(), "right", "well formed"], rows, 5);
        shown(&table).lines().map(|line| format!("  {line}\n")).collect()
    }

    fn samples(&self) -> String {
        let mut text = String::new();
        let greedy = self.before.of(QuestionKind::Asked, Decoding::Greedy);
        for before in greedy.take(SAMPLES_SHOWN) {
            let question = &before.question;
            let _ = writeln!(text, "  {}", shortened(&question.text()));
            let mut after = self.after.of(QuestionKind::Asked, Decoding::Greedy);
            let after = after.find(|after| after.question == *question);
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
        let questions =
            report.held_out.first().map_or(0, |row| row.before.reward.map_or(0, |r| r.n));
        fact(
            "held out",
            format!("{questions} questions of each kind, in neither pretraining nor training"),
        );
        fact(
            "policy versions",
            format!("{} before, {} after", self.before.version, self.after.version),
        );
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
        if let Some(versions) = &report.versions {
            let VersionHistory { promoted, rejected, rolled_back, decisions, .. } = versions;
            fact(
                "versions",
                format!("{promoted} promoted · {rejected} rejected · {rolled_back} rolled back"),
            );
            for decision in decisions.iter().filter(|d| d.decision != DecisionKind::Promoted) {
                fact(decision.label(), shortened(&decision.text()));
            }
        }
        if let Some(seconds) = report.seconds_to_nine_tenths {
            let ratings = report.ratings_to_90.map(|n| format!(" · {}", count(n, "thumb")));
            let ratings = ratings.unwrap_or_default();
            fact("90 % of the maximum", format!("after {seconds:.1} s{ratings}"));
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
        if !report.improved() {
            let result = "the held-out reward did not rise beyond its interval";
            fact("result", result.to_owned());
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

/// `0.52 (0.40–0.64)`.
fn reward(stats: &AnswerStats) -> String {
    match stats.reward {
        Some(Estimate { mean, interval: Some(Interval { low, high }), .. }) => {
            format!("{mean:.2} ({low:.2}–{high:.2})")
        }
        Some(Estimate { mean, .. }) => format!("{mean:.2}"),
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
    cut(&one_line(text), ANSWER_WIDTH)
}

// The data directory of a demo.

/// The configuration file that a demo leaves in its data directory.
pub const SERVE_FILE: &str = "hone.toml";

fn wrong_directory(dir: &Path, reason: &str) -> DemoUsage {
    DemoUsage(format!("data directory {}: {reason}", dir.display()))
}

/// The data directory.
pub(super) struct DemoDir {
    pub(super) path: PathBuf,
    /// Removes the directory on drop, if no other was named.
    _temporary: Option<TempDir>,
}

impl DemoDir {
    /// Creates the directory. It must be new or empty, because a demo starts from the base model.
    pub(super) fn open(data: Option<&Path>) -> anyhow::Result<Self> {
        let Some(dir) = data else {
            let temporary = tempfile::Builder::new().prefix("hone-demo-").tempdir()?;
            let path = temporary.path().canonicalize()?;
            return Ok(Self { path, _temporary: Some(temporary) });
        };
        let wrong = |reason: String| wrong_directory(dir, &reason);
        let open = || {
            std::fs::create_dir_all(dir)?;
            Ok((std::fs::read_dir(dir)?.next().is_none(), dir.canonicalize()?))
        };
        let (is_empty, path) = open().map_err(|e: std::io::Error| wrong(e.to_string()))?;
        if !is_empty {
            let advice = "`hone serve --data` continues with an existing directory";
            return Err(
                wrong(format!("is not empty, and a demo needs a new one ({advice})")).into()
            );
        }
        Ok(Self { path, _temporary: None })
    }

    /// Writes the configuration with which `hone serve` continues.
    pub(super) fn write_config(&self, demo: &Config) -> Result<(), DemoUsage> {
        let wrong = |reason: String| wrong_directory(&self.path, &reason);
        let text = toml::to_string(&config::to_serve(demo)).map_err(|e| wrong(e.to_string()))?;
        std::fs::write(self.path.join(SERVE_FILE), text).map_err(|e| wrong(e.to_string()))
    }
}

#[cfg(test)]
mod tests;
