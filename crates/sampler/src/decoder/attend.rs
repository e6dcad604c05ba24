//! Attention of all rows of a pass, divided between threads.

use std::borrow::BorrowMut;

use hone_kernels::hot_team::for_each_pair;

use super::{Decoder, PassRows, Scratch};
use crate::attention::{SequenceAttention, scratch_len};
use crate::kv_cache::SequencePages;

impl Decoder {
    /// Writes the attention output of every row to `scratch.row_values`.
    ///
    /// With fewer than two sequences per thread, divides the heads of keys between the threads, because whole
    /// sequences would leave some threads idle.
    pub(super) fn attend<M: BorrowMut<SequencePages> + Send + Sync>(
        &self,
        tokens: &PassRows<'_, '_, M>,
        layer: usize,
        scratch: &mut Scratch,
        threads: usize,
    ) {
        let (queries, shape) = (self.weights.spec.num_heads, self.shape);
        let rows = tokens.len();
        let longest = (0..rows).map(|row| tokens.position(row)).max().unwrap_or(0);
        let work = rows * longest * queries * shape.dim;
        let threads = if work < self.min_work.attention { 1 } else { threads };
        let by_heads = threads > 1 && rows < 2 * threads && tokens.chunks.is_empty();
        // Some heads of keys of a row.
        let (units_of_row, heads) = if by_heads { (shape.heads, 1) } else { (1, shape.heads) };
        let (units, group) = (rows * units_of_row, queries / shape.heads);
        let width = heads * group * shape.dim;
        let threads = threads.min(units);
        let scores = scratch_len(longest, group, shape.dim);
        scratch.reserve_scores(threads * scores);
        let stride = (queries + 2 * shape.heads) * shape.dim;
        let options = self.weights.layers[layer].options;
        let Scratch { row_values, scores: buffer, qkv, .. } = scratch;
        let attend_units = |first: usize, out: &mut [f32], scores: &mut [f32]| {
            let (mut unit, mut rest) = (first, out);
            while !rest.is_empty() {
                let (row, at) = (unit / units_of_row, unit % units_of_row);
                let run = if by_heads { 1 } else { tokens.run_len(row).min(rest.len() / width) };
                let (out, after) = rest.split_at_mut(run * width);
                let next = unit + run;
                SequenceAttention {
                    shape,
                    layer,
                    options,
                    heads: at * heads..(at + 1) * heads,
                    kv: tokens.view(if by_heads { row } else { row + run - 1 }),
                    q: &qkv[row * stride + at * width..],
                    stride,
                    out,
                    width,
                    next: (!after.is_empty())
                        .then(|| (tokens.view(next / units_of_row), next % units_of_row * heads)),
                    scratch: &mut *scores,
                }
                .run();
                (unit, rest) = (next, after);
            }
        };
        let out = &mut row_values[..units * width];
        if threads == 1 {
            return attend_units(0, out, buffer);
        }
        let part = units.div_ceil(threads);
        let parts = ((out, part * width), (&mut buffer[..], scores));
        for_each_pair(parts.0, parts.1, |i, out, scores| attend_units(i * part, out, scores));
    }
}
