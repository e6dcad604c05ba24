//! Opens a dataset: reads its files, checks every row and splits the prompts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::config::{DatasetConfig, OnBadRow};
use crate::curriculum::Curriculum;
use crate::error::{BadRow, DESCRIBED_ROWS, DatasetError};
use crate::prompt::{ANSWER, Prompt, PromptBuilder, PromptId, held_out, normalize};
use crate::read::{DatasetRow, FileFormat, read_rows};

/// Largest size of a row in bytes.
const MAX_ROW_BYTES: usize = 4 << 20;

/// A dataset that was read and split.
#[derive(Clone, Debug, Default)]
pub struct Dataset {
    /// Prompts to train on, in the file's order.
    pub train: Vec<Arc<Prompt>>,
    /// Prompts for evaluation, which are never trained on, in the file's order.
    pub held_out: Vec<Arc<Prompt>>,
    /// Statistics.
    pub report: DatasetReport,
}

/// Checks the templates and filters of a configuration without reading the file.
///
/// # Errors
/// The key, its value and the reason.
pub fn check(config: &DatasetConfig) -> Result<(), DatasetError> {
    PromptBuilder::new(config)?;
    Curriculum::new(&config.stages)?;
    Ok(())
}

impl Dataset {
    /// Reads `config.path`, and `config.eval_path` if it is set, or the files that replace them;
    /// checks every row and splits the prompts.
    ///
    /// # Errors
    /// If a file cannot be read or has no prompt. Also if a row is bad, unless `config.on_bad_row`
    /// is `skip`; all rows are read first, so that the error has the number of bad rows.
    pub fn open(config: &DatasetConfig) -> Result<Self, DatasetError> {
        let mut builder = PromptBuilder::new(config)?;
        Curriculum::new(&config.stages)?;
        let (prompts, mut report) = load(&config.path, &config.files, config, &mut builder)?;
        let has_eval_file = !config.eval_path.as_os_str().is_empty();
        let (held_ids, mut held_out) = if has_eval_file {
            // The first file provided the worked examples, so every row of this one is a prompt.
            let (separate, _) = load(&config.eval_path, &config.eval_files, config, &mut builder)?;
            (separate.iter().map(|prompt| prompt.id).collect(), separate)
        } else {
            let ids: BTreeSet<PromptId> = prompts.iter().map(|prompt| prompt.id).collect();
            (held_out(&ids, config.held_out, config.seed), Vec::new())
        };
        let (held, train): (Vec<_>, Vec<_>) =
            prompts.into_iter().partition(|prompt| held_ids.contains(&prompt.id));
        if has_eval_file {
            report.leaked = held.len();
        } else {
            held_out = held;
        }
        if train.is_empty() {
            let reason = "no prompt is left to train on: every prompt is held out";
            return Err(DatasetError::file(&config.path, reason));
        }
        (report.train, report.held_out) = (train.len(), held_out.len());
        Ok(Self { train, held_out, report })
    }
}

/// Reads the prompts of one file, or of the Parquet files that replace it.
fn load(
    path: &Path,
    files: &[PathBuf],
    config: &DatasetConfig,
    builder: &mut PromptBuilder,
) -> Result<(Vec<Arc<Prompt>>, DatasetReport), DatasetError> {
    let mut report = DatasetReport { path: path.to_owned(), ..DatasetReport::default() };
    let mut prompts: Vec<Arc<Prompt>> = Vec::new();
    let mut columns = BTreeSet::new();
    let mut visit = |row: Result<DatasetRow, BadRow>| {
        report.rows += 1;
        let used = row.and_then(|mut row| {
            report.replies += u64::from(normalize(&mut row, config));
            for name in row.columns.keys() {
                if !columns.contains(name) {
                    columns.insert(name.clone());
                }
            }
            if builder.needs_example() {
                builder.add_example(&row)?;
                report.few_shot += 1;
                return Ok(());
            }
            prompts.push(Arc::new(builder.prompt(&row)?));
            Ok(())
        });
        if let Err(bad) = used {
            report.bad += 1;
            if report.bad_rows.len() < DESCRIBED_ROWS {
                report.bad_rows.push(bad);
            }
        }
    };
    if files.is_empty() {
        let format = FileFormat::of(path);
        read_rows(path, format, MAX_ROW_BYTES, &mut visit).map_err(in_file(path))?;
    }
    let mut before = 0;
    for file in files {
        let mut rows = 0;
        let mut numbered = |row: Result<DatasetRow, BadRow>| {
            rows += 1;
            visit(row.map(|row| row.after(before)).map_err(|bad| bad.after(before)));
        };
        let format = FileFormat::Parquet;
        read_rows(file, format, MAX_ROW_BYTES, &mut numbered).map_err(in_file(file))?;
        before += rows;
    }
    let found = std::mem::take(&mut builder.extraction);
    (report.answers, report.unanswered) = (found.answers, found.missed);
    report.columns = columns.into_iter().collect();
    if report.bad == report.rows
        && let Some(reason) = missing_columns(config, &report.columns)
    {
        return Err(DatasetError::file(path, reason));
    }
    if let (Some(first), true) = (found.first_missed, report.answers.is_empty()) {
        return Err(DatasetError::file(path, format!("no row has an answer; {first}")));
    }
    let empty = || DatasetError::empty(path, report.bad, report.bad_rows.first());
    if report.bad == report.rows && is_one_fault(&report.bad_rows) {
        return Err(empty());
    }
    if report.bad > 0 && config.on_bad_row == OnBadRow::Refuse {
        return Err(DatasetError::bad_rows(path, report.bad, &report.bad_rows));
    }
    if prompts.is_empty() {
        return Err(empty());
    }
    count_duplicates(&prompts, &mut report);
    Ok((prompts, report))
}

