//! The values of quantized blocks in f32, bit for bit those of ggml's reference implementation: products
//! and sums are rounded one at a time, in its order.

use hone_core::simd::SimdTask;

use super::format::BlockFormat;
use super::interleave::{BlockLayout, GROUP_ROWS};

/// Writes values of a matrix to `to`, row by row.
pub(super) struct DequantizeTask<'a> {
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
mod tests {
    use candle_core::Device;
    use candle_core::quantized::{QStorage, QTensor};
    use half::f16;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use hone_core::testing::assert_same_bits;

    use super::super::interleave::interleave;
    use super::*;

    /// Random blocks whose scales are of moderate size.
    fn random_blocks(format: BlockFormat, count: usize, seed: u64) -> Vec<u8> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut bytes = vec![0_u8; count * format.bytes()];
        rng.fill(bytes.as_mut_slice());
        let scales: &[usize] = match format {
            BlockFormat::Q8_0 | BlockFormat::Q4_0 => &[0],
            BlockFormat::Q4_1 | BlockFormat::Q4K => &[0, 2],
            BlockFormat::Q6K => &[208],
        };
        for block in bytes.chunks_exact_mut(format.bytes()) {
            for at in scales {
                let scale = f16::from_f32(rng.random_range(-0.02..0.02));
                block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        bytes
    }

    #[test]
    fn values_are_those_of_ggml_with_every_instruction_set() {
        // A whole group of rows, and a part of one.
        let (rows, row_blocks) = (19, 3);
        for format in BlockFormat::ALL {
            let mut blocks = random_blocks(format, rows * row_blocks, 5);
            let count = rows * row_blocks * format.values();
            let storage =
                QStorage::from_data(blocks.as_slice().into(), &Device::Cpu, format.ggml()).unwrap();
            let tensor = QTensor::new(storage, count).unwrap();
            let expected = tensor.dequantize(&Device::Cpu).unwrap().to_vec1::<f32>().unwrap();
            interleave(format, row_blocks * format.bytes(), &mut blocks);
            for range in [0..rows * row_blocks, 5..7, 46..54] {
                let values = range.start * format.values()..range.end * format.values();
                assert_same_bits(|instructions| {
                    let mut to = vec![0.0; values.len()];
                    let (blocks, first) = (&blocks[..], range.start);
                    let to_values = &mut to;
                    instructions.run(DequantizeTask {
                        format,
                        blocks,
                        rows,
                        row_blocks,
                        first,
                        to: to_values,
                    });
                    let bits =
                        |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&to), bits(&expected[values.clone()]), "{format:?}");
                    to
                });
            }
            assert!(expected.iter().any(|x| x.abs() > 0.1), "{format:?}");
        }
    }

    #[test]
    fn halves_are_widened_exactly() {
        for bits in 0..=u16::MAX {
            let expected = f16::from_bits(bits).to_f32();
            let found = half_at(&bits.to_le_bytes(), 0);
            if expected.is_nan() {
                assert!(found.is_nan(), "{bits:#x}");
            } else {
                assert_eq!(found.to_bits(), expected.to_bits(), "{bits:#x}");
            }
        }
    }
}
