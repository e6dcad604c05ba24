//! Tiles of queries, and the vectorized loops over their scores.

use std::ops::Range;

use hone_core::simd::SimdTask;

use crate::kernels::float::Real;
use crate::kernels::reductions::{dot, max, sum};
use crate::spec::AttentionOptions;
use crate::transformer::segments::PrefixGroup;

/// Queries of a tile.
const TILE: usize = 64;

/// Queries of one segment, and the keys that they attend to, at consecutive positions.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Token of the first query.
    pub token: usize,
    /// Position of the first query in its sequence.
    position: usize,
    /// Number of queries.
    pub rows: usize,
    /// Position of the first key.
    first: usize,
    /// Keys in the prefix: first token, count.
    pub prefix: (usize, usize),
    /// Keys in the segment itself: first token, count.
    pub own: (usize, usize),
}

impl Tile {
    pub fn keys(&self) -> usize {
        self.prefix.1 + self.own.1
    }

    /// The columns of the scores that a row attends to.
    fn visible(&self, row: usize, window: Option<usize>) -> Range<usize> {
        let position = self.position + row;
        let first = window.map_or(0, |w| (position + 1).saturating_sub(w)).max(self.first);
        first - self.first..position + 1 - self.first
    }
}

/// The tiles of a group.
pub(super) fn tiles(group: &PrefixGroup, window: Option<usize>) -> Vec<Tile> {
    let mut tiles = Vec::new();
    for (before, start, len) in group.segments() {
        for row in (0..len).step_by(TILE) {
            let rows = TILE.min(len - row);
            let position = before + row;
            let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
            let skipped = first.saturating_sub(before);
            tiles.push(Tile {
                token: start + row,
                position,
                rows,
                first,
                prefix: (group.start + first.min(before), before - first.min(before)),
                own: (start + skipped, row + rows - skipped),
            });
        }
    }
    tiles
}

/// Replaces a tile's scores by their softmax; writes the logarithm of each sum.
pub(super) struct Softmax<'a, T> {
    pub tile: Tile,
    pub options: AttentionOptions,
    pub scores: &'a mut [T],
    pub lse: &'a mut [T],
}

impl<T: Real> SimdTask for Softmax<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let scale = T::of(self.options.scale);
        let rows = self.scores.chunks_exact_mut(self.tile.keys()).zip(self.lse);
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
pub(super) struct SoftmaxGrad<'a, T> {
    pub tile: Tile,
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
        let keys = self.tile.keys();
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
