//! Log-probabilities and entropies straight from hidden states, without `tokens x vocabulary` in
//! memory (CPU).

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, WithDType};

use hone_core::simd::{SimdTask, dispatch};

use super::token_stats::{Chosen, token_stats};
use crate::kernels::custom_op::{
    Saved, is_half, runs_on, runs_with, slice, with_values, with_wide,
};
use crate::kernels::float::Real;
use crate::kernels::matmul::{Matrix, WriteMode, multiply};
use crate::kernels::{ops, parallel};
use crate::spec::ModelSpec;

type Result<T> = candle_core::Result<T>;

const NAME: &str = "head-stats";

/// Most logits that exist at once: with fewer rows, laying out a large W for its product takes as long
/// as the product.
const LOGITS: usize = 1 << 23;

/// Rows of a chunk.
fn chunk_rows(vocab: usize) -> usize {
    (LOGITS / vocab.max(1)).clamp(1, 512)
}

/// Logits that a pass over `rows` rows holds at once.
pub fn logits_held(rows: usize, vocab: usize) -> usize {
    rows.min(chunk_rows(vocab)) * vocab
}

/// Values of a 16-bit W that are widened at a time; so few in tests that it takes several.
const WIDENED: usize = if cfg!(test) { 1 << 9 } else { 1 << 22 };

/// Rows of W that a product takes at once.
fn stretch_rows(dtype: DType, vocab: usize, hidden: usize) -> usize {
    let all = vocab.max(1);
    if is_half(dtype) { (WIDENED / hidden.max(1)).clamp(1, all) } else { all }
}

/// Values of a 16-bit head that are widened at once.
pub fn head_widened(spec: &ModelSpec) -> usize {
    stretch_rows(DType::BF16, spec.vocab_size, spec.hidden_size) * spec.hidden_size
}

/// [`token_stats`] of the logits `x W^T`, or `cap tanh(x W^T / cap)`, for x `[n, hidden]` and a
/// frozen W `[vocab, hidden]`: `[n, 2]`, differentiable in x. The logits are computed a chunk at a
/// time. Where x is differentiated, the forward pass computes the log-probabilities' gradients from
/// them too (`[n, hidden]`), which the backward pass only scales; gradients of entropies need the
/// logits again.
///
/// # Errors
/// As [`token_stats`].
pub fn head_stats(
    x: &Tensor,
    weight: &Tensor,
    softcap: Option<f64>,
    targets: &[u32],
    temperatures: &[f32],
) -> Result<Tensor> {
    if !runs_on(x) || !runs_with(weight) {
        let logits = ops::linear(x, weight, None)?;
        let logits = match softcap {
            Some(cap) => ops::softcap(&logits, cap)?,
            None => logits,
        };
        return token_stats(&logits, targets, temperatures);
    }
    let (vocab, _) = weight.dims2()?;
    let chosen = Chosen::new(targets, temperatures, x.dim(0)?, vocab)?;
    let saved = x.track_op().then(Saved::empty);
    let op = Head { weight: weight.clone(), softcap, chosen, saved };
    x.contiguous()?.apply_op1(op)
}

#[derive(Clone)]
struct Head {
    weight: Tensor,
    softcap: Option<f64>,
    chosen: Chosen,
    /// The gradients of the log-probabilities `[n, hidden]`, where they will be needed.
    saved: Option<Saved<CpuStorage>>,
}

/// Statistics of rows of raw products, which become logits.
struct Forward<'a, T> {
    head: &'a Head,
    first: usize,
    logits: &'a mut [T],
    stats: &'a mut [T],
}

impl<T: Real> SimdTask for Forward<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let vocab = self.logits.len() / (self.stats.len() / 2).max(1);
        let rows = self.logits.chunks_exact_mut(vocab.max(1)).zip(self.stats.chunks_exact_mut(2));
        for (i, (logits, stats)) in rows.enumerate() {
            self.head.cap(logits);
            stats.copy_from_slice(&self.head.chosen.forward(self.first + i, logits));
        }
    }
}

