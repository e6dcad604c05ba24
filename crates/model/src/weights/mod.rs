//! The frozen base's weights: candle tensors, or matrices of quantized blocks.
//!
//! A quantized matrix stays quantized in memory. What uses it dequantizes whole rows when it needs them
//! ([`with_upcast`](crate::kernels::storage::with_upcast)), so the trainer computes in f32 with
//! these values ("QLoRA", Dettmers et al. 2023). The sampler multiplies the blocks themselves where it can.
//! Weights come from safetensors files, which can be quantized while they are loaded ([`Quantize`]), or from
//! a GGUF file.

mod files;
mod format;
mod matrix;
mod options;

use rayon::prelude::*;

use hone_core::simd::SimdTask;

pub use files::{WeightFiles, safetensors_bytes};
pub use format::{BlockFormat, WeightType};
pub use matrix::{BaseMatrix, QuantizedMatrix};
pub use options::{LoadOptions, Quantize};

// The order of quantized blocks in memory: those of 16 rows are interleaved.
//
// A kernel that computes 16 outputs reads the same weights of 16 rows at a time. Here they are side by
// side, so that it reads memory in one sequence, without transposing. ggml's files store row after row
// instead.

/// Rows whose blocks are interleaved. The last rows of a matrix may be fewer.
pub const GROUP_ROWS: usize = 16;

/// How blocks of a format are divided: f16 numbers, then words of 4 bytes, then f16 numbers.
#[derive(Clone, Copy)]
struct BlockLayout {
    /// The f16 numbers before the words, and after them.
    halves: [usize; 2],
}

impl BlockLayout {
    #[inline(always)]
    pub fn new(format: BlockFormat) -> Self {
        let halves = match format {
            BlockFormat::Q8_0 | BlockFormat::Q4_0 => [1, 0],
            BlockFormat::Q4_1 | BlockFormat::Q4K => [2, 0],
            BlockFormat::Q6K => [0, 1],
        };
        Self { halves }
    }

    /// Calls `f` with the position and the length of each part of a block of `bytes` bytes.
    #[inline(always)]
    fn each_part(self, bytes: usize, mut f: impl FnMut(usize, usize)) {
        let [before, after] = self.halves.map(|halves| 2 * halves);
        (0..before).step_by(2).for_each(|at| f(at, 2));
        (before..bytes - after).step_by(4).for_each(|at| f(at, 4));
        (bytes - after..bytes).step_by(2).for_each(|at| f(at, 2));
    }

    /// Copies row `row`'s block out of the interleaved blocks of `rows` rows.
    #[inline(always)]
    pub fn block<const BYTES: usize>(
        self,
        interleaved: &[u8],
        rows: usize,
        row: usize,
    ) -> [u8; BYTES] {
        let mut block = [0; BYTES];
        self.each_part(BYTES, |at, len| {
            block[at..at + len].copy_from_slice(&interleaved[at * rows + row * len..][..len]);
        });
        block
    }
}

/// Interleaves the blocks of a matrix whose rows have `row_bytes` bytes each, in place, on the threads
/// of the current pool.
///
/// The first block of each of [`GROUP_ROWS`] rows comes first: a part of the block of each row (an f16
/// number, or a word of 4 bytes), then the next part of each row. Then comes the second block of each row.
fn interleave(format: BlockFormat, row_bytes: usize, matrix: &mut [u8]) {
    if row_bytes == 0 {
        return;
    }
    let (layout, bytes) = (BlockLayout::new(format), format.bytes());
    matrix.par_chunks_mut(GROUP_ROWS * row_bytes).for_each(|group| {
        let rows = group.len() / row_bytes;
        let stored = group.to_vec();
        for (i, interleaved) in group.chunks_exact_mut(rows * bytes).enumerate() {
            for (row, stored) in stored.chunks_exact(row_bytes).enumerate() {
                let block = &stored[i * bytes..][..bytes];
                layout.each_part(bytes, |at, len| {
                    let to = at * rows + row * len;
                    interleaved[to..to + len].copy_from_slice(&block[at..at + len]);
                });
            }
        }
    });
}

// The values of quantized blocks in f32, bit for bit those of ggml's reference implementation: products
// and sums are rounded one at a time, in its order.

/// Writes values of a matrix to `to`, row by row.
struct DequantizeTask<'a> {
    pub format: BlockFormat,
    /// The interleaved blocks of the matrix.
    pub blocks: &'a [u8],
    pub rows: usize,
    /// Blocks of a row.
    pub row_blocks: usize,
    /// The first block, counted row by row.
    pub first: usize,
    /// The values of whole blocks.
    pub to: &'a mut [f32],
}

impl SimdTask for DequantizeTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match self.format {
            BlockFormat::Q8_0 => self.each(q8_0),
            BlockFormat::Q4_0 => self.each(q4_0),
            BlockFormat::Q4_1 => self.each(q4_1),
            BlockFormat::Q4K => self.each(q4_k),
            BlockFormat::Q6K => self.each(q6_k),
        }
    }
}

