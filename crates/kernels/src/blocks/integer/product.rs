//! The operands of a product.

use std::ops::Range;

use super::activations::{BLOCK, LANES};
use super::columns::IntegerColumns;
use crate::blocks::{BlockFormat, QuantizedMatrix};

/// The operands of `out = w x + bias`.
pub(super) struct Product<'a> {
    /// `[outputs, width]`
    pub out: &'a mut [f32],
    pub width: usize,
    /// The first row of the matrix to use.
    pub first: usize,
    pub matrix: &'a QuantizedMatrix,
    /// For each row of the whole matrix; none is 0.
    pub bias: Option<&'a [f32]>,
    pub x: &'a IntegerColumns,
}

/// Up to [`LANES`] rows of weights whose blocks are interleaved.
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
    pub fn check(&self, format: BlockFormat) {
        let (rows, inner) = self.matrix.dims();
        assert!(self.matrix.format() == format && inner == self.x.blocks() * BLOCK);
        assert!(self.first + self.out.len() / self.width <= rows);
        assert!(self.x.all_columns() <= self.width);
        assert!(self.bias.is_none_or(|bias| bias.len() == rows));
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
            for (i, out) in self.out.chunks_exact_mut(width).enumerate() {
                out[columns..].fill(self.bias.map_or(0.0, |bias| bias[self.first + i]));
            }
        }
    }

    /// The rows to compute from row `start` on, which is a multiple of [`LANES`] or before the first row;
    /// `None` after the last one.
    pub fn rows_from(&self, start: usize) -> Option<OutputRows> {
        let end = self.first + self.out.len() / self.width;
        let start = start.max(self.first / LANES * LANES);
        if start >= end {
            return None;
        }
        let rows = LANES.min(self.matrix.dims().0 - start);
        let lanes = self.first.max(start) - start..end.min(start + rows) - start;
        Some(OutputRows { start, rows, at: start + lanes.start - self.first, lanes })
    }
}
