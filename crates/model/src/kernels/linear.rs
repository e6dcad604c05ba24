//! A frozen linear layer with its LoRA adapter, forward and backward (CPU).
//!
//! `y = x W^T + bias + s (m x) A^T B^T`, where m is the dropout mask, 1 without dropout. With the
//! gradient g of y and `u = s g B`:
//!
//! ```text
//! dx = g W + m (u A)        dA = u^T (m x)        dB = s g^T (m x A^T)
//! ```
//!
//! The output is computed in parts, which are consecutive rows of W: a layer that fuses several
//! projections returns each of them without copies.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};

use hone_kernels::float::Real;
use hone_kernels::matmul::{Matrix, WriteMode, multiply, product};

use super::compute::{Compute, LeftFactor, WeightRows};
use super::rowwise;
use super::storage::with_values;
use crate::adapter::weights::{Dropout, LoraPair};
use crate::weights::BaseMatrix;

const NAME: &str = "linear";

#[derive(Clone, Copy)]
pub(crate) struct LoraLinear<'a> {
    /// `[out, in]`
    pub weight: &'a BaseMatrix,
    /// `[out]`
    pub bias: Option<&'a Tensor>,
    pub pair: Option<&'a LoraPair>,
    /// The arithmetic of products with the weight.
    pub compute: Compute,
}

/// The input in the adapter's low-rank space, `m x A^T` `[n, r]`; empty without an adapter.
pub(crate) struct LowRank<T> {
    values: Vec<T>,
    /// The random stream before the mask was drawn, from which the backward pass draws it again.
    dropout: Option<Dropout>,
}

impl LoraLinear<'_> {
    /// The low-rank projection of x `[n, in]`.
    pub fn low_rank<T: Real>(&self, x: &[T], dropout: Option<&mut Dropout>) -> Result<LowRank<T>> {
        let Some(pair) = self.pair else {
            return Ok(LowRank { values: Vec::new(), dropout: None });
        };
        let (r, width) = pair.a.dims2()?;
        let before = dropout.as_deref().cloned();
        let dropped =
            dropout.and_then(|dropout| dropout.mask(x.len())).map(|mask| masked(x, &mask));
        let x = Matrix::new(dropped.as_deref().unwrap_or(x), x.len() / width, width);
        let values = with_values([pair.a.as_tensor()], NAME, |[a]| {
            Ok(product(1.0, x, Matrix::new(a, r, width).t()))
        })?;
        Ok(LowRank { values, dropout: before })
    }

    /// x `[n, in]` as a factor for [`Self::forward`] of this layer, and of others with the same input.
    pub fn factor<'x, T: Real>(&self, x: &'x [T]) -> Result<LeftFactor<'x, T>> {
        let (_, width) = self.weight.dims2()?;
        Ok(LeftFactor::new(self.compute, Matrix::new(x, x.len() / width, width)))
    }

    /// The output for x `[n, in]` in `parts` of these widths, each `[n, width]`.
    pub fn forward<T: Real>(
        &self,
        x: &LeftFactor<'_, T>,
        low_rank: &LowRank<T>,
        widths: &[usize],
        parts: &mut [Vec<T>],
    ) -> Result<()> {
        let mut first = 0;
        for (part, count) in parts.iter_mut().zip(widths.iter().copied()) {
            *part = x.product(&self.weight_rows(first..first + count, true))?;
            if let Some(bias) = self.bias {
                with_values([bias], NAME, |[bias]| {
                    rowwise::add_bias(part, &bias[first..first + count]);
                    Ok(())
                })?;
            }
            if let Some(pair) = self.pair {
                let r = pair.a.dim(0)?;
                with_values([pair.b.as_tensor()], NAME, |[b]| {
                    let n = low_rank.values.len() / r;
                    let low_rank = Matrix::new(&low_rank.values, n, r);
                    let b = Matrix::new(&b[first * r..], count, r);
                    multiply((part, count), WriteMode::Add, pair.scale, low_rank, b.t());
                    Ok(())
                })?;
            }
            first += count;
        }
        Ok(())
    }

    fn weight_rows(&self, rows: Range<usize>, transposed: bool) -> WeightRows<'_> {
        WeightRows { weight: self.weight, rows, transposed }
    }

    /// Gradients of A and B from the gradients of the output's parts. The gradient of x `[n, in]` is
    /// added to `dx` if there is one; an empty `dx` counts as 0.
    pub fn backward<T: Real>(
        &self,
        x: &[T],
        low_rank: LowRank<T>,
        grads: &[&[T]],
        mut dx: Option<&mut Vec<T>>,
    ) -> Result<Option<[Tensor; 2]>> {
        let (out, width) = self.weight.dims2()?;
        let n = x.len() / width;
        let mut first = 0;
        let parts: Vec<(usize, usize, Matrix<'_, T>)> = grads
            .iter()
            .map(|grad| {
                let count = grad.len() / n.max(1);
                first += count;
                (first - count, count, Matrix::new(grad, n, count))
            })
            .collect();
        if let Some(dx) = &mut dx {
            for (first, count, grad) in &parts {
                let grad = LeftFactor::new(self.compute, *grad);
                let rows = self.weight_rows(*first..first + count, false);
                if dx.is_empty() {
                    **dx = grad.product(&rows)?;
                } else {
                    grad.multiply((&mut **dx, width), WriteMode::Add, &rows)?;
                }
            }
        }
        let Some(pair) = self.pair else { return Ok(None) };
        let r = pair.a.dim(0)?;
        with_values([pair.a.as_tensor(), pair.b.as_tensor()], NAME, |[a, b]| {
            let mut u = vec![T::of(0.0); n * r];
            let mut db = vec![T::of(0.0); out * r];
            for (first, count, grad) in parts {
                let b = Matrix::new(&b[first * r..], count, r);
                multiply((&mut u, r), WriteMode::Add, pair.scale, grad, b);
                let low_rank = Matrix::new(&low_rank.values, n, r);
                let db = &mut db[first * r..];
                multiply((db, r), WriteMode::Replace, pair.scale, grad.t(), low_rank);
            }
            let (u, a) = (Matrix::new(&u, n, r), Matrix::new(a, r, width));
            let mask = low_rank.dropout.and_then(|mut dropout| dropout.mask(x.len()));
            let dropped = mask.as_ref().map(|mask| masked(x, mask));
            let da = product(1.0, u.t(), Matrix::new(dropped.as_deref().unwrap_or(x), n, width));
            match (dx, mask) {
                (None, _) => {}
                (Some(dx), None) => multiply((dx, width), WriteMode::Add, 1.0, u, a),
                (Some(dx), Some(mask)) => {
                    rowwise::add(dx, &masked(&product(1.0, u, a), &mask), width);
                }
            }
            let da = Tensor::from_vec(da, (r, width), &Device::Cpu)?;
            Ok(Some([da, Tensor::from_vec(db, (out, r), &Device::Cpu)?]))
        })
    }
}

fn masked<T: Real>(x: &[T], mask: &[f32]) -> Vec<T> {
    x.iter().zip(mask).map(|(x, mask)| *x * T::of(f64::from(*mask))).collect()
}
