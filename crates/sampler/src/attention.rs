//! Attention of one token to the cache of its sequence.
//!
//! Sums over positions go page by page in the order of the sequence, so they depend on its length
//! and its prompt's length alone.

use hone_core::simd::{SimdTask, mul_add};
use hone_model::kernels::exp::exp_f32;
use hone_model::spec::AttentionOptions;

use crate::kv_cache::{CacheShape, Keys, PAGE, Page};
use crate::simd_ops::tanh;

/// Sums side by side, so that one multiply-add need not wait for the one before it.
const PARTS: usize = 4;

/// All heads of one token.
pub(super) struct Attend<'a> {
    pub shape: CacheShape,
    pub layer: usize,
    pub options: AttentionOptions,
    pub keys: Keys<'a>,
    /// `[query heads * dim]`, turned.
    pub q: &'a [f32],
    /// The same shape.
    pub out: &'a mut [f32],
    /// [`scores`] values.
    pub scores: &'a mut [f32],
}

/// Values of scratch that a token at `position` needs, where so many query heads share a key head.
pub(super) fn scores(position: usize, group: usize) -> usize {
    // The prompt's last page may be part empty.
    group * (position / PAGE + 2) * PAGE
}

/// A page in use: where its first slot's score is, and the slots that the query sees.
struct Seen<'a> {
    page: &'a Page,
    from: usize,
    to: usize,
}

impl<'a> Keys<'a> {
    /// Pages with a position that is seen, in order.
    #[inline(always)]
    fn seen(self, window: Option<usize>) -> impl Iterator<Item = Seen<'a>> + Clone {
        let (prompt_len, len) = (self.prompt_len, self.prompt_len + self.own_len);
        let first = window.map_or(0, |window| len.saturating_sub(window));
        let prompt =
            self.prompt.iter().enumerate().map(move |(i, page)| (page, i * PAGE, prompt_len));
        let own = self.own.iter().enumerate();
        let own = own.map(move |(i, page)| (page, prompt_len + i * PAGE, len));
        prompt.chain(own).filter_map(move |(page, start, end)| {
            let end = end.min(start + PAGE);
            (start < end && end > first).then(|| Seen {
                page,
                from: first.saturating_sub(start),
                to: end - start,
            })
        })
    }
}

impl SimdTask for Attend<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { shape, layer, options, keys, q, out, scores } = self;
        let dim = shape.dim;
        let group = q.len() / dim / shape.heads;
        let seen = keys.seen(options.window);
        let width = seen.clone().count() * PAGE;
        let heads = q.chunks_exact(group * dim).zip(out.chunks_exact_mut(group * dim));
        for (head, (q, out)) in heads.enumerate() {
            let place = shape.keys(layer, head);
            for (at, seen) in seen.clone().enumerate() {
                let keys = &seen.page[place.clone()][..dim * PAGE];
                for (g, q) in q.chunks_exact(dim).enumerate() {
                    let mut row = products::<FUSED>(q, keys);
                    cap(&mut row, options);
                    row[..seen.from].fill(f32::NEG_INFINITY);
                    row[seen.to..].fill(f32::NEG_INFINITY);
                    scores[g * width + at * PAGE..][..PAGE].copy_from_slice(&row);
                }
            }
            for (g, out) in out.chunks_exact_mut(dim).enumerate() {
                let weights = &mut scores[g * width..][..width];
                let inverse = 1.0 / exponentials(weights);
                let mut first = 0;
                while first < dim {
                    first += match dim - first {
                        16.. => combine::<FUSED, 16>(out, first, weights, seen.clone(), &place),
                        8.. => combine::<FUSED, 8>(out, first, weights, seen.clone(), &place),
                        _ => combine::<FUSED, 2>(out, first, weights, seen.clone(), &place),
                    };
                }
                out.iter_mut().for_each(|x| *x *= inverse);
            }
        }
    }
}

/// `sums += factor * values`
#[inline(always)]
fn add<const FUSED: bool, const W: usize>(sums: &mut [f32; W], factor: f32, values: &[f32]) {
    // Of a known length, so that the sums stay in one register.
    let Some(values) = values.first_chunk::<W>() else { return };
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = mul_add::<FUSED>(factor, *value, *sum);
    }
}

