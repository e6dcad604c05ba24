//! Plumbing between plain loops over slices and candle's custom operations (CPU, f32 or f64).

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Shape, Tensor, WithDType,
};

use super::real::Real;

type Result<T> = candle_core::Result<T>;

/// A loop over contiguous inputs that makes one output.
pub(super) trait Kernel: Send + Sync {
    /// For error messages.
    const NAME: &'static str;

    /// The output's shape, from the inputs'.
    fn shape(&self, inputs: &[&Shape]) -> Result<Shape>;

    /// The output, of as many values as [`Self::shape`] says.
    fn run<T: Real>(&self, inputs: &[&[T]], shapes: &[&Shape]) -> Vec<T>;
}

/// Runs a kernel on CPU storages.
pub(super) fn launch<K: Kernel>(
    kernel: &K,
    inputs: &[(&CpuStorage, &Layout)],
) -> Result<(CpuStorage, Shape)> {
    let shapes: Vec<&Shape> = inputs.iter().map(|(_, layout)| layout.shape()).collect();
    let shape = kernel.shape(&shapes)?;
    let storage = match inputs.first().map(|(storage, _)| storage) {
        Some(CpuStorage::F32(_)) => f32::to_cpu_storage_owned(run(kernel, inputs, &shapes)?),
        Some(CpuStorage::F64(_)) => f64::to_cpu_storage_owned(run(kernel, inputs, &shapes)?),
        _ => candle_core::bail!("{}: only f32 and f64 are supported", K::NAME),
    };
    Ok((storage, shape))
}

fn run<K: Kernel, T: Real>(
    kernel: &K,
    inputs: &[(&CpuStorage, &Layout)],
    shapes: &[&Shape],
) -> Result<Vec<T>> {
    let mut slices = Vec::with_capacity(inputs.len());
    for (storage, layout) in inputs {
        let values = T::cpu_storage_as_slice(storage)?;
        match layout.contiguous_offsets() {
            Some((start, end)) => slices.push(&values[start..end]),
            None => candle_core::bail!("{}: an input is not contiguous", K::NAME),
        }
    }
    Ok(kernel.run(&slices, shapes))
}

/// Whether our loops can run on these tensors; candle's differentiable forms do otherwise.
pub(super) fn runs_on(tensor: &Tensor) -> bool {
    tensor.device().is_cpu() && matches!(tensor.dtype(), DType::F32 | DType::F64)
}

/// A kernel as an operation without gradient: for computing gradients.
pub(super) struct Plain<K>(pub K);

impl<K: Kernel> CustomOp1 for Plain<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }
    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        launch(&self.0, &[(s, l)])
    }
}

impl<K: Kernel> CustomOp2 for Plain<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }
    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        launch(&self.0, &[(s1, l1), (s2, l2)])
    }
}

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