/// Turns rows of logits into gradients of the raw products.
struct Backward<'a, T> {
    head: &'a Head,
    /// Logits are still raw products.
    raw: bool,
    first: usize,
    logits: &'a mut [T],
    /// From row `first` on, as are the gradients.
    stats: &'a [T],
    /// Gradients of the statistics; 1 for log-probabilities and 0 for entropies where there are none.
    grad: Option<&'a [T]>,
    vocab: usize,
}

impl<T: Real> SimdTask for Backward<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let mut slopes = Vec::new();
        let one = [T::of(1.0), T::of(0.0)];
        for (i, logits) in self.logits.chunks_exact_mut(self.vocab).enumerate() {
            let row = self.first + i;
            if self.raw {
                self.head.cap(logits);
            }
            let stats = &self.stats[2 * i..][..2];
            let grad = self.grad.map_or(&one[..], |grad| &grad[2 * i..][..2]);
            let Some(cap) = self.head.softcap else {
                self.head.chosen.backward(row, logits, stats, grad);
                continue;
            };
            let inverse = T::of(1.0 / cap);
            slopes.clear();
            slopes.extend(logits.iter().map(|x| T::of(1.0) - *x * inverse * *x * inverse));
            self.head.chosen.backward(row, logits, stats, grad);
            logits.iter_mut().zip(&slopes).for_each(|(x, slope)| *x *= *slope);
        }
    }
}

impl Head {
    #[inline(always)]
    fn cap<T: Real>(&self, row: &mut [T]) {
        if let Some(cap) = self.softcap {
            let (cap, inverse) = (T::of(cap), T::of(1.0 / cap));
            row.iter_mut().for_each(|x| *x = cap * (*x * inverse).tanh());
        }
    }

