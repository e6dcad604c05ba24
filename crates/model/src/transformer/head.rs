//! Log-probabilities and entropies straight from hidden states, without `tokens x vocabulary` in
//! memory (CPU).

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, DType, Tensor};

use hone_core::simd::{SimdTask, dispatch};

use super::token_stats::{CustomOp, StatsGradTask, StatsOp, StatsTask, TokenTargets, token_stats};
use crate::kernels::float::Real;
use crate::kernels::matmul::{Matrix, WriteMode, multiply};
use crate::kernels::storage::{is_16_bit, is_cpu_float, is_frozen_cpu_weight, with_upcast};
use crate::kernels::{ops, parallel};
use crate::spec::ModelSpec;

type Result<T> = candle_core::Result<T>;

const NAME: &str = "head-stats";

/// Most logits in memory at once. With much fewer rows, packing a large W for its product takes as
/// long as the product.
const LOGITS: usize = 1 << 23;

/// Rows of a chunk.
fn chunk_rows(vocab: usize) -> usize {
    (LOGITS / vocab.max(1)).clamp(1, 512)
}

/// Logits in memory at once in a pass over `rows` rows.
pub fn logits_in_memory(rows: usize, vocab: usize) -> usize {
    rows.min(chunk_rows(vocab)) * vocab
}

/// Values of a 16-bit W that are upcast at once; few in tests, so that they cover several blocks.
const UPCAST: usize = if cfg!(test) { 1 << 9 } else { 1 << 22 };

/// Rows of W in one product: all, or a block that is upcast.
fn block_rows(dtype: DType, vocab: usize, hidden: usize) -> usize {
    let all = vocab.max(1);
    if is_16_bit(dtype) { (UPCAST / hidden.max(1)).clamp(1, all) } else { all }
}

/// Values of a 16-bit output layer that are upcast at once.
pub fn head_upcast_values(spec: &ModelSpec) -> usize {
    block_rows(DType::BF16, spec.vocab_size, spec.hidden_size) * spec.hidden_size
}

/// [`token_stats`] of the logits `x W^T`, or `cap tanh(x W^T / cap)`, for x `[n, hidden]` and a
/// frozen W `[vocab, hidden]`: `[n, 2]`, differentiable in x.
///
/// The logits are computed a chunk of rows at a time. If x is differentiated, the forward pass also
/// computes the gradients of the log-probabilities `[n, hidden]`, which the backward pass only scales.
/// Gradients of entropies need the logits again.
///
/// # Errors
/// As [`token_stats`].
pub(super) fn head_stats(
    x: &Tensor,
    weight: &Tensor,
    softcap: Option<f64>,
    targets: &[u32],
    temperatures: &[f32],
) -> Result<Tensor> {
    if !is_cpu_float(x) || !is_frozen_cpu_weight(weight) {
        let logits = ops::softcap(ops::linear(x, weight, None)?, softcap)?;
        return token_stats(&logits, targets, temperatures);
    }
    let ((n, hidden), (vocab, columns)) = (x.dims2()?, weight.dims2()?);
    if hidden != columns {
        candle_core::bail!(
            "{NAME}: hidden states of width {hidden} and a weight of width {columns}"
        );
    }
    let targets = TokenTargets::new(targets, temperatures, n, vocab)?;
    let gradients = x.track_op().then(|| Mutex::new(None));
    let op = HeadStats { weight: weight.clone(), softcap, targets, gradients };
    x.contiguous()?.apply_op1(CustomOp(op))
}

struct HeadStats {
    weight: Tensor,
    softcap: Option<f64>,
    targets: TokenTargets,
    /// If x is differentiated: gradients of the log-probabilities `[n, hidden]`, from the forward to
    /// the backward pass.
    gradients: Option<Mutex<Option<CpuStorage>>>,
}

