//! The final report of a run: `report.md` in a directory.
//!
//! A report is rendered from a [`RunReport`] alone: the same report gives the same bytes.

mod data;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hone_core::files::{FileError, at};
use hone_core::types::{StepRecord, UnixMillis};
use hone_train::monitoring::metric_names;

use crate::runs::table::number;
use hone_report::terminal::{clock, markdown, one_line, shown, sparkline, table};

pub use data::{Comparison, Ending, RunReport, comparison_table, comparisons, samples};

pub const REPORT_FILE: &str = "report.md";

impl RunReport {
    /// Writes the text to a directory, which is created if necessary, in place of an earlier report.
    /// Returns its path.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, FileError> {
        std::fs::create_dir_all(folder).map_err(at(folder))?;
        let path = folder.join(REPORT_FILE);
        std::fs::write(&path, self.markdown()).map_err(at(&path))?;
        Ok(path)
    }

    /// The measurements on held-out prompts or records, for the terminal.
    pub fn summary(&self) -> String {
        match &self.recorded {
            Some(recorded) => recorded.to_string(),
            None => shown(&comparison_table(&self.comparisons, ["before", "after"], one_line)),
        }
    }

    pub fn markdown(&self) -> String {
        let mut text = format!("# {}\n\n", inline(&self.name));
        summary(&mut text, self);
        compare(&mut text, self);
        if let Some(recorded) = &self.recorded {
            let _ = writeln!(text, "## Recorded completions\n\n{recorded}");
        }
        warnings(&mut text, self);
        metrics(&mut text, self);
        show_samples(&mut text, self);
        configuration(&mut text, self);
        text
    }
}

// The report's text.
//
// Prompts, completions and names come from models and datasets. Tables escape them, and the fence
// around a completion is longer than any run of backquotes in it.

/// Maximum length of a prompt or a completion, in characters.
const SHOWN: usize = 2000;
/// Characters of the course of a metric.
const COURSE: usize = 40;

fn summary(text: &mut String, report: &RunReport) {
    let ending = match &report.ending {
        Ending::Finished => "all steps were taken".to_owned(),
        Ending::EarlyStop => "stopped early: the held-out reward stopped rising".to_owned(),
        Ending::Interrupted => "interrupted by the operator".to_owned(),
        Ending::Failed(reason) => format!("failed: {}", inline(reason)),
    };
    let took = Duration::from_millis(report.ended.saturating_sub(report.started));
    let steps = report.steps.last().map_or(0, |s| s.step);
    let tokens: f64 =
        report.steps.iter().filter_map(|s| metric_names::finite(s, metric_names::TOKENS)).sum();
    let mut row = |label: &str, value: String| {
        let _ = writeln!(text, "- **{label}**: {value}");
    };
    row("Model", inline(&report.model));
    row("Began", date(report.started));
    row("Took", format!("{} ({steps} steps, {tokens:.0} completion tokens)", clock(took)));
    row("Ending", ending);
    let first = report.held_out.first();
    let last = report.held_out.last();
    if let (Some((_, first)), Some((_, last))) = (first, last) {
        row("Held-out reward", format!("{first:.3} at first, {last:.3} at the end"));
    }
    match (&report.best, &report.best_checkpoint) {
        (Some(best), Some(path)) => {
            let path = inline(path);
            row("Best", format!("{:.3} at step {}, saved in {path}", best.reward, best.step));
        }
        (Some(best), None) => row("Best", format!("{:.3} at step {}", best.reward, best.step)),
        _ => {}
    }
    row(
        "Warnings",
        match report.warnings.len() {
            0 => "none".to_owned(),
            n => format!("{n}, see below"),
        },
    );
    text.push('\n');
}

fn compare(text: &mut String, report: &RunReport) {
    if report.comparisons.is_empty() {
        return;
    }
    let table = comparison_table(&report.comparisons, ["before", "after"], inline);
    let _ = writeln!(
        text,
        "## Held-out prompts before and after\n\nMeans with 95 % confidence intervals; the \
         difference is over the same prompts. ▲ and ▼: its interval excludes 0.\n\n{}",
        markdown(table)
    );
}

fn warnings(text: &mut String, report: &RunReport) {
    if report.warnings.is_empty() {
        return;
    }
    let rows = report.warnings.iter().map(|warning| {
        let kind = warning.kind.as_str().replace('_', " ");
        // The advice contains keys in backquotes, so it is not escaped.
        [warning.step.to_string(), kind, inline(&warning.message), warning.advice.clone()]
    });
    let table = table(["step", "kind", "observation", "advice"], rows, 4);
    let _ = writeln!(text, "## Warnings\n\n{}", markdown(table));
}

