//! Progress on stderr: bars on a terminal, plain lines elsewhere.

use std::io::Write as _;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Time between two frames of a spinner.
const REDRAW: Duration = Duration::from_millis(120);

/// The bars of a terminal. Without a terminal only [`Self::note`] writes.
pub struct Progress {
    /// `None` without a terminal.
    screen: Option<MultiProgress>,
    bars: Vec<ProgressBar>,
}

impl Progress {
    /// No bars yet. `terminal` is whether stderr is a terminal.
    pub fn new(terminal: bool) -> Self {
        Self { screen: terminal.then(MultiProgress::new), bars: Vec::new() }
    }

    /// Whether bars are drawn. If not, callers write lines with [`Self::note`].
    pub fn has_bars(&self) -> bool {
        self.screen.is_some()
    }

    /// Replaces the bars with a spinner and a message.
    pub fn spin(&mut self, message: &str) {
        self.clear();
        self.add("  {spinner:.cyan} {msg}", 0);
        self.set_message(message);
    }

    /// Changes the message of the first bar.
    pub fn set_message(&self, message: &str) {
        if let Some(bar) = self.bars.first() {
            bar.set_message(message.to_owned());
        }
    }

    /// Shows a bar that is at `step` of `steps`, with a message beside it and `rows` below it.
    pub fn show(&mut self, step: u64, steps: u64, message: &str, rows: &[String]) {
        if self.bars.len() != rows.len() + 1 || self.bars[0].length() != Some(steps) {
            self.clear();
            self.add("  {spinner:.cyan} {bar:24.cyan/238} step {pos} of {len} · {wide_msg}", steps);
            rows.iter().for_each(|_| self.add("    {wide_msg}", 0));
        }
        let messages = std::iter::once(message).chain(rows.iter().map(String::as_str));
        for (bar, message) in self.bars.iter().zip(messages) {
            bar.set_message(message.to_owned());
        }
        self.bars.iter().take(1).for_each(|bar| bar.set_position(step));
    }

    /// Writes lines that stay, above the bars.
    pub fn note(&self, text: &str) {
        // Progress is optional: a closed stderr must not end the run.
        let write = || _ = writeln!(std::io::stderr().lock(), "{}", text.trim_end());
        match &self.screen {
            Some(screen) => screen.suspend(write),
            None => write(),
        }
    }

    /// Removes the bars.
    pub fn clear(&mut self) {
        for bar in self.bars.drain(..) {
            bar.finish_and_clear();
            if let Some(screen) = &self.screen {
                screen.remove(&bar);
            }
        }
    }

    fn add(&mut self, template: &str, steps: u64) {
        let Some(screen) = &self.screen else { return };
        let bar = screen.add(ProgressBar::new(steps));
        // The templates are constants; with an invalid one the default style still shows progress.
        let style = ProgressStyle::with_template(template)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("━╸─");
        bar.set_style(style);
        if self.bars.is_empty() {
            bar.enable_steady_tick(REDRAW);
        }
        self.bars.push(bar);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_have_hours_when_needed() {
        assert_eq!(clock(Duration::from_secs(59)), "0:59");
        assert_eq!(clock(Duration::from_secs(3599)), "59:59");
        assert_eq!(clock(Duration::from_secs(7384)), "2:03:04");
    }

    #[test]
    fn bars_follow_the_number_of_rows() {
        let mut progress = Progress::new(true);
        progress.spin("starting");
        progress.show(1, 9, "0:01", &["reward".to_owned()]);
        assert_eq!((progress.bars.len(), progress.bars[0].position()), (2, 1));
        progress.show(2, 9, "0:02", &[]);
        assert_eq!((progress.bars.len(), progress.bars[0].message()), (1, "0:02".to_owned()));
        progress.clear();
        assert!(progress.bars.is_empty());
    }

    #[test]
    fn without_a_terminal_there_are_no_bars() {
        let mut progress = Progress::new(false);
        progress.spin("starting");
        progress.show(1, 9, "0:01", &[]);
        assert!(!progress.has_bars() && progress.bars.is_empty());
    }
}