/// `cap tanh(x / cap)` in place.
struct SoftcapTask<'a, T> {
    cap: f64,
    values: &'a mut [T],
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
    /// Calls `f` with each block of W `[count, hidden]` and its first row.
    fn weight_blocks<T: Real>(&self, mut f: impl FnMut(usize, Matrix<'_, T>)) -> Result<()> {
        let (vocab, hidden) = self.weight.dims2()?;
        let most = block_rows(self.weight.dtype(), vocab, hidden);
        for first in (0..vocab).step_by(most) {
            let count = most.min(vocab - first);
            let range = first * hidden..(first + count) * hidden;
            with_upcast(&self.weight, range, NAME, |weight| {
                f(first, Matrix::new(weight, count, hidden));
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Products `x W^T` `[n, vocab]` for x `[n, hidden]`, not yet capped.
    fn products<T: Real>(&self, x: Matrix<'_, T>, out: &mut [T]) -> Result<()> {
        let vocab = self.weight.dim(0)?;
        self.weight_blocks(|first, weight| {
            multiply((&mut out[first..], vocab), WriteMode::Replace, 1.0, x, weight.t());
        })
    }

    /// The gradient `[n, hidden]` of x from the gradient of the products, `[n, vocab]`.
    fn products_backward<T: Real>(&self, grads: &[T], dx: &mut [T]) -> Result<()> {
        let (vocab, hidden) = self.weight.dims2()?;
        self.weight_blocks(|first, weight| {
            let mode = if first == 0 { WriteMode::Replace } else { WriteMode::Add };
            let count = dx.len() / hidden;
            let grads = Matrix::strided(&grads[first..], count, weight.rows(), vocab);
            multiply((&mut *dx, hidden), mode, 1.0, grads, weight);
        })
    }

    fn cap<T: Real>(&self, values: &mut [T]) {
        if let Some(cap) = self.softcap {
            dispatch(SoftcapTask { cap, values });
        }
    }

    /// The gradient of x from recomputed logits.
    fn recompute<T: Real>(&self, x: &[T], stats: &[T], grad: &[T]) -> Result<Vec<T>> {
        let (targets, softcap) = (&self.targets, self.softcap);
        let (vocab, hidden) = self.weight.dims2()?;
        let (rows, n) = (chunk_rows(vocab), stats.len() / 2);
        let mut dx = vec![T::of(0.0); n * hidden];
        let mut buffer = vec![T::of(0.0); n.min(rows) * vocab];
        let chunks = x.chunks(rows * hidden).zip(dx.chunks_mut(rows * hidden));
        for (i, (x, dx)) in chunks.enumerate() {
            let count = x.len() / hidden;
            let logits = &mut buffer[..count * vocab];
            self.products(Matrix::new(x, count, hidden), logits)?;
            parallel::rows(logits, vocab, |first, logits| {
                let first = i * rows + first;
                let (stats, grad) = (&stats[2 * first..], Some(&grad[2 * first..]));
                self.cap(logits);
                dispatch(StatsGradTask { targets, softcap, first, logits, stats, grad });
            });
            self.products_backward(logits, dx)?;
        }
        Ok(dx)
    }
}

impl StatsOp for HeadStats {
    const NAME: &'static str = NAME;

    fn forward<T: Real>(&self, x: &[T]) -> Result<Vec<T>> {
        let (targets, softcap) = (&self.targets, self.softcap);
        let (vocab, hidden) = self.weight.dims2()?;
        let n = x.len() / hidden.max(1);
        let (rows, differentiated) = (chunk_rows(vocab), self.gradients.is_some());
        let mut stats = vec![T::of(0.0); 2 * n];
        let mut logits = vec![T::of(0.0); n.min(rows) * vocab];
        let mut gradients = vec![T::of(0.0); if differentiated { n * hidden } else { 0 }];
        for (i, (x, stats)) in x.chunks(rows * hidden).zip(stats.chunks_mut(2 * rows)).enumerate() {
            let count = x.len() / hidden;
            let logits = &mut logits[..count * vocab];
            self.products(Matrix::new(x, count, hidden), logits)?;
            // A parallel task needs a row's logits and its statistics.
            let mut pairs: Vec<_> = logits.chunks_mut(vocab).zip(stats.chunks_mut(2)).collect();
            parallel::rows(&mut pairs, 1, |first, pairs| {
                for (j, (logits, stats)) in pairs.iter_mut().enumerate() {
                    let first = i * rows + first + j;
                    self.cap(logits);
                    dispatch(StatsTask { targets, first, logits, stats });
                    if differentiated {
                        let grad = None;
                        dispatch(StatsGradTask { targets, softcap, first, logits, stats, grad });
                    }
                }
            });
            if differentiated {
                let gradients = &mut gradients[i * rows * hidden..][..count * hidden];
                self.products_backward(logits, gradients)?;
            }
        }
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
                let hidden = self.weight.dim(1)?;
                for (row, grad) in dx.chunks_exact_mut(hidden).zip(grad.chunks_exact(2)) {
                    row.iter_mut().for_each(|x| *x *= grad[0]);
                }
                Ok(dx)
            }
            _ => self.recompute(x, stats, grad),
        }
    }
}
