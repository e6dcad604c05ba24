//! A matrix of the base: a candle tensor, or quantized blocks.

use std::fmt;
use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

use hone_core::memory::collect_into_huge_pages;
use hone_core::simd::dispatch;

use super::DequantizeTask;
use super::format::{BlockFormat, WeightType};
use super::interleave;
use crate::{ModelError, Result};

/// A matrix `[rows, columns]` of quantized blocks in main memory. The blocks of
/// [`GROUP_ROWS`](super::GROUP_ROWS) rows are interleaved.
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
    ) -> Result<Self> {
        let whole = columns > 0 && columns.is_multiple_of(format.values());
        if !whole || bytes.len() != rows * format.row_bytes(columns) {
            return Err(ModelError::weights(format!(
                "{} bytes of {} are not a matrix [{rows}, {columns}]",
                bytes.len(),
                format.as_str()
            )));
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

    /// The blocks, interleaved: the first block of each of [`GROUP_ROWS`](super::GROUP_ROWS) rows, the
    /// second one, and so on, then the next rows. In the blocks of the same number, each f16 number and
    /// each word of 4 bytes is followed by that of the next row. The last rows may be fewer.
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
        dispatch(DequantizeTask {
            format: self.format,
            blocks: &self.bytes,
            rows: self.rows,
            row_blocks: self.columns / values,
            first: first / values,
            to,
        });
    }

    /// The first values of the matrix, `count` or all.
    fn first_values(&self, count: usize) -> Vec<f32> {
        let whole = count.next_multiple_of(self.format.values()).min(self.rows * self.columns);
        let mut values = vec![0.0; whole];
        self.dequantize(0, &mut values);
        values.truncate(count);
        values
    }
}

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
            Self::Quantized(matrix) => vec![matrix.rows, matrix.columns],
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
            Self::Quantized(matrix) => WeightType::Blocks(matrix.format),
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
            Self::Quantized(matrix) => collect_into_huge_pages(&matrix.bytes),
            Self::Float(tensor) => match &*tensor.storage_and_layout().0 {
                Storage::Cpu(CpuStorage::F32(values)) => collect_into_huge_pages(values),
                Storage::Cpu(CpuStorage::F16(values)) => collect_into_huge_pages(values),
                Storage::Cpu(CpuStorage::BF16(values)) => collect_into_huge_pages(values),
                _ => {}
            },
        }
    }

    /// The tensor of floats.
    ///
    /// # Errors
    /// If the matrix is quantized: operation `name` is for floats only.
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
                let values = matrix.first_values(matrix.rows * matrix.columns);
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
                Ok(matrix.first_values(count).into_iter().map(f64::from).collect())
            }
        }
    }
}
