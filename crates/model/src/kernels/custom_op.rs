//! Plumbing between plain loops over slices and candle's custom operations (CPU, f32 or f64).

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor, WithDType};

use hone_core::simd::{SimdTask, dispatch};

use super::float::Real;
use super::parallel;

type Result<T> = candle_core::Result<T>;

/// Values that are widened at a time: a few blocks of rows make a task.
const WIDENED_AT_ONCE: usize = 1 << 12;

/// A loop over the rows (of the last dimension) of contiguous inputs that makes one output.
pub(crate) trait Kernel: Send + Sync {
    /// For error messages.
    const NAME: &'static str;

    /// The output's shape, from the inputs'.
    fn shape(&self, inputs: &[&Shape]) -> Result<Shape>;

    /// Fills rows of the output, from `first` on. Mark it `#[inline(always)]`, so that it is
    /// compiled for the processor.
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], width: usize);
}

/// Runs a kernel on CPU storages.
pub(crate) fn launch<K: Kernel>(
    kernel: &K,
    inputs: &[(&CpuStorage, &Layout)],
) -> Result<(CpuStorage, Shape)> {
    let shapes: Vec<&Shape> = inputs.iter().map(|(_, layout)| layout.shape()).collect();
    let shape = kernel.shape(&shapes)?;
    let storage = match inputs.first().map(|(storage, _)| storage) {
        Some(CpuStorage::F32(_)) => f32::to_cpu_storage_owned(run(kernel, inputs, &shape)?),
        Some(CpuStorage::F64(_)) => f64::to_cpu_storage_owned(run(kernel, inputs, &shape)?),
        _ => candle_core::bail!("{}: only f32 and f64 are supported", K::NAME),
    };
    Ok((storage, shape))
}

struct Fill<'a, K, T> {
    kernel: &'a K,
    first: usize,
    out: &'a mut [T],
    inputs: &'a [&'a [T]],
    width: usize,
}

impl<K: Kernel, T: Real> SimdTask for Fill<'_, K, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        self.kernel.fill(self.first, self.out, self.inputs, self.width);
    }
}

fn run<K: Kernel, T: Real>(
    kernel: &K,
    inputs: &[(&CpuStorage, &Layout)],
    shape: &Shape,
) -> Result<Vec<T>> {
    let mut slices = Vec::with_capacity(inputs.len());
    for (storage, layout) in inputs {
        slices.push(slice::<T>(storage, layout, K::NAME)?);
    }
    let width = shape.dims().last().copied().unwrap_or(1).max(1);
    let mut out = vec![T::of(0.0); shape.elem_count()];
    parallel::rows(&mut out, width, |first, out| {
        dispatch(Fill { kernel, first, out, inputs: &slices, width });
    });
    Ok(out)
}

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

/// Calls `f` with the values of contiguous CPU tensors.
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

/// Calls `f` with a range of the values of a contiguous CPU tensor; 16-bit ones are widened, into a
/// buffer that this thread keeps.
pub fn with_wide<T: Real, R>(
    tensor: &Tensor,
    range: Range<usize>,
    name: &str,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, _))) = (&*storage, layout.contiguous_offsets()) else {
        candle_core::bail!("{name}: an input is not on the CPU, or not contiguous");
    };
    let all = start + range.start..start + range.end;
    match storage {
        CpuStorage::F16(values) => widened(&values[all], T::widen_f16, f),
        CpuStorage::BF16(values) => widened(&values[all], T::widen_bf16, f),
        storage => f(&T::cpu_storage_as_slice(storage)?[all]),
    }
}

fn widened<T: Real, H: Sync, R>(
    values: &[H],
    widen: impl Fn(&mut [T], &[H]) + Sync + Send,
    f: impl FnOnce(&[T]) -> R,
) -> R {
    // Taken out, as `f` may have this thread compute something else meanwhile.
    let mut buffer = T::widened().take();
    if buffer.len() < values.len() {
        buffer = vec![T::of(0.0); values.len()];
    }
    let wide = &mut buffer[..values.len()];
    parallel::rows(wide, WIDENED_AT_ONCE, |first, wide| {
        let first = first * WIDENED_AT_ONCE;
        widen(wide, &values[first..first + wide.len()]);
    });
    let made = f(wide);
    T::widened().set(buffer);
    made
}

/// What an operation keeps from its forward pass for its backward pass. One operation is used once.
pub(crate) struct Saved<T>(Arc<Mutex<Option<T>>>);

impl<T> Clone for Saved<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Saved<T> {
    pub fn empty() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    pub fn put(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    pub fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Whether our loops can run on these tensors; candle's differentiable forms do otherwise.
pub(crate) fn runs_on(tensor: &Tensor) -> bool {
    tensor.device().is_cpu() && matches!(tensor.dtype(), DType::F32 | DType::F64)
}

/// Whether it is one of the 16-bit types that [`with_wide`] widens.
pub fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Whether our loops can run with these frozen weights: rows in main memory, of a precision that
/// [`with_wide`] reads.
pub(crate) fn runs_with(weight: &Tensor) -> bool {
    let half = is_half(weight.dtype()) && weight.device().is_cpu();
    (half || runs_on(weight)) && weight.is_contiguous() && !weight.track_op()
}

/// A kernel as an operation without gradient: for computing gradients.
pub(crate) struct Plain<K>(pub K);

impl<K: Kernel> CustomOp3 for Plain<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }
    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        launch(&self.0, &[(s1, l1), (s2, l2), (s3, l3)])
    }
}