    /// Calls `f` with stretches of W `[count, hidden]` that cover it, and the row that each begins at.
    fn stretches<T: Real>(&self, mut f: impl FnMut(usize, Matrix<'_, T>)) -> Result<()> {
        let (vocab, hidden) = self.weight.dims2()?;
        let most = stretch_rows(self.weight.dtype(), vocab, hidden);
        for first in (0..vocab).step_by(most) {
            let count = most.min(vocab - first);
            let range = first * hidden..(first + count) * hidden;
            with_wide(&self.weight, range, NAME, |weight| {
                f(first, Matrix::new(weight, count, hidden));
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Raw products `[n, vocab]` of x `[n, hidden]`.
    fn logits<T: Real>(&self, x: Matrix<'_, T>, out: &mut [T]) -> Result<()> {
        let vocab = self.weight.dim(0)?;
        self.stretches(|first, weight| {
            multiply((&mut out[first..], vocab), WriteMode::Replace, 1.0, x, weight.t());
        })
    }

    /// The gradient `[n, hidden]` of x from that of the raw products, `[n, vocab]`.
    fn pull_back<T: Real>(&self, grads: &[T], dx: &mut [T]) -> Result<()> {
        let (vocab, hidden) = self.weight.dims2()?;
        self.stretches(|first, weight| {
            let store = if first == 0 { WriteMode::Replace } else { WriteMode::Add };
            let count = dx.len() / hidden;
            let grads = Matrix::strided(&grads[first..], count, weight.rows(), vocab);
            multiply((&mut *dx, hidden), store, 1.0, grads, weight);
        })
    }

    fn forward<T: Real>(&self, x: &[T], hidden: usize) -> Result<Vec<T>> {
        let vocab = self.weight.dim(0)?;
        let n = x.len() / hidden.max(1);
        let (rows, differentiated) = (chunk_rows(vocab), self.saved.is_some());
        let mut stats = vec![T::of(0.0); 2 * n];
        let mut logits = vec![T::of(0.0); n.min(rows) * vocab];
        let mut slopes = vec![T::of(0.0); if differentiated { n * hidden } else { 0 }];
        for (i, (x, stats)) in x.chunks(rows * hidden).zip(stats.chunks_mut(2 * rows)).enumerate() {
            let count = x.len() / hidden;
            let logits = &mut logits[..count * vocab];
            self.logits(Matrix::new(x, count, hidden), logits)?;
            // Logits and statistics of a row go together.
            let mut pairs: Vec<_> = logits.chunks_mut(vocab).zip(stats.chunks_mut(2)).collect();
            parallel::rows(&mut pairs, 1, |first, pairs| {
                for (j, (logits, stats)) in pairs.iter_mut().enumerate() {
                    let (head, first) = (self, i * rows + first + j);
                    dispatch(Forward { head, first, logits, stats });
                    if differentiated {
                        let (raw, grad) = (false, None);
                        dispatch(Backward { head, raw, first, logits, stats, grad, vocab });
                    }
                }
            });
            if differentiated {
                self.pull_back(logits, &mut slopes[i * rows * hidden..][..count * hidden])?;
            }
        }
        if let Some(saved) = &self.saved {
            saved.put(T::to_cpu_storage_owned(slopes));
        }
        Ok(stats)
    }

    fn backward<T: Real>(&self, x: &Tensor, stats: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let (n, hidden) = x.dims2()?;
        let saved = self.saved.as_ref().and_then(Saved::take);
        let dx = with_values::<T, 3, _>([x, stats, grad], NAME, |[x, stats, grad]| match saved {
            Some(saved) if grad.chunks_exact(2).all(|grad| grad[1] == T::of(0.0)) => {
                let mut dx = T::cpu_storage_data(saved)?;
                for (row, grad) in dx.chunks_exact_mut(hidden).zip(grad.chunks_exact(2)) {
                    row.iter_mut().for_each(|x| *x *= grad[0]);
                }
                Ok(dx)
            }
            _ => self.again(x, hidden, (stats, grad)),
        })?;
        Tensor::from_vec(dx, (n, hidden), x.device())
    }

    /// The gradient of x from logits that are computed again.
    fn again<T: Real>(
        &self,
        x: &[T],
        hidden: usize,
        (stats, grad): (&[T], &[T]),
    ) -> Result<Vec<T>> {
        let (vocab, n) = (self.weight.dim(0)?, x.len() / hidden.max(1));
        let rows = chunk_rows(vocab);
        let mut dx = vec![T::of(0.0); n * hidden];
        let mut buffer = vec![T::of(0.0); n.min(rows) * vocab];
        let chunks = x.chunks(rows * hidden).zip(dx.chunks_mut(rows * hidden));
        for (i, (x, dx)) in chunks.enumerate() {
            let count = x.len() / hidden;
            let logits = &mut buffer[..count * vocab];
            self.logits(Matrix::new(x, count, hidden), logits)?;
            parallel::rows(logits, vocab, |first, logits| {
                let first = i * rows + first;
                let (stats, grad) = (&stats[2 * first..], Some(&grad[2 * first..]));
                let (head, raw) = (self, true);
                dispatch(Backward { head, raw, first, logits, stats, grad, vocab });
            });
            self.pull_back(logits, dx)?;
        }
        Ok(dx)
    }
}

impl CustomOp1 for Head {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (n, hidden) = layout.shape().dims2()?;
        if hidden != self.weight.dim(1)? {
            candle_core::bail!("{NAME}: {hidden} columns meet {}", self.weight.dim(1)?);
        }
        let stats = match storage {
            CpuStorage::F64(_) => f64::to_cpu_storage_owned(
                self.forward::<f64>(slice(storage, layout, NAME)?, hidden)?,
            ),
            _ => f32::to_cpu_storage_owned(
                self.forward::<f32>(slice(storage, layout, NAME)?, hidden)?,
            ),
        };
        Ok((stats, Shape::from((n, 2))))
    }

    fn bwd(&self, arg: &Tensor, res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        Ok(Some(match arg.dtype() {
            DType::F64 => self.backward::<f64>(arg, res, &grad)?,
            _ => self.backward::<f32>(arg, res, &grad)?,
        }))
    }
}
