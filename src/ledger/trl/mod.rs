//! `hone db export` with `--columns`: completions in the columns of TRL's dataset formats, which `datasets` reads.
//!
//! Prompts and completions are conversations: lists of `{role, content}`. A row is left out, and counted, if its prompt
//! is kept for exams, if it has calls of tools, which these columns cannot express, or if nothing rates it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;

use clap::ValueEnum;
use serde_json::{Value, json};

use hone_core::types::{Interaction, Message, Role, Sample, SampleId, SampleOrigin};
use hone_store::Ledger;

use super::parquet::ParquetRows;
use super::row::{Cell, TrlColumns, TrlRow};

/// Prompts that are read at once.
const PAGE: usize = 256;

/// The form of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TableFormat {
    /// A JSON object per line
    #[default]
    Jsonl,
    /// Parquet
    Parquet,
}

/// What to export.
#[derive(Clone, Debug)]
pub(crate) struct TrlExport {
    pub(crate) columns: TrlColumns,
    pub(crate) format: TableFormat,
    /// The reward part that counts; `None` for the sum of all parts.
    pub(crate) part: Option<String>,
    /// The largest reward whose label is false.
    pub(crate) threshold: f64,
}

/// How many rows were written, and how many completions or prompts were left out, by reason.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TrlCounts {
    pub(crate) rows: u64,
    pub(crate) left_out: BTreeMap<&'static str, u64>,
}

impl TrlCounts {
    fn leave_out(&mut self, reason: &'static str) {
        *self.left_out.entry(reason).or_default() += 1;
    }
}

impl fmt::Display for TrlCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows written", self.rows)?;
        for (reason, count) in &self.left_out {
            write!(f, "; {count} {reason}")?;
        }
        Ok(())
    }
}

/// Where rows are written.
enum Sink<W: Write + Send> {
    Lines(W),
    Parquet(Box<ParquetRows<W>>),
}

impl TrlExport {
    /// Writes all rows, oldest prompt first.
    ///
    /// # Errors
    /// If the ledger cannot be read or `out` cannot be written.
    pub(crate) fn write(
        &self,
        ledger: &Ledger,
        out: impl Write + Send,
    ) -> anyhow::Result<TrlCounts> {
        let mut counts = TrlCounts::default();
        let mut sink = match self.format {
            TableFormat::Jsonl => Sink::Lines(out),
            TableFormat::Parquet => Sink::Parquet(Box::new(ParquetRows::new(out, self.columns)?)),
        };
        let mut last = None;
        loop {
            let page = ledger.interactions_after(last, PAGE)?;
            let Some(newest) = page.last() else { break };
            last = Some(newest.id);
            for interaction in &page {
                for row in self.rows(ledger, interaction, &mut counts)? {
                    counts.rows += 1;
                    match &mut sink {
                        Sink::Lines(out) => writeln!(out, "{}", json_row(row))?,
                        Sink::Parquet(file) => file.add(row)?,
                    }
                }
            }
        }
        match sink {
            Sink::Lines(mut out) => out.flush()?,
            Sink::Parquet(file) => file.finish()?,
        }
        Ok(counts)
    }

    fn rows(
        &self,
        ledger: &Ledger,
        interaction: &Interaction,
        counts: &mut TrlCounts,
    ) -> anyhow::Result<Vec<TrlRow>> {
        if interaction.held_out {
            counts.leave_out("prompts held out for exams");
            return Ok(Vec::new());
        }
        if interaction.messages.iter().any(|message| !message.tool_calls.is_empty()) {
            counts.leave_out("prompts with calls of tools");
            return Ok(Vec::new());
        }
        let (mut rated, mut corrections) = (Vec::new(), Vec::new());
        let samples = ledger.samples_of(interaction.id)?;
        for sample in &samples {
            if sample.origin == SampleOrigin::Correction {
                corrections.push(sample);
            } else if let Some(reward) = self.reward(ledger, sample.id)? {
                rated.push((sample, reward));
            } else {
                counts.leave_out("completions without a reward");
            }
        }
        let row = |cells: Vec<(&'static str, Cell)>, sample: &Sample| {
            let version = i64::try_from(sample.version.0).unwrap_or(i64::MAX);
            let mut row = vec![("prompt", Cell::Conversation(interaction.messages.clone()))];
            row.extend(cells);
            row.push(("version", Cell::Integer(version)));
            row.push(("completion_id", Cell::Text(interaction.completion_id())));
            row
        };
        let pair = |chosen: &Sample, rejected: &Sample| {
            row(vec![("chosen", answer(chosen)), ("rejected", answer(rejected))], rejected)
        };
        Ok(match self.columns {
            TrlColumns::Reward => {
                let cells = |(sample, reward): &(&Sample, f64)| {
                    row(
                        vec![("completion", answer(sample)), ("reward", Cell::Number(*reward))],
                        sample,
                    )
                };
                rated.iter().map(cells).collect()
            }
            TrlColumns::Label => {
                let label = |reward: f64| Cell::Flag(reward > self.threshold);
                let cells = |(sample, reward): &(&Sample, f64)| {
                    row(vec![("completion", answer(sample)), ("label", label(*reward))], sample)
                };
                rated.iter().map(cells).collect()
            }
            TrlColumns::Preference => {
                let corrected = corrections.iter().filter_map(|correction| {
                    let original = samples.iter().find(|sample| {
                        sample.origin == SampleOrigin::Served && sample.choice == correction.choice
                    })?;
                    (original.text != correction.text).then(|| pair(correction, original))
                });
                let mut rows: Vec<TrlRow> = corrected.collect();
                rated.sort_by(|a, b| a.1.total_cmp(&b.1));
                if let (Some(worst), Some(best)) = (rated.first(), rated.last())
                    && best.1 > worst.1
                    && best.0.text != worst.0.text
                {
                    rows.push(pair(best.0, worst.0));
                }
                rows
            }
        })
    }

    /// The reward of a completion; `None` without a finite value.
    fn reward(&self, ledger: &Ledger, sample: SampleId) -> anyhow::Result<Option<f64>> {
        let parts = ledger.rewards_of(sample)?;
        let counted =
            parts.iter().filter(|part| self.part.as_ref().is_none_or(|p| *p == part.name));
        let values: Vec<f64> = counted.filter_map(|part| part.value).collect();
        Ok(Some(values.iter().sum::<f64>()).filter(|sum| !values.is_empty() && sum.is_finite()))
    }
}

/// A completion as a conversation of one message.
fn answer(sample: &Sample) -> Cell {
    Cell::Conversation(vec![Message::new(Role::Assistant, sample.text.clone())])
}

fn json_row(row: TrlRow) -> Value {
    let value = |cell| match cell {
        Cell::Conversation(messages) => {
            let turn = |message: Message| json!({"role": message.role.as_str(), "content": message.content});
            messages.into_iter().map(turn).collect()
        }
        Cell::Text(text) => Value::from(text),
        Cell::Number(number) => Value::from(number),
        Cell::Integer(number) => Value::from(number),
        Cell::Flag(flag) => Value::from(flag),
    };
    Value::Object(row.into_iter().map(|(name, cell)| (name.to_owned(), value(cell))).collect())
}

#[cfg(test)]
mod tests;
