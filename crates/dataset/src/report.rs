//! Statistics of a dataset: rows, bad rows, duplicates, lengths.

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
    /// Lengths of the prompts, once [`Dataset::measure`](crate::Dataset::measure) has run.
    pub lengths: Option<LengthStats>,
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
            (self.few_shot, "examples"),
            (self.leaked as u64, "left out because the evaluation file has them"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        match &self.lengths {
            Some(lengths) => write!(f, "; {lengths}"),
            None => Ok(()),
        }
    }
}

/// Lengths of the prompts in tokens, including prompts that are too long.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LengthStats {
    /// Number of measured prompts.
    pub measured: usize,
    /// The smallest length.
    pub min: usize,
    /// The mean length.
    pub mean: f64,
    /// The median (nearest rank).
    pub p50: usize,
    /// The 95th percentile (nearest rank).
    pub p95: usize,
    /// The largest length.
    pub max: usize,
    /// Number of prompts above the limit, which were removed.
    pub too_long: usize,
    /// Number of prompts that the model's template or tokenizer refused, which were removed.
    pub refused: usize,
    /// Why the first of them was refused.
    pub first_refusal: Option<String>,
}

impl LengthStats {
    /// The statistics of lengths in any order; `None` if there are none.
    pub(crate) fn of(mut lengths: Vec<usize>) -> Option<Self> {
        lengths.sort_unstable();
        let count = lengths.len();
        // Nearest rank: the `ceil(q n)`-th smallest, counted from 1.
        let rank = |percent: usize| lengths.get((percent * count).div_ceil(100).max(1) - 1);
        let (p50, p95) = (*rank(50)?, *rank(95)?);
        Some(Self {
            measured: count,
            min: *lengths.first()?,
            mean: lengths.iter().map(|length| *length as f64).sum::<f64>() / count as f64,
            p50,
            p95,
            max: *lengths.last()?,
            too_long: 0,
            refused: 0,
            first_refusal: None,
        })
    }
}

impl fmt::Display for LengthStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { min, mean, p50, p95, max, .. } = self;
        write!(f, "tokens min {min}, mean {mean:.1}, p50 {p50}, p95 {p95}, max {max}")?;
        if self.too_long > 0 {
            write!(f, ", {} too long", self.too_long)?;
        }
        if self.refused > 0 {
            write!(f, ", {} refused by the model's template", self.refused)?;
        }
        Ok(())
    }
}
