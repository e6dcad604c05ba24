//! Errors of a dataset, which name the file, the line and the column.

use std::fmt;
use std::path::Path;

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

/// Why a dataset cannot be used: a sentence that names the file, or the configuration key and its value.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DatasetError(String);

impl DatasetError {
    /// The file cannot be read, or has no prompt to train on.
    pub(crate) fn file(path: &Path, reason: impl fmt::Display) -> Self {
        Self(format!("`{}`: {reason}", path.display()))
    }

    /// A template or a filter of the configuration does not parse.
    pub(crate) fn config(key: &str, value: &str, reason: impl fmt::Display) -> Self {
        Self(format!("{key} = {value:?}: {reason}"))
    }

    pub(crate) fn state(reason: impl fmt::Display) -> Self {
        Self(format!("the saved position in the dataset cannot be resumed: {reason}"))
    }

    /// The file has no usable row, and `bad` bad ones.
    pub(crate) fn empty(path: &Path, bad: u64, first: Option<&BadRow>) -> Self {
        let why = first.map(|first| format!(": all of its {bad} rows are bad; {first}"));
        Self(format!("`{}` holds no prompt{}", path.display(), why.unwrap_or_default()))
    }

    /// The file has `total` bad rows, of which these are the first ten, and `dataset.on_bad_row` is `refuse`.
    pub(crate) fn bad_rows(path: &Path, total: u64, first: &[BadRow]) -> Self {
        let path = path.display();
        if let ([only], 1) = (first, total) {
            return Self(format!("`{path}`, {only}"));
        }
        let mut text = format!("`{path}` has {total} bad rows");
        if total > first.len() as u64 {
            text += &format!(", the first {} of which are", first.len());
        }
        for bad in first {
            text += &format!("\n  {bad}");
        }
        Self(text + "\ndataset.on_bad_row = \"skip\" leaves them out")
    }
}
