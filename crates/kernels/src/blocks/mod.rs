//! Quantized matrices: blocks of weights that share a scale, in the formats of ggml. Their values are computed as
//! ggml does ([`QuantizedMatrix::dequantize`]), or the blocks are multiplied themselves ([`integer`]).
//!
//! A kernel that computes 16 outputs reads the same weights of 16 rows at a time. In memory these are side by side,
//! unlike in ggml's files, so that it reads in one sequence, without transposing.

pub mod integer;

use std::fmt;

use candle_core::quantized::GgmlDType;
use rayon::prelude::*;

use hone_core::simd::{SimdTask, dispatch};

use crate::vector::widen_f16;

/// Rows whose blocks are interleaved. The last rows of a matrix may be fewer.
pub(crate) const GROUP_ROWS: usize = 16;

/// A format of quantized weights, as ggml defines it. A row of a matrix is a sequence of blocks, and its
/// number of values is a multiple of [`Self::values`].
///
/// `d` and `m` are f16 scales, little-endian; `q` is an unsigned integer.
///
/// | format | values | bytes | content of a block | value |
/// | --- | --- | --- | --- | --- |
/// | `Q8_0` | 32 | 34 | d, 32 signed q | `q d` |
/// | `Q4_0` | 32 | 18 | d, 16 bytes: q of values j and j + 16 | `(q - 8) d` |
/// | `Q4_1` | 32 | 20 | d, m, 16 bytes as in `Q4_0` | `q d + m` |
/// | `Q4K` | 256 | 144 | d, m, 12 bytes of scales s and offsets o, 128 bytes of q | `(d s) q - (m o)` |
/// | `Q6K` | 256 | 210 | 128 bytes and 64 bytes of q, 16 signed scales s, d | `(d s) (q - 32)` |
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockFormat {
    /// 8 bits, 32 values to a scale.
    Q8_0,
    /// 4 bits, 32 values to a scale.
    Q4_0,
    /// 4 bits, 32 values to a scale and an offset.
    Q4_1,
    /// 4 bits, 32 values to a scale and an offset of 6 bits.
    Q4K,
    /// 6 bits, 16 values to a scale of 8 bits.
    Q6K,
}

impl BlockFormat {
    /// All formats.
    pub const ALL: [Self; 5] = [Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Q4K, Self::Q6K];

    /// The values and the bytes of a block, its f16 numbers before and after its words of 4 bytes, and the names in
    /// llama.cpp and candle.
    #[inline(always)]
    const fn layout(self) -> (usize, usize, [usize; 2], &'static str, GgmlDType) {
        match self {
            Self::Q8_0 => (32, 34, [1, 0], "q8_0", GgmlDType::Q8_0),
            Self::Q4_0 => (32, 18, [1, 0], "q4_0", GgmlDType::Q4_0),
            Self::Q4_1 => (32, 20, [2, 0], "q4_1", GgmlDType::Q4_1),
            Self::Q4K => (256, 144, [2, 0], "q4_k", GgmlDType::Q4K),
            Self::Q6K => (256, 210, [0, 1], "q6_k", GgmlDType::Q6K),
        }
    }

    /// Values of a block.
    pub const fn values(self) -> usize {
        self.layout().0
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        self.layout().1
    }

    /// Bytes of a row of `columns` values, which are whole blocks.
    pub fn row_bytes(self, columns: usize) -> usize {
        columns / self.values() * self.bytes()
    }

