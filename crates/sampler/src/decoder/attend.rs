//! Attention of all rows of a pass, divided between threads.

use hone_kernels::hot_team::for_each_pair;

use super::{Decoder, PassRows, Scratch};
use crate::attention::{SequenceAttention, scratch_len};
use crate::kv_cache::BatchMember;

impl Decoder {
    /// Writes the attention output of every row to `scratch.row_values`.
    pub(super) fn attend<M: BatchMember>(
        &self,
        tokens: &PassRows<'_, '_, M>,
        layer: usize,
        scratch: &mut Scratch,
        threads: usize,
    ) {
        let (spec, shape) = (&self.weights.spec, self.shape);
        let (rows, q_width) = (tokens.len(), spec.num_heads * shape.dim);
        let longest = (0..rows).map(|row| tokens.position(row)).max().unwrap_or(0);
        let work = rows * longest * q_width;
        let threads = if work < self.min_work.attention { 1 } else { threads };
        if threads > 1 && rows < 2 * threads && tokens.chunks.is_empty() {
            return self.attend_by_heads(tokens, layer, longest, scratch, threads);
        }
        let threads = threads.min(rows);
        let scores = scratch_len(longest, spec.num_heads / shape.heads, shape.dim);
        scratch.reserve_scores(threads * scores);
        let qkv_width = q_width + 2 * shape.heads * shape.dim;
        let qkv = &scratch.qkv[..rows * qkv_width];
        let options = self.weights.layers[layer].options;
        let attend_rows = |first: usize, out: &mut [f32], scores: &mut [f32]| {
            let (mut row, mut rest) = (first, out);
            while !rest.is_empty() {
                let run = tokens.run_len(row).min(rest.len() / q_width);
                let (out, after) = rest.split_at_mut(run * q_width);
                SequenceAttention {
                    shape,
                    layer,
                    options,
                    heads: 0..shape.heads,
                    kv: tokens.view(row + run - 1),
                    q: &qkv[row * qkv_width..(row + run) * qkv_width],
                    stride: qkv_width,
                    out,
                    width: q_width,
                    next: (!after.is_empty()).then(|| (tokens.view(row + run), 0)),
                    scratch: &mut *scores,
                }
                .run();
                (row, rest) = (row + run, after);
            }
        };
        let out = &mut scratch.row_values[..rows * q_width];
        if threads == 1 {
            return attend_rows(0, out, &mut scratch.scores);
        }
        let part = rows.div_ceil(threads);
        let (parts, scratch) = ((out, part * q_width), (&mut scratch.scores[..], scores));
        for_each_pair(parts, scratch, |i, out, scores| attend_rows(i * part, out, scores));
    }

    /// [`Self::attend`] for fewer than two sequences per thread, up to position `longest`: divides the heads
    /// of keys between the threads, because whole sequences would leave some threads idle.
    fn attend_by_heads<M: BatchMember>(
        &self,
        tokens: &PassRows<'_, '_, M>,
        layer: usize,
        longest: usize,
        scratch: &mut Scratch,
        threads: usize,
    ) {
        let (rows, shape, queries) = (tokens.len(), self.shape, self.weights.spec.num_heads);
        let group = queries / shape.heads;
        let (width, heads) = (group * shape.dim, rows * shape.heads);
        let stride = (queries + 2 * shape.heads) * shape.dim;
        let scores = scratch_len(longest, group, shape.dim);
        scratch.reserve_scores(threads * scores);
        let options = self.weights.layers[layer].options;
        let part = heads.div_ceil(threads);
        let Scratch { row_values, scores: buffer, qkv, .. } = scratch;
        let parts = (&mut row_values[..heads * width], part * width);
        for_each_pair(parts, (&mut buffer[..], scores), |i, out, scores| {
            for (i, out) in (i * part..).zip(out.chunks_exact_mut(width)) {
                let (row, head) = (i / shape.heads, i % shape.heads);
                let q = &qkv[row * stride + head * width..][..width];
                let kv = tokens.view(row);
                SequenceAttention {
                    shape,
                    layer,
                    options,
                    heads: head..head + 1,
                    kv,
                    q,
                    stride: width,
                    out,
                    width,
                    next: (head + 1 < shape.heads).then_some((kv, head + 1)),
                    scratch: &mut *scores,
                }
                .run();
            }
        });
    }
}
