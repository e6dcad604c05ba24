//! Causal attention over segments, fused: memory is linear in the tokens (CPU).
//!
//! The forward pass saves the logarithm of every softmax's sum (`lse`). The backward pass recomputes
//! the probabilities from it, a tile of queries at a time (Dao 2023, "FlashAttention-2", algorithms 1
//! and 2; a tile here spans all keys of its queries). With `s = scale q k`, or
//! `cap tanh(scale q k / cap)`, `p = exp(s - lse)`, output `o = sum p v` and its gradient `g`:
//!
//! ```text
//! dv = sum p g        ds = p (g v - g o) [1 - (s / cap)^2]        dq = scale sum ds k
//!                                                                 dk = scale sum ds q
//! ```

mod graph;

use std::ops::Range;

use candle_core::Result;
use hone_core::simd::{SimdTask, dispatch};
use hone_kernels::float::Real;
use hone_kernels::float::{dot, max, sum};
use hone_kernels::matmul::{Matrix, WriteMode, multiply};
use hone_kernels::parallel;

use super::Segments;
use crate::spec::{AttentionOptions, HeadLayout};
use crate::transformer::SegmentTree;

pub(super) use graph::graph_attention;

/// Attention of q `[n, queries * dim]` to k and v `[n, keys * dim]`. Each token attends to its own
/// segment up to itself and to all segments that it continues; query head h uses key head
/// `h / (queries / keys)`.
#[derive(Clone, Copy)]
pub(super) struct Attention<'s> {
    segments: &'s Segments,
    heads: HeadLayout,
    options: AttentionOptions,
}

/// Columns of one head in a packed matrix.
#[derive(Clone, Copy)]
struct Columns<'a, T> {
    values: &'a [T],
    stride: usize,
    offset: usize,
    dim: usize,
}

impl<'a, T> Columns<'a, T> {
    fn rows(&self, (start, len): (usize, usize)) -> Matrix<'a, T> {
        let from = (start * self.stride + self.offset).min(self.values.len());
        Matrix::strided(&self.values[from..], len, self.dim, self.stride)
    }

    fn row(&self, token: usize) -> &'a [T] {
        &self.values[token * self.stride + self.offset..][..self.dim]
    }
}

impl<'s> Attention<'s> {
    pub fn new(
        segments: &'s Segments,
        heads: HeadLayout,
        options: AttentionOptions,
    ) -> Result<Self> {
        if options.window == Some(0) {
            candle_core::bail!("attention: the window is 0, but must be at least 1");
        }
        if !heads.queries.is_multiple_of(heads.keys) {
            candle_core::bail!(
                "attention: {} query heads are not a multiple of {} key heads",
                heads.queries,
                heads.keys
            );
        }
        Ok(Self { segments, heads, options })
    }

