//! Causal attention over segments in memory linear in the tokens (CPU).
//!
//! The forward pass keeps the logarithm of every softmax's sum, and the backward pass computes the
//! probabilities again, a tile of queries at a time (Dao 2023, "FlashAttention-2", algorithms 1 and
//! 2; a tile here spans all keys of its queries). With `s = scale q k`, or
//! `cap tanh(scale q k / cap)`, `p = exp(s - lse)`, output `o = sum p v` and its gradient `g`:
//!
//! ```text
//! dv = sum p g        ds = p (g v - g o) [1 - (s / cap)^2]        dq = scale sum ds k
//!                                                                 dk = scale sum ds q
//! ```

mod chain;
mod tile;

use tile::{Dot, Softmax, SoftmaxGrad, Tile, tiles};

use hone_core::simd::dispatch;

use super::segments::{PrefixGroup, Segments};
use crate::kernels::float::Real;
use crate::kernels::matmul::{Matrix, WriteMode, multiply};
use crate::kernels::parallel;
use crate::spec::AttentionOptions;

pub(super) use chain::chain;

type Result<T> = candle_core::Result<T>;

/// The heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub queries: usize,
    /// Key and value heads; divides the former.
    pub keys: usize,
    /// Width of a head.
    pub dim: usize,
}

/// Attention of q `[n, queries * dim]` to k and v `[n, keys * dim]`, each token to its own segment up
/// to itself and to all of the segment's prefix; query head h looks at key head
/// `h / (queries / keys)`.
#[derive(Clone, Copy)]
pub(super) struct Attention<'s> {
    segments: &'s Segments,
    heads: Heads,
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

/// What one head of one family gives: rows of its tokens.
struct Part<T> {
    values: [Vec<T>; 3],
    lse: Vec<T>,
}

impl<'s> Attention<'s> {
    /// # Errors
    /// If the window sees nothing, or the heads do not fit one another.
    pub fn new(segments: &'s Segments, heads: Heads, options: AttentionOptions) -> Result<Self> {
        if options.window == Some(0) {
            candle_core::bail!("attention: a window of 0 sees nothing");
        }
        if !heads.queries.is_multiple_of(heads.keys) {
            candle_core::bail!("attention: {heads:?} do not fit one another");
        }
        Ok(Self { segments, heads, options })
    }

