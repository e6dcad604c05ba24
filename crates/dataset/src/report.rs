//! What was found in a dataset: rows, bad rows, duplicates, lengths.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::error::BadRow;

/// What reading and splitting found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DatasetReport {
    /// The file.
    pub path: PathBuf,
    /// Rows in the file, bad ones included, blank lines not.
    pub rows: u64,
    /// Rows that cannot be used.
    pub bad: u64,
    /// The first of them, at most [`super::SHOWN`].
    pub bad_rows: Vec<BadRow>,
    /// Rows whose conversation an earlier row has already.
    pub duplicates: u64,
    /// Those of them whose answer is another one than the earlier row's.
    pub contradictions: u64,
    /// Rows that became worked examples.
    pub few_shot: u64,
    /// The columns' names, in alphabetical order.
    pub columns: Vec<String>,
    /// Prompts to train on.
    pub train: usize,
    /// Prompts that are never trained on.
    pub held_out: usize,
    /// Prompts of the file that were left out because the separate evaluation file has them too.
    pub leaked: usize,
    /// Lengths, once they have been measured.
    pub lengths: Option<LengthStats>,
}

impl fmt::Display for DatasetReport {
    /// One line for people.
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

/// Lengths of the prompts in tokens, those that are left out included.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LengthStats {
    /// Prompts that were measured.
    pub measured: usize,
    /// The shortest.
    pub min: usize,
    /// The mean.
    pub mean: f64,
    /// The median: the smallest length that half of the prompts do not exceed (nearest rank).
    pub p50: usize,
    /// The smallest length that 95 % of the prompts do not exceed (nearest rank).
    pub p95: usize,
    /// The longest.
    pub max: usize,
    /// Prompts above the limit, which are left out.
    pub too_long: usize,
    /// Prompts that the model's template or tokenizer refuses, which are left out.
    pub refused: usize,
    /// Why the first of them is refused.
    pub first_refusal: Option<String>,
}

impl LengthStats {
    /// From the lengths, in any order; `None` when there are none.
    pub(super) fn of(mut lengths: Vec<usize>) -> Option<Self> {
        lengths.sort_unstable();
        let count = lengths.len();
        // Nearest rank: the ceil(q n)-th smallest, from 1.
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
