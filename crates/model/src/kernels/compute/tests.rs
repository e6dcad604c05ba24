//! Products with weights of every type in memory, and their errors in bf16.

use candle_core::{DType, Device, Tensor};

use hone_core::testing::skip_without;

use super::*;
use crate::testing::waves;
use crate::weights::{BlockFormat, QuantizedMatrix};

const ROWS: usize = 40;
const COLUMNS: usize = 64;

/// Weights in f16, bf16 and quantized blocks, each with its values in f32.
fn weights() -> Vec<(BaseMatrix, Vec<f32>)> {
    let values = waves(ROWS * COLUMNS, 0.3);
    let f32 = Tensor::from_vec(values.clone(), (ROWS, COLUMNS), &Device::Cpu).unwrap();
    // Blocks of a scale, 2^-7 to 2^-4, and 32 values.
    let blocks: Vec<u8> = (0..ROWS * COLUMNS / 32)
        .flat_map(|i| {
            let scale = half::f16::from_f32(2.0_f32.powi(-7 + i as i32 % 4)).to_le_bytes();
            let values = (0..32).map(move |j| (i * 37 + j * 11) as u8);
            scale.into_iter().chain(values)
        })
        .collect();
    let quantized = QuantizedMatrix::new(BlockFormat::Q8_0, (ROWS, COLUMNS), blocks).unwrap();
    let stored = [
        BaseMatrix::from(f32.to_dtype(DType::F16).unwrap()),
        BaseMatrix::from(f32.to_dtype(DType::BF16).unwrap()),
        BaseMatrix::from(quantized),
    ];
    let with_values = |matrix: BaseMatrix| {
        let float = matrix.to_float().unwrap().to_dtype(DType::F32).unwrap();
        (matrix, float.flatten_all().unwrap().to_vec1().unwrap())
    };
    stored.into_iter().map(with_values).collect()
}

#[test]
fn every_type_in_memory_has_the_bits_of_its_values_in_f32() {
    for compute in Compute::ALL {
        if available(compute) != compute {
            skip_without("fast products in bf16");
            continue;
        }
        for (stored, values) in weights() {
            let wide = Tensor::from_vec(values, (ROWS, COLUMNS), &Device::Cpu).unwrap();
            let wide = BaseMatrix::from(wide);
            // Some of the rows.
            for (transposed, inner) in [(true, COLUMNS), (false, 35)] {
                let x = waves(3 * inner, 0.8);
                let left = LeftFactor::new(compute, Matrix::new(&x, 3, inner));
                let rows = |weight| WeightRows { weight, rows: 3..38, transposed };
                let found = left.product(&rows(&stored)).unwrap();
                assert_eq!(found, left.product(&rows(&wide)).unwrap(), "{compute:?}");
                assert!(found.iter().any(|x| x.abs() > 0.1));
                let mut sum = found.clone();
                let width = found.len() / 3;
                left.multiply((&mut sum, width), WriteMode::Add, &rows(&stored)).unwrap();
                let close = |(sum, x): (&f32, &f32)| (sum - 2.0 * x).abs() < 1e-3;
                assert!(sum.iter().zip(&found).all(close), "{compute:?}");
            }
        }
    }
}

#[test]
fn the_error_of_bf16_is_that_of_two_roundings() {
    if available(Compute::Bf16) == Compute::F32 {
        return skip_without("fast products in bf16");
    }
    let (n, inner) = (20, 600);
    let (x, w) = (waves(n * inner, 0.2), waves(ROWS * inner, 0.7));
    let weight =
        BaseMatrix::from(Tensor::from_vec(w.clone(), (ROWS, inner), &Device::Cpu).unwrap());
    let rows = WeightRows { weight: &weight, rows: 0..ROWS, transposed: true };
    let [exact, found] = Compute::ALL
        .map(|compute| LeftFactor::new(compute, Matrix::new(&x, n, inner)).product(&rows).unwrap());
    let mut largest = 0.0_f32;
    for (i, (exact, found)) in exact.iter().zip(&found).enumerate() {
        let (row, column) = (i / ROWS, i % ROWS);
        let terms = x[row * inner..][..inner].iter().zip(&w[column * inner..][..inner]);
        let size: f32 = terms.map(|(x, w)| (x * w).abs()).sum();
        largest = largest.max((exact - found).abs() / size);
    }
    // Rounding to 8 bits changes a value by at most 2^-8 of it, and a product by twice as much. Most
    // errors cancel in a sum.
    assert!((1e-6..8e-3).contains(&largest), "{largest:e}");
}
