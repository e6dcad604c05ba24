//! The contents of a report, and the comparison of two evaluations of the same prompts.

use comfy_table::Table;
use serde::{Deserialize, Serialize};

use hone_core::types::{StepRecord, UnixMillis};
use hone_train::monitoring::warnings::Warning;

use crate::runs::Best;
use crate::runs::eval_set::Evaluation;
use crate::runs::from_ledger::RecordReport;
use crate::runs::table::ScoredSample;
use crate::tracker::RunStatus;
use hone_report::stats::{self, Estimate};
use hone_report::terminal::{self, MISSING};

/// Why a run ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    #[default]
    Finished,
    EarlyStop,
    Interrupted,
    /// A component failed, with this error.
    Failed(String),
}

impl Ending {
    /// The status that trackers get.
    pub fn status(&self) -> RunStatus {
        match self {
            Self::Finished | Self::EarlyStop => RunStatus::Finished,
            Self::Interrupted => RunStatus::Killed,
            Self::Failed(_) => RunStatus::Failed,
        }
    }
}

/// One measurement on the held-out prompts before the first step and after the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// `total` or the name of a part.
    pub name: String,
    pub before: Option<Estimate>,
    pub after: Option<Estimate>,
    /// After minus before, over the same prompts.
    pub difference: Option<Estimate>,
}

/// A held-out prompt with a completion before and after training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplePair {
    pub prompt: String,
    pub before: Option<(String, Option<f64>)>,
    pub after: Option<(String, Option<f64>)>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    pub name: String,
    pub model: String,
    pub started: UnixMillis,
    pub ended: UnixMillis,
    pub ending: Ending,
    /// Keys of the configuration that differ from their defaults, with their values, in display order.
    pub configuration: Vec<(String, String)>,
    /// The whole effective configuration as TOML, without secrets.
    #[serde(default)]
    pub configuration_text: String,
    /// The file with a copy of it.
    #[serde(default)]
    pub configuration_file: Option<String>,
    pub steps: Vec<StepRecord>,
    /// Step and mean held-out reward of each evaluation; step 0 is before training.
    pub held_out: Vec<(u64, f64)>,
    pub comparisons: Vec<Comparison>,
    pub samples: Vec<SamplePair>,
    /// The warnings in the order they were raised.
    pub warnings: Vec<Warning>,
    pub best: Option<Best>,
    pub best_checkpoint: Option<String>,
    /// The recorded completions of a run on a ledger, and what they say about the policies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<RecordReport>,
}

/// The total and every part before and after, with the paired difference.
pub fn comparisons(before: &Evaluation, after: &Evaluation, seed: u64) -> Vec<Comparison> {
    let mut all = vec![comparison("total", before, after, seed, |sample| sample.total)];
    for name in after.parts() {
        let value = |sample: &ScoredSample| sample.parts.get(&name).copied().flatten();
        all.push(comparison(&name, before, after, seed, value));
    }
    all
}

fn comparison(
    name: &str,
    before: &Evaluation,
    after: &Evaluation,
    seed: u64,
    value: impl Fn(&ScoredSample) -> Option<f64>,
) -> Comparison {
    let (first, second) = (before.means(&value), after.means(&value));
    let known = |means: &[Option<f64>]| means.iter().copied().flatten().collect::<Vec<f64>>();
    let pairs: Vec<(f64, f64)> =
        first.iter().zip(&second).filter_map(|(a, b)| Some(((*a)?, (*b)?))).collect();
    Comparison {
        name: name.to_owned(),
        before: stats::estimate(&known(&first), seed),
        after: stats::estimate(&known(&second), seed),
        difference: stats::paired_difference(&pairs, seed),
    }
}

/// The first completion of each of the first `most` prompts.
pub fn samples(before: &Evaluation, after: &Evaluation, most: usize) -> Vec<SamplePair> {
    let completion =
        |sample: Option<&ScoredSample>| sample.map(|s| (s.completion.clone(), s.total));
    let pairs = before.answers.iter().zip(&after.answers);
    pairs
        .filter_map(|(before, after)| {
            let (before, after) = (before.first(), after.first());
            let prompt = after.or(before)?.prompt.clone();
            Some(SamplePair { prompt, before: completion(before), after: completion(after) })
        })
        .take(most)
        .collect()
}

/// The comparisons as a table. `before` and `after` are the titles of the evaluations, and `name` shows
/// the name of a part.
pub fn comparison_table(
    comparisons: &[Comparison],
    [before, after]: [&str; 2],
    name: fn(&str) -> String,
) -> Table {
    let shown = |estimate: Option<Estimate>, signed: bool| {
        let Some(Estimate { mean, interval, .. }) = estimate else { return MISSING.to_owned() };
        let number = |v: f64| if signed { format!("{v:+.3}") } else { format!("{v:.3}") };
        let range = interval.map(|i| format!(" ({} to {})", number(i.low), number(i.high)));
        format!("{}{}", number(mean), range.unwrap_or_default())
    };
    let rows = comparisons.iter().map(|c| {
        let mark = match c.difference.and_then(|d| d.interval) {
            Some(interval) if interval.low > 0.0 => "▲",
            Some(interval) if interval.high < 0.0 => "▼",
            _ => "",
        };
        let numbers = [(c.before, false), (c.after, false), (c.difference, true)];
        let [before, after, difference] = numbers.map(|(e, signed)| shown(e, signed));
        [name(&c.name), before, after, difference, mark.to_owned()]
    });
    terminal::table(["", before, after, "difference", ""], rows, 1)
}
