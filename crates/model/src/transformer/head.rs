//! Log-probabilities and entropies straight from hidden states, without `tokens x vocabulary` in
//! memory (CPU).

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType};

use hone_core::simd::{SimdTask, dispatch};
use hone_kernels::float::Real;
use hone_kernels::matmul::{Matrix, WriteMode};
use hone_kernels::parallel;

use super::token_stats::{StatsGradTask, StatsTask, TokenTargets};
use crate::kernels::compute::{Compute, LeftFactor, WeightRows};
use crate::kernels::storage::{slice, with_values};
use crate::kernels::with_float;
use crate::spec::ModelSpec;
use crate::weights::BaseMatrix;

const NAME: &str = "head-stats";

/// Most logits in memory at once. With much fewer rows, packing a large W for its product takes as
/// long as the product.
const LOGITS: usize = 1 << 23;

pub(super) fn chunk_rows(vocab: usize) -> usize {
    (LOGITS / vocab.max(1)).clamp(1, 512)
}

/// Logits in memory at once in a pass over `rows` rows.
pub fn logits_in_memory(rows: usize, vocab: usize) -> usize {
    rows.min(chunk_rows(vocab)) * vocab
}

/// Values of W that are widened at once if it is not of the computation's type; few in tests, so that
/// they cover several pieces.
const UPCAST: usize = if cfg!(test) { 1 << 9 } else { 1 << 22 };

/// Values of W that are packed at once for products in bf16: as many as fit into the second-level cache
/// of most processors that have such products. Few in tests.
const PACKED: usize = if cfg!(test) { 1 << 9 } else { 1 << 19 };

/// Rows of W with about this number of values.
fn block_rows(values: usize, vocab: usize, hidden: usize) -> usize {
    (values / hidden.max(1)).clamp(1, vocab.max(1))
}

/// Values of an output layer of 16 bits or quantized blocks that are widened at once.
pub fn head_upcast_values(spec: &ModelSpec) -> usize {
    block_rows(UPCAST, spec.vocab_size, spec.hidden_size) * spec.hidden_size
}

/// Values of an output layer that are packed at once for products in bf16.
pub fn head_packed_values(spec: &ModelSpec) -> usize {
    block_rows(PACKED, spec.vocab_size, spec.hidden_size) * spec.hidden_size
}

pub(super) struct OutputLayer {
    /// `[vocab, hidden]`
    pub weight: BaseMatrix,
    pub softcap: Option<f64>,
    /// The arithmetic of products with the weight.
    pub compute: Compute,
}

/// Log-probabilities and entropies ([`Model::stats`](crate::Model::stats)) of the logits `x W^T`, or
/// `cap tanh(x W^T / cap)`, for x `[n, hidden]`: `[n, 2]`, differentiable in x.
///
/// The logits are computed a chunk of rows at a time. If x is differentiated, the forward pass also
/// computes the gradients of the log-probabilities `[n, hidden]`, which the backward pass only scales.
/// Gradients of entropies need the logits again.
pub(super) fn head_stats(
    x: &Tensor,
    layer: OutputLayer,
    targets: &[u32],
    temperatures: &[f32],
) -> Result<Tensor> {
    let ((n, hidden), (vocab, columns)) = (x.dims2()?, layer.weight.dims2()?);
    if hidden != columns {
        candle_core::bail!(
            "{NAME}: hidden states of width {hidden} and a weight of width {columns}"
        );
    }
    let targets = TokenTargets::new(targets, temperatures, n, vocab)?;
    let gradients = x.track_op().then(|| Mutex::new(None));
    x.contiguous()?.apply_op1(HeadStats { layer, targets, gradients })
}

struct HeadStats {
    layer: OutputLayer,
    targets: TokenTargets,
    /// If x is differentiated: gradients of the log-probabilities `[n, hidden]`, from the forward to
    /// the backward pass.
    gradients: Option<Mutex<Option<CpuStorage>>>,
}

/// `cap tanh(x / cap)` in place.
pub(super) struct SoftcapTask<'a, T> {
    pub cap: f64,
    pub values: &'a mut [T],
}

impl<T: Real> SimdTask for SoftcapTask<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let (cap, inverse) = (T::of(self.cap), T::of(1.0 / self.cap));
        self.values.iter_mut().for_each(|x| *x = cap * (*x * inverse).tanh());
    }
}

