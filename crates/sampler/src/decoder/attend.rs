//! Attention of all rows of a pass, and the keys and values of its tokens, divided between threads.

use std::borrow::BorrowMut;
use std::iter;

use hone_core::simd::dispatch;
use hone_kernels::hot_team::{FirstError, for_each_chunk, for_each_pair};

use super::{Decoder, NormAndRotate, PassRows, Scratch};
use crate::attention::{SequenceAttention, scratch_len};
use crate::error::{Result, SamplerError};
use crate::kv_cache::{CacheShape, PAGE, SequencePages};

/// Queries, keys and values of consecutive tokens in one page.
struct PageRows<'a> {
    position: usize,
    qkv: &'a mut [f32],
}

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

    /// Values of a row of queries, keys and values.
    fn qkv_width(&self) -> usize {
        (self.weights.spec.num_heads + 2 * self.shape.heads) * self.shape.dim
    }

    /// Normalizes and rotates the queries and keys of every row, and writes keys and values to the cache, on up
    /// to `threads` threads of the current pool.
    pub(super) fn cache_keys_and_values<M: BorrowMut<SequencePages> + Send + Sync>(
        &self,
        tokens: &mut PassRows<'_, '_, M>,
        layer: usize,
        qkv: &mut [f32],
        threads: usize,
    ) -> Result<()> {
        let width = self.qkv_width();
        let threads = threads.min(qkv.len() / self.min_work.row_values).max(1);
        let members = &mut *tokens.members;
        let (decoded, mut prompts) = qkv.split_at_mut(members.len() * width);
        let write = |(member, qkv): (&mut M, &mut [f32])| -> Result<()> {
            let sequence = member.borrow_mut();
            let position = sequence.position(0);
            let page = sequence.next_pages(1).and_then(|pages| pages.first_mut()?.values_mut());
            let page = page.ok_or(SamplerError::NoPage)?;
            self.write_rows(layer, page, &mut PageRows { position, qkv });
            Ok(())
        };
        let part = members.len().div_ceil(threads).max(1);
        let error = FirstError::default();
        for_each_pair((members, part), (decoded, part * width), |_, members, rows| {
            let mut rows = members.iter_mut().zip(rows.chunks_exact_mut(width));
            error.keep(rows.try_for_each(write));
        });
        error.into_result()?;
        let mut parts = Vec::new();
        for chunk in tokens.chunks.iter_mut() {
            let (prompt, others) = prompts.split_at_mut(chunk.tokens * width);
            prompts = others;
            let start = chunk.sequence.position(0);
            let pages = chunk.sequence.next_pages(chunk.tokens).ok_or(SamplerError::NoPage)?;
            let first = (PAGE - start % PAGE).min(chunk.tokens);
            let (first, rest) = prompt.split_at_mut(first * width);
            let rows = iter::once(first).chain(rest.chunks_mut(PAGE * width));
            for (i, (page, qkv)) in pages.iter_mut().zip(rows).enumerate() {
                let page = page.values_mut().ok_or(SamplerError::NoPage)?;
                let position = if i == 0 { start } else { (start / PAGE + i) * PAGE };
                parts.push((page, PageRows { position, qkv }));
            }
        }
        let part = if threads > 1 { 1 } else { parts.len().max(1) };
        for_each_chunk(&mut parts, part, |_, parts| {
            parts.iter_mut().for_each(|(page, rows)| self.write_rows(layer, page, rows));
        });
        Ok(())
    }

    /// Normalizes and rotates queries and keys of tokens in one page, and writes keys and values to it.
    fn write_rows(&self, index: usize, page: &mut [f32], rows: &mut PageRows<'_>) {
        let (spec, width) = (&self.weights.spec, self.qkv_width());
        let CacheShape { heads, dim, .. } = self.shape;
        let (q_width, kv_width) = (spec.num_heads * dim, heads * dim);
        let (layer, eps) = (&self.weights.layers[index], spec.rms_norm_eps as f32);
        for (position, qkv) in (rows.position..).zip(rows.qkv.chunks_exact_mut(width)) {
            let (q, kv) = qkv.split_at_mut(q_width);
            let (k, v) = kv.split_at_mut(kv_width);
            let rotation = layer.rope.then(|| self.rope.get(position));
            for (x, which) in [(q, 0), (&mut *k, 1)] {
                let norm = layer.head_norms.as_ref().map(|norms| (norms[which].as_slice(), eps));
                dispatch(NormAndRotate { x, dim, norm, rotation });
            }
            for (head, (k, v)) in k.chunks_exact(dim).zip(v.chunks_exact(dim)).enumerate() {
                self.shape.write(page, (index, head, position % PAGE), k, v);
            }
        }
    }
}
