use super::super::*;

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
        let found = BlockLayout::new(format).block::<BYTES>(interleaved, group_rows, row - first);
        assert_eq!(found, expected, "{format:?} {row} {block}");
    }
}
