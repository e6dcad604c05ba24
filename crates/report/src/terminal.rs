//! Text on the terminal: progress on stderr, tables, and texts of models as visible characters.

use std::io::Write as _;
use std::time::Duration;

use comfy_table::{CellAlignment, Row, Table, presets};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Shown for a missing value.
pub const MISSING: &str = "–";

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

// Tables.

/// A table without borders. The columns after the first `texts` are aligned to the right.
pub fn table<H: Into<Row>, R: Into<Row>>(
    head: H,
    rows: impl IntoIterator<Item = R>,
    texts: usize,
) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(head).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(index > 0), 1));
        if index >= texts {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The lines of a table without spaces at their ends, each with a line end.
pub fn shown(table: &Table) -> String {
    table.trim_fmt() + "\n"
}

/// A table as Markdown, with line ends. Its cells must be escaped.
pub fn markdown(mut table: Table) -> String {
    table.column_iter_mut().for_each(|column| _ = column.set_padding((1, 1)));
    shown(table.load_preset(presets::ASCII_MARKDOWN))
}

/// Values between `low` and `high` as at most `width` block characters, oldest first. More values are
/// averaged in equal shares.
pub fn sparkline(values: &[f64], low: f64, high: f64, width: usize) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let cells = values.len().min(width);
    (0..cells)
        .map(|cell| {
            let share = &values[cell * values.len() / cells..(cell + 1) * values.len() / cells];
            let mean = share.iter().sum::<f64>() / share.len() as f64;
            let level = (((mean - low) / (high - low)).clamp(0.0, 1.0) * 7.0).round() as usize;
            BLOCKS[level]
        })
        .collect()
}

// Texts of models. Control characters, which could control the terminal, are shown as symbols, and marks
// that reorder text are left out.

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
    let mut used = 0;
    let fits = |c: &char| {
        used += c.width().unwrap_or(0);
        used < width
    };
    let head: String = text.chars().take_while(fits).collect();
    if width == 0 { head } else { head + "…" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_never_reach_the_terminal() {
        assert_eq!(one_line(" a\r\nb\tc\u{1b}[0m\u{9b}2J\u{202e}d "), "a⏎b c␛[0m\u{fffd}2Jd");
    }

    #[test]
    fn columns_are_cut_and_clocks_have_hours_when_needed() {
        assert_eq!(cut("日本語", 6), "日本語");
        assert_eq!(cut("日本語", 5), "日本…");
        assert_eq!(cut("日本語", 4), "日…");
        assert_eq!(cut("abc", 0), "");
        assert_eq!(clock(Duration::from_secs(59)), "0:59");
        assert_eq!(clock(Duration::from_secs(3599)), "59:59");
        assert_eq!(clock(Duration::from_secs(7384)), "2:03:04");
    }

    #[test]
    fn sparklines_rise_and_average_long_histories() {
        assert_eq!(sparkline(&[0.0, 0.5, 1.0, 1.5], 0.0, 1.5, 32), "▁▃▆█");
        assert_eq!(sparkline(&[], 0.0, 1.5, 32), "");
        assert_eq!(sparkline(&[-1.0, 9.0, f64::NAN], 0.0, 1.5, 32), "▁█▁");
        assert_eq!(sparkline(&[2.0, 3.0, 4.0], 2.0, 4.0, 32), "▁▅█");
        let history: Vec<f64> = (0..64).map(|i| f64::from(i % 2)).collect();
        assert_eq!(sparkline(&history, 0.0, 1.0, 4), "▅▅▅▅");
        for len in 0..200 {
            assert_eq!(sparkline(&vec![1.0; len], 0.0, 1.0, 32).chars().count(), len.min(32));
        }
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
