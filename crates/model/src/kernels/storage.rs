//! The values of candle tensors on the CPU as slices.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout, Storage, Tensor};

use super::float::Real;
use super::parallel;

type Result<T> = candle_core::Result<T>;

/// Values that are upcast at a time; a parallel task takes a few of these blocks.
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

/// Calls `f` with a range of the values of a contiguous CPU tensor. Values of 16 bits are upcast to
/// `T`, into a buffer that this thread reuses. Errors name the operation `name`.
///
/// # Errors
/// If the tensor is elsewhere, not contiguous, or neither of 16 bits nor of type `T`; or `f`'s error.
pub fn with_upcast<T: Real, R>(
    tensor: &Tensor,
    range: Range<usize>,
    name: &str,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, _))) = (&*storage, layout.contiguous_offsets()) else {
        candle_core::bail!("{name}: an input is not on the CPU, or not contiguous");
    };
    let range = start + range.start..start + range.end;
    match storage {
        CpuStorage::F16(values) => upcast(&values[range], T::upcast_f16, f),
        CpuStorage::BF16(values) => upcast(&values[range], T::upcast_bf16, f),
        storage => f(&T::cpu_storage_as_slice(storage)?[range]),
    }
}

fn upcast<T: Real, H: Sync, R>(
    values: &[H],
    convert: impl Fn(&mut [T], &[H]) + Sync + Send,
    f: impl FnOnce(&[T]) -> R,
) -> R {
    // Taken out of its cell, because rayon may run another task on this thread while `f` waits.
    let mut buffer = T::upcast_buffer().take();
    if buffer.len() < values.len() {
        buffer = vec![T::of(0.0); values.len()];
    }
    let converted = &mut buffer[..values.len()];
    parallel::rows(converted, UPCAST_BLOCK, |first, block| {
        let first = first * UPCAST_BLOCK;
        convert(block, &values[first..first + block.len()]);
    });
    let result = f(converted);
    T::upcast_buffer().set(buffer);
    result
}

/// Whether a type is one of the 16-bit floats that [`with_upcast`] converts.
pub fn is_16_bit(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Whether the fused kernels can read this weight: frozen, contiguous, on the CPU, and of a type that
/// [`with_upcast`] reads.
pub(crate) fn is_frozen_cpu_weight(weight: &Tensor) -> bool {
    let dtype = weight.dtype();
    weight.device().is_cpu()
        && (is_16_bit(dtype) || matches!(dtype, DType::F32 | DType::F64))
        && weight.is_contiguous()
        && !weight.track_op()
}
