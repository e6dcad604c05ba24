//! Prompts from files: read and checked whole at start, split, and drawn in an order that a run can
//! resume.
//!
//! ```text
//! file -> read (rows) -> prompt (conversation + metadata) -> split -> train    -> PromptSampler -> draws
//!                                                              '---> held_out         ^- outcomes
//! ```
//!
//! Invariants: a prompt is never both trained on and held out; the same file, configuration and
//! saved state draw the same prompts; no content of a file makes this panic.

mod config;
mod curriculum;
mod error;
mod filter;
mod mix;
mod outcome;
mod prompt;
mod read;
mod report;
mod sampler;
mod split;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use hone_core::types::Message;

pub use config::{
    DatasetConfig, DatasetFormat, DifficultyConfig, FewShot, MixConfig, OnBadRow, SamplingStrategy,
    StageConfig,
};
pub use curriculum::{Curriculum, LearningRate, Stage};
pub use error::{BadRow, DatasetError, RowPlace, SHOWN};
pub use filter::Filter;
pub use mix::LiveMix;
pub use outcome::PromptOutcome;
pub use prompt::{ANSWER, Prompt, PromptId};
pub use report::{DatasetReport, LengthStats};
pub use sampler::{Draw, PromptSampler, PromptSamplerState};

/// A dataset that has been read and split.
#[derive(Clone, Debug, Default)]
pub struct Dataset {
    /// Prompts to train on, in the file's order.
    pub train: Vec<Arc<Prompt>>,
    /// Prompts that are never trained on, in the file's order.
    pub held_out: Vec<Arc<Prompt>>,
    /// What was found.
    pub report: DatasetReport,
}

/// Checks what the configuration says without reading a file: templates and filters.
///
/// # Errors
/// [`DatasetError::Config`] with the key, its value and the reason.
pub fn check(config: &DatasetConfig) -> Result<(), DatasetError> {
    prompt::PromptBuilder::new(config)?;
    Curriculum::new(&config.stages)?;
    Ok(())
}

impl Dataset {
    /// Reads `config.path`, and `config.eval_path` where there is one, checks every row and splits.
    ///
    /// # Errors
    /// If a file cannot be read or holds no prompt, and, unless `config.on_bad_row` is `skip`, if
    /// any row is bad; then all rows are read first, so that the error can say how many.
    pub fn open(config: &DatasetConfig) -> Result<Self, DatasetError> {
        check(config)?;
        let mut builder = prompt::PromptBuilder::new(config)?;
        let (prompts, mut report) = load(&config.path, config, &mut builder)?;
        let separate = !config.eval_path.as_os_str().is_empty();
        let (held_ids, mut held_out) = if separate {
            // The examples are those of the first file; every row of this one is asked.
            let (held, _) = load(&config.eval_path, config, &mut builder)?;
            (held.iter().map(|prompt| prompt.id).collect(), held)
        } else {
            let ids: BTreeSet<PromptId> = prompts.iter().map(|prompt| prompt.id).collect();
            (split::held_out(&ids, config.held_out, config.seed), Vec::new())
        };
        let (taken, train): (Vec<_>, Vec<_>) =
            prompts.into_iter().partition(|prompt| held_ids.contains(&prompt.id));
        if separate {
            report.leaked = taken.len();
        } else {
            held_out = taken;
        }
        if train.is_empty() {
            return Err(DatasetError::File {
                path: config.path.clone(),
                reason: "nothing is left to train on: every prompt is held out".to_owned(),
            });
        }
        (report.train, report.held_out) = (train.len(), held_out.len());
        Ok(Self { train, held_out, report })
    }

    /// Measures every prompt with `tokens` and leaves out those of more than `limit` tokens and
    /// those that it refuses, on both sides. The result stands in `report.lengths` too.
    ///
    /// # Errors
    /// If no prompt to train on is left.
    pub fn measure<E: std::fmt::Display>(
        &mut self,
        mut tokens: impl FnMut(&[Message]) -> Result<usize, E>,
        limit: usize,
    ) -> Result<(), DatasetError> {
        let (mut lengths, mut too_long) = (Vec::new(), 0);
        let (mut refused, mut first_refusal) = (0, None);
        for side in [&mut self.train, &mut self.held_out] {
            side.retain(|prompt| match tokens(&prompt.messages) {
                Ok(length) => {
                    lengths.push(length);
                    too_long += usize::from(length > limit);
                    length <= limit
                }
                Err(error) => {
                    refused += 1;
                    first_refusal.get_or_insert_with(|| format!("{}: {error}", prompt.place));
                    false
                }
            });
        }
        (self.report.train, self.report.held_out) = (self.train.len(), self.held_out.len());
        self.report.lengths = LengthStats::of(lengths).map(|stats| LengthStats {
            too_long,
            refused,
            first_refusal: first_refusal.clone(),
            ..stats
        });
        if !self.train.is_empty() {
            return Ok(());
        }
        let reason = match first_refusal {
            Some(first) if too_long == 0 => {
                format!("the model's template refuses every prompt: {first}")
            }
            _ => format!("no prompt to train on has {limit} tokens or fewer"),
        };
        Err(DatasetError::File { path: self.report.path.clone(), reason })
    }
}

/// Reads one file to prompts.
fn load(
    path: &Path,
    config: &DatasetConfig,
    builder: &mut prompt::PromptBuilder,
) -> Result<(Vec<Arc<Prompt>>, DatasetReport), DatasetError> {
    let mut report = DatasetReport { path: path.to_owned(), ..DatasetReport::default() };
    let mut prompts: Vec<Arc<Prompt>> = Vec::new();
    let mut columns = BTreeSet::new();
    let mut visit = |row: Result<read::DatasetRow, BadRow>| {
        report.rows += 1;
        let used = row.and_then(|row| {
            for name in row.columns.keys() {
                if !columns.contains(name) {
                    columns.insert(name.clone());
                }
            }
            if builder.rows_wanted() > 0 {
                builder.add_example(&row)?;
                report.few_shot += 1;
                return Ok(());
            }
            prompts.push(Arc::new(builder.prompt(&row)?));
            Ok(())
        });
        if let Err(bad) = used {
            report.bad += 1;
            if report.bad_rows.len() < SHOWN {
                report.bad_rows.push(bad);
            }
        }
    };
    read::rows(path, config.format, config.max_row_bytes, &mut visit)
        .map_err(|reason| DatasetError::File { path: path.to_owned(), reason })?;
    let path = path.to_owned();
    if report.bad > 0 && config.on_bad_row == OnBadRow::Refuse {
        return Err(DatasetError::BadRows { path, total: report.bad, first: report.bad_rows });
    }
    if prompts.is_empty() {
        let first = report.bad_rows.first().cloned();
        return Err(DatasetError::Empty { path, bad: report.bad, first });
    }
    report.columns = columns.into_iter().collect();
    count_duplicates(&prompts, &mut report);
    Ok((prompts, report))
}

fn count_duplicates(prompts: &[Arc<Prompt>], report: &mut DatasetReport) {
    let mut first: BTreeMap<PromptId, Option<&String>> = BTreeMap::new();
    for prompt in prompts {
        let answer = prompt.metadata.get(ANSWER);
        match first.get(&prompt.id) {
            None => {
                first.insert(prompt.id, answer);
            }
            Some(earlier) => {
                report.duplicates += 1;
                report.contradictions += u64::from(*earlier != answer);
            }
        }
    }
}

/// Texts as they are, anything else as JSON.
fn plain(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
