//! Log-probability and entropy of target tokens, in one pass over the logits (CPU).

use candle_core::{Result, Tensor};

use hone_core::simd::SimdTask;
use hone_kernels::float::{LANES, Real, max};

/// The target token and the temperature of each row of logits.
pub(super) struct TokenTargets {
    ids: Vec<u32>,
    temperatures: Vec<f32>,
    vocab: usize,
}

impl TokenTargets {
    pub fn new(ids: &[u32], temperatures: &[f32], rows: usize, vocab: usize) -> Result<Self> {
        let (targets, others) = (ids.len(), temperatures.len());
        if [targets, others] != [rows; 2] {
            candle_core::bail!("{rows} rows of logits, {targets} targets, {others} temperatures");
        }
        if let Some(target) = ids.iter().find(|id| **id as usize >= vocab) {
            candle_core::bail!("target {target} is outside the vocabulary of {vocab}");
        }
        Ok(Self { ids: ids.to_vec(), temperatures: temperatures.to_vec(), vocab: vocab.max(1) })
    }

    /// Targets and 1 / T, each `[rows, 1]`, in the float type and on the device of `x`.
    pub fn columns(&self, x: &Tensor) -> Result<[Tensor; 2]> {
        let scales: Vec<f64> = self.temperatures.iter().map(|t| 1.0 / f64::from(*t)).collect();
        let targets = Tensor::new(self.ids.as_slice(), x.device())?.unsqueeze(1)?;
        let scales = Tensor::new(scales, x.device())?.unsqueeze(1)?.to_dtype(x.dtype())?;
        Ok([targets, scales])
    }

    /// The target, and 1 / T.
    #[inline(always)]
    fn row<T: Real>(&self, row: usize) -> (usize, T) {
        (self.ids[row] as usize, T::of(1.0 / f64::from(self.temperatures[row])))
    }

    /// `[ln p[target], entropy]`. With `z = (x - max) / T` and `S = sum e^z`, the entropy is
    /// `ln S - sum e^z z / S`, a sum without cancellation as `z <= 0`.
    #[inline(always)]
    fn forward<T: Real>(&self, row: usize, logits: &[T]) -> [T; 2] {
        let (target, scale) = self.row::<T>(row);
        let max = max(logits);
        let mut sums = [T::of(0.0); LANES];
        let mut means = [T::of(0.0); LANES];
        let terms = |x: T| {
            let z = (x - max) * scale;
            let e = z.exp();
            // e z is 0 where e is 0, even if z is minus infinity.
            (e, if e > T::of(0.0) { e * z } else { T::of(0.0) })
        };
        let chunks = logits.chunks_exact(LANES);
        for (i, x) in chunks.remainder().iter().enumerate() {
            let (e, ez) = terms(*x);
            sums[i] += e;
            means[i] += ez;
        }
        for x in chunks {
            for i in 0..LANES {
                let (e, ez) = terms(x[i]);
                sums[i] += e;
                means[i] += ez;
            }
        }
        let total = |lanes: [T; LANES]| lanes.iter().fold(T::of(0.0), |total, x| total + *x);
        let (sum, mean) = (total(sums), total(means));
        [(logits[target] - max) * scale - sum.ln(), sum.ln() - mean / sum]
    }

    /// Replaces logits by their gradients: `d ln p_k / d x_j = (1[j = k] - p_j) / T` and
    /// `d H / d x_j = -p_j (ln p_j + H) / T`.
    #[inline(always)]
    fn backward<T: Real>(&self, row: usize, logits: &mut [T], stats: &[T], grad: &[T]) {
        let (target, scale) = self.row::<T>(row);
        let (grad_logp, grad_entropy) = (grad[0], grad[1]);
        let (log_sum, entropy) = (logits[target] * scale - stats[0], stats[1]);
        if grad_entropy == T::of(0.0) {
            let factor = T::of(0.0) - grad_logp * scale;
            logits.iter_mut().for_each(|x| *x = factor * (*x * scale - log_sum).exp());
        } else {
            for x in logits.iter_mut() {
                let logp = *x * scale - log_sum;
                let p = logp.exp();
                let of_entropy = if p > T::of(0.0) { p * (logp + entropy) } else { T::of(0.0) };
                *x = (T::of(0.0) - grad_logp * p - grad_entropy * of_entropy) * scale;
            }
        }
        logits[target] += grad_logp * scale;
    }
}

/// Computes `stats` `[rows, 2]` of `logits` `[rows, vocab]`, which start at row `first`.
pub(super) struct StatsTask<'a, T> {
    pub targets: &'a TokenTargets,
    pub first: usize,
    pub logits: &'a [T],
    pub stats: &'a mut [T],
}

impl<T: Real> SimdTask for StatsTask<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let logits = self.logits.chunks_exact(self.targets.vocab);
        for (i, (stats, logits)) in self.stats.chunks_exact_mut(2).zip(logits).enumerate() {
            stats.copy_from_slice(&self.targets.forward(self.first + i, logits));
        }
    }
}

/// Replaces `logits` `[rows, vocab]`, which start at row `first`, by their gradients.
pub(super) struct StatsGradTask<'a, T> {
    pub targets: &'a TokenTargets,
    /// Where there is a cap, the gradients are those of the values that [`softcap`] took.
    ///
    /// [`softcap`]: crate::kernels::ops::softcap
    pub softcap: Option<f64>,
    pub first: usize,
    pub logits: &'a mut [T],
    /// `[rows, 2]`
    pub stats: &'a [T],
    /// Gradients of the statistics `[rows, 2]`; 1 for log-probabilities and 0 for entropies if absent.
    pub grad: Option<&'a [T]>,
}

impl<T: Real> SimdTask for StatsGradTask<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let mut derivatives = Vec::new();
        let default = [T::of(1.0), T::of(0.0)];
        for (i, logits) in self.logits.chunks_exact_mut(self.targets.vocab).enumerate() {
            let stats = &self.stats[2 * i..][..2];
            let grad = self.grad.map_or(&default[..], |grad| &grad[2 * i..][..2]);
            if let Some(cap) = self.softcap {
                let inverse = T::of(1.0 / cap);
                derivatives.clear();
                derivatives.extend(logits.iter().map(|x| T::of(1.0) - *x * inverse * *x * inverse));
            }
            self.targets.backward(self.first + i, logits, stats, grad);
            logits.iter_mut().zip(&derivatives).for_each(|(x, derivative)| *x *= *derivative);
        }
    }
}
