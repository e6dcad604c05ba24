//! The formats of quantized weights, as the kernel reads them. [`BlockFormat`] describes their blocks.

use super::activations::{BLOCK, WORDS};
use super::lanes::RowVectors;
use crate::blocks::BlockFormat;

/// 32 weights of 16 rows.
pub(super) struct RowsPart<V: RowVectors> {
    /// Unsigned bytes q, four consecutive ones of each row.
    pub weights: [V::Weights; WORDS],
    pub scale: V::Floats,
    /// The offset, or with [`RowsFormat::SPLIT`] the scale of the second half.
    pub second: V::Floats,
}

/// A format of blocks, which are divided into parts of 32 weights.
///
/// A weight is `scale (q - 2^SHIFT)`, or without a `SHIFT` `scale q - offset`, with an unsigned integer q of
/// at most 8 bits.
pub(super) trait RowsFormat {
    /// The format.
    const FORMAT: BlockFormat;

    /// Bytes of a block.
    const BYTES: usize = Self::FORMAT.bytes();

    /// Parts of a block.
    const PARTS: usize = Self::FORMAT.values() / BLOCK;

    /// What is subtracted from the integers, as a power of two. `None` for formats with an offset.
    const SHIFT: Option<u32>;

    /// Whether each 16 weights of a part have a scale of their own.
    const SPLIT: bool = false;

    /// Scales and offsets of the parts of a block.
    type Scales<V: RowVectors>: Copy;

    /// Reads what the parts share.
    ///
    /// # Safety
    /// `blocks` is the first of [`Self::BYTES`] bytes of each of 16 rows, which are interleaved.
    unsafe fn scales<V: RowVectors>(v: V, blocks: *const u8) -> Self::Scales<V>;

    /// Reads a part.
    ///
    /// # Safety
    /// As for [`Self::scales`]; `part` is below [`Self::PARTS`].
    unsafe fn part<V: RowVectors>(
        v: V,
        blocks: *const u8,
        scales: Self::Scales<V>,
        part: usize,
    ) -> RowsPart<V>;
}

/// The same byte in all bytes.
#[inline(always)]
fn bytes<V: RowVectors>(v: V, byte: u8) -> V::Words {
    v.words(u32::from_le_bytes([byte; 4]))
}

/// Byte `at` of each word as a signed number.
#[inline(always)]
fn signed_bytes<V: RowVectors>(v: V, words: V::Words, at: u32) -> V::Floats {
    let byte = v.and(v.shift_right(words, 8 * at), v.words(255));
    // Exact: the unsigned byte plus 128, modulo 256, minus 128.
    v.mul_add(v.to_floats(v.xor(byte, v.words(128))), v.floats(1.0), v.floats(-128.0))
}

/// The integers of 4 bits of 16 bytes: the lower halves, then the upper ones.
///
/// # Safety
/// The block has these bytes.
#[inline(always)]
unsafe fn halves_of_bytes<V: RowVectors>(
    v: V,
    blocks: *const u8,
    at: usize,
) -> [V::Weights; WORDS] {
    let mut all = [v.weights(v.words(0)); WORDS];
    let (lower, upper) = all.split_at_mut(WORDS / 2);
    for (p, (lower, upper)) in lower.iter_mut().zip(upper).enumerate() {
        // SAFETY: the caller's guarantee.
        let both = unsafe { v.read_words(blocks, at + 4 * p) };
        *lower = v.weights(v.and(both, bytes(v, 15)));
        *upper = v.weights(v.and(v.shift_right(both, 4), bytes(v, 15)));
    }
    all
}

/// A scale, and 32 integers of 8 bits.
pub(super) struct Q8_0;

impl RowsFormat for Q8_0 {
    const FORMAT: BlockFormat = BlockFormat::Q8_0;
    const SHIFT: Option<u32> = Some(7);
    type Scales<V: RowVectors> = V::Floats;

    #[inline(always)]
    unsafe fn scales<V: RowVectors>(v: V, blocks: *const u8) -> V::Floats {
        // SAFETY: the caller's guarantee.
        unsafe { v.read_halves(blocks, 0) }
    }

    #[inline(always)]
    unsafe fn part<V: RowVectors>(
        v: V,
        blocks: *const u8,
        scale: V::Floats,
        _: usize,
    ) -> RowsPart<V> {
        let mut all = [v.weights(v.words(0)); WORDS];
        for (p, weights) in all.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            let signed = unsafe { v.read_words(blocks, 2 + 4 * p) };
            *weights = v.weights(v.xor(signed, bytes(v, 128)));
        }
        RowsPart { weights: all, scale, second: scale }
    }
}

/// A scale, and 16 bytes: the integers `j` and `j + 16` of 4 bits, plus 8.
pub(super) struct Q4_0;

impl RowsFormat for Q4_0 {
    const FORMAT: BlockFormat = BlockFormat::Q4_0;
    const SHIFT: Option<u32> = Some(3);
    type Scales<V: RowVectors> = V::Floats;

    #[inline(always)]
    unsafe fn scales<V: RowVectors>(v: V, blocks: *const u8) -> V::Floats {
        // SAFETY: the caller's guarantee.
        unsafe { v.read_halves(blocks, 0) }
    }

    #[inline(always)]
    unsafe fn part<V: RowVectors>(
        v: V,
        blocks: *const u8,
        scale: V::Floats,
        _: usize,
    ) -> RowsPart<V> {
        // SAFETY: the caller's guarantee.
        RowsPart { weights: unsafe { halves_of_bytes(v, blocks, 2) }, scale, second: scale }
    }
}

/// A scale and an offset, and 16 bytes as in [`Q4_0`] but without the 8.
pub(super) struct Q4_1;

