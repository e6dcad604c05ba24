//! How far `hone train` is, on stderr: a bar on a terminal, a plain line every few steps elsewhere.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use hone_core::types::StepRecord;
use hone_train::monitoring::metric_names;
use hone_train::monitoring::warnings::Warning;

/// The state of a run after a step. Figures that are not known are left out of the line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunView {
    /// Optimiser steps taken, those before a resume included.
    pub step: u64,
    /// Optimiser steps asked for.
    pub steps: u64,
    /// The step that this process began after: 0, or the one it resumed from.
    pub first: u64,
    /// Mean reward of the step.
    pub reward: Option<f64>,
    /// Standard deviation of the reward within groups.
    pub std: Option<f64>,
    /// KL to the reference, in nats a token.
    pub kl: Option<f64>,
    /// Mean completion length in tokens.
    pub length: Option<f64>,
    /// The last held-out reward.
    pub held_out: Option<f64>,
    /// Completion tokens trained on by this process.
    pub tokens: f64,
    /// Since this process began to train.
    pub elapsed: Duration,
}

impl RunView {
    /// Takes a step's figures; `elapsed` since this process began to train.
    pub fn take(&mut self, record: &StepRecord, elapsed: Duration) {
        self.step = record.step;
        self.elapsed = elapsed;
        self.reward = metric_names::finite(record, metric_names::REWARD_MEAN);
        self.std = metric_names::finite(record, metric_names::REWARD_STD);
        self.kl = metric_names::finite(record, metric_names::KL);
        self.length = metric_names::finite(record, metric_names::LENGTH);
        self.held_out = metric_names::finite(record, metric_names::HELD_OUT).or(self.held_out);
        self.tokens += metric_names::finite(record, metric_names::TOKENS).unwrap_or(0.0);
    }

    /// How long the rest will take at the pace so far; `None` before this process's first step.
    pub fn remaining(&self) -> Option<Duration> {
        let done = self.step.checked_sub(self.first).filter(|done| *done > 0)?;
        let left = self.steps.saturating_sub(self.step);
        let seconds = self.elapsed.as_secs_f64() / done as f64 * left as f64;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Completion tokens a second, generation and evaluation included in the time.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let seconds = self.elapsed.as_secs_f64();
        (seconds > 0.0 && self.tokens > 0.0).then(|| self.tokens / seconds)
    }

    /// Everything after `step X/Y`.
    fn figures(&self) -> String {
        let mut text = String::new();
        let mut put = |part: std::fmt::Arguments<'_>| {
            let gap = if text.is_empty() { "" } else { " · " };
            let _ = write!(text, "{gap}{part}");
        };
        match (self.reward, self.std) {
            (Some(reward), Some(std)) => put(format_args!("reward {reward:.3} ± {std:.3}")),
            (Some(reward), None) => put(format_args!("reward {reward:.3}")),
            _ => {}
        }
        if let Some(held_out) = self.held_out {
            put(format_args!("held out {held_out:.3}"));
        }
        if let Some(kl) = self.kl {
            put(format_args!("KL {kl:.4}"));
        }
        if let Some(length) = self.length {
            put(format_args!("length {length:.0}"));
        }
        if let Some(rate) = self.tokens_per_second() {
            put(format_args!("{rate:.0} tok/s"));
        }
        if let Some(left) = self.remaining() {
            put(format_args!("ETA {}", clock(left)));
        }
        text
    }

    /// The state in one line, without a line end.
    pub fn line(&self) -> String {
        let digits = self.steps.max(1).ilog10() as usize + 1;
        format!("step {:>digits$}/{}  {}", self.step, self.steps, self.figures())
            .trim_end()
            .to_owned()
    }
}

/// `1:23`, or `2:03:04` from an hour on.
pub fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// A warning as two lines for the terminal.
pub fn warning_text(warning: &Warning) -> String {
    format!("warning: step {}: {}\n         {}", warning.step, warning.message, warning.advice)
}

/// Where progress goes.
pub struct RunProgress {
    bar: Option<ProgressBar>,
    every: u64,
}

impl RunProgress {
    /// A bar on a terminal, else a line every `every` steps (0 counts as 1) and at the last one.
    pub fn new(terminal: bool, steps: u64, every: u64) -> Self {
        let bar = terminal.then(|| {
            let bar = ProgressBar::new(steps);
            let template = "  {bar:24.cyan/238} {pos}/{len} {wide_msg}";
            // The template is a constant; should it be wrong, the default style still tells.
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("━╸─"));
            bar
        });
        Self { bar, every: every.max(1) }
    }

    /// A step was taken.
    pub fn update(&self, view: &RunView) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(view.step);
                bar.set_message(view.figures());
            }
            None if view.step.is_multiple_of(self.every) || view.step >= view.steps => {
                write_line(&view.line());
            }
            None => {}
        }
    }

    /// Lines that stay: a warning, a sample table, a checkpoint.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| write_line(text.trim_end())),
            None => write_line(text.trim_end()),
        }
    }

    /// Takes the bar off the screen.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn write_line(line: &str) {
    // Progress is a courtesy: a closed stderr must not end the run.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

#[cfg(test)]
mod tests {
    use hone_train::monitoring::warnings::WarningKind;

    use super::*;

    fn record(step: u64, figures: &[(&str, f64)]) -> StepRecord {
        let metrics = figures.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect();
        StepRecord { step, groups: Vec::new(), metrics, created: 0 }
    }

    #[test]
    fn a_line_tells_what_is_known() {
        let mut view = RunView { steps: 300, ..RunView::default() };
        insta::assert_snapshot!(view.line(), @"step   0/300");
        let figures = [
            ("reward_mean", 0.8125),
            ("reward_std", 0.31),
            ("kl", 0.0123),
            ("completion_length", 31.6),
            ("tokens", 2022.0),
            ("held_out_reward", 0.9),
        ];
        view.take(&record(1, &figures), Duration::from_secs(2));
        insta::assert_snapshot!(view.line(), @"step   1/300  reward 0.812 ± 0.310 · held out 0.900 · KL 0.0123 · length 32 · 1011 tok/s · ETA 9:58");
        view.take(&record(2, &[("reward_mean", f64::NAN)]), Duration::from_secs(4));
        insta::assert_snapshot!(view.line(), @"step   2/300  held out 0.900 · 506 tok/s · ETA 9:56");
    }

    #[test]
    fn the_time_left_counts_from_where_a_run_was_resumed() {
        let elapsed = Duration::from_secs(100);
        let view = RunView { step: 110, steps: 200, first: 100, elapsed, ..RunView::default() };
        assert_eq!(view.remaining(), Some(Duration::from_secs(900)));
        assert_eq!(RunView { step: 100, ..view.clone() }.remaining(), None);
        assert_eq!(RunView { step: 300, ..view }.remaining(), Some(Duration::ZERO));
    }

    #[test]
    fn clocks_have_hours_when_needed() {
        assert_eq!(clock(Duration::from_secs(59)), "0:59");
        assert_eq!(clock(Duration::from_secs(3599)), "59:59");
        assert_eq!(clock(Duration::from_secs(7384)), "2:03:04");
    }

    #[test]
    fn warnings_are_two_lines() {
        let warning = Warning {
            kind: WarningKind::Collapse,
            step: 7,
            message: "the deviation fell".to_owned(),
            advice: "Raise `rollout.group_size`.".to_owned(),
        };
        insta::assert_snapshot!(warning_text(&warning), @"
        warning: step 7: the deviation fell
                 Raise `rollout.group_size`.
        ");
    }
}