    /// The name, as in llama.cpp: `q8_0`.
    pub fn as_str(self) -> &'static str {
        self.layout().3
    }

    /// candle's name.
    pub fn ggml(self) -> GgmlDType {
        self.layout().4
    }

    /// Calls `f` with the position and the length of each f16 number and each word of a block.
    #[inline(always)]
    fn each_part(self, mut f: impl FnMut(usize, usize)) {
        let (_, bytes, halves, ..) = self.layout();
        let [before, after] = halves.map(|halves| 2 * halves);
        (0..before).step_by(2).for_each(|at| f(at, 2));
        (before..bytes - after).step_by(4).for_each(|at| f(at, 4));
        (bytes - after..bytes).step_by(2).for_each(|at| f(at, 2));
    }

    /// Copies row `row`'s block out of the interleaved blocks of `rows` rows.
    #[inline(always)]
    fn block<const BYTES: usize>(self, interleaved: &[u8], rows: usize, row: usize) -> [u8; BYTES] {
        let mut block = [0; BYTES];
        self.each_part(|at, len| {
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
    let bytes = format.bytes();
    matrix.par_chunks_mut(GROUP_ROWS * row_bytes).for_each(|group| {
        let rows = group.len() / row_bytes;
        let stored = group.to_vec();
        for (i, interleaved) in group.chunks_exact_mut(rows * bytes).enumerate() {
            for (row, stored) in stored.chunks_exact(row_bytes).enumerate() {
                let block = &stored[i * bytes..][..bytes];
                format.each_part(|at, len| {
                    let to = at * rows + row * len;
                    interleaved[to..to + len].copy_from_slice(&block[at..at + len]);
                });
            }
        }
    });
}

/// A matrix `[rows, columns]` of quantized blocks in main memory. The blocks of 16 rows are interleaved.
pub struct QuantizedMatrix {
    format: BlockFormat,
    rows: usize,
    columns: usize,
    bytes: Vec<u8>,
}

impl fmt::Debug for QuantizedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QuantizedMatrix({} [{}, {}])", self.format.as_str(), self.rows, self.columns)
    }
}

impl QuantizedMatrix {
    /// A matrix from its blocks, row by row.
    ///
    /// # Errors
    /// If a row is not a sequence of whole blocks, or the bytes do not fit the shape.
    pub fn new(
        format: BlockFormat,
        (rows, columns): (usize, usize),
        mut bytes: Vec<u8>,
    ) -> Result<Self, String> {
        let whole = columns > 0 && columns.is_multiple_of(format.values());
        if !whole || bytes.len() != rows * format.row_bytes(columns) {
            let (len, name) = (bytes.len(), format.as_str());
            return Err(format!("{len} bytes of {name} are not a matrix [{rows}, {columns}]"));
        }
        interleave(format, format.row_bytes(columns), &mut bytes);
        Ok(Self { format, rows, columns, bytes })
    }

    /// The format.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// Rows and columns.
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// The blocks, interleaved: the first block of each of 16 rows, the second one, and so on, then the next
    /// rows. In the blocks of the same number, each f16 number and each word of 4 bytes is followed by that of
    /// the next row. The last rows may be fewer.
    pub fn interleaved(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes the values from `first` on, counted row by row, to `to`.
    ///
    /// # Panics
    /// If `first` or the length of `to` is not a multiple of the values of a block, or the values are outside
    /// the matrix.
    pub fn dequantize(&self, first: usize, to: &mut [f32]) {
        let values = self.format.values();
        assert!(first.is_multiple_of(values), "{first} is within a block");
        dispatch(DequantizeTask { matrix: self, first: first / values, to });
    }
}

// The values of quantized blocks in f32, bit for bit those of ggml's reference implementation: products
// and sums are rounded one at a time, in its order.

/// Writes values of a matrix to `to`, row by row.
struct DequantizeTask<'a> {
    matrix: &'a QuantizedMatrix,
    /// The first block, counted row by row.
    first: usize,
    /// The values of whole blocks.
    to: &'a mut [f32],
}

impl SimdTask for DequantizeTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        match self.matrix.format {
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
        let QuantizedMatrix { format, rows: all, columns, ref bytes } = *self.matrix;
        let (to, rest) = self.to.as_chunks_mut::<VALUES>();
        let row_blocks = columns / VALUES;
        assert!(rest.is_empty() && self.first + to.len() <= all * row_blocks);
        let (mut row, mut column) = (self.first / row_blocks, self.first % row_blocks);
        for to in to {
            let group = row / GROUP_ROWS * GROUP_ROWS;
            let rows = GROUP_ROWS.min(all - group);
            let at = (group * row_blocks + column * rows) * BYTES;
            decode(&format.block(&bytes[at..at + rows * BYTES], rows, row - group), to);
            column += 1;
            if column == row_blocks {
                (row, column) = (row + 1, 0);
            }
        }
    }
}

/// The f16 at `block[at..at + 2]`.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    widen_f16(u16::from_le_bytes([block[at], block[at + 1]]))
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
