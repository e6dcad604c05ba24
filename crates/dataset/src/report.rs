//! Statistics of a dataset: rows, bad rows and duplicates.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::error::BadRow;

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
