//! The final report of a run: a directory with `report.md` and its plots as SVG.
//!
//! A report is rendered from a [`RunReport`] alone: the same report gives the same bytes.

mod data;
mod plots;
pub mod svg;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hone_core::files::{FileError, at};
use hone_core::types::UnixMillis;
use hone_train::monitoring::metric_names;

use crate::progress::clock;
use crate::runs::from_ledger::RecordReport;
use crate::runs::stats::Estimate;
use crate::runs::table::{number, one_line};

pub use data::{Comparison, Ending, RunReport, SamplePair};

/// The report's file name.
pub const REPORT_FILE: &str = "report.md";

impl RunReport {
    /// The text, which links to the files of [`Self::plots`].
    pub fn markdown(&self) -> String {
        render(self)
    }

    /// File name and content of each plot. Metrics that no step has have no plot.
    pub fn plots(&self) -> Vec<(String, String)> {
        plots::all(self).into_iter().map(|plot| (plot.file, plot.svg)).collect()
    }

    /// Writes the text and the plots to a directory, which is created if necessary, and replaces the
    /// files of an earlier report. Returns the path of the text.
    ///
    /// # Errors
    /// If the directory or a file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, FileError> {
        std::fs::create_dir_all(folder).map_err(at(folder))?;
        let mut files = self.plots();
        files.push((REPORT_FILE.to_owned(), self.markdown()));
        for (name, text) in files {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(at(&path))?;
        }
        Ok(folder.join(REPORT_FILE))
    }
}

// The report's text.
//
// Prompts, completions and names come from models and datasets. Tables escape them, and the fence
// around a completion is longer than any run of backquotes in it.

/// Maximum length of a prompt or a completion, in characters.
const SHOWN: usize = 2000;

fn render(report: &RunReport) -> String {
    let mut text = format!("# {}\n\n", inline(&report.name));
    summary(&mut text, report);
    comparisons(&mut text, report);
    text.extend(report.recorded.as_ref().map(RecordReport::markdown));
    warnings(&mut text, report);
    text.push_str("## Metrics\n\n");
    let plots = plots::all(report);
    for plot in &plots {
        let _ = writeln!(text, "![{}]({})\n", plot.alt, plot.file);
    }
    if plots.is_empty() {
        text.push_str("No step was taken.\n\n");
    }
    samples(&mut text, report);
    configuration(&mut text, report);
    text
}

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

fn comparisons(text: &mut String, report: &RunReport) {
    if report.comparisons.is_empty() {
        return;
    }
    text.push_str(
        "## Held-out prompts before and after\n\nMeans with 95 % confidence intervals; the \
         difference is over the same prompts. ▲ and ▼: its interval excludes 0.\n\n\
         | | before | after | difference | |\n| --- | --- | --- | --- | --- |\n",
    );
    for row in &report.comparisons {
        let interval = row.difference.and_then(|d| d.interval);
        let mark = match interval {
            Some(interval) if interval.low > 0.0 => "▲",
            Some(interval) if interval.high < 0.0 => "▼",
            _ => "",
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {mark} |",
            inline(&row.name),
            estimate(row.before, false),
            estimate(row.after, false),
            estimate(row.difference, true)
        );
    }
    text.push('\n');
}

fn estimate(estimate: Option<Estimate>, signed: bool) -> String {
    let Some(estimate) = estimate else { return "–".to_owned() };
    let number = |value: f64| if signed { format!("{value:+.3}") } else { format!("{value:.3}") };
    match estimate.interval {
        Some(i) => {
            format!("{} ({} to {})", number(estimate.mean), number(i.low), number(i.high))
        }
        None => number(estimate.mean),
    }
}

fn warnings(text: &mut String, report: &RunReport) {
    if report.warnings.is_empty() {
        return;
    }
    text.push_str(
        "## Warnings\n\n| step | kind | observation | advice |\n| --- | --- | --- | --- |\n",
    );
    for warning in &report.warnings {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            warning.step,
            warning.kind.as_str().replace('_', " "),
            inline(&warning.message),
            // Contains keys in backquotes, so it is not escaped.
            warning.advice
        );
    }
    text.push('\n');
}

fn samples(text: &mut String, report: &RunReport) {
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
        text.push_str("Keys that differ from their defaults:\n\n| key | value |\n| --- | --- |\n");
    }
    for (key, value) in &report.configuration {
        let _ = writeln!(text, "| {} | {} |", inline(key), inline(value));
    }
    let copy =
        report.configuration_file.as_deref().map(|file| format!(", also in {}", inline(file)));
    let fence = fence(&report.configuration_text);
    let _ = writeln!(
        text,
        "\nAll keys{}:\n\n{fence}toml\n{}\n{fence}",
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
