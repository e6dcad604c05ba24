//! Tables of completions with the parts of their reward, for `hone train`, `hone eval` and
//! `hone rewards test`.

use std::collections::{BTreeMap, BTreeSet};

use comfy_table::{ColumnConstraint, ContentArrangement, Row, Width};
use serde::{Deserialize, Serialize};

use hone_report::stats::{ScoreStats, score_stats};
use hone_report::terminal::{MISSING, cut, one_line, shown, table};

/// Columns of a table, unless the numbers alone need more.
const WIDTH: u16 = 120;
/// Maximum lines of a completion.
const LINES: usize = 6;
/// Maximum columns of a part's name.
const NAME: usize = 14;
/// Maximum columns of the answer that was found.
const FOUND: usize = 16;
/// Minimum columns of a prompt and of a completion.
const TEXT: u16 = 20;

/// A completion with its reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoredSample {
    /// The last message of the prompt.
    pub prompt: String,
    pub completion: String,
    /// The parts by name; `None` if a part could not be scored.
    pub parts: BTreeMap<String, Option<f64>>,
    /// The weighted sum; `None` if no part has a value.
    pub total: Option<f64>,
    /// The answer that each part found in the completion, for `hone rewards test`: `None` where it
    /// found none. Parts that extract nothing are left out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub extracted: BTreeMap<String, Option<String>>,
}

impl ScoredSample {
    /// The distinct answers that parts found, as text; `None` if no part extracts one.
    fn found(&self) -> Option<String> {
        let mut distinct: Vec<String> = Vec::new();
        for answer in self.extracted.values() {
            let shown = answer.as_deref().map_or_else(|| MISSING.to_owned(), one_line);
            if !distinct.contains(&shown) {
                distinct.push(shown);
            }
        }
        (!distinct.is_empty()).then(|| distinct.join(" | "))
    }
}

/// A table of samples; empty without samples.
pub fn render(samples: &[ScoredSample]) -> String {
    if samples.is_empty() {
        return String::new();
    }
    let parts = part_names(samples);
    let has_found = samples.iter().any(|sample| !sample.extracted.is_empty());
    let row = |texts: [String; 2], found: String, numbers: Vec<String>| {
        let mut row = Row::from(texts);
        if has_found {
            row.add_cell(cut(&found, FOUND).into());
        }
        numbers.into_iter().for_each(|number| _ = row.add_cell(number.into()));
        row.max_height(LINES);
        row
    };
    let names = parts.iter().map(|name| cut(&one_line(name), NAME)).chain(["total".to_owned()]);
    let head = row(["prompt".into(), "completion".into()], "found".into(), names.collect());
    let rows = samples.iter().map(|sample| {
        let parts = parts.iter().map(|name| sample.parts.get(*name).copied().flatten());
        let numbers = parts.chain([sample.total]).map(number).collect();
        let texts = [one_line(&sample.prompt), one_line(&sample.completion)];
        row(texts, sample.found().unwrap_or_default(), numbers)
    });
    let mut table = table(head, rows, 2 + usize::from(has_found));
    table.set_truncation_indicator("…").set_width(WIDTH);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_constraint(match index {
            0 | 1 => ColumnConstraint::LowerBoundary(Width::Fixed(TEXT)),
            _ => ColumnConstraint::ContentWidth,
        });
    }
    shown(&table)
}

/// [`render`], then the statistics of each part, as `hone rewards test` prints them. `seed` is for the
/// bootstrap of the intervals.
pub fn scores_text(samples: &[ScoredSample], seed: u64) -> String {
    if samples.is_empty() {
        return "no samples\n".to_owned();
    }
    let parts = part_names(samples).into_iter().map(|name| (name, of_part(samples, name, seed)));
    let rows = parts.chain([("total", of_total(samples, seed))]).map(|(name, stats)| {
        let ScoreStats { estimate, std, min, max, missing } = stats;
        let interval = estimate.and_then(|e| e.interval);
        let (low, high) = (interval.map(|i| i.low), interval.map(|i| i.high));
        let numbers = [estimate.map(|e| e.mean), low, high, std, min, max].map(number);
        [vec![one_line(name)], numbers.into(), vec![missing.to_string()]].concat()
    });
    let head = ["part", "mean", "95 %", "", "std", "min", "max", "missing"];
    format!("{}\n{}", render(samples), shown(&table(head, rows, 1)))
}

/// The same as JSON: `{"samples": […], "parts": {NAME: statistics}, "total": statistics}`.
pub fn scores_json(samples: &[ScoredSample], seed: u64) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Scores<'a> {
        samples: &'a [ScoredSample],
        parts: BTreeMap<&'a str, ScoreStats>,
        total: ScoreStats,
    }
    let parts =
        part_names(samples).into_iter().map(|name| (name, of_part(samples, name, seed))).collect();
    let scores = Scores { samples, parts, total: of_total(samples, seed) };
    serde_json::to_string_pretty(&scores).map(|text| text + "\n")
}

fn of_part(samples: &[ScoredSample], name: &str, seed: u64) -> ScoreStats {
    let values: Vec<Option<f64>> =
        samples.iter().map(|s| s.parts.get(name).copied().flatten()).collect();
    score_stats(&values, seed)
}

fn of_total(samples: &[ScoredSample], seed: u64) -> ScoreStats {
    score_stats(&samples.iter().map(|s| s.total).collect::<Vec<_>>(), seed)
}

/// The parts of all samples in alphabetical order.
fn part_names(samples: &[ScoredSample]) -> Vec<&str> {
    let names = samples.iter().flat_map(|s| s.parts.keys().map(String::as_str));
    names.collect::<BTreeSet<&str>>().into_iter().collect()
}

/// Two decimals, or `–` without a value.
pub(super) fn number(value: Option<f64>) -> String {
    match value {
        // Avoids "-0.00".
        Some(value) if value.abs() < 0.005 => "0.00".to_owned(),
        Some(value) => format!("{value:.2}"),
        None => MISSING.to_owned(),
    }
}

#[cfg(test)]
mod tests;
