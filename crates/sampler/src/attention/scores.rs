//! Parts of attention that every kernel shares: the scores of a page, and the softmax.

use hone_model::kernels::exp::exp_f32;
use hone_model::spec::AttentionOptions;

use crate::kv_cache::PAGE;
use crate::simd_ops::tanh;

/// Independent partial sums, which hide the latency of multiply-add.
pub(super) const PARTIAL_SUMS: usize = 4;

/// Pages whose values stay in the first-level cache while several queries use them.
pub(super) const PAGE_BLOCK: usize = 4;

/// Applies the scale and the soft cap.
#[inline(always)]
pub(super) fn scale_and_cap(row: &mut [f32; PAGE], options: AttentionOptions) {
    let scale = options.scale as f32;
    match options.softcap {
        None => row.iter_mut().for_each(|s| *s *= scale),
        Some(cap) => {
            let (cap, inverse) = (cap as f32, (1.0 / cap) as f32);
            row.iter_mut().for_each(|s| *s = cap * tanh(*s * scale * inverse));
        }
    }
}

/// Replaces scores by `e^(score - maximum)`. Returns their sum.
#[inline(always)]
pub(super) fn exponentiate(weights: &mut [f32]) -> f32 {
    let mut max = [f32::NEG_INFINITY; PAGE];
    for row in weights.chunks_exact(PAGE) {
        for slot in 0..PAGE {
            max[slot] = if row[slot] > max[slot] { row[slot] } else { max[slot] };
        }
    }
    let max = max.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    let mut sums = [0.0_f32; PAGE];
    for row in weights.chunks_exact_mut(PAGE) {
        for slot in 0..PAGE {
            row[slot] = exp_f32(row[slot] - max);
            sums[slot] += row[slot];
        }
    }
    sums.iter().sum()
}
