//! A matrix of the base: a candle tensor, or quantized blocks; and the types that weights are stored in.

use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

use hone_core::memory::collect_into_huge_pages;
use hone_kernels::blocks::{BlockFormat, QuantizedMatrix};

/// A frozen or trained matrix of the model, or a weight of another rank, which is never quantized.
#[derive(Clone, Debug)]
pub enum BaseMatrix {
    /// Floats, on any device.
    Float(Tensor),
    /// Quantized blocks, in main memory. The fused kernels alone can use them.
    Quantized(Arc<QuantizedMatrix>),
}

impl From<Tensor> for BaseMatrix {
    fn from(tensor: Tensor) -> Self {
        Self::Float(tensor)
    }
}

impl From<QuantizedMatrix> for BaseMatrix {
    fn from(matrix: QuantizedMatrix) -> Self {
        Self::Quantized(Arc::new(matrix))
    }
}

impl BaseMatrix {
    /// All dimensions.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Float(tensor) => tensor.dims().to_vec(),
            Self::Quantized(matrix) => <[usize; 2]>::from(matrix.dims()).to_vec(),
        }
    }

    /// Rows and columns.
    ///
    /// # Errors
    /// If it is a tensor of another rank.
    pub fn dims2(&self) -> candle_core::Result<(usize, usize)> {
        match self {
            Self::Float(tensor) => tensor.dims2(),
            Self::Quantized(matrix) => Ok(matrix.dims()),
        }
    }

    /// The type of the values in memory.
    pub fn stored(&self) -> WeightType {
        match self {
            Self::Float(tensor) => WeightType::Float(tensor.dtype()),
            Self::Quantized(matrix) => WeightType::Blocks(matrix.format()),
        }
    }

    /// Bytes in memory.
    pub fn size(&self) -> usize {
        self.stored().size(self.shape().iter().product())
    }

    /// Moves values in main memory into huge pages, if the system has them. Reading the values from many small
    /// pages takes longer.
    pub(crate) fn use_huge_pages(&self) {
        match self {
            Self::Quantized(matrix) => collect_into_huge_pages(matrix.interleaved()),
            Self::Float(tensor) => match &*tensor.storage_and_layout().0 {
                Storage::Cpu(CpuStorage::F32(values)) => collect_into_huge_pages(values),
                Storage::Cpu(CpuStorage::F16(values)) => collect_into_huge_pages(values),
                Storage::Cpu(CpuStorage::BF16(values)) => collect_into_huge_pages(values),
                _ => {}
            },
        }
    }

    /// The tensor of floats, which operation `name` needs.
    pub(crate) fn float(&self, name: &str) -> candle_core::Result<&Tensor> {
        match self {
            Self::Float(tensor) => Ok(tensor),
            Self::Quantized(matrix) => {
                candle_core::bail!("{name}: {matrix:?} can be used by the fused kernels only")
            }
        }
    }

    /// The matrix as floats: the tensor itself, or the values of the blocks in f32.
    ///
    /// # Errors
    /// If memory for the values cannot be allocated as a tensor.
    pub fn to_float(&self) -> candle_core::Result<Tensor> {
        match self {
            Self::Float(tensor) => Ok(tensor.clone()),
            Self::Quantized(matrix) => {
                let values = first_values(matrix, usize::MAX);
                Tensor::from_vec(values, matrix.dims(), &Device::Cpu)
            }
        }
    }

    /// The rows `ids` (u32) as floats `[ids, columns]` of type `dtype`.
    pub(crate) fn select_rows(&self, ids: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        let matrix = match self {
            Self::Float(tensor) => return tensor.index_select(ids, 0)?.to_dtype(dtype),
            Self::Quantized(matrix) => matrix,
        };
        let ids = ids.to_vec1::<u32>()?;
        let (rows, columns) = matrix.dims();
        let mut values = vec![0.0; ids.len() * columns];
        for (id, to) in ids.iter().zip(values.chunks_exact_mut(columns)) {
            let row = *id as usize;
            if row >= rows {
                candle_core::bail!("row {row} is outside the {rows} rows of a matrix");
            }
            matrix.dequantize(row * columns, to);
        }
        Tensor::from_vec(values, (ids.len(), columns), &Device::Cpu)?.to_dtype(dtype)
    }

    /// The first values, `count` or all.
    pub(crate) fn first_values(&self, count: usize) -> candle_core::Result<Vec<f64>> {
        match self {
            Self::Float(tensor) => {
                let flat = tensor.flatten_all()?;
                let first = flat.narrow(0, 0, flat.elem_count().min(count))?;
                first.to_dtype(DType::F64)?.to_vec1()
            }
            Self::Quantized(matrix) => {
                Ok(first_values(matrix, count).into_iter().map(f64::from).collect())
            }
        }
    }
}

/// The first values of blocks, `count` or all.
fn first_values(matrix: &QuantizedMatrix, count: usize) -> Vec<f32> {
    let (rows, columns) = matrix.dims();
    let count = count.min(rows * columns);
    let mut values = vec![0.0; count.next_multiple_of(matrix.format().values())];
    matrix.dequantize(0, &mut values);
    values.truncate(count);
    values
}

/// The type of a weight in a file or in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// Floats.
    Float(DType),
    /// Quantized blocks.
    Blocks(BlockFormat),
}

impl WeightType {
    /// Bytes of `values` values, which are whole blocks.
    pub fn size(self, values: usize) -> usize {
        match self {
            Self::Float(dtype) => values * dtype.size_in_bytes(),
            Self::Blocks(format) => format.row_bytes(values),
        }
    }

    /// The name: `q8_0`, `BF16`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Float(dtype) => dtype.as_str(),
            Self::Blocks(format) => format.as_str(),
        }
    }

    /// Whether a computation in f32 needs a converted copy of the values.
    pub fn is_widened(self) -> bool {
        matches!(self, Self::Float(DType::F16 | DType::BF16) | Self::Blocks(_))
    }
}

impl From<DType> for WeightType {
    fn from(dtype: DType) -> Self {
        Self::Float(dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_sizes_of_ggml() {
        for format in BlockFormat::ALL {
            assert_eq!(format.values(), format.ggml().block_size(), "{format:?}");
            assert_eq!(format.bytes(), format.ggml().type_size(), "{format:?}");
        }
    }
}
