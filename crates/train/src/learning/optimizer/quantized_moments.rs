//! Block-wise dynamic quantisation of optimiser moments to eight bits (Dettmers et al. 2021, "8-bit
//! Optimizers via Block-wise Quantization"), with the code book of bitsandbytes.
//!
//! A block of [`BLOCK`] values is divided by its largest magnitude, and each quotient becomes the
//! index of the nearest of 256 values, which lie densest, by ratio, near 0.

use std::sync::LazyLock;

/// Values that share a scale.
pub(crate) const BLOCK: usize = 256;
/// Tensors of fewer values keep 32 bits, as in bitsandbytes.
pub(crate) const SMALLEST: usize = 4096;

/// 256 rising values from -1 (or 0) to 1.
pub(crate) struct CodeBook {
    values: [f32; 256],
    /// Between each value and the next.
    middles: [f32; 255],
}

/// For first moments: both signs.
pub(crate) static SIGNED: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(true));
/// For second moments: no negative value.
pub(crate) static UNSIGNED: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(false));

impl CodeBook {
    /// Dynamic tree quantisation: decade `e` of seven, from `10^-6` to `1`, holds `2^e` values (twice
    /// as many without a sign), the middles of equal parts of `[0.1, 1]` times the decade; and 0 and 1.
    fn new(signed: bool) -> Self {
        let mut all = vec![0.0, 1.0];
        for decade in 0..7_i32 {
            let parts = 1_u32 << (decade + i32::from(!signed));
            for part in 0..parts {
                let middle = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
                let value = (middle * 10_f64.powi(decade - 6)) as f32;
                all.push(value);
                if signed {
                    all.push(-value);
                }
            }
        }
        all.sort_unstable_by(f32::total_cmp);
        let mut values = [0.0; 256];
        values.copy_from_slice(&all);
        let middles = std::array::from_fn(|i| f32::midpoint(values[i], values[i + 1]));
        Self { values, middles }
    }

    /// The index of the nearest value.
    fn nearest(&self, x: f32) -> u8 {
        self.middles.partition_point(|middle| *middle < x) as u8
    }

    #[cfg(test)]
    pub(crate) fn values(&self) -> &[f32; 256] {
        &self.values
    }
}

/// A list of values, a byte each and four for every block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Blocks {
    /// Index of each value in the code book.
    pub codes: Vec<u8>,
    /// The largest magnitude in each block.
    pub maxima: Vec<f32>,
}

impl Blocks {
    /// Quantises finite values. With `positive` what is above 0 stays so: a second moment that
    /// became 0 would divide by epsilon alone. (bitsandbytes lets it; this only shortens steps.)
    pub(crate) fn encode(values: &[f32], book: &CodeBook, positive: bool) -> Self {
        let zero = book.nearest(0.0);
        let mut codes = Vec::with_capacity(values.len());
        let mut maxima = Vec::with_capacity(values.len().div_ceil(BLOCK));
        for block in values.chunks(BLOCK) {
            let max = block.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            maxima.push(max);
            codes.extend(block.iter().map(|x| {
                let code = if max > 0.0 { book.nearest(x / max) } else { zero };
                if positive && *x > 0.0 && code == zero { zero + 1 } else { code }
            }));
        }
        Self { codes, maxima }
    }

    /// The values that the codes stand for.
    pub(crate) fn decode(&self, book: &CodeBook) -> Vec<f32> {
        let blocks = self.codes.chunks(BLOCK).zip(&self.maxima);
        blocks
            .flat_map(|(codes, max)| codes.iter().map(|c| book.values[usize::from(*c)] * *max))
            .collect()
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.codes.len() + 4 * self.maxima.len()
    }
}
