//! `hone db inspect`: browses the ledger of a stopped daemon in the terminal.
//!
//! Each page is a list or a text. Enter opens what is selected as a further page, and Esc returns. [`render`] draws a
//! page and reads nothing else.

use std::io;

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Table, TableState, Wrap};

use hone_core::text::shortened;
use hone_core::types::{PolicyVersion, Sample, SampleOrigin, UnixMillis};
use hone_report::terminal::{MISSING, one_line};
use hone_store::{Ledger, StoreError};

/// Completions of a list, the newest ones.
const LISTED: usize = 1000;
/// Lines of Page Up and Page Down.
const PAGE: usize = 20;

const HELP: &str =
    " ↑↓ PgUp PgDn select   Enter open   Esc back   1 versions  2 steps  3 completions   q quit ";

/// What a row of a list opens.
#[derive(Clone, Debug)]
enum RowTarget {
    Version(PolicyVersion),
    Step(u64),
    Sample(Box<Sample>),
}

/// The content of a page.
#[derive(Debug)]
enum Content {
    List { header: Vec<&'static str>, widths: Vec<u16>, rows: Vec<(Vec<String>, RowTarget)> },
    Text(Vec<Line<'static>>),
}

/// What the terminal shows.
#[derive(Debug)]
struct ShownPage {
    title: String,
    content: Content,
    /// The selected row, or the first visible line.
    position: usize,
}

impl ShownPage {
    fn new(title: impl Into<String>, content: Content) -> Self {
        Self { title: title.into(), content, position: 0 }
    }

    fn last(&self) -> usize {
        let length = match &self.content {
            Content::List { rows, .. } => rows.len(),
            Content::Text(lines) => lines.len(),
        };
        length.saturating_sub(1)
    }
}

/// The pages that were opened; the last one is shown.
pub(crate) struct Inspector {
    ledger: Ledger,
    pages: Vec<ShownPage>,
}

impl Inspector {
    /// Starts with the list of versions.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub(crate) fn new(ledger: Ledger) -> Result<Self, StoreError> {
        let first = versions(&ledger)?;
        Ok(Self { ledger, pages: vec![first] })
    }

    /// Runs until the user quits.
    ///
    /// # Errors
    /// If the terminal or the ledger cannot be read.
    pub(crate) fn run(mut self) -> anyhow::Result<()> {
        let mut terminal = ratatui::try_init()?;
        let done = self.show(&mut terminal);
        ratatui::try_restore()?;
        done
    }

    fn show(&mut self, terminal: &mut ratatui::DefaultTerminal) -> anyhow::Result<()> {
        while let Some(page) = self.pages.last() {
            terminal.draw(|frame| render(frame, page))?;
            match event::read() {
                Ok(Event::Key(key)) if key.kind != KeyEventKind::Release => self.press(key.code)?,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Applies a key. No page is left after the last one was closed.
    fn press(&mut self, key: KeyCode) -> Result<(), StoreError> {
        let Some(page) = self.pages.last_mut() else { return Ok(()) };
        let (at, last) = (page.position, page.last());
        match key {
            KeyCode::Up | KeyCode::Char('k') => page.position = at.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => page.position = last.min(at + 1),
            KeyCode::PageUp => page.position = at.saturating_sub(PAGE),
            KeyCode::PageDown => page.position = last.min(at + PAGE),
            KeyCode::Home => page.position = 0,
            KeyCode::End => page.position = last,
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left => drop(self.pages.pop()),
            KeyCode::Char('q') => self.pages.clear(),
            KeyCode::Char('1') => self.pages = vec![versions(&self.ledger)?],
            KeyCode::Char('2') => self.pages = vec![steps(&self.ledger)?],
            KeyCode::Char('3') => self.pages = vec![completions(&self.ledger, None)?],
            KeyCode::Enter | KeyCode::Right => {
                if let Content::List { rows, .. } = &page.content
                    && let Some((_, target)) = rows.get(at)
                {
                    let opened = match target {
                        RowTarget::Version(version) => completions(&self.ledger, Some(*version))?,
                        RowTarget::Step(step) => completions_of_step(&self.ledger, *step)?,
                        RowTarget::Sample(sample) => completion(&self.ledger, sample)?,
                    };
                    self.pages.push(opened);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Draws a page.
fn render(frame: &mut Frame<'_>, page: &ShownPage) {
    let [body, help] =
        Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(frame.area());
    let block = Block::bordered().title(format!(" {} ", page.title).bold());
    match &page.content {
        Content::List { header, widths, rows } => {
            let cells = rows.iter().map(|(cells, _)| Row::new(cells.iter().map(String::as_str)));
            let fixed = widths.iter().map(|width| Constraint::Length(*width));
            let table = Table::new(cells, fixed.chain([Constraint::Min(10)]))
                .header(Row::new(header.iter().copied()).style(Style::new().bold()))
                .row_highlight_style(Style::new().reversed())
                .block(block);
            let mut state = TableState::new().with_selected(Some(page.position));
            frame.render_stateful_widget(table, body, &mut state);
        }
        Content::Text(lines) => {
            let shown = lines.get(page.position..).unwrap_or_default().to_vec();
            let text = Paragraph::new(shown).wrap(Wrap { trim: false }).block(block);
            frame.render_widget(text, body);
        }
    }
    frame.render_widget(Line::from(HELP).dim(), help);
}

// The pages.

fn versions(ledger: &Ledger) -> Result<ShownPage, StoreError> {
    let rows = ledger.policies()?.into_iter().rev().map(|record| {
        let checks = record.checks.iter().filter(|check| !check.passed).map(|check| &*check.name);
        let notes = record.reason.as_deref().into_iter().chain(checks).collect::<Vec<_>>();
        let cells = vec![
            record.version.to_string(),
            record.parent.map_or_else(|| MISSING.to_owned(), |parent| parent.to_string()),
            record.step.to_string(),
            record.state.as_str().to_owned(),
            number(record.metrics.get("reward_mean").copied()),
            date(record.created),
            one_line(&notes.join(", ")),
        ];
        (cells, RowTarget::Version(record.version))
    });
    let header = vec!["version", "parent", "step", "state", "reward", "made", "why"];
    let content = Content::List { header, widths: vec![7, 7, 7, 11, 7, 19], rows: rows.collect() };
    Ok(ShownPage::new("versions (Enter: their completions)", content))
}

fn steps(ledger: &Ledger) -> Result<ShownPage, StoreError> {
    let rows = ledger.steps(0, usize::MAX)?.into_iter().rev().map(|record| {
        let metric = |name: &str| number(record.metrics.get(name).copied());
        let cells = vec![
            record.step.to_string(),
            record.groups.len().to_string(),
            metric("reward_mean"),
            metric("kl"),
            metric("entropy"),
            date(record.created),
        ];
        (cells, RowTarget::Step(record.step))
    });
    let header = vec!["step", "groups", "reward", "KL", "entropy", "ended"];
    let content = Content::List { header, widths: vec![7, 7, 9, 9, 9], rows: rows.collect() };
    Ok(ShownPage::new("steps (Enter: their completions)", content))
}

fn completions(ledger: &Ledger, version: Option<PolicyVersion>) -> Result<ShownPage, StoreError> {
    let samples = ledger.newest_samples(version, LISTED)?;
    let of = version.map(|version| format!(" of version {version}")).unwrap_or_default();
    let title = match samples.len() {
        LISTED => format!("the newest {LISTED} completions{of}"),
        count => format!("{count} completions{of}"),
    };
    list(ledger, title, samples)
}

fn completions_of_step(ledger: &Ledger, step: u64) -> Result<ShownPage, StoreError> {
    let mut samples = Vec::new();
    for record in ledger.steps(step, 1)? {
        for id in record.groups {
            for member in ledger.group(id)?.map(|group| group.members).unwrap_or_default() {
                samples.extend(ledger.sample(member)?);
            }
        }
    }
    list(ledger, format!("{} completions of step {step}", samples.len()), samples)
}

fn list(ledger: &Ledger, title: String, samples: Vec<Sample>) -> Result<ShownPage, StoreError> {
    let mut rows = Vec::with_capacity(samples.len());
    for sample in samples {
        let rewards = ledger.rewards_of(sample.id)?;
        let values: Vec<f64> = rewards.iter().filter_map(|reward| reward.value).collect();
        let total = (!values.is_empty()).then(|| values.iter().sum());
        let cells = vec![
            date(sample.created),
            sample.version.to_string(),
            origin(&sample).to_owned(),
            sample.ids.len().to_string(),
            number(total),
            shortened(&one_line(&sample.text), 300).into_owned(),
        ];
        rows.push((cells, RowTarget::Sample(Box::new(sample))));
    }
    let header = vec!["sampled", "version", "origin", "tokens", "reward", "text"];
    let content = Content::List { header, widths: vec![19, 7, 10, 6, 7], rows };
    Ok(ShownPage::new(title, content))
}

fn completion(ledger: &Ledger, sample: &Sample) -> Result<ShownPage, StoreError> {
    let mut lines = Vec::new();
    let mut add = |heading: &str, text: &str| {
        lines.push(Line::from(heading.to_owned()).bold());
        lines.extend(text.lines().map(|line| Line::from(one_line(line))));
        lines.push(Line::default());
    };
    let interaction = ledger.interaction(sample.interaction)?;
    for message in interaction.iter().flat_map(|prompt| &prompt.messages) {
        add(message.role.as_str(), &message.content);
    }
    add("completion", &sample.text);
    let mut rewards = String::new();
    for reward in ledger.rewards_of(sample.id)? {
        let comment = reward.comment.as_deref().map(|c| format!("  {c}")).unwrap_or_default();
        rewards += &format!("{}  {}{comment}\n", reward.name, number(reward.value));
    }
    add("rewards", if rewards.is_empty() { MISSING } else { &rewards });
    let mean = sample.logprobs.iter().map(|logprob| f64::from(*logprob)).sum::<f64>()
        / sample.logprobs.len() as f64;
    let route = interaction.as_ref().map_or(MISSING, |prompt| &prompt.route);
    let id = interaction.as_ref().map_or_else(|| MISSING.to_owned(), |p| p.completion_id());
    let unused = sample.untrainable.as_deref().unwrap_or("none");
    add(
        "record",
        &format!(
            "id  {id}\nroute  {route}\nversion  {}\norigin  {}, choice {}\nsampled  {}\ntokens  {}, ended by \
             {:?}\nmean log-probability  {}\nuntrainable  {unused}",
            sample.version,
            origin(sample),
            sample.choice,
            date(sample.created),
            sample.ids.len(),
            sample.finish,
            number(Some(mean)),
        ),
    );
    Ok(ShownPage::new("completion", Content::Text(lines)))
}

fn origin(sample: &Sample) -> &'static str {
    match sample.origin {
        SampleOrigin::Served => "served",
        SampleOrigin::Shadow => "shadow",
        SampleOrigin::Correction => "correction",
    }
}

fn number(value: Option<f64>) -> String {
    let finite = value.filter(|value| value.is_finite());
    finite.map_or_else(|| MISSING.to_owned(), |value| format!("{value:.3}"))
}

/// `2023-11-14 22:13:20`, in UTC.
fn date(time: UnixMillis) -> String {
    let known = i64::try_from(time).ok().and_then(chrono::DateTime::from_timestamp_millis);
    known.map_or_else(|| MISSING.to_owned(), |time| time.format("%Y-%m-%d %H:%M:%S").to_string())
}

#[cfg(test)]
mod tests;
