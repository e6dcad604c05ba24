//! Arrays, for whose loops the compiler selects instructions. With NEON these are widening multiply-adds of 16
//! bits, four at a time.

use hone_core::simd::mul_add;

use super::activations::LANES;
use super::lanes::RowVectors;
use crate::vector::widen_f16;

/// Every processor can compute with arrays. `FUSED` is whether `f32::mul_add` is one instruction.
#[derive(Clone, Copy)]
pub(super) struct Portable<const FUSED: bool>;

impl<const FUSED: bool> RowVectors for Portable<FUSED> {
    type Words = [u32; LANES];
    type Floats = [f32; LANES];
    /// The first and the third weight of each row, and the second and the fourth, as the two products take them.
    type Weights = [[[i16; LANES]; 2]; 2];
    type Dots = [u32; LANES];
    const STEPS: [usize; 2] = [2, 1];

    #[inline(always)]
    unsafe fn read_words(self, blocks: *const u8, at: usize) -> [u32; LANES] {
        // SAFETY: the caller guarantees the bytes.
        let words = unsafe { blocks.add(at * LANES).cast::<[[u8; 4]; LANES]>().read() };
        words.map(u32::from_le_bytes)
    }

    #[inline(always)]
    unsafe fn read_halves(self, blocks: *const u8, at: usize) -> [f32; LANES] {
        // SAFETY: the caller guarantees the bytes.
        let halves = unsafe { blocks.add(at * LANES).cast::<[[u8; 2]; LANES]>().read() };
        halves.map(|half| widen_f16(u16::from_le_bytes(half)))
    }

    #[inline(always)]
    fn words(self, word: u32) -> [u32; LANES] {
        [word; LANES]
    }

    #[inline(always)]
    fn floats(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn and(self, mut a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        a.iter_mut().zip(&b).for_each(|(a, b)| *a &= b);
        a
    }

    #[inline(always)]
    fn xor(self, mut a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        a.iter_mut().zip(&b).for_each(|(a, b)| *a ^= b);
        a
    }

    #[inline(always)]
    fn shift_left(self, words: [u32; LANES], bits: u32) -> [u32; LANES] {
        words.map(|word| word << bits)
    }

    #[inline(always)]
    fn shift_right(self, words: [u32; LANES], bits: u32) -> [u32; LANES] {
        words.map(|word| word >> bits)
    }

    #[inline(always)]
    fn weights(self, words: [u32; LANES]) -> [[[i16; LANES]; 2]; 2] {
        let mut pairs = [[[0; LANES]; 2]; 2];
        for (i, pairs) in pairs.iter_mut().enumerate() {
            for (j, weights) in pairs.iter_mut().enumerate() {
                for (weight, word) in weights.iter_mut().zip(&words) {
                    *weight = ((word >> (8 * i + 16 * j)) & 255) as i16;
                }
            }
        }
        pairs
    }

    #[inline(always)]
    fn dots(self, start: [u32; LANES]) -> [u32; LANES] {
        start
    }

    #[inline(always)]
    fn add_products<const J: usize>(
        self,
        mut dots: [u32; LANES],
        weights: [[[i16; LANES]; 2]; 2],
        x: u32,
    ) -> [u32; LANES] {
        for (weights, x) in weights[J].iter().zip([x as i16, (x >> 16) as i16]) {
            for (dot, weight) in dots.iter_mut().zip(weights) {
                let product = i32::from(*weight) * i32::from(x);
                *dot = dot.wrapping_add(product.cast_unsigned());
            }
        }
        dots
    }

    #[inline(always)]
    fn total(self, dots: [u32; LANES]) -> [u32; LANES] {
        dots
    }

    #[inline(always)]
    fn to_floats(self, words: [u32; LANES]) -> [f32; LANES] {
        words.map(|word| word.cast_signed() as f32)
    }

    #[inline(always)]
    fn mul(self, mut a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        a.iter_mut().zip(&b).for_each(|(a, b)| *a *= b);
        a
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], mut c: [f32; LANES]) -> [f32; LANES] {
        for (c, (a, b)) in c.iter_mut().zip(a.iter().zip(&b)) {
            *c = mul_add::<FUSED>(*a, *b, *c);
        }
        c
    }

    #[inline(always)]
    fn values(self, x: [f32; LANES]) -> [f32; LANES] {
        x
    }
}
