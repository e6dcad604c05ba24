//! Quantizes matrices of floats, by candle's implementation of ggml's formats.

use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::format::BlockFormat;
use super::matrix::QuantizedMatrix;
use crate::{ModelError, Result};

/// Values that a task converts to f32 and quantizes at a time, at least a row.
const TASK_VALUES: usize = 1 << 15;

/// Quantizes a matrix of floats, which `bytes` holds row by row in type `dtype`, on the threads of the
/// current pool. Memory holds f32 copies of a few rows at a time.
///
/// # Errors
/// If rows are not whole blocks, or the bytes do not fit the shape.
pub(super) fn quantize(
    format: BlockFormat,
    (rows, columns): (usize, usize),
    dtype: DType,
    bytes: &[u8],
) -> Result<QuantizedMatrix> {
    let group = (TASK_VALUES / columns.max(1)).max(1);
    let (from_row, to_row) = (columns * dtype.size_in_bytes(), format.row_bytes(columns));
    let mut blocks = vec![0; rows * to_row];
    let one = |(to, from): (&mut [u8], &[u8])| -> candle_core::Result<()> {
        let rows = to.len() / to_row;
        let floats = Tensor::from_raw_buffer(from, dtype, &[rows, columns], &Device::Cpu)?;
        let quantized = QTensor::quantize(&floats, format.ggml())?;
        to.copy_from_slice(&quantized.data()?);
        Ok(())
    };
    if to_row == 0 || bytes.len() != rows * from_row {
        let reason = format!("{} bytes of {dtype:?} are not a matrix", bytes.len());
        return Err(ModelError::weights(format!("{reason} [{rows}, {columns}] of whole blocks")));
    }
    let groups = blocks.par_chunks_mut(group * to_row);
    groups.zip(bytes.par_chunks(group * from_row)).try_for_each(one)?;
    QuantizedMatrix::new(format, (rows, columns), blocks)
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::QTensor;
    use half::bf16;

    use super::*;
    use crate::weights::BaseMatrix;

    #[test]
    fn quantizes_as_candle_does_the_whole_matrix() {
        // Several groups of rows, the last of them partial.
        let (rows, columns) = (301, 256);
        let value = |i: usize| bf16::from_f32(((i * 7919) % 1009) as f32 / 504.5 - 1.0);
        let values: Vec<bf16> = (0..rows * columns).map(value).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let floats = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
        for format in [BlockFormat::Q8_0, BlockFormat::Q4K, BlockFormat::Q6K] {
            let found = quantize(format, (rows, columns), DType::BF16, &bytes).unwrap();
            let expected = QTensor::quantize(&floats, format.ggml()).unwrap();
            let found = BaseMatrix::from(found).to_float().unwrap();
            let values = |floats: &Tensor| floats.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let expected = expected.dequantize(&Device::Cpu).unwrap();
            assert_eq!(values(&found), values(&expected), "{format:?}");
            let error = (found - floats.to_dtype(DType::F32).unwrap()).unwrap().abs().unwrap();
            let error = error.max_all().unwrap().to_scalar::<f32>().unwrap();
            let bound = if format == BlockFormat::Q4K { 0.2 } else { 0.04 };
            assert!(error > 0.0 && error < bound, "{format:?}: {error}");
        }
        assert!(quantize(BlockFormat::Q8_0, (3, 40), DType::F32, &[0; 480]).is_err());
        assert!(quantize(BlockFormat::Q8_0, (3, 32), DType::F32, &[0; 4]).is_err());
    }
}
