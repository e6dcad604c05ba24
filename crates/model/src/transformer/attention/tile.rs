//! Tiles of queries, and the loops over their scores.

use hone_core::simd::SimdTask;

use super::super::segments::PrefixGroup;
use crate::kernels::float::Real;
use crate::kernels::simd;
use crate::kernels::simd::dot;
use crate::spec::AttentionOptions;

/// Queries of a tile.
const TILE: usize = 64;

/// Queries of one segment, and the consecutive positions of the keys that they see.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// The first query: token, and position in its sequence.
    pub token: usize,
    pub position: usize,
    pub rows: usize,
    /// The first key's position.
    pub first: usize,
    /// Keys in the prefix: first token, count.
    pub prefix: (usize, usize),
    /// Keys in the segment itself.
    pub own: (usize, usize),
}

impl Tile {
    pub fn keys(&self) -> usize {
        self.prefix.1 + self.own.1
    }

    /// The columns that a row sees.
    pub fn seen(&self, row: usize, window: Option<usize>) -> std::ops::Range<usize> {
        let position = self.position + row;
        let first = window.map_or(0, |w| (position + 1).saturating_sub(w)).max(self.first);
        first - self.first..position + 1 - self.first
    }
}

pub(super) fn tiles(family: &PrefixGroup, window: Option<usize>) -> Vec<Tile> {
    let own = (family.start, family.prefix);
    let mut tiles = Vec::new();
    for (i, (start, len)) in std::iter::once(&own).chain(&family.branches).enumerate() {
        let before = if i == 0 { 0 } else { family.prefix };
        for row in (0..*len).step_by(TILE) {
            let rows = TILE.min(len - row);
            let position = before + row;
            let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
            let skipped = first.saturating_sub(before);
            tiles.push(Tile {
                token: start + row,
                position,
                rows,
                first,
                prefix: (family.start + first.min(before), before - first.min(before)),
                own: (start + skipped, row + rows - skipped),
            });
        }
    }
    tiles
}

/// Softmax of a tile's scores in place; writes the logarithm of each sum.
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
            let seen = self.tile.seen(i, self.options.window);
            row[..seen.start].fill(T::of(0.0));
            row[seen.end..].fill(T::of(0.0));
            let row = &mut row[seen];
            row.iter_mut().for_each(|s| *s *= scale);
            if let Some(cap) = self.options.softcap {
                let (cap, inverse) = (T::of(cap), T::of(1.0 / cap));
                row.iter_mut().for_each(|s| *s = cap * (*s * inverse).tanh());
            }
            let max = simd::max(row);
            row.iter_mut().for_each(|s| *s = (*s - max).exp());
            let sum = simd::sum(row);
            let inverse = T::of(1.0) / sum;
            row.iter_mut().for_each(|s| *s *= inverse);
            *lse = max + sum.ln();
        }
    }
}

/// Turns products `q k` into probabilities and gradients of the probabilities, `g v`, into those of
/// the products.
pub(super) struct SoftmaxGrad<'a, T> {
    pub tile: Tile,
    pub options: AttentionOptions,
    pub scores: &'a mut [T],
    pub grads: &'a mut [T],
    /// Of each row: the logarithm of its sum, and `g o`.
    pub rows: &'a [(T, T)],
}

impl<T: Real> SimdTask for SoftmaxGrad<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let scale = T::of(self.options.scale);
        let keys = self.tile.keys();
        let rows = self.scores.chunks_exact_mut(keys).zip(self.grads.chunks_exact_mut(keys));
        for (i, ((p, ds), (lse, mean))) in rows.zip(self.rows).enumerate() {
            let seen = self.tile.seen(i, self.options.window);
            for row in [&mut *p, &mut *ds] {
                row[..seen.start].fill(T::of(0.0));
                row[seen.end..].fill(T::of(0.0));
            }
            let both = p[seen.clone()].iter_mut().zip(&mut ds[seen]);
            match self.options.softcap {
                None => both.for_each(|(p, d)| {
                    *p = (*p * scale - *lse).exp();
                    *d = *p * (*d - *mean) * scale;
                }),
                Some(cap) => {
                    let (cap, inverse) = (T::of(cap), scale / T::of(cap));
                    both.for_each(|(p, d)| {
                        let t = (*p * inverse).tanh();
                        *p = (cap * t - *lse).exp();
                        *d = *p * (*d - *mean) * scale * (T::of(1.0) - t * t);
                    });
                }
            }
        }
    }
}

/// `sum a_i b_i` of two rows.
pub(super) struct Dot<'a, T>(pub &'a [T], pub &'a [T]);

impl<T: Real> SimdTask for Dot<'_, T> {
    type Output = T;
    #[inline(always)]
    fn run<const FUSED: bool>(self) -> T {
        dot(self.0, self.1)
    }
}
