//! The formats of quantized weights, as the kernels need them. `hone_model::weights::BlockFormat` describes
//! their blocks.

/// A format of blocks, which are divided into parts of 32 weights.
///
/// A weight is `scale (q - 2^SHIFT)`, or without a `SHIFT` `scale q - offset`, with an unsigned integer q of
/// at most 8 bits.
pub(super) trait WeightFormat {
    /// Bytes of a block.
    const BYTES: usize;

    /// Parts of a block.
    const PARTS: usize;

    /// The f16 numbers of a block before its words of 4 bytes, and after them.
    const HALVES: [usize; 2];

    /// What is subtracted from the integers, as a power of two. `None` for formats with an offset.
    const SHIFT: Option<u32>;

    /// Whether each 16 weights of a part have a scale of their own.
    const SPLIT: bool = false;
}

/// A scale, and 32 integers of 8 bits.
pub(super) struct Q8_0;

/// A scale, and 16 bytes: the integers `j` and `j + 16` of 4 bits, plus 8.
pub(super) struct Q4_0;

/// A scale and an offset, and 16 bytes as in [`Q4_0`] but without the 8.
pub(super) struct Q4_1;

/// Two scales of the scales and of the offsets, eight of these with 6 bits each, and 128 bytes: 32 of them
/// hold the integers of two parts.
pub(super) struct Q4K;

/// Integers of 6 bits, plus 32, in 128 bytes with four bits of each and 64 bytes with two; sixteen scales of 8
/// bits, and the scale of these.
pub(super) struct Q6K;

impl WeightFormat for Q8_0 {
    const BYTES: usize = 34;
    const PARTS: usize = 1;
    const HALVES: [usize; 2] = [1, 0];
    const SHIFT: Option<u32> = Some(7);
}

impl WeightFormat for Q4_0 {
    const BYTES: usize = 18;
    const PARTS: usize = 1;
    const HALVES: [usize; 2] = [1, 0];
    const SHIFT: Option<u32> = Some(3);
}

impl WeightFormat for Q4_1 {
    const BYTES: usize = 20;
    const PARTS: usize = 1;
    const HALVES: [usize; 2] = [2, 0];
    const SHIFT: Option<u32> = None;
}

impl WeightFormat for Q4K {
    const BYTES: usize = 144;
    const PARTS: usize = 8;
    const HALVES: [usize; 2] = [2, 0];
    const SHIFT: Option<u32> = None;
}

impl WeightFormat for Q6K {
    const BYTES: usize = 210;
    const PARTS: usize = 8;
    const HALVES: [usize; 2] = [0, 1];
    const SHIFT: Option<u32> = Some(5);
    const SPLIT: bool = true;
}

/// Where the integers of a part of [`Q6K`] are in its block: the low four bits, by how many bits they are
/// shifted, the high two bits, and by how many bits these are shifted.
pub(super) fn q6_k_part(part: usize) -> ((usize, u32), (usize, u32)) {
    // 64 bytes of low bits and 32 bytes of high bits hold four parts.
    let (group, quarter) = (part / 4, part % 4);
    let low = (64 * group + 32 * (quarter % 2), 4 * (quarter as u32 / 2));
    (low, (128 + 32 * group, 2 * quarter as u32))
}