impl RowsFormat for Q4_1 {
    const FORMAT: BlockFormat = BlockFormat::Q4_1;
    const SHIFT: Option<u32> = None;
    /// The scale and the offset.
    type Scales<V: RowVectors> = [V::Floats; 2];

    #[inline(always)]
    unsafe fn scales<V: RowVectors>(v: V, blocks: *const u8) -> [V::Floats; 2] {
        // The offset is added to the weight.
        // SAFETY: the caller's guarantee.
        unsafe { [v.read_halves(blocks, 0), v.mul(v.read_halves(blocks, 2), v.floats(-1.0))] }
    }

    #[inline(always)]
    unsafe fn part<V: RowVectors>(
        v: V,
        blocks: *const u8,
        [scale, second]: [V::Floats; 2],
        _: usize,
    ) -> RowsPart<V> {
        // SAFETY: the caller's guarantee.
        RowsPart { weights: unsafe { halves_of_bytes(v, blocks, 4) }, scale, second }
    }
}

/// Two scales of the scales and of the offsets, eight of these with 6 bits each, and 128 bytes: 32 of them
/// hold the integers of two parts.
pub(super) struct Q4K;

impl RowsFormat for Q4K {
    const FORMAT: BlockFormat = BlockFormat::Q4K;
    const SHIFT: Option<u32> = None;
    /// The scale and the offset, and a byte of each for each part: the first four, then the others.
    type Scales<V: RowVectors> = ([V::Floats; 2], [[V::Words; 2]; 2]);

    #[inline(always)]
    unsafe fn scales<V: RowVectors>(v: V, blocks: *const u8) -> Self::Scales<V> {
        // SAFETY: the caller's guarantee.
        let ([a, b, c], both) = unsafe {
            let both = [v.read_halves(blocks, 0), v.read_halves(blocks, 2)];
            ([v.read_words(blocks, 4), v.read_words(blocks, 8), v.read_words(blocks, 12)], both)
        };
        // Of the parts 4 to 7, the upper two bits are those of the bytes of the parts 0 to 3. No bit is set in
        // both, so `xor` joins them.
        let (low, high) = (bytes(v, 15), bytes(v, 48));
        let scales = v.xor(v.and(c, low), v.and(v.shift_right(a, 2), high));
        let offsets = v.xor(v.and(v.shift_right(c, 4), low), v.and(v.shift_right(b, 2), high));
        let first = bytes(v, 63);
        (both, [[v.and(a, first), scales], [v.and(b, first), offsets]])
    }

    #[inline(always)]
    unsafe fn part<V: RowVectors>(
        v: V,
        blocks: *const u8,
        ([scale, offset], [scales, offsets]): Self::Scales<V>,
        part: usize,
    ) -> RowsPart<V> {
        let (mut all, shift) = ([v.weights(v.words(0)); WORDS], 4 * (part as u32 % 2));
        for (p, weights) in all.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            let both = unsafe { v.read_words(blocks, 16 + 32 * (part / 2) + 4 * p) };
            *weights = v.weights(v.and(v.shift_right(both, shift), bytes(v, 15)));
        }
        let at = 8 * (part as u32 % 4);
        let scale_byte = v.and(v.shift_right(scales[part / 4], at), v.words(255));
        let offset_byte = v.and(v.shift_right(offsets[part / 4], at), v.words(255));
        RowsPart {
            weights: all,
            scale: v.mul(scale, v.to_floats(scale_byte)),
            second: v.mul(offset, v.to_floats(offset_byte)),
        }
    }
}

/// Integers of 6 bits, plus 32, in 128 bytes with four bits of each and 64 bytes with two; sixteen scales of 8
/// bits, and the scale of these.
pub(super) struct Q6K;

impl RowsFormat for Q6K {
    const FORMAT: BlockFormat = BlockFormat::Q6K;
    const SHIFT: Option<u32> = Some(5);
    const SPLIT: bool = true;
    /// The scale, and a signed byte for each half of a part.
    type Scales<V: RowVectors> = (V::Floats, [V::Words; 4]);

    #[inline(always)]
    unsafe fn scales<V: RowVectors>(v: V, blocks: *const u8) -> Self::Scales<V> {
        let mut scales = [v.words(0); 4];
        for (i, scales) in scales.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            *scales = unsafe { v.read_words(blocks, 192 + 4 * i) };
        }
        // SAFETY: the caller's guarantee.
        (unsafe { v.read_halves(blocks, 208) }, scales)
    }

    #[inline(always)]
    unsafe fn part<V: RowVectors>(
        v: V,
        blocks: *const u8,
        (scale, scales): Self::Scales<V>,
        part: usize,
    ) -> RowsPart<V> {
        // 64 bytes of low bits and 32 bytes of high bits hold four parts.
        let (group, quarter) = (part / 4, part % 4);
        let (low_at, high_at) = (64 * group + 32 * (quarter % 2), 128 + 32 * group);
        let (low_shift, high_shift) = (4 * (quarter as u32 / 2), 2 * quarter as u32);
        let mut all = [v.weights(v.words(0)); WORDS];
        for (p, weights) in all.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            let (low, high) = unsafe {
                (v.read_words(blocks, low_at + 4 * p), v.read_words(blocks, high_at + 4 * p))
            };
            let high = v.and(v.shift_right(high, high_shift), bytes(v, 3));
            let low = v.and(v.shift_right(low, low_shift), bytes(v, 15));
            *weights = v.weights(v.xor(low, v.shift_left(high, 4)));
        }
        let bytes = scales[part / 2];
        let first = signed_bytes(v, bytes, 2 * (part as u32 % 2));
        let second = signed_bytes(v, bytes, 2 * (part as u32 % 2) + 1);
        RowsPart { weights: all, scale: v.mul(scale, first), second: v.mul(scale, second) }
    }
}