    fn head<'a, T>(&self, x: &'a [T], head: usize, heads: usize) -> Columns<'a, T> {
        let dim = self.heads.dim;
        Columns { values: x, stride: heads * dim, offset: head * dim, dim }
    }

    /// One job for every head of every tree.
    fn jobs(&self) -> Vec<(&'s SegmentTree, usize)> {
        let trees = self.segments.trees().iter();
        trees.flat_map(|tree| (0..self.heads.queries).map(move |h| (tree, h))).collect()
    }

    fn views<'a, T>(&self, head: usize, [q, k, v]: [&'a [T]; 3]) -> [Columns<'a, T>; 3] {
        let HeadLayout { queries, keys, .. } = self.heads;
        let key_head = head / (queries / keys);
        [self.head(q, head, queries), self.head(k, key_head, keys), self.head(v, key_head, keys)]
    }

    /// From q, k and v: the output `[n, queries * dim]`, and the logarithms of the softmaxes' sums
    /// `[n, queries]`.
    pub fn forward<T: Real>(&self, inputs: [&[T]; 3]) -> (Vec<T>, Vec<T>) {
        let HeadLayout { queries, dim, .. } = self.heads;
        let jobs = self.jobs();
        let parts = parallel::map(&jobs, |(tree, head)| self.head_forward(tree, *head, inputs));
        let mut out = vec![T::of(0.0); self.segments.tokens() * queries * dim];
        let mut lse = vec![T::of(0.0); self.segments.tokens() * queries];
        for ((tree, head), (head_out, head_lse)) in jobs.iter().zip(&parts) {
            add_rows(&mut out, head_out.chunks_exact(dim), tree.start, (*head, queries));
            add_rows(&mut lse, head_lse.chunks_exact(1), tree.start, (*head, queries));
        }
        (out, lse)
    }

    fn head_forward<T: Real>(
        &self,
        tree: &SegmentTree,
        head: usize,
        inputs: [&[T]; 3],
    ) -> (Vec<T>, Vec<T>) {
        let [q, k, v] = self.views(head, inputs);
        let dim = self.heads.dim;
        let mut out = vec![T::of(0.0); tree.len * dim];
        let mut lse = vec![T::of(0.0); tree.len];
        let mut scores = Vec::new();
        for tile in &tiles(tree, self.options.window) {
            scores.resize(tile.rows * tile.keys, T::of(0.0));
            scores_of(&mut scores, tile, q, k);
            let local = tile.token - tree.start;
            dispatch(Softmax {
                tile,
                options: self.options,
                scores: &mut scores,
                lse: &mut lse[local..local + tile.rows],
            });
            weighted_sum((&mut out[local * dim..], dim), &scores, tile, v);
        }
        (out, lse)
    }

    /// Gradients of q, k and v from the output, its gradient, and the logarithms of the softmaxes' sums.
    pub fn backward<T: Real>(
        &self,
        inputs: [&[T]; 3],
        (out, grad, lse): (&[T], &[T], &[T]),
    ) -> [Vec<T>; 3] {
        let HeadLayout { queries, keys, dim } = self.heads;
        let jobs = self.jobs();
        let parts = parallel::map(&jobs, |(tree, head)| {
            self.head_backward(tree, *head, inputs, (out, grad, lse))
        });
        let mut sums =
            [queries, keys, keys].map(|n| vec![T::of(0.0); self.segments.tokens() * n * dim]);
        for ((tree, head), parts) in jobs.iter().zip(&parts) {
            let key_head = (head / (queries / keys), keys);
            let places = [(*head, queries), key_head, key_head];
            for ((sum, part), place) in sums.iter_mut().zip(parts).zip(places) {
                add_rows(sum, part.chunks_exact(dim), tree.start, place);
            }
        }
        sums
    }

    fn head_backward<T: Real>(
        &self,
        tree: &SegmentTree,
        head: usize,
        inputs: [&[T]; 3],
        (out, grad, lse): (&[T], &[T], &[T]),
    ) -> [Vec<T>; 3] {
        let [q, k, v] = self.views(head, inputs);
        let HeadLayout { queries, dim, .. } = self.heads;
        let (out, grad) = (self.head(out, head, queries), self.head(grad, head, queries));
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![T::of(0.0); tree.len * dim]);
        let (mut scores, mut grads, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for tile in &tiles(tree, self.options.window) {
            let keys = tile.keys;
            scores.resize(tile.rows * keys, T::of(0.0));
            grads.resize(tile.rows * keys, T::of(0.0));
            scores_of(&mut scores, tile, q, k);
            scores_of(&mut grads, tile, grad, v);
            rows.clear();
            let tokens = tile.token..tile.token + tile.rows;
            rows.extend(tokens.map(|t| (lse[t * queries + head], grad.row(t), out.row(t))));
            dispatch(SoftmaxGrad {
                tile,
                options: self.options,
                scores: &mut scores,
                grads: &mut grads,
                rows: &rows,
            });
            let local = (tile.token - tree.start) * dim;
            weighted_sum((&mut dq[local..], dim), &grads, tile, k);
            let queries = (tile.token, tile.rows);
            let mut column = 0;
            for &(start, count) in &tile.spans {
                let at = (start - tree.start) * dim;
                let part = |x| Matrix::strided(&Vec::as_slice(x)[column..], tile.rows, count, keys);
                let into = (&mut dv[at..], dim);
                multiply(into, WriteMode::Add, 1.0, part(&scores).t(), grad.rows(queries));
                let into = (&mut dk[at..], dim);
                multiply(into, WriteMode::Add, 1.0, part(&grads).t(), q.rows(queries));
                column += count;
            }
        }
        [dq, dk, dv]
    }
}

/// Products `x y^T` of a tile's rows of x with all its keys' rows of y.
fn scores_of<T: Real>(out: &mut [T], tile: &Tile, x: Columns<'_, T>, y: Columns<'_, T>) {
    let (rows, mut column) = (x.rows((tile.token, tile.rows)), 0);
    for span in &tile.spans {
        let into = (&mut out[column..], tile.keys);
        multiply(into, WriteMode::Replace, 1.0, rows, y.rows(*span).t());
        column += span.1;
    }
}

/// Weights `[rows, keys]` of a tile times its keys' rows of y.
fn weighted_sum<T: Real>(
    (out, stride): (&mut [T], usize),
    weights: &[T],
    tile: &Tile,
    y: Columns<'_, T>,
) {
    let (mut column, mut mode) = (0, WriteMode::Replace);
    for span in &tile.spans {
        let part = Matrix::strided(&weights[column..], tile.rows, span.1, tile.keys);
        multiply((&mut *out, stride), mode, 1.0, part, y.rows(*span));
        (column, mode) = (column + span.1, WriteMode::Add);
    }
}