/// The required columns that no row has, as a sentence.
fn missing_columns(config: &DatasetConfig, columns: &[String]) -> Option<String> {
    let has = |name: &String| columns.contains(name);
    let mut missing = Vec::new();
    let (messages, prompt) = (&config.messages_column, &config.prompt_column);
    if config.template.is_empty() && !has(messages) && !has(prompt) {
        missing.push(format!(
            "`{prompt}` (dataset.prompt_column) or `{messages}` (dataset.messages_column)"
        ));
    }
    let answer = &config.answer_column;
    if !answer.is_empty() && !has(answer) {
        missing.push(format!("`{answer}` (dataset.answer_column)"));
    }
    if missing.is_empty() || columns.is_empty() {
        return None;
    }
    let (missing, known) = (missing.join(", nor "), columns.join(", "));
    Some(format!("no row has the column {missing}; the columns are {known}"))
}

/// Whether all rows, of which there are several, are bad for the same reason.
fn is_one_fault(rows: &[BadRow]) -> bool {
    let same =
        |pair: &[BadRow]| (&pair[0].column, &pair[0].reason) == (&pair[1].column, &pair[1].reason);
    rows.len() > 1 && rows.windows(2).all(same)
}

fn in_file(path: &Path) -> impl FnOnce(String) -> DatasetError + '_ {
    |reason| DatasetError::file(path, reason)
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

// Statistics of a dataset: rows, bad rows and duplicates.

/// The result of reading and splitting a dataset.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DatasetReport {
    /// The file.
    pub path: PathBuf,
    /// Number of rows in the file, including bad rows but not blank lines.
    pub rows: u64,
    /// Number of bad rows.
    pub bad: u64,
    /// The first ten of them.
    pub bad_rows: Vec<BadRow>,
    /// Number of rows with the same conversation as an earlier row.
    pub duplicates: u64,
    /// Number of duplicates whose answer differs from that of the first such row.
    pub contradictions: u64,
    /// Number of conversations whose last reply was removed.
    pub replies: u64,
    /// The first three answers that `dataset.extract_answer` found.
    pub answers: Vec<String>,
    /// Number of rows in which it found none.
    pub unanswered: u64,
    /// Number of rows that became worked examples.
    pub few_shot: u64,
    /// Names of the columns, in alphabetical order.
    pub columns: Vec<String>,
    /// Number of prompts to train on.
    pub train: usize,
    /// Number of held-out prompts.
    pub held_out: usize,
    /// Number of prompts that were removed because the separate evaluation file contains them too.
    pub leaked: usize,
}

impl fmt::Display for DatasetReport {
    /// One line for a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (train, held_out) = (self.train, self.held_out);
        write!(f, "{}: {train} prompts to train on, {held_out} held out", self.path.display())?;
        for (count, what) in [
            (self.bad, "bad rows left out"),
            (self.duplicates, "duplicates"),
            (self.contradictions, "of them with another answer"),
            (self.replies, "conversations without their last reply"),
            (self.few_shot, "examples"),
            (self.leaked as u64, "left out because the evaluation file has them"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}
