//! Log-probabilities and entropies straight from hidden states, without `tokens x vocabulary` in
//! memory (CPU).

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, Tensor};

use hone_core::simd::{SimdTask, dispatch};

use super::token_stats::{CustomOp, StatsGradTask, StatsOp, StatsTask, TokenTargets};
use crate::kernels::float::Real;
use crate::kernels::matmul::{Matrix, WriteMode, multiply};
use crate::kernels::parallel;
use crate::kernels::storage::with_upcast;
use crate::spec::ModelSpec;
use crate::weights::BaseMatrix;

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

/// Values of W that are widened at once if it is not of the computation's type; few in tests, so that
/// they cover several pieces.
const UPCAST: usize = if cfg!(test) { 1 << 9 } else { 1 << 22 };

/// Rows of W in one product: all, or those that are widened at once.
fn block_rows(widened: bool, vocab: usize, hidden: usize) -> usize {
    let all = vocab.max(1);
    if widened { (UPCAST / hidden.max(1)).clamp(1, all) } else { all }
}

/// Values of an output layer of 16 bits or quantized blocks that are widened at once.
pub fn head_upcast_values(spec: &ModelSpec) -> usize {
    block_rows(true, spec.vocab_size, spec.hidden_size) * spec.hidden_size
}

/// [`token_stats`](super::token_stats()) of the logits `x W^T`, or `cap tanh(x W^T / cap)`, for x
/// `[n, hidden]` and a frozen W `[vocab, hidden]`: `[n, 2]`, differentiable in x.
///
/// The logits are computed a chunk of rows at a time. If x is differentiated, the forward pass also
/// computes the gradients of the log-probabilities `[n, hidden]`, which the backward pass only scales.
/// Gradients of entropies need the logits again.
///
/// # Errors
/// As `token_stats`.
pub(super) fn head_stats(
    x: &Tensor,
    weight: &BaseMatrix,
    softcap: Option<f64>,
    targets: &[u32],
    temperatures: &[f32],
) -> Result<Tensor> {
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
    weight: BaseMatrix,
    softcap: Option<f64>,
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
    /// Calls `f` with each block of W `[count, hidden]` and its first row.
    fn weight_blocks<T: Real>(&self, mut f: impl FnMut(usize, Matrix<'_, T>)) -> Result<()> {
        let (vocab, hidden) = self.weight.dims2()?;
        let most = block_rows(self.weight.stored().is_widened(), vocab, hidden);
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

    /// Calls `f` with each chunk of the products `x W^T` `[count, vocab]`, not yet capped, and its rows.
    fn chunks<T: Real>(
        &self,
        x: &[T],
        mut f: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        let (vocab, hidden) = self.weight.dims2()?;
        let rows = chunk_rows(vocab);
        let mut buffer = vec![T::of(0.0); (x.len() / hidden.max(1)).min(rows) * vocab];
        for (i, x) in x.chunks(rows * hidden).enumerate() {
            let count = x.len() / hidden;
            let (x, products) = (Matrix::new(x, count, hidden), &mut buffer[..count * vocab]);
            self.weight_blocks(|first, weight| {
                multiply((&mut products[first..], vocab), WriteMode::Replace, 1.0, x, weight.t());
            })?;
            f(i * rows..i * rows + count, products)?;
        }
        Ok(())
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
}

impl StatsOp for HeadStats {
    const NAME: &'static str = NAME;

    fn forward<T: Real>(&self, x: &[T]) -> Result<Vec<T>> {
        let (targets, softcap) = (&self.targets, self.softcap);
        let (vocab, hidden) = self.weight.dims2()?;
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
                let (_, hidden) = self.weight.dims2()?;
                for (row, grad) in dx.chunks_exact_mut(hidden).zip(grad.chunks_exact(2)) {
                    row.iter_mut().for_each(|x| *x *= grad[0]);
                }
                Ok(dx)
            }
            _ => self.recompute(x, stats, grad),
        }
    }
}
