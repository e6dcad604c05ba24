//! Live progress on stderr: a few bars on a terminal, a plain line every few seconds elsewhere.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::report::{clock, count, ms, percent};
use super::tally::UserTally;

/// How often a plain line is written.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Characters of the sparkline.
const SPARK_WIDTH: usize = 32;
/// Redraws a second.
const REDRAW: Duration = Duration::from_millis(120);

/// The state of the learning phase.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Optimiser steps taken.
    pub step: u64,
    /// Optimiser steps asked for.
    pub steps: u64,
    /// The trainer's state.
    pub trainer: String,
    /// The version being served.
    pub version: u64,
    /// KL to the reference policy, in nats a token.
    pub kl: Option<f64>,
    /// The served reward after each step so far.
    pub history: Vec<f64>,
    /// The most an answer can earn.
    pub reward_max: f64,
    /// What the users saw.
    pub tally: UserTally,
    /// Since the demo began.
    pub elapsed: Duration,
}

/// Where progress goes.
pub struct DemoProgress {
    began: Instant,
    screen: Screen,
}

enum Screen {
    Terminal { multi: MultiProgress, bars: Vec<ProgressBar> },
    Lines { last: Option<Instant> },
}

impl DemoProgress {
    /// Bars on a terminal, else lines.
    pub fn new(terminal: bool) -> Self {
        let screen = if terminal {
            Screen::Terminal { multi: MultiProgress::new(), bars: Vec::new() }
        } else {
            Screen::Lines { last: None }
        };
        Self { began: Instant::now(), screen }
    }

    /// Since the demo began.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Something that takes a while begins.
    pub fn begin(&mut self, what: &str) {
        let Screen::Terminal { multi, bars } = &mut self.screen else { return };
        clear(multi, bars);
        let bar = multi.add(ProgressBar::new_spinner());
        bar.set_style(style("  {spinner:.cyan} {msg}"));
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(REDRAW);
        bars.push(bar);
    }

    /// How far it is.
    pub fn message(&self, text: &str) {
        if let Screen::Terminal { bars, .. } = &self.screen
            && let Some(bar) = bars.first()
        {
            bar.set_message(text.to_owned());
        }
    }

    /// It is done: one line that stays.
    pub fn done(&mut self, label: &str, text: &str) {
        let line = format!("{label:<10} {text}");
        match &mut self.screen {
            Screen::Terminal { multi, bars } => {
                clear(multi, bars);
                // A line that cannot be written is no reason to stop.
                let _ = multi.println(format!("  ✓ {line}"));
            }
            Screen::Lines { .. } => write_line(self.began.elapsed(), &line),
        }
    }

    /// The state of the learning phase.
    pub fn update(&mut self, view: &View) {
        match &mut self.screen {
            Screen::Terminal { multi, bars } => {
                let rows = rows(view);
                if bars.len() != rows.len() + 1 {
                    clear(multi, bars);
                    bars.extend(learning_bars(multi, view.steps, rows.len()));
                }
                if let Some((first, rest)) = bars.split_first() {
                    first.set_position(view.step);
                    first.set_message(clock(view.elapsed));
                    for (bar, row) in rest.iter().zip(rows) {
                        bar.set_message(row);
                    }
                }
            }
            Screen::Lines { last } => {
                if last.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
                    *last = Some(Instant::now());
                    write_line(view.elapsed, &plain(view));
                }
            }
        }
    }

    /// Takes everything temporary off the screen.
    pub fn clear(&mut self) {
        if let Screen::Terminal { multi, bars } = &mut self.screen {
            clear(multi, bars);
        }
    }
}

fn clear(multi: &MultiProgress, bars: &mut Vec<ProgressBar>) {
    for bar in bars.drain(..) {
        bar.finish_and_clear();
        multi.remove(&bar);
    }
}

fn learning_bars(multi: &MultiProgress, steps: u64, rows: usize) -> Vec<ProgressBar> {
    let first = multi.add(ProgressBar::new(steps));
    first.set_style(
        style("  {spinner:.cyan} learning   {bar:32.cyan/238} step {pos} of {len} · {msg}")
            .progress_chars("━╸─"),
    );
    first.enable_steady_tick(REDRAW);
    let mut bars = vec![first];
    for _ in 0..rows {
        let bar = multi.add(ProgressBar::new_spinner());
        bar.set_style(style("    {wide_msg}"));
        bars.push(bar);
    }
    bars
}

