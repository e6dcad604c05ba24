//! Log-probability and entropy of chosen tokens in one pass over the logits.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use crate::kernels::custom_op::{Kernel, Plain, launch};
use crate::kernels::float::Real;
use crate::kernels::simd::max;

type Result<T> = candle_core::Result<T>;

/// For logits `[n, vocab]`, one target id and one temperature T per row, with
/// `p = softmax(logits / T)`: column 0 is `ln p[target]`, column 1 the entropy
/// `-sum p ln p`, both in nats, `[n, 2]`. Differentiable in the logits.
///
/// # Errors
/// If a target is outside the vocabulary or a length does not fit.
pub fn token_stats(logits: &Tensor, targets: &[u32], temperatures: &[f32]) -> Result<Tensor> {
    let (rows, vocab) = logits.dims2()?;
    let chosen = Chosen::new(targets, temperatures, rows, vocab)?;
    logits.contiguous()?.apply_op1(TokenStats { chosen, vocab })
}

/// What is asked of each row.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    targets: Vec<u32>,
    temperatures: Vec<f32>,
}

impl Chosen {
    pub fn new(targets: &[u32], temperatures: &[f32], rows: usize, vocab: usize) -> Result<Self> {
        if targets.len() != rows || temperatures.len() != rows {
            candle_core::bail!(
                "{rows} rows of logits, {} targets, {} temperatures",
                targets.len(),
                temperatures.len()
            );
        }
        if let Some(target) = targets.iter().find(|t| **t as usize >= vocab) {
            candle_core::bail!("target {target} is outside the vocabulary of {vocab}");
        }
        Ok(Self { targets: targets.to_vec(), temperatures: temperatures.to_vec() })
    }

    /// The target, and 1 / T.
    #[inline(always)]
    fn of<T: Real>(&self, row: usize) -> (usize, T) {
        (self.targets[row] as usize, T::of(1.0 / f64::from(self.temperatures[row])))
    }

    /// `[ln p[target], entropy]`. With `z = (x - max) / T` and `S = sum e^z`, the entropy is
    /// `ln S - sum e^z z / S`, a sum without cancellation as `z <= 0`.
    #[inline(always)]
    pub fn forward<T: Real>(&self, row: usize, logits: &[T]) -> [T; 2] {
        const LANES: usize = 16;
        let (target, scale) = self.of::<T>(row);
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
    pub fn backward<T: Real>(&self, row: usize, logits: &mut [T], result: &[T], grad: &[T]) {
        let (target, scale) = self.of::<T>(row);
        let (grad_logp, grad_entropy) = (grad[0], grad[1]);
        let (log_sum, entropy) = (logits[target] * scale - result[0], result[1]);
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

#[derive(Clone)]
struct TokenStats {
    chosen: Chosen,
    vocab: usize,
}

impl Kernel for TokenStats {
    const NAME: &'static str = "token-stats";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(Shape::from((inputs[0].dims2()?.0, 2)))
    }

    #[inline(always)]
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], _width: usize) {
        let logits = &inputs[0][first * self.vocab..];
        for (i, (out, row)) in
            out.chunks_exact_mut(2).zip(logits.chunks_exact(self.vocab)).enumerate()
        {
            out.copy_from_slice(&self.chosen.forward(first + i, row));
        }
    }
}

/// Inputs: logits, result, gradient of the result.
struct TokenStatsGrad(TokenStats);

impl Kernel for TokenStatsGrad {
    const NAME: &'static str = "token-stats-grad";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    #[inline(always)]
    fn fill<T: Real>(&self, first: usize, out: &mut [T], inputs: &[&[T]], width: usize) {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let row = first + i;
            out.copy_from_slice(&inputs[0][row * width..][..width]);
            let (result, grad) = (&inputs[1][2 * row..][..2], &inputs[2][2 * row..][..2]);
            self.0.chosen.backward(row, out, result, grad);
        }
    }
}

impl CustomOp1 for TokenStats {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        launch(self, &[(storage, layout)])
    }

    fn bwd(&self, arg: &Tensor, res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let op = Plain(TokenStatsGrad(self.clone()));
        Ok(Some(arg.detach().apply_op3_no_bwd(&res.detach(), &grad.contiguous()?, &op)?))
    }
}
