//! The order of quantized blocks in memory: those of 16 rows are interleaved.
//!
//! A kernel that computes 16 outputs reads the same weights of 16 rows at a time. Here they are side by
//! side, so that it reads memory in one sequence, without transposing. ggml's files store row after row
//! instead.

use rayon::prelude::*;

use super::format::BlockFormat;

/// Rows whose blocks are interleaved. The last rows of a matrix may be fewer.
pub const GROUP_ROWS: usize = 16;

/// How blocks of a format are divided: f16 numbers, then words of 4 bytes, then f16 numbers.
#[derive(Clone, Copy)]
pub(super) struct BlockLayout {
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
pub(super) fn interleave(format: BlockFormat, row_bytes: usize, matrix: &mut [u8]) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_group_are_side_by_side() {
        // Two rows of two blocks: a half and eight words.
        let (row, mut matrix): (Vec<u8>, _) = ((0..68).collect(), vec![0; 136]);
        matrix[..68].copy_from_slice(&row);
        matrix[68..].copy_from_slice(&row.iter().map(|x| x + 100).collect::<Vec<_>>());
        interleave(BlockFormat::Q8_0, 68, &mut matrix);
        assert_eq!(matrix[..12], [0, 1, 100, 101, 2, 3, 4, 5, 102, 103, 104, 105]);
        assert_eq!(matrix[68..72], [34, 35, 134, 135]);
    }

    #[test]
    fn every_block_is_found_again() {
        for format in BlockFormat::ALL {
            for rows in [1, 16, 19] {
                let row_bytes = 2 * format.bytes();
                let stored: Vec<u8> = (0..rows * row_bytes).map(|i| (i * 7 % 251) as u8).collect();
                let mut matrix = stored.clone();
                interleave(format, row_bytes, &mut matrix);
                match format {
                    BlockFormat::Q8_0 => check::<34>(format, rows, &stored, &matrix),
                    BlockFormat::Q4_0 => check::<18>(format, rows, &stored, &matrix),
                    BlockFormat::Q4_1 => check::<20>(format, rows, &stored, &matrix),
                    BlockFormat::Q4K => check::<144>(format, rows, &stored, &matrix),
                    BlockFormat::Q6K => check::<210>(format, rows, &stored, &matrix),
                }
            }
        }
    }

    /// Two blocks a row.
    fn check<const BYTES: usize>(format: BlockFormat, rows: usize, stored: &[u8], matrix: &[u8]) {
        for (i, expected) in stored.chunks_exact(BYTES).enumerate() {
            let (row, block) = (i / 2, i % 2);
            let first = row / GROUP_ROWS * GROUP_ROWS;
            let group_rows = GROUP_ROWS.min(rows - first);
            let interleaved = &matrix[(first * 2 + block * group_rows) * BYTES..];
            let found =
                BlockLayout::new(format).block::<BYTES>(interleaved, group_rows, row - first);
            assert_eq!(found, expected, "{format:?} {row} {block}");
        }
    }
}