/// Adds rows of one head to a packed matrix.
fn add_rows<'a, T: Real>(
    sum: &mut [T],
    rows: std::slice::ChunksExact<'a, T>,
    first: usize,
    (head, heads): (usize, usize),
) {
    for (i, row) in rows.enumerate() {
        let at = ((first + i) * heads + head) * row.len();
        for (sum, x) in sum[at..].iter_mut().zip(row) {
            *sum += *x;
        }
    }
}

// Tiles of queries, and the vectorized loops over their scores.

const TILE: usize = 64;

/// Queries of one segment, and the keys that they attend to, at consecutive positions.
struct Tile {
    /// Token of the first query.
    pub token: usize,
    /// Position of the first query in its sequence.
    position: usize,
    pub rows: usize,
    /// Position of the first key.
    first: usize,
    /// `(first token, count)` of the keys in each segment that it continues, then in the segment itself;
    /// none is empty.
    pub spans: Vec<(usize, usize)>,
    /// All keys.
    pub keys: usize,
}

impl Tile {
    /// The columns of the scores that a row attends to.
    fn visible(&self, row: usize, window: Option<usize>) -> Range<usize> {
        let position = self.position + row;
        let first = window.map_or(0, |w| (position + 1).saturating_sub(w)).max(self.first);
        first - self.first..position + 1 - self.first
    }
}

fn tiles(tree: &SegmentTree, window: Option<usize>) -> Vec<Tile> {
    let mut tiles = Vec::new();
    for branch in &tree.branches {
        for row in (0..branch.len).step_by(TILE) {
            let rows = TILE.min(branch.len - row);
            let position = branch.position + row;
            let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
            // The window counts positions, whichever segments they are in.
            let (mut spans, mut skipped) = (Vec::new(), first);
            for &(start, len) in branch.prefixes.iter().chain([&(branch.start, row + rows)]) {
                let skip = skipped.min(len);
                skipped -= skip;
                if skip < len {
                    spans.push((start + skip, len - skip));
                }
            }
            let (token, keys) = (branch.start + row, position + rows - first);
            tiles.push(Tile { token, position, rows, first, spans, keys });
        }
    }
    tiles
}

/// Replaces a tile's scores by their softmax; writes the logarithm of each sum.
struct Softmax<'a, T> {
    pub tile: &'a Tile,
    pub options: AttentionOptions,
    pub scores: &'a mut [T],
    pub lse: &'a mut [T],
}

impl<T: Real> SimdTask for Softmax<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let scale = T::of(self.options.scale);
        let rows = self.scores.chunks_exact_mut(self.tile.keys).zip(self.lse);
        for (i, (row, lse)) in rows.enumerate() {
            let visible = self.tile.visible(i, self.options.window);
            row[..visible.start].fill(T::of(0.0));
            row[visible.end..].fill(T::of(0.0));
            let row = &mut row[visible];
            row.iter_mut().for_each(|s| *s *= scale);
            if let Some(cap) = self.options.softcap {
                let (cap, inverse) = (T::of(cap), T::of(1.0 / cap));
                row.iter_mut().for_each(|s| *s = cap * (*s * inverse).tanh());
            }
            let max = max(row);
            row.iter_mut().for_each(|s| *s = (*s - max).exp());
            let sum = sum(row);
            let inverse = T::of(1.0) / sum;
            row.iter_mut().for_each(|s| *s *= inverse);
            *lse = max + sum.ln();
        }
    }
}

/// Replaces scores `q k` by probabilities, and gradients of the probabilities, `g v`, by gradients of
/// the scores.
struct SoftmaxGrad<'a, T> {
    pub tile: &'a Tile,
    pub options: AttentionOptions,
    pub scores: &'a mut [T],
    pub grads: &'a mut [T],
    /// For each row the logarithm of its softmax's sum, and the rows of g and o.
    pub rows: &'a [(T, &'a [T], &'a [T])],
}

impl<T: Real> SimdTask for SoftmaxGrad<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let scale = T::of(self.options.scale);
        let keys = self.tile.keys;
        let rows = self.scores.chunks_exact_mut(keys).zip(self.grads.chunks_exact_mut(keys));
        for (i, ((p, ds), (lse, g, o))) in rows.zip(self.rows).enumerate() {
            let mean = dot(g, o);
            let visible = self.tile.visible(i, self.options.window);
            for row in [&mut *p, &mut *ds] {
                row[..visible.start].fill(T::of(0.0));
                row[visible.end..].fill(T::of(0.0));
            }
            let both = p[visible.clone()].iter_mut().zip(&mut ds[visible]);
            match self.options.softcap {
                None => both.for_each(|(p, d)| {
                    *p = (*p * scale - *lse).exp();
                    *d = *p * (*d - mean) * scale;
                }),
                Some(cap) => {
                    let (cap, inverse) = (T::of(cap), scale / T::of(cap));
                    both.for_each(|(p, d)| {
                        let t = (*p * inverse).tanh();
                        *p = (cap * t - *lse).exp();
                        *d = *p * (*d - mean) * scale * (T::of(1.0) - t * t);
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