/// A row for each metric that a step has.
fn metrics(text: &mut String, report: &RunReport) {
    use metric_names::{
        CLIP_HIGH, CLIP_LOW, ENTROPY, KL, LENGTH, REWARD_MEAN, REWARD_STD, finite, part, parts,
    };
    let course = |value: &dyn Fn(&StepRecord) -> Option<f64>| -> Vec<f64> {
        report.steps.iter().filter_map(value).collect()
    };
    let metric = |name: &'static str| course(&|step| finite(step, name));
    let mut all = vec![
        ("reward".to_owned(), metric(REWARD_MEAN)),
        ("its standard deviation within groups".to_owned(), metric(REWARD_STD)),
        ("reward on held-out prompts".to_owned(), report.held_out.iter().map(|e| e.1).collect()),
    ];
    let names: BTreeSet<&str> = report.steps.iter().flat_map(parts).collect();
    for name in names {
        all.push((format!("part {}", inline(name)), course(&|step| part(step, name))));
    }
    let others = [
        ("KL to the reference policy in nats per token", KL),
        ("entropy of the policy in nats per token", ENTROPY),
        ("length of completions in tokens", LENGTH),
        ("share of tokens whose ratio was clipped below", CLIP_LOW),
        ("share of tokens whose ratio was clipped above", CLIP_HIGH),
    ];
    all.extend(others.map(|(label, name)| (label.to_owned(), metric(name))));
    let rows = all.into_iter().filter_map(|(label, values)| {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (first, last) = (values.first()?, values.last()?);
        let course = sparkline(&values, low, high, COURSE);
        Some([label, course, format!("{first:.4}"), format!("{last:.4}")])
    });
    let table = table(["", "course", "first", "last"], rows, 2);
    let shown = match table.is_empty() {
        true => "No step was taken.\n".to_owned(),
        false => markdown(table),
    };
    let _ = writeln!(text, "## Metrics\n\n{shown}");
}

fn show_samples(text: &mut String, report: &RunReport) {
    if report.samples.is_empty() {
        return;
    }
    text.push_str("## Samples\n\n");
    for (index, pair) in report.samples.iter().enumerate() {
        let _ = writeln!(text, "### {}\n", index + 1);
        block(text, "Prompt", &pair.prompt);
        for (label, completion) in [("Before", &pair.before), ("After", &pair.after)] {
            if let Some((completion, reward)) = completion {
                block(text, &format!("{label}, reward {}", number(*reward)), completion);
            }
        }
    }
}

fn block(text: &mut String, label: &str, content: &str) {
    let mut shown: String =
        content.chars().filter(|c| *c == '\n' || *c == '\t' || !c.is_control()).collect();
    if let Some((at, _)) = shown.char_indices().nth(SHOWN) {
        shown.truncate(at);
        shown.push('…');
    }
    let fence = fence(&shown);
    let _ = writeln!(text, "{label}:\n\n{fence}text\n{shown}\n{fence}\n");
}

fn configuration(text: &mut String, report: &RunReport) {
    if report.configuration_text.is_empty() {
        return;
    }
    text.push_str("## Configuration\n\n");
    if !report.configuration.is_empty() {
        let rows = report.configuration.iter().map(|(key, value)| [inline(key), inline(value)]);
        let table = markdown(table(["key", "value"], rows, 2));
        let _ = writeln!(text, "Keys that differ from their defaults:\n\n{table}");
    }
    let copy =
        report.configuration_file.as_deref().map(|file| format!(", also in {}", inline(file)));
    let fence = fence(&report.configuration_text);
    let _ = writeln!(
        text,
        "All keys{}:\n\n{fence}toml\n{}\n{fence}",
        copy.unwrap_or_default(),
        report.configuration_text.trim_end()
    );
}

/// A fence of backquotes that is longer than any run of them in the text.
fn fence(text: &str) -> String {
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    "`".repeat(longest.max(2) + 1)
}

/// One line, with all markup escaped.
fn inline(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in one_line(text).chars() {
        if "\\`*_[]<>|#&~".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// `2023-11-14 22:13:20 UTC`.
fn date(time: UnixMillis) -> String {
    let known = i64::try_from(time).ok().and_then(chrono::DateTime::from_timestamp_millis);
    known.map_or_else(|| "–".to_owned(), |t| t.format("%Y-%m-%d %H:%M:%S UTC").to_string())
}

#[cfg(test)]
mod tests;
