//! What can be wrong with a dataset, in sentences that name the file, the line and the column.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// Bad rows that an error or a report shows.
pub const SHOWN: usize = 10;

/// Where a row stands in its file, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowPlace {
    /// The line on which the row begins: JSONL and CSV.
    Line(u64),
    /// The row's number: Parquet.
    Row(u64),
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Row(number) => write!(f, "row {number}"),
        }
    }
}

/// A row that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRow {
    /// Where it stands.
    pub place: RowPlace,
    /// The column at fault, as in `messages[1].role`; `None` when it is the row as a whole.
    pub column: Option<String>,
    /// What is wrong, as a phrase that continues the place or the column.
    pub reason: String,
}

impl BadRow {
    pub(super) fn whole(place: RowPlace, reason: impl Into<String>) -> Self {
        Self { place, column: None, reason: reason.into() }
    }

    pub(super) fn column(
        place: RowPlace,
        name: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        Self { place, column: Some(name.into()), reason: reason.into() }
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
    /// The file cannot be read at all.
    #[error("`{}`: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// There are bad rows, and `dataset.on_bad_row` is `refuse`.
    #[error("{}", bad_rows(.path, *.total, .first))]
    BadRows {
        /// The file.
        path: PathBuf,
        /// How many.
        total: u64,
        /// The first [`SHOWN`] of them.
        first: Vec<BadRow>,
    },
    /// No usable row is left.
    #[error("`{}` holds no prompt{}", .path.display(), all_bad(*.bad, .first))]
    Empty {
        /// The file.
        path: PathBuf,
        /// Rows that could not be used.
        bad: u64,
        /// The first of them.
        first: Option<BadRow>,
    },
    /// A template or a filter of the configuration does not parse.
    #[error("{key} = {value:?}: {reason}")]
    Config {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What is wrong.
        reason: String,
    },
    /// A saved position belongs to another configuration.
    #[error("the saved position in the dataset cannot be resumed: {0}")]
    State(String),
}

fn bad_rows(path: &std::path::Path, total: u64, first: &[BadRow]) -> String {
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
