//! Products of weights that are stored in bf16 with activations that are rounded to bf16, with sums in f32, by
//! the instruction of AVX-512 for bf16 (`vdpbf16ps`).
//!
//! A word of 32 bits has two weights of a row, or two activations of a column with consecutive k. The
//! instruction adds both products of two words to a sum, the second one first. A sum runs over the words with k
//! ascending, in every kernel, so the bits of an element do not depend on the other columns, on the tile that
//! computes it, or on the number of threads. Weights need not be widened, which for few tokens takes longer than
//! to multiply them. Subnormal numbers count as 0.

#[cfg(target_arch = "x86_64")]
mod pairs;

use half::bf16;

use hone_core::simd::{SimdTask, dispatch};
use hone_core::threads::pause_point;

use super::TokenColumns;
use super::kernel::WeightMatrix;
use crate::hot_team::for_each_chunk;
use crate::processor::has_fast_bf16_vectors;

/// Values of a thread's part of a conversion, with which it takes longer than to wake the thread.
const PART_VALUES: usize = 1 << 15;

/// Activations `[inner, width]` rounded to the nearest bf16, ties to even, two to a word.
#[derive(Debug, Default)]
pub struct Bf16Columns {
    /// `[inner / 2, width]`: in the lower half the activation with the smaller k.
    words: Vec<u32>,
    inner: usize,
    width: usize,
    tokens: usize,
}

impl Bf16Columns {
    /// Rounds the columns of `x`, on up to `threads` threads of the current pool. `inner` is even.
    pub fn round(&mut self, x: TokenColumns<'_>, inner: usize, threads: usize) -> &Self {
        let TokenColumns { values, width, tokens } = x;
        assert!(inner.is_multiple_of(2) && values.len() >= inner * width, "odd, or too few values");
        (self.inner, self.width, self.tokens) = (inner, width, tokens);
        self.words.resize(inner / 2 * width, 0);
        let rows = (inner / 2).div_ceil(threads.max(1)).max(PART_VALUES / (2 * width).max(1));
        let part = (rows * width).max(1);
        let values = &values[..inner * width];
        for_each_chunk(&mut self.words, part, |i, words| {
            let values = &values[2 * i * part..][..2 * words.len()];
            dispatch(RoundPairs { words, values, width });
        });
        self
    }

    /// Bytes of `tokens` columns of `inner` activations.
    #[cfg(test)]
    pub fn bytes(tokens: usize, inner: usize) -> usize {
        inner / 2 * tokens * size_of::<u32>()
    }
}

/// Rounds pairs of rows.
struct RoundPairs<'a> {
    /// `[rows, width]`
    words: &'a mut [u32],
    /// `[2 rows, width]`
    values: &'a [f32],
    width: usize,
}

impl SimdTask for RoundPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { words, values, width } = self;
        for (words, rows) in words.chunks_exact_mut(width).zip(values.chunks_exact(2 * width)) {
            let (lower, upper) = rows.split_at(width);
            for (word, (lower, upper)) in words.iter_mut().zip(lower.iter().zip(upper)) {
                *word = rounded(*lower) | rounded(*upper) << 16;
            }
        }
    }
}

/// The bits of the nearest bf16, ties to even. Unlike [`bf16::from_f32`], this can be vectorized.
#[inline(always)]
fn rounded(x: f32) -> u32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // A number that is none stays so: its payload must not be rounded to that of infinity.
    if x.is_nan() { bits >> 16 | 0x40 } else { nearest }
}

/// Computes `out += w x` on the current thread. `out` is `[outputs, width]`; uses as many rows of `w` as it has.
///
/// # Panics
/// If shapes disagree, or unless [`has_fast_bf16_vectors`].
pub fn add_product(out: &mut [f32], w: WeightMatrix<'_, bf16>, x: &Bf16Columns) {
    assert!(has_fast_bf16_vectors() && w.inner == x.inner, "no products in bf16");
    let outputs = out.len() / x.width.max(1);
    assert!(out.len() == outputs * x.width && w.values.len() >= outputs * w.inner);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the processor has the instructions, and the assertions and `round` guarantee the shapes.
    unsafe {
        pairs::add_product(out, w, (&x.words, x.width, x.tokens));
    }
    pause_point();
}

#[cfg(test)]
mod tests;
