use candle_core::Device;
use candle_core::quantized::{QStorage, QTensor};
use half::f16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_core::testing::assert_same_bits;

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
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&to), bits(&expected[values.clone()]), "{format:?}");
                to
            });
        }
        assert!(expected.iter().any(|x| x.abs() > 0.1), "{format:?}");
    }
}

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
        let found = format.block::<BYTES>(interleaved, group_rows, row - first);
        assert_eq!(found, expected, "{format:?} {row} {block}");
    }
}
