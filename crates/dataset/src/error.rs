//! Errors of a dataset, which name the file, the line and the column.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Number of bad rows that an error or a report describes.
pub(crate) const DESCRIBED_ROWS: usize = 10;

/// Position of a row in its file, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowPlace {
    /// The line on which the row begins, in JSONL and CSV files.
    Line(u64),
    /// The number of the row, in JSON arrays and Parquet files.
    Row(u64),
}

impl RowPlace {
    /// The position in a dataset in which `rows` rows of earlier files precede the file.
    pub(crate) fn after(self, rows: u64) -> Self {
        match self {
            Self::Line(number) => Self::Line(number + rows),
            Self::Row(number) => Self::Row(number + rows),
        }
    }
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Row(number) => write!(f, "row {number}"),
        }
    }
}

/// An unusable row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRow {
    /// Position in the file.
    pub place: RowPlace,
    /// The invalid column, such as `messages[1].role`; `None` if the whole row is invalid.
    pub column: Option<String>,
    /// A phrase that continues the place or the column.
    pub reason: String,
}

impl BadRow {
    pub(crate) fn whole(place: RowPlace, reason: impl Into<String>) -> Self {
        Self { place, column: None, reason: reason.into() }
    }

    pub(crate) fn column(
        place: RowPlace,
        name: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        Self { place, column: Some(name.into()), reason: reason.into() }
    }

    /// As [`RowPlace::after`].
    pub(crate) fn after(self, rows: u64) -> Self {
        Self { place: self.place.after(rows), ..self }
    }
}

impl fmt::Display for BadRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.column {
            Some(column) => write!(f, "{}: `{column}` {}", self.place, self.reason),
            None => write!(f, "{}: {}", self.place, self.reason),
        }
    }
}

/// Why a dataset cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The file cannot be read, or has no prompt to train on.
    #[error("`{}`: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file has bad rows, and `dataset.on_bad_row` is `refuse`.
    #[error("{}", bad_rows(.path, *.total, .first))]
    BadRows {
        /// The file.
        path: PathBuf,
        /// Number of bad rows.
        total: u64,
        /// The first ten of them.
        first: Vec<BadRow>,
    },
    /// The file has no usable row.
    #[error("`{}` holds no prompt{}", .path.display(), all_bad(*.bad, .first))]
    Empty {
        /// The file.
        path: PathBuf,
        /// Number of bad rows.
        bad: u64,
        /// The first of them.
        first: Option<BadRow>,
    },
    /// A template or a filter of the configuration does not parse.
    #[error("{key} = {value:?}: {reason}")]
    Config {
        /// The configuration key.
        key: String,
        /// Its value.
        value: String,
        /// What is wrong.
        reason: String,
    },
    /// A saved sampler state belongs to another configuration.
    #[error("the saved position in the dataset cannot be resumed: {0}")]
    State(String),
}

fn bad_rows(path: &Path, total: u64, first: &[BadRow]) -> String {
    let path = path.display();
    if let ([only], 1) = (first, total) {
        return format!("`{path}`, {only}");
    }
    let mut text = format!("`{path}` has {total} bad rows");
    if total > first.len() as u64 {
        text += &format!(", the first {} of which are", first.len());
    }
    for bad in first {
        text += &format!("\n  {bad}");
    }
    text + "\ndataset.on_bad_row = \"skip\" leaves them out"
}

fn all_bad(bad: u64, first: &Option<BadRow>) -> String {
    match first {
        Some(first) => format!(": all of its {bad} rows are bad; {first}"),
        None => String::new(),
    }
}
