//! Products of weights with activations whose lanes are sequences.
//!
//! For weights `[out, inner]` as the model's files have them and x `[inner, width]`, whose columns
//! (lanes) are tokens, `y[o, lane] = sum_k w[o, k] x[k, lane]`, with k ascending in one sum. A vector
//! holds the same sum of sixteen lanes, so no sum depends on its neighbours, on how many lanes there
//! are, or on how many outputs are computed at a time; and weights need no other layout.

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::convert::Infallible;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use pulp::x86::V4;
use rayon::prelude::*;

use hone_core::simd::{SimdTask, dispatch, mul_add};
use hone_core::threads::pause_point;

/// Lanes of a block: a width is a multiple of it.
pub const LANES: usize = 16;

/// Multiplications that are worth another thread.
const WORTH_A_THREAD: usize = 1 << 19;

/// Outputs of a part are a multiple of this where possible, so that most tiles are whole.
const TILE_OUTPUTS: usize = 16;

/// What a sum begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Nothing.
    Zero,
    /// What stands in the output.
    Output,
}

/// Weights `[out, inner]`, row after row.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, W = f32> {
    pub values: &'a [W],
    pub inner: usize,
}

/// Activations `[features, width]`.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'a> {
    pub values: &'a [f32],
    pub width: usize,
}

/// `out = w x`, or `out += w x`, on up to `threads` threads of the current pool; `out` is
/// `[out, width]`.
pub(super) fn product(out: &mut [f32], w: Rows<'_>, x: Lanes<'_>, start: Start, threads: usize) {
    debug_assert!(w.values.len() >= out.len() / x.width.max(1) * w.inner);
    let Ok(()) = by_outputs(out, x.width, w.inner, threads, |first, out| {
        part(out, Rows { values: &w.values[first * w.inner..], ..w }, x, start);
        Ok::<(), Infallible>(())
    });
}

/// Calls `f(first output, part of out)` so that all of `out` `[outputs, width]` is covered, on up to
/// `threads` threads of the current pool, where each output takes `inner` multiplications a lane.
///
/// # Errors
/// The first of `f`'s.
pub(super) fn by_outputs<E: Send>(
    out: &mut [f32],
    width: usize,
    inner: usize,
    threads: usize,
    f: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let threads = threads.min(out.len() * inner / WORTH_A_THREAD).max(1);
    if threads == 1 {
        return f(0, out);
    }
    // Several parts a thread, as another process may take a processor away.
    let outputs = (out.len() / width).div_ceil(threads * 2).next_multiple_of(TILE_OUTPUTS);
    out.par_chunks_mut(outputs * width).enumerate().try_for_each(|(i, out)| f(i * outputs, out))
}

/// [`product`] on this thread.
pub(super) fn part(out: &mut [f32], w: Rows<'_>, x: Lanes<'_>, start: Start) {
    debug_assert!(x.width.is_multiple_of(LANES) && x.values.len() >= w.inner * x.width);
    compute(out, w, x, start);
    pause_point();
}

/// 16-bit weights.
#[derive(Clone, Copy)]
pub(super) enum Half<'a> {
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// [`part`] of 16-bit weights `[out, inner]`, widened in registers; `false`, and nothing is done, where
/// the processor cannot.
#[cfg(target_arch = "x86_64")]
pub(super) fn half_part(
    out: &mut [f32],
    (w, inner): (Half<'_>, usize),
    x: Lanes<'_>,
    start: Start,
) -> bool {
    let Some(avx512) = V4::try_new() else { return false };
    match w {
        Half::F16(values) => avx512::product(avx512, out, Rows { values, inner }, x, start),
        Half::Bf16(values) => avx512::product(avx512, out, Rows { values, inner }, x, start),
    }
    pause_point();
    true
}

/// `false`: other processors widen into memory.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn half_part(_: &mut [f32], _: (Half<'_>, usize), _: Lanes<'_>, _: Start) -> bool {
    false
}

fn compute(out: &mut [f32], w: Rows<'_>, x: Lanes<'_>, start: Start) {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx512) = V4::try_new() {
        return avx512::product(avx512, out, w, x, start);
    }
    dispatch(Portable { out, w, x, start });
}

/// The same for every processor.
struct Portable<'a> {
    out: &'a mut [f32],
    w: Rows<'a>,
    x: Lanes<'a>,
    start: Start,
}

impl SimdTask for Portable<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        const OUTPUTS: usize = 8;
        const HALF: usize = LANES / 2;
        let Self { out, w, x, start } = self;
        let (inner, width) = (w.inner, x.width);
        for (i, out) in out.chunks_mut(OUTPUTS * width).enumerate() {
            let w = &w.values[i * OUTPUTS * inner..];
            let outputs = out.len() / width;
            for lane in (0..width).step_by(HALF) {
                let mut sums = [[0.0_f32; HALF]; OUTPUTS];
                if start == Start::Output {
                    for (sum, out) in sums.iter_mut().zip(out.chunks_exact(width)) {
                        sum.copy_from_slice(&out[lane..lane + HALF]);
                    }
                }
                if outputs == OUTPUTS {
                    let rows: [&[f32]; OUTPUTS] = std::array::from_fn(|o| &w[o * inner..][..inner]);
                    for (k, x) in x.values.chunks_exact(width).take(inner).enumerate() {
                        let x = &x[lane..lane + HALF];
                        for (sum, row) in sums.iter_mut().zip(rows) {
                            for (sum, x) in sum.iter_mut().zip(x) {
                                *sum = mul_add::<FUSED>(row[k], *x, *sum);
                            }
                        }
                    }
                } else {
                    for (sum, row) in sums.iter_mut().zip(w.chunks_exact(inner)).take(outputs) {
                        for (w, x) in row.iter().zip(x.values.chunks_exact(width)) {
                            for (sum, x) in sum.iter_mut().zip(&x[lane..lane + HALF]) {
                                *sum = mul_add::<FUSED>(*w, *x, *sum);
                            }
                        }
                    }
                }
                for (sum, out) in sums.iter().zip(out.chunks_exact_mut(width)) {
                    out[lane..lane + HALF].copy_from_slice(sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