impl HeadStats {
    /// The rows of W in parts: all at once if they are used as they are stored.
    fn weight_blocks(&self, transposed: bool) -> Result<impl Iterator<Item = WeightRows<'_>>> {
        let OutputLayer { weight, compute, .. } = &self.layer;
        let (vocab, hidden) = weight.dims2()?;
        let most = match compute {
            Compute::Bf16 => block_rows(PACKED, vocab, hidden),
            Compute::F32 if weight.stored().is_widened() => block_rows(UPCAST, vocab, hidden),
            Compute::F32 => vocab.max(1),
        };
        let rows = (0..vocab).step_by(most).map(move |first| first..vocab.min(first + most));
        Ok(rows.map(move |rows| WeightRows { weight, rows, transposed }))
    }

    /// Calls `f` with each chunk of the products `x W^T` `[count, vocab]`, not yet capped, and its rows.
    fn chunks<T: Real>(
        &self,
        x: &[T],
        mut f: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        let (vocab, hidden) = self.layer.weight.dims2()?;
        let rows = chunk_rows(vocab);
        let mut buffer = vec![T::of(0.0); (x.len() / hidden.max(1)).min(rows) * vocab];
        for (i, x) in x.chunks(rows * hidden).enumerate() {
            let count = x.len() / hidden;
            let x = LeftFactor::new(self.layer.compute, Matrix::new(x, count, hidden));
            let products = &mut buffer[..count * vocab];
            for weight in self.weight_blocks(true)? {
                let out = &mut products[weight.rows.start..];
                x.multiply((out, vocab), WriteMode::Replace, &weight)?;
            }
            // The products of `f` use its buffer.
            drop(x);
            f(i * rows..i * rows + count, products)?;
        }
        Ok(())
    }

    /// The gradient `[n, hidden]` of x from the gradient of the products, `[n, vocab]`.
    fn products_backward<T: Real>(&self, grads: &[T], dx: &mut [T]) -> Result<()> {
        let (vocab, hidden) = self.layer.weight.dims2()?;
        let count = dx.len() / hidden;
        for weight in self.weight_blocks(false)? {
            let first = weight.rows.start;
            let mode = if first == 0 { WriteMode::Replace } else { WriteMode::Add };
            let grads = Matrix::strided(&grads[first..], count, weight.rows.len(), vocab);
            let grads = LeftFactor::new(self.layer.compute, grads);
            grads.multiply((&mut *dx, hidden), mode, &weight)?;
        }
        Ok(())
    }

    fn cap<T: Real>(&self, values: &mut [T]) {
        if let Some(cap) = self.layer.softcap {
            dispatch(SoftcapTask { cap, values });
        }
    }

    /// The gradient of x from recomputed logits.
    fn recompute<T: Real>(&self, x: &[T], stats: &[T], grad: &[T]) -> Result<Vec<T>> {
        let (targets, softcap) = (&self.targets, self.layer.softcap);
        let (vocab, hidden) = self.layer.weight.dims2()?;
        let mut dx = vec![T::of(0.0); x.len()];
        self.chunks(x, |rows, logits| {
            parallel::rows(logits, vocab, |first, logits| {
                let first = rows.start + first;
                let (stats, grad) = (&stats[2 * first..], Some(&grad[2 * first..]));
                self.cap(logits);
                dispatch(StatsGradTask { targets, softcap, first, logits, stats, grad });
            });
            self.products_backward(logits, &mut dx[rows.start * hidden..rows.end * hidden])
        })?;
        Ok(dx)
    }

    fn forward<T: Real>(&self, x: &[T]) -> Result<Vec<T>> {
        let (targets, softcap) = (&self.targets, self.layer.softcap);
        let (vocab, hidden) = self.layer.weight.dims2()?;
        let differentiated = self.gradients.is_some();
        let mut stats = vec![T::of(0.0); 2 * (x.len() / hidden.max(1))];
        let mut gradients = vec![T::of(0.0); if differentiated { x.len() } else { 0 }];
        self.chunks(x, |rows, logits| {
            // A parallel task needs a row's logits and its statistics.
            let stats = stats[2 * rows.start..].chunks_mut(2);
            let mut pairs: Vec<_> = logits.chunks_mut(vocab).zip(stats).collect();
            parallel::rows(&mut pairs, 1, |first, pairs| {
                for (j, (logits, stats)) in pairs.iter_mut().enumerate() {
                    let first = rows.start + first + j;
                    self.cap(logits);
                    dispatch(StatsTask { targets, first, logits, stats });
                    if differentiated {
                        let grad = None;
                        dispatch(StatsGradTask { targets, softcap, first, logits, stats, grad });
                    }
                }
            });
            if !differentiated {
                return Ok(());
            }
            self.products_backward(logits, &mut gradients[rows.start * hidden..rows.end * hidden])
        })?;
        if let Some(slot) = &self.gradients {
            let storage = T::to_cpu_storage_owned(gradients);
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(storage);
        }
        Ok(stats)
    }

    fn backward<T: Real>(&self, x: &[T], stats: &[T], grad: &[T]) -> Result<Vec<T>> {
        let slot = self.gradients.as_ref();
        match slot.and_then(|s| s.lock().unwrap_or_else(PoisonError::into_inner).take()) {
            Some(saved) if grad.chunks_exact(2).all(|grad| grad[1] == T::of(0.0)) => {
                let mut dx = T::cpu_storage_data(saved)?;
                let (_, hidden) = self.layer.weight.dims2()?;
                for (row, grad) in dx.chunks_exact_mut(hidden).zip(grad.chunks_exact(2)) {
                    row.iter_mut().for_each(|x| *x *= grad[0]);
                }
                Ok(dx)
            }
            _ => self.recompute(x, stats, grad),
        }
    }
}

impl CustomOp1 for HeadStats {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let stats = with_float!(storage.dtype(), T => {
            T::to_cpu_storage_owned(self.forward::<T>(slice(storage, layout, NAME)?)?)
        });
        Ok((stats, Shape::from((layout.dims()[0], 2))))
    }

    fn bwd(&self, x: &Tensor, stats: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let inputs = [x, stats, &grad.contiguous()?];
        with_float!(x.dtype(), T => {
            let dx = with_values::<T, 3, _>(inputs, NAME, |[x, stats, grad]| {
                self.backward(x, stats, grad)
            })?;
            Tensor::from_vec(dx, x.shape(), x.device()).map(Some)
        })
    }
}