impl DequantizeTask<'_> {
    #[inline(always)]
    fn each<const BYTES: usize, const VALUES: usize>(
        self,
        decode: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
    ) {
        let (to, rest) = self.to.as_chunks_mut::<VALUES>();
        assert!(rest.is_empty() && self.first + to.len() <= self.rows * self.row_blocks);
        let layout = BlockLayout::new(self.format);
        let (mut row, mut column) = (self.first / self.row_blocks, self.first % self.row_blocks);
        for to in to {
            let group = row / GROUP_ROWS * GROUP_ROWS;
            let rows = GROUP_ROWS.min(self.rows - group);
            let at = (group * self.row_blocks + column * rows) * BYTES;
            let interleaved = &self.blocks[at..at + rows * BYTES];
            decode(&layout.block(interleaved, rows, row - group), to);
            column += 1;
            if column == self.row_blocks {
                (row, column) = (row + 1, 0);
            }
        }
    }
}

/// The f16 at `block[at..at + 2]`. Exact; unlike [`half::f16::to_f32`] it does not detect the
/// processor's features in each call.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    const INFINITE: u32 = 31 << 23;
    let bits = u16::from_le_bytes([block[at], block[at + 1]]);
    // The sign, and the exponent and mantissa at their positions in an f32.
    let wide = (i32::from(bits.cast_signed()) << 13).cast_unsigned() & 0x8fff_e000;
    // Corrects the exponent's bias from 15 to 127; exact for subnormal numbers too.
    let value = f32::from_bits(wide) * f32::from_bits((127 + 112) << 23);
    let special = if wide & INFINITE == INFINITE { 0xff << 23 } else { 0 };
    f32::from_bits(value.to_bits() | special)
}

#[inline(always)]
fn q8_0(block: &[u8; 34], to: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (to, q) in to.iter_mut().zip(&block[2..]) {
        *to = f32::from(q.cast_signed()) * d;
    }
}

#[inline(always)]
fn q4_0(block: &[u8; 18], to: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let (low, high) = to.split_at_mut(16);
    for ((low, high), q) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = (f32::from(q & 15) - 8.0) * d;
        *high = (f32::from(q >> 4) - 8.0) * d;
    }
}

#[inline(always)]
fn q4_1(block: &[u8; 20], to: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = to.split_at_mut(16);
    for ((low, high), q) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = f32::from(q & 15) * d + m;
        *high = f32::from(q >> 4) * d + m;
    }
}

/// The scale and the offset of the 32 values number `i`, of 6 bits each. Those of the first four are the
/// low bits of bytes; the others' low four bits share bytes, and their high bits are the high bits of the
/// first eight bytes.
#[inline(always)]
fn scale_and_offset(scales: &[u8], i: usize) -> (f32, f32) {
    let (scale, offset) = if i < 4 {
        (scales[i] & 63, scales[i + 4] & 63)
    } else {
        let low = scales[i + 4];
        ((low & 15) | (scales[i - 4] >> 6 << 4), (low >> 4) | (scales[i] >> 6 << 4))
    };
    (f32::from(scale), f32::from(offset))
}

#[inline(always)]
fn q4_k(block: &[u8; 144], to: &mut [f32; 256]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (scales, qs) = block[4..].split_at(12);
    // 32 bytes hold the low and the high halves of 64 values.
    for (pair, (to, qs)) in to.chunks_exact_mut(64).zip(qs.chunks_exact(32)).enumerate() {
        let (scale, offset) = scale_and_offset(scales, 2 * pair);
        let (low_scale, low_offset) = (d * scale, m * offset);
        let (scale, offset) = scale_and_offset(scales, 2 * pair + 1);
        let (high_scale, high_offset) = (d * scale, m * offset);
        let (low, high) = to.split_at_mut(32);
        for ((low, high), q) in low.iter_mut().zip(high).zip(qs) {
            *low = low_scale * f32::from(q & 15) - low_offset;
            *high = high_scale * f32::from(q >> 4) - high_offset;
        }
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], to: &mut [f32; 256]) {
    let d = half_at(block, 208);
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    // 64 bytes of low bits and 32 bytes of high bits hold 128 values.
    for (i, to) in to.chunks_exact_mut(128).enumerate() {
        let (low, high, scales) = (&low[64 * i..], &high[32 * i..], &scales[8 * i..]);
        // Value `32 quarter + j`: its low bits are a half of byte `j` or `32 + j`.
        for (quarter, to) in to.chunks_exact_mut(32).enumerate() {
            let (low, shift) = (&low[32 * (quarter % 2)..][..32], 4 * (quarter / 2));
            for (part, to) in to.chunks_exact_mut(16).enumerate() {
                let scale = d * f32::from(scales[2 * quarter + part].cast_signed());
                let bytes = low[16 * part..].iter().zip(&high[16 * part..]);
                for (to, (low, high)) in to.iter_mut().zip(bytes) {
                    let q = ((low >> shift) & 15) | (((high >> (2 * quarter)) & 3) << 4);
                    *to = scale * (f32::from(q) - 32.0);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