/// The sum of four sums.
#[inline(always)]
fn total<const W: usize>([a, b, c, d]: [[f32; W]; PARTS]) -> [f32; W] {
    std::array::from_fn(|i| (a[i] + b[i]) + (c[i] + d[i]))
}

/// A query times the keys `[dim, PAGE]` of a page.
#[inline(always)]
fn products<const FUSED: bool>(q: &[f32], keys: &[f32]) -> [f32; PAGE] {
    // Written out: indexed by a loop's variable, the sums would lie in memory.
    let [mut a, mut b, mut c, mut d] = [[0.0_f32; PAGE]; PARTS];
    let mut q = q.chunks_exact(PARTS);
    let mut keys = keys.chunks_exact(PARTS * PAGE);
    for (q, keys) in q.by_ref().zip(keys.by_ref()) {
        add::<FUSED, PAGE>(&mut a, q[0], keys);
        add::<FUSED, PAGE>(&mut b, q[1], &keys[PAGE..]);
        add::<FUSED, PAGE>(&mut c, q[2], &keys[2 * PAGE..]);
        add::<FUSED, PAGE>(&mut d, q[3], &keys[3 * PAGE..]);
    }
    let rest = q.remainder().iter().zip(keys.remainder().chunks_exact(PAGE));
    for (sums, (q, keys)) in [&mut a, &mut b, &mut c].into_iter().zip(rest) {
        add::<FUSED, PAGE>(sums, *q, keys);
    }
    total([a, b, c, d])
}

/// Scale and soft cap.
#[inline(always)]
fn cap(row: &mut [f32; PAGE], options: AttentionOptions) {
    let scale = options.scale as f32;
    match options.softcap {
        None => row.iter_mut().for_each(|s| *s *= scale),
        Some(cap) => {
            let (cap, inverse) = (cap as f32, (1.0 / cap) as f32);
            row.iter_mut().for_each(|s| *s = cap * tanh(*s * scale * inverse));
        }
    }
}

/// Replaces scores by `e^(score - greatest)` and returns their sum.
#[inline(always)]
fn exponentials(weights: &mut [f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; PAGE];
    for row in weights.chunks_exact(PAGE) {
        for slot in 0..PAGE {
            most[slot] = if row[slot] > most[slot] { row[slot] } else { most[slot] };
        }
    }
    let most = most.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    let mut sums = [0.0_f32; PAGE];
    for row in weights.chunks_exact_mut(PAGE) {
        for slot in 0..PAGE {
            row[slot] = exp_f32(row[slot] - most);
            sums[slot] += row[slot];
        }
    }
    sums.iter().sum()
}

/// `W` values of the weighted sum of values, from `first` on; returns `W`.
#[inline(always)]
fn combine<'a, const FUSED: bool, const W: usize>(
    out: &mut [f32],
    first: usize,
    weights: &[f32],
    seen: impl Iterator<Item = Seen<'a>>,
    place: &std::ops::Range<usize>,
) -> usize {
    let dim = out.len();
    let [mut a, mut b, mut c, mut d] = [[0.0_f32; W]; PARTS];
    for (seen, weights) in seen.zip(weights.chunks_exact(PAGE)) {
        let values = &seen.page[place.clone()][dim * PAGE..];
        let value = |slot: usize| &values[slot * dim + first..];
        // Slots beyond may hold anything, and 0 times anything need not be 0.
        for slot in (seen.from / PARTS * PARTS..seen.to).step_by(PARTS) {
            let sees = |i: usize| slot + i >= seen.from && slot + i < seen.to;
            if sees(0) {
                add::<FUSED, W>(&mut a, weights[slot], value(slot));
            }
            if sees(1) {
                add::<FUSED, W>(&mut b, weights[slot + 1], value(slot + 1));
            }
            if sees(2) {
                add::<FUSED, W>(&mut c, weights[slot + 2], value(slot + 2));
            }
            if sees(3) {
                add::<FUSED, W>(&mut d, weights[slot + 3], value(slot + 3));
            }
        }
    }
    out[first..first + W].copy_from_slice(&total([a, b, c, d]));
    W
}
