//! Block-wise dynamic quantization of optimizer moments to eight bits (Dettmers et al. 2021, "8-bit
//! Optimizers via Block-wise Quantization"), with the code books of bitsandbytes.
//!
//! Each block of [`BLOCK`] values is divided by its largest magnitude, and each quotient is replaced
//! by the index of the nearest of 256 values, which are densest near 0.

use std::sync::LazyLock;

/// Number of values that share a scale.
pub(super) const BLOCK: usize = 256;
/// Tensors with fewer values keep 32 bits, as in bitsandbytes.
pub(super) const MIN_VALUES: usize = 4096;

/// 256 ascending values from -1 (or 0) to 1.
pub(super) struct CodeBook {
    pub(super) values: [f32; 256],
    /// The midpoint of each value and the next.
    midpoints: [f32; 255],
}

/// For first moments, which have both signs.
pub(super) static SIGNED: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(true));
/// For second moments, which are not negative.
pub(super) static UNSIGNED: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(false));

impl CodeBook {
    /// Dynamic tree quantization: decade `e` of seven, from `10^-6` to `1`, has `2^e` values (twice
    /// as many without a sign), the midpoints of equal parts of `[0.1, 1]` times the decade. 0 and 1
    /// are added.
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
        let midpoints = std::array::from_fn(|i| f32::midpoint(values[i], values[i + 1]));
        Self { values, midpoints }
    }

    /// The index of the nearest value.
    fn nearest(&self, x: f32) -> u8 {
        self.midpoints.partition_point(|midpoint| *midpoint < x) as u8
    }
}

/// Quantized values: one byte per value, and four per block.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct QuantizedBlocks {
    /// Index of each value in the code book.
    pub codes: Vec<u8>,
    /// The largest magnitude in each block.
    pub maxima: Vec<f32>,
}

impl QuantizedBlocks {
    /// Quantizes finite values. With `positive`, values above 0 do not become 0: with a second
    /// moment of 0, AdamW would divide by epsilon alone. bitsandbytes rounds them to 0; the
    /// difference only makes steps shorter.
    pub(super) fn encode(values: &[f32], book: &CodeBook, positive: bool) -> Self {
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

    /// The values of the codes.
    pub(super) fn decode(&self, book: &CodeBook) -> Vec<f32> {
        let blocks = self.codes.chunks(BLOCK).zip(&self.maxima);
        blocks
            .flat_map(|(codes, max)| codes.iter().map(|c| book.values[usize::from(*c)] * *max))
            .collect()
    }
}
