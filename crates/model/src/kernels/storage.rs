//! The values of candle tensors and quantized matrices on the CPU as slices.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor};
use half::{bf16, f16};

use hone_kernels::float::Real;
use hone_kernels::parallel;

use crate::weights::{BaseMatrix, QuantizedMatrix};

/// Values that are widened at a time, whole blocks of each format; a parallel task takes a few of these.
const UPCAST_BLOCK: usize = 1 << 12;

/// The values of a contiguous storage.
pub(crate) fn slice<'a, T: Real>(
    storage: &'a CpuStorage,
    layout: &Layout,
    name: &str,
) -> Result<&'a [T]> {
    let values = T::cpu_storage_as_slice(storage)?;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&values[start..end]),
        None => candle_core::bail!("{name}: an input is not contiguous"),
    }
}

/// Calls `f` with the values of contiguous CPU tensors. Errors name the operation `name`.
pub(crate) fn with_values<T: Real, const N: usize, R>(
    tensors: [&Tensor; N],
    name: &str,
    f: impl FnOnce([&[T]; N]) -> Result<R>,
) -> Result<R> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut slices: [&[T]; N] = [&[]; N];
    for (slot, (storage, layout)) in slices.iter_mut().zip(&guards) {
        match &**storage {
            Storage::Cpu(storage) => *slot = slice(storage, layout, name)?,
            _ => candle_core::bail!("{name}: an input is not on the CPU"),
        }
    }
    f(slices)
}

/// Values of a matrix as they are stored.
pub enum StoredValues<'a> {
    /// f16.
    F16(&'a [f16]),
    /// bf16.
    Bf16(&'a [bf16]),
    /// f32 or f64.
    Wide(&'a CpuStorage, Range<usize>),
    /// The values of whole blocks, from this one on.
    Quantized(&'a QuantizedMatrix, usize),
}

/// As [`with_upcast`], with the values as they are stored.
///
/// # Errors
/// If the matrix is elsewhere or not contiguous; or `f`'s error.
pub fn with_stored<R>(
    matrix: &BaseMatrix,
    range: Range<usize>,
    name: &str,
    f: impl FnOnce(StoredValues<'_>) -> Result<R>,
) -> Result<R> {
    let tensor = match matrix {
        BaseMatrix::Float(tensor) => tensor,
        BaseMatrix::Quantized(matrix) => {
            return f(StoredValues::Quantized(matrix, range.start));
        }
    };
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, _))) = (&*storage, layout.contiguous_offsets()) else {
        candle_core::bail!("{name}: an input is not on the CPU, or not contiguous");
    };
    let range = start + range.start..start + range.end;
    f(match storage {
        CpuStorage::F16(values) => StoredValues::F16(&values[range]),
        CpuStorage::BF16(values) => StoredValues::Bf16(&values[range]),
        storage => StoredValues::Wide(storage, range),
    })
}

/// Calls `f` with a range of the values of a matrix on the CPU, which is contiguous: whole rows, if it is
/// quantized. Values of 16 bits and those of quantized blocks are widened to `T`, into a buffer that
/// this thread reuses. Errors name the operation `name`.
///
/// # Errors
/// If the matrix is elsewhere, not contiguous, or of another float type than 16 bits and `T`; or `f`'s
/// error.
pub fn with_upcast<T: Real, R>(
    matrix: &BaseMatrix,
    range: Range<usize>,
    name: &str,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let count = range.len();
    with_stored(matrix, range, name, |stored| match stored {
        StoredValues::F16(values) => {
            widened(count, |at, to| T::upcast_f16(to, &values[at..at + to.len()]), f)
        }
        StoredValues::Bf16(values) => {
            widened(count, |at, to| T::upcast_bf16(to, &values[at..at + to.len()]), f)
        }
        StoredValues::Wide(storage, range) => f(&T::cpu_storage_as_slice(storage)?[range]),
        StoredValues::Quantized(matrix, first) => {
            widened(count, |at, to| T::dequantize(matrix, first + at, to), f)
        }
    })
}

/// Calls `f` with `count` values, which `widen(first, to)` writes to `to`, in this thread's buffer.
pub(super) fn widened<T: Real, R>(
    count: usize,
    widen: impl Fn(usize, &mut [T]) + Sync + Send,
    f: impl FnOnce(&[T]) -> R,
) -> R {
    // Taken out of its cell, because rayon may run another task on this thread while `f` waits.
    let mut buffer = T::upcast_buffer().take();
    if buffer.len() < count {
        buffer = vec![T::of(0.0); count];
    }
    let wide = &mut buffer[..count];
    parallel::rows(wide, UPCAST_BLOCK, |first, block| widen(first * UPCAST_BLOCK, block));
    let result = f(wide);
    T::upcast_buffer().set(buffer);
    result
}

/// Whether the fused kernels can read this weight: frozen, contiguous, on the CPU, and of a type that
/// [`with_upcast`] reads.
pub(crate) fn is_frozen_cpu_weight(weight: &Tensor) -> bool {
    weight.device().is_cpu()
        && matches!(weight.dtype(), DType::F16 | DType::BF16 | DType::F32 | DType::F64)
        && weight.is_contiguous()
        && !weight.track_op()
}
