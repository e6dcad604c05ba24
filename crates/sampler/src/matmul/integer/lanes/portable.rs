//! Arrays, for whose loops the compiler selects instructions. With NEON these are widening multiply-adds of 16
//! bits, four at a time.

use half::f16;

use hone_core::simd::mul_add;

use super::RowVectors;
use super::RowsFormat;
use super::kernel::run;
use crate::matmul::integer::layout::LANES;
use crate::matmul::integer::product::Product;
use crate::matmul::kernel::StoredWeight;

/// Computes all outputs on any processor. `FUSED` is whether `f32::mul_add` is one instruction.
pub(in crate::matmul::integer) fn run_portable<const FUSED: bool, F: RowsFormat>(
    product: &mut Product<'_>,
) {
    run::<_, F>(Portable::<FUSED>, product);
}

/// Every processor can compute with arrays.
#[derive(Clone, Copy)]
struct Portable<const FUSED: bool>;

impl<const FUSED: bool> RowVectors for Portable<FUSED> {
    type Words = [u32; LANES];
    /// The first weight of each row, then the second.
    type Pairs = [[i16; LANES]; 2];
    type Floats = [f32; LANES];

    #[inline(always)]
    fn read_words(self, from: &[u8]) -> [u32; LANES] {
        let mut words = [0; LANES];
        for (word, from) in words.iter_mut().zip(from.as_chunks().0) {
            *word = u32::from_le_bytes(*from);
        }
        words
    }

    #[inline(always)]
    fn read_halves(self, from: &[u8]) -> [f32; LANES] {
        let mut halves = [0.0; LANES];
        for (half, from) in halves.iter_mut().zip(from.as_chunks().0) {
            *half = f16::from_le_bytes(*from).widen();
        }
        halves
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
    fn or(self, mut a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        a.iter_mut().zip(&b).for_each(|(a, b)| *a |= b);
        a
    }

    #[inline(always)]
    fn xor(self, mut a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        a.iter_mut().zip(&b).for_each(|(a, b)| *a ^= b);
        a
    }

    #[inline(always)]
    fn add(self, mut a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        a.iter_mut().zip(&b).for_each(|(a, b)| *a = a.wrapping_add(*b));
        a
    }

    #[inline(always)]
    fn shift_left(self, mut words: [u32; LANES], bits: u32) -> [u32; LANES] {
        words.iter_mut().for_each(|word| *word <<= bits);
        words
    }

    #[inline(always)]
    fn shift_right(self, mut words: [u32; LANES], bits: u32) -> [u32; LANES] {
        words.iter_mut().for_each(|word| *word >>= bits);
        words
    }

    #[inline(always)]
    fn pairs(self, words: [u32; LANES]) -> [[[i16; LANES]; 2]; 2] {
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
    fn add_products(
        self,
        mut sums: [u32; LANES],
        weights: [[i16; LANES]; 2],
        x: u32,
    ) -> [u32; LANES] {
        for (weights, x) in weights.iter().zip([x as i16, (x >> 16) as i16]) {
            for (sum, weight) in sums.iter_mut().zip(weights) {
                let product = i32::from(*weight) * i32::from(x);
                *sum = sum.wrapping_add(product.cast_unsigned());
            }
        }
        sums
    }

    #[inline(always)]
    fn to_floats(self, words: [u32; LANES]) -> [f32; LANES] {
        let mut floats = [0.0; LANES];
        for (float, word) in floats.iter_mut().zip(&words) {
            *float = word.cast_signed() as f32;
        }
        floats
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
