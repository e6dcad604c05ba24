//! Tables of completions with the parts of their reward, for `hone train` and `hone rewards test`.
//!
//! Completions come from a model. Control characters, which could control the terminal, are shown as
//! symbols, and marks that reorder text are left out.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::stats::{ScoreStats, score_stats};

/// Maximum lines of a completion.
const LINES: usize = 6;
/// Columns of a number.
const NUMBER: usize = 7;
/// Maximum columns of a part's name.
const NAME: usize = 14;
/// Maximum columns of the answer that was found.
const FOUND: usize = 16;
/// With fewer columns for prompt and completion, each sample is a block of lines instead.
const NARROW: usize = 40;
/// Shown for a missing value.
const MISSING: &str = "–";

/// A completion with its reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoredSample {
    /// The last message of the prompt.
    pub prompt: String,
    /// The completion.
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

/// A table of samples with line ends, at most `width` columns wide unless the numbers alone are wider;
/// empty without samples.
pub fn render(samples: &[ScoredSample], width: usize) -> String {
    let parts = part_names(samples);
    let columns: Vec<(&str, usize)> = parts
        .iter()
        .map(|name| (*name, name.width().clamp(NUMBER, NAME)))
        .chain([("total", NUMBER)])
        .collect();
    let numbers: usize = columns.iter().map(|(_, w)| w + 2).sum();
    let found = samples.iter().filter_map(ScoredSample::found).map(|found| found.width()).max();
    let found = found.map(|widest| widest.clamp("found".len(), FOUND));
    match width.saturating_sub(numbers + 4 + found.map_or(0, |width| width + 2)) {
        _ if samples.is_empty() => String::new(),
        text if text >= NARROW => wide(samples, &columns, text, found),
        _ => blocks(samples, &parts, width),
    }
}

/// [`render`], then the statistics of each part, as `hone rewards test` prints them. `seed` is for the
/// bootstrap of the intervals.
pub fn scores_text(samples: &[ScoredSample], width: usize, seed: u64) -> String {
    let mut text = render(samples, width);
    let stats = statistics(samples, seed);
    let label = stats.iter().map(|(name, _)| name.width()).max().unwrap_or(0).clamp(5, 32);
    let mut row = |name: &str, cells: [&str; 7]| {
        let [mean, low, high, std, min, max, missing] = cells;
        let line = format!(
            "  {}{mean:>8}{low:>8}{high:>8}{std:>8}{min:>8}{max:>8}{missing:>9}",
            padded(&one_line(name), label)
        );
        let _ = writeln!(text, "{}", line.trim_end());
    };
    if samples.is_empty() {
        return "  no samples\n".to_owned();
    }
    row("part", ["mean", "95 %", "", "std", "min", "max", "missing"]);
    for (name, stats) in &stats {
        let mean = stats.estimate.map(|e| e.mean);
        let interval = stats.estimate.and_then(|e| e.interval);
        let numbers = [
            mean,
            interval.map(|i| i.low),
            interval.map(|i| i.high),
            stats.std,
            stats.min,
            stats.max,
        ]
        .map(number);
        let [mean, low, high, std, min, max] = numbers.each_ref().map(String::as_str);
        row(name, [mean, low, high, std, min, max, &stats.missing.to_string()]);
    }
    text
}

/// The same as JSON: `{"samples": […], "parts": {NAME: statistics}, "total": statistics}`.
///
/// # Errors
/// Never for these types.
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

fn statistics(samples: &[ScoredSample], seed: u64) -> Vec<(&str, ScoreStats)> {
    let parts = part_names(samples).into_iter().map(|name| (name, of_part(samples, name, seed)));
    parts.chain([("total", of_total(samples, seed))]).collect()
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
    let distinct: std::collections::BTreeSet<&str> = names.collect();
    distinct.into_iter().collect()
}

