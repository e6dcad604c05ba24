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
        let blocks = random_blocks(format, rows * row_blocks, 5);
        let count = rows * row_blocks * format.values();
        let storage =
            QStorage::from_data(blocks.as_slice().into(), &Device::Cpu, format.ggml()).unwrap();
        let tensor = QTensor::new(storage, count).unwrap();
        let expected = tensor.dequantize(&Device::Cpu).unwrap().to_vec1::<f32>().unwrap();
        let shape = (rows, row_blocks * format.values());
        let matrix = &QuantizedMatrix::new(format, shape, blocks).unwrap();
        for range in [0..rows * row_blocks, 5..7, 46..54] {
            let values = range.start * format.values()..range.end * format.values();
            assert_same_bits(|instructions| {
                let mut to = vec![0.0; values.len()];
                let first = range.start;
                instructions.run(DequantizeTask { matrix, first, to: &mut to });
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&to), bits(&expected[values.clone()]), "{format:?}");
                to
            });
        }
        assert!(expected.iter().any(|x| x.abs() > 0.1), "{format:?}");
    }
}