    fn head<'a, T>(&self, x: &'a [T], head: usize, of: usize) -> Columns<'a, T> {
        let dim = self.heads.dim;
        Columns { values: x, stride: of * dim, offset: head * dim, dim }
    }

    /// One job for every head of every family.
    fn jobs(&self) -> Vec<(&'s PrefixGroup, usize)> {
        let families = self.segments.families().iter();
        families.flat_map(|family| (0..self.heads.queries).map(move |h| (family, h))).collect()
    }

    fn views<'a, T>(&self, head: usize, [q, k, v]: [&'a [T]; 3]) -> [Columns<'a, T>; 3] {
        let Heads { queries, keys, .. } = self.heads;
        let key_head = head / (queries / keys);
        [self.head(q, head, queries), self.head(k, key_head, keys), self.head(v, key_head, keys)]
    }

    /// Of q, k and v: the output `[n, queries * dim]`, and the logarithms of the softmaxes' sums
    /// `[n, queries]`.
    pub fn forward<T: Real>(&self, inputs: [&[T]; 3]) -> (Vec<T>, Vec<T>) {
        let Heads { queries, dim, .. } = self.heads;
        let jobs = self.jobs();
        let parts = parallel::map(&jobs, |(family, head)| self.head_forward(family, *head, inputs));
        let mut out = vec![T::of(0.0); self.segments.tokens() * queries * dim];
        let mut lse = vec![T::of(0.0); self.segments.tokens() * queries];
        for ((family, head), part) in jobs.iter().zip(parts) {
            add_rows(&mut out, part.values[0].chunks_exact(dim), family.start, (*head, queries));
            add_rows(&mut lse, part.lse.chunks_exact(1), family.start, (*head, queries));
        }
        (out, lse)
    }

    fn head_forward<T: Real>(
        &self,
        family: &PrefixGroup,
        head: usize,
        inputs: [&[T]; 3],
    ) -> Part<T> {
        let [q, k, v] = self.views(head, inputs);
        let dim = self.heads.dim;
        let mut out = vec![T::of(0.0); family.len * dim];
        let mut lse = vec![T::of(0.0); family.len];
        let mut scores = Vec::new();
        for tile in tiles(family, self.options.window) {
            let keys = tile.keys();
            scores.resize(tile.rows * keys, T::of(0.0));
            products(&mut scores, tile, q, k);
            let local = tile.token - family.start;
            dispatch(Softmax {
                tile,
                options: self.options,
                scores: &mut scores,
                lse: &mut lse[local..local + tile.rows],
            });
            let out = &mut out[local * dim..];
            combine((out, dim), WriteMode::Replace, &scores, tile, v);
        }
        Part { values: [out, Vec::new(), Vec::new()], lse }
    }

    /// Gradients of q, k and v from the output, its gradient, and the logarithms.
    pub fn backward<T: Real>(
        &self,
        inputs: [&[T]; 3],
        (out, grad, lse): (&[T], &[T], &[T]),
    ) -> [Vec<T>; 3] {
        let Heads { queries, keys, dim } = self.heads;
        let jobs = self.jobs();
        let parts = parallel::map(&jobs, |(family, head)| {
            self.head_backward(family, *head, inputs, (out, grad, lse))
        });
        let mut sums =
            [queries, keys, keys].map(|n| vec![T::of(0.0); self.segments.tokens() * n * dim]);
        for ((family, head), part) in jobs.iter().zip(parts) {
            let key_head = (head / (queries / keys), keys);
            let places = [(*head, queries), key_head, key_head];
            for ((sum, part), place) in sums.iter_mut().zip(&part.values).zip(places) {
                add_rows(sum, part.chunks_exact(dim), family.start, place);
            }
        }
        sums
    }

    fn head_backward<T: Real>(
        &self,
        family: &PrefixGroup,
        head: usize,
        inputs: [&[T]; 3],
        (out, grad, lse): (&[T], &[T], &[T]),
    ) -> Part<T> {
        let [q, k, v] = self.views(head, inputs);
        let Heads { queries, dim, .. } = self.heads;
        let (out, grad) = (self.head(out, head, queries), self.head(grad, head, queries));
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![T::of(0.0); family.len * dim]);
        let (mut scores, mut grads, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for tile in tiles(family, self.options.window) {
            let keys = tile.keys();
            scores.resize(tile.rows * keys, T::of(0.0));
            grads.resize(tile.rows * keys, T::of(0.0));
            products(&mut scores, tile, q, k);
            products(&mut grads, tile, grad, v);
            rows.clear();
            rows.extend((tile.token..tile.token + tile.rows).map(|token| {
                let mean = dispatch(Dot(grad.row(token), out.row(token)));
                (lse[token * queries + head], mean)
            }));
            dispatch(SoftmaxGrad {
                tile,
                options: self.options,
                scores: &mut scores,
                grads: &mut grads,
                rows: &rows,
            });
            let local = (tile.token - family.start) * dim;
            combine((&mut dq[local..], dim), WriteMode::Replace, &grads, tile, k);
            let queries = (tile.token, tile.rows);
            let mut column = 0;
            for (start, count) in [tile.prefix, tile.own] {
                if count > 0 {
                    let at = (start - family.start) * dim;
                    let part =
                        |x| Matrix::strided(&Vec::as_slice(x)[column..], tile.rows, count, keys);
                    let into = (&mut dv[at..], dim);
                    multiply(into, WriteMode::Add, 1.0, part(&scores).t(), grad.rows(queries));
                    let into = (&mut dk[at..], dim);
                    multiply(into, WriteMode::Add, 1.0, part(&grads).t(), q.rows(queries));
                }
                column += count;
            }
        }
        Part { values: [dq, dk, dv], lse: Vec::new() }
    }
}

/// Rows of a tile by all its keys: `x y^T`.
fn products<T: Real>(out: &mut [T], tile: Tile, x: Columns<'_, T>, y: Columns<'_, T>) {
    let (rows, keys) = (x.rows((tile.token, tile.rows)), tile.keys());
    if tile.prefix.1 > 0 {
        multiply((out, keys), WriteMode::Replace, 1.0, rows, y.rows(tile.prefix).t());
    }
    let own = &mut out[tile.prefix.1..];
    multiply((own, keys), WriteMode::Replace, 1.0, rows, y.rows(tile.own).t());
}

/// Weights `[rows, keys]` of a tile times its keys' rows of `y`.
fn combine<T: Real>(
    (out, stride): (&mut [T], usize),
    store: WriteMode,
    weights: &[T],
    tile: Tile,
    y: Columns<'_, T>,
) {
    let (keys, before) = (tile.keys(), tile.prefix.1);
    let mut store = store;
    if before > 0 {
        let part = Matrix::strided(weights, tile.rows, before, keys);
        multiply((&mut *out, stride), store, 1.0, part, y.rows(tile.prefix));
        store = WriteMode::Add;
    }
    let part = Matrix::strided(&weights[before..], tile.rows, tile.own.1, keys);
    multiply((out, stride), store, 1.0, part, y.rows(tile.own));
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

#[cfg(test)]
mod tests;