/// Templates here are constants; should one be wrong, the default style still tells the state.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn write_line(elapsed: Duration, line: &str) {
    // DemoProgress is a courtesy: a closed stderr must not end the demo.
    let _ = writeln!(std::io::stderr().lock(), "{} {line}", clock(elapsed));
}

/// The rows below the bar.
fn rows(view: &View) -> Vec<String> {
    let spark = sparkline(&view.history, view.reward_max, SPARK_WIDTH);
    let mut policy = format!("policy     version {}", view.version);
    if let Some(kl) = view.kl {
        let _ = write!(policy, " · KL {kl:.3}");
    }
    let _ = write!(policy, " · trainer is {}", view.trainer);
    vec![
        format!("reward     {:<15}{spark}", reward(view)).trim_end().to_owned(),
        policy,
        format!("users      {}", traffic(&view.tally)),
    ]
}

/// The same in one line.
fn plain(view: &View) -> String {
    let kl = view.kl.map(|kl| format!(" · KL {kl:.3}")).unwrap_or_default();
    format!(
        "{:<10} step {} of {} · reward {} · version {}{kl} · {}",
        "learning",
        view.step,
        view.steps,
        reward(view),
        view.version,
        traffic(&view.tally)
    )
}

fn reward(view: &View) -> String {
    match view.tally.reward {
        Some(reward) => format!("{reward:.2} of {:.2}", view.reward_max),
        None => "–".to_owned(),
    }
}

fn traffic(tally: &UserTally) -> String {
    let mut text = format!("{}, {} failed", count(tally.requests, "request"), tally.failed);
    if tally.feedback > 0 {
        let up = percent(ratio(tally.thumbs_up, tally.feedback));
        let _ = write!(text, " · {} ({up} up)", count(tally.feedback, "thumb"));
    }
    if let Some(p50) = tally.overall().p50 {
        let _ = write!(text, " · first token {}", ms(Some(p50)));
    }
    text
}

fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// Values between 0 and `max` as at most `width` block characters, oldest first; more values than
/// that are averaged in equal shares.
pub fn sparkline(values: &[f64], max: f64, width: usize) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let cells = values.len().min(width);
    (0..cells)
        .map(|cell| {
            let share = &values[cell * values.len() / cells..(cell + 1) * values.len() / cells];
            let mean = share.iter().sum::<f64>() / share.len() as f64;
            let level = ((mean / max).clamp(0.0, 1.0) * 7.0).round() as usize;
            BLOCKS[level]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::tally::Board;
    use super::*;

    #[test]
    fn sparklines_rise_with_the_values() {
        assert_eq!(sparkline(&[0.0, 0.5, 1.0, 1.5], 1.5, 32), "▁▃▆█");
        assert_eq!(sparkline(&[], 1.5, 32), "");
        assert_eq!(sparkline(&[-1.0, 9.0, f64::NAN], 1.5, 32), "▁█▁");
    }

    #[test]
    fn long_histories_are_averaged_to_the_width() {
        let history: Vec<f64> = (0..64).map(|i| f64::from(i % 2)).collect();
        assert_eq!(sparkline(&history, 1.0, 4), "▅▅▅▅");
        for len in 0..200 {
            assert_eq!(sparkline(&vec![1.0; len], 1.0, 32).chars().count(), len.min(32));
        }
    }

    #[test]
    fn the_display_says_what_matters() {
        let board = Board::default();
        for index in 0..40 {
            board.asked();
            board.served(1.2, Duration::from_millis(8), false);
            board.thumb(index % 4 != 0);
        }
        let mut view =
            View { steps: 60, reward_max: 1.5, trainer: "waiting".into(), ..View::default() };
        insta::assert_snapshot!(rows(&view).join("\n"), @r"
        reward     –
        policy     version 0 · trainer is waiting
        users      0 requests, 0 failed
        ");
        view.history = vec![0.7, 0.8, 0.8, 1.0, 1.2];
        view.tally = board.read();
        view.kl = Some(0.0421);
        view.elapsed = Duration::from_secs(83);
        (view.step, view.version, view.trainer) = (5, 5, "training".into());
        insta::assert_snapshot!(rows(&view).join("\n"), @r"
        reward     1.20 of 1.50   ▄▅▅▆▇
        policy     version 5 · KL 0.042 · trainer is training
        users      40 requests, 0 failed · 40 thumbs (75 % up) · first token 8.0 ms
        ");
        insta::assert_snapshot!(plain(&view), @"learning   step 5 of 60 · reward 1.20 of 1.50 · version 5 · KL 0.042 · 40 requests, 0 failed · 40 thumbs (75 % up) · first token 8.0 ms");
    }
}