/// `text` is the width of prompt and completion together, `found` that of the answers, if any.
fn wide(
    samples: &[ScoredSample],
    columns: &[(&str, usize)],
    text: usize,
    found: Option<usize>,
) -> String {
    let prompt = text / 3;
    let completion = text - prompt;
    let mut out = String::new();
    let mut row = |first: &str, second: &str, third: &str, values: &[String]| {
        let mut line = format!("  {}  {}", padded(first, prompt), padded(second, completion));
        if let Some(found) = found {
            let _ = write!(line, "  {}", padded(third, found));
        }
        for ((_, width), value) in columns.iter().zip(values) {
            let gap = (width + 2).saturating_sub(value.width());
            let _ = write!(line, "{}{value}", " ".repeat(gap));
        }
        let _ = writeln!(out, "{}", line.trim_end());
    };
    let names: Vec<String> = columns.iter().map(|(name, w)| cut(&one_line(name), *w)).collect();
    row("prompt", "completion", "found", &names);
    let rules: Vec<String> = columns.iter().map(|(_, width)| "─".repeat(*width)).collect();
    let rule = "─".repeat(found.unwrap_or_default());
    row(&"─".repeat(prompt), &"─".repeat(completion), &rule, &rules);
    for sample in samples {
        let asked = wrapped(&sample.prompt, prompt, LINES);
        let answered = wrapped(&sample.completion, completion, LINES);
        let mut values = values(sample, columns);
        let mut answer = sample.found().unwrap_or_default();
        for line in 0..asked.len().max(answered.len()).max(1) {
            let of = |lines: &[String]| lines.get(line).cloned().unwrap_or_default();
            let (answer, values) = (std::mem::take(&mut answer), std::mem::take(&mut values));
            row(&of(&asked), &of(&answered), &answer, &values);
        }
    }
    out
}

fn values(sample: &ScoredSample, columns: &[(&str, usize)]) -> Vec<String> {
    let parts = columns.len().saturating_sub(1);
    let of_parts = columns[..parts].iter().map(|(name, _)| sample.parts.get(*name).copied());
    of_parts.map(Option::flatten).chain([sample.total]).map(number).collect()
}

fn blocks(samples: &[ScoredSample], parts: &[&str], width: usize) -> String {
    let mut out = String::new();
    let inner = width.saturating_sub(4).max(16);
    for sample in samples {
        for line in wrapped(&sample.prompt, inner, LINES) {
            let _ = writeln!(out, "  {line}");
        }
        for line in wrapped(&sample.completion, inner, LINES) {
            let _ = writeln!(out, "    {line}");
        }
        let found = sample.found().map(|found| format!("found {found}"));
        let of_parts = parts.iter().map(|name| {
            let value = sample.parts.get(*name).copied().flatten();
            format!("{} {}", one_line(name), number(value))
        });
        let mut numbers: Vec<String> = found.into_iter().chain(of_parts).collect();
        numbers.push(format!("total {}", number(sample.total)));
        for line in wrapped(&numbers.join(" · "), inner, usize::MAX) {
            let _ = writeln!(out, "    {line}");
        }
        out.push('\n');
    }
    out
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

/// One line of visible characters: line ends as `⏎`, control characters as symbols, without marks of
/// direction.
pub fn one_line(text: &str) -> String {
    text.trim().chars().filter_map(visible).collect()
}

/// The character that shows `c` on one line; `None` for characters without one.
pub fn visible(c: char) -> Option<char> {
    match c {
        '\n' => Some('⏎'),
        '\r' => None,
        '\t' => Some(' '),
        '\u{0}'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)),
        '\u{7f}' => Some('␡'),
        '\u{80}'..='\u{9f}' => Some('\u{fffd}'),
        '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => None,
        '\u{2028}' | '\u{2029}' => Some('⏎'),
        _ => Some(c),
    }
}

/// At most `width` columns, ending in `…` if the text is longer.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let (head, _) = split_at_width(text, width.saturating_sub(1));
    if width == 0 { String::new() } else { format!("{head}…") }
}

/// At most `lines` lines of at most `width` columns. Breaks at a space in the second half of a line if
/// there is one. The last line ends in `…` if the text is longer.
pub fn wrapped(text: &str, width: usize, lines: usize) -> Vec<String> {
    let flat = one_line(text);
    let (mut rest, mut out) = (flat.as_str(), Vec::new());
    while !rest.is_empty() {
        if rest.width() <= width || out.len() + 1 == lines {
            out.push(cut(rest, width));
            break;
        }
        let (head, _) = split_at_width(rest, width);
        let next_is_space = rest[head.len()..].starts_with(' ');
        let at = match head.rfind(' ') {
            Some(space) if !next_is_space && head[..space].width() * 2 >= width => space,
            _ => head.len(),
        };
        // A character that is wider than the line gets a line, or the loop would not end.
        let at = if at == 0 { rest.chars().next().map_or(rest.len(), char::len_utf8) } else { at };
        out.push(rest[..at].trim_end().to_owned());
        rest = rest[at..].trim_start();
    }
    out
}

/// The longest prefix of at most `width` columns, and the rest.
fn split_at_width(text: &str, width: usize) -> (&str, &str) {
    let mut used = 0;
    for (at, c) in text.char_indices() {
        used += c.width().unwrap_or(0);
        if used > width {
            return text.split_at(at);
        }
    }
    (text, "")
}

fn padded(text: &str, width: usize) -> String {
    let text = cut(text, width);
    let gap = width.saturating_sub(text.width());
    text + " ".repeat(gap).as_str()
}

#[cfg(test)]
mod tests;
