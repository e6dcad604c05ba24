//! The operands of a product.

use std::ops::Range;

use super::columns::IntegerColumns;
use super::formats::WeightFormat;
use super::layout::LANES;

/// The operands of `out = w x + bias`.
pub(super) struct Product<'a> {
    /// `[outputs, width]`
    pub out: &'a mut [f32],
    pub width: usize,
    /// The first row of `w` to use.
    pub first: usize,
    /// The interleaved blocks of the whole matrix.
    pub w: &'a [u8],
    /// Rows of the whole matrix.
    pub rows: usize,
    /// For each row of the whole matrix; none is 0.
    pub bias: Option<&'a [f32]>,
    pub x: &'a IntegerColumns,
}

/// Up to [`LANES`] rows of weights whose blocks are interleaved.
#[derive(Clone)]
pub(super) struct OutputRows {
    /// The first row.
    pub start: usize,
    /// The number of rows.
    pub rows: usize,
    /// Those of them that are computed.
    pub lanes: Range<usize>,
    /// The output of the first one that is computed.
    pub at: usize,
}

impl Product<'_> {
    /// Checks that the operands fit each other.
    ///
    /// # Panics
    /// If they do not.
    pub fn check<F: WeightFormat>(&self) {
        let outputs = self.out.len() / self.width;
        assert!(self.first + outputs <= self.rows && self.x.blocks().is_multiple_of(F::PARTS));
        assert!(self.w.len() == self.rows * self.row_bytes::<F>());
        assert!(self.x.all_columns() <= self.width);
        assert!(self.bias.is_none_or(|bias| bias.len() == self.rows));
    }

    /// The bias of an output.
    #[inline(always)]
    pub fn bias(&self, output: usize) -> f32 {
        self.bias.map_or(0.0, |bias| bias[self.first + output])
    }

    /// The bias of each of some rows; 0 for those that are not computed.
    #[inline(always)]
    pub fn biases(&self, rows: &OutputRows) -> [f32; LANES] {
        let mut biases = [0.0; LANES];
        if let Some(bias) = self.bias {
            let lanes = rows.lanes.clone();
            biases[lanes.clone()].copy_from_slice(&bias[rows.start..][lanes]);
        }
        biases
    }

    /// Writes the columns that no token has.
    pub fn fill_other_columns(&mut self) {
        let (columns, width) = (self.x.all_columns(), self.width);
        if columns < width {
            for output in 0..self.out.len() / width {
                let bias = self.bias(output);
                self.out[output * width..][columns..width].fill(bias);
            }
        }
    }

    /// Bytes of a row of weights.
    pub fn row_bytes<F: WeightFormat>(&self) -> usize {
        self.x.blocks() / F::PARTS * F::BYTES
    }

    /// The rows to compute from row `start` on, which is a multiple of [`LANES`] or before the first row;
    /// `None` after the last one.
    pub fn rows_from(&self, start: usize) -> Option<OutputRows> {
        let end = self.first + self.out.len() / self.width;
        let start = start.max(self.first / LANES * LANES);
        if start >= end {
            return None;
        }
        let rows = LANES.min(self.rows - start);
        let lanes = self.first.max(start) - start..end.min(start + rows) - start;
        Some(OutputRows { start, rows, at: start + lanes.start - self.first, lanes })
    }
}
