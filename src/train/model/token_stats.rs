//! Log-probability and entropy of chosen tokens in one pass over the logits.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use super::kernel::{Kernel, Plain, launch};
use super::real::Real;

type Result<T> = candle_core::Result<T>;

/// For logits `[n, vocab]`, one target id and one temperature T per row, with
/// `p = softmax(logits / T)`: column 0 is `ln p[target]`, column 1 the entropy
/// `-sum p ln p`, both in nats, `[n, 2]`. Differentiable in the logits.
///
/// # Errors
/// If a target is outside the vocabulary or a length does not fit.
pub fn token_stats(logits: &Tensor, targets: &[u32], temperatures: &[f32]) -> Result<Tensor> {
    let (rows, vocab) = logits.dims2()?;
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
    logits
        .contiguous()?
        .apply_op1(TokenStats { targets: targets.to_vec(), temperatures: temperatures.to_vec() })
}

#[derive(Clone)]
struct TokenStats {
    targets: Vec<u32>,
    temperatures: Vec<f32>,
}

impl TokenStats {
    fn forward<T: Real>(&self, logits: &[T]) -> Vec<T> {
        let vocab = logits.len() / self.targets.len().max(1);
        let mut out = Vec::with_capacity(self.targets.len() * 2);
        for (i, row) in logits.chunks_exact(vocab.max(1)).enumerate() {
            let scale = T::of(1.0 / f64::from(self.temperatures[i]));
            let log_sum = log_sum_exp(row, scale);
            let mut entropy = T::of(0.0);
            for x in row {
                let logp = *x * scale - log_sum;
                // p ln p is 0 where p is 0, even if ln p is minus infinity.
                let p = logp.exp();
                if p > T::of(0.0) {
                    entropy = entropy - p * logp;
                }
            }
            out.push(row[self.targets[i] as usize] * scale - log_sum);
            out.push(entropy);
        }
        out
    }

    /// `d ln p_k / d x_j = (1[j = k] - p_j) / T` and `d H / d x_j = -p_j (ln p_j + H) / T`.
    fn backward<T: Real>(&self, logits: &[T], result: &[T], grad: &[T]) -> Vec<T> {
        let vocab = logits.len() / self.targets.len().max(1);
        let mut out = Vec::with_capacity(logits.len());
        for (i, row) in logits.chunks_exact(vocab.max(1)).enumerate() {
            let scale = T::of(1.0 / f64::from(self.temperatures[i]));
            let target = self.targets[i] as usize;
            let (grad_logp, grad_entropy) = (grad[2 * i], grad[2 * i + 1]);
            let log_sum = row[target] * scale - result[2 * i];
            let entropy = result[2 * i + 1];
            let start = out.len();
            for x in row {
                let logp = *x * scale - log_sum;
                let p = logp.exp();
                let mut g = T::of(0.0) - grad_logp * p;
                if grad_entropy != T::of(0.0) && p > T::of(0.0) {
                    g = g - grad_entropy * p * (logp + entropy);
                }
                out.push(g * scale);
            }
            out[start + target] = out[start + target] + grad_logp * scale;
        }
        out
    }
}

fn log_sum_exp<T: Real>(row: &[T], scale: T) -> T {
    let max = row.iter().fold(T::of(f64::NEG_INFINITY), |m, x| if *x > m { *x } else { m });
    let sum = row.iter().fold(T::of(0.0), |sum, x| sum + ((*x - max) * scale).exp());
    max * scale + sum.ln()
}

impl Kernel for TokenStats {
    const NAME: &'static str = "token-stats";

    fn shape(&self, _inputs: &[&Shape]) -> Result<Shape> {
        Ok(Shape::from((self.targets.len(), 2)))
    }

    fn run<T: Real>(&self, inputs: &[&[T]], _shapes: &[&Shape]) -> Vec<T> {
        self.forward(inputs[0])
    }
}

/// Inputs: logits, result, gradient of the result.
struct TokenStatsGrad(TokenStats);

impl Kernel for TokenStatsGrad {
    const NAME: &'static str = "token-stats-grad";

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn run<T: Real>(&self, inputs: &[&[T]], _shapes: &[&Shape]) -> Vec<T> {
        self.0.backward(inputs[0], inputs[1], inputs[2])
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
