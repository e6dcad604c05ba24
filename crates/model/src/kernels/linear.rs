//! A frozen linear layer and its adapter, forwards and backwards (CPU).
//!
//! `y = x W^T + bias + s (m x) A^T B^T`, where m is dropout's mask, 1 without dropout. With the
//! gradient g of y and `u = s g B`:
//!
//! ```text
//! dx = g W + m (u A)        dA = u^T (m x)        dB = s g^T (m x A^T)
//! ```
//!
//! The output may be wanted in parts, one after another in the rows of W: that is how a layer which
//! fuses several gives each of them without copies.

use candle_core::{Device, Tensor};

use super::custom_op::{with_values, with_wide};
use super::float::Real;
use super::matmul::{Matrix, WriteMode, multiply, product};
use super::rowwise;
use crate::adapter::weights::{Dropout, Pair};

type Result<T> = candle_core::Result<T>;

const NAME: &str = "linear";

/// W `[out, in]`, bias `[out]` and the adapter, where there are such.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub pair: Option<&'a Pair>,
}

/// What the adapter's first factor gives, `m x A^T` `[n, r]`; empty without an adapter.
pub(crate) struct Inner<T> {
    values: Vec<T>,
    /// The random stream before the mask was drawn.
    dropout: Option<Dropout>,
}

impl Linear<'_> {
    /// The adapter's first factor of x `[n, in]`.
    pub fn inner<T: Real>(&self, x: &[T], dropout: Option<&mut Dropout>) -> Result<Inner<T>> {
        let Some(pair) = self.pair else {
            return Ok(Inner { values: Vec::new(), dropout: None });
        };
        let (r, width) = pair.a.dims2()?;
        let before = dropout.as_deref().cloned();
        let dropped =
            dropout.and_then(|dropout| dropout.mask(x.len())).map(|mask| masked(x, &mask));
        let x = Matrix::new(dropped.as_deref().unwrap_or(x), x.len() / width, width);
        let values = with_values([pair.a.as_tensor()], NAME, |[a]| {
            Ok(product(1.0, x, Matrix::new(a, r, width).t()))
        })?;
        Ok(Inner { values, dropout: before })
    }

    /// The output of x `[n, in]` in `parts` of these widths, each `[n, width]`.
    pub fn outer<T: Real>(
        &self,
        x: &[T],
        inner: &Inner<T>,
        widths: &[usize],
        parts: &mut [Vec<T>],
    ) -> Result<()> {
        let (_, width) = self.weight.dims2()?;
        let n = x.len() / width;
        let mut first = 0;
        for (part, count) in parts.iter_mut().zip(widths.iter().copied()) {
            *part =
                with_wide(self.weight, first * width..(first + count) * width, NAME, |weight| {
                    let weight = Matrix::new(weight, count, width);
                    Ok(product(1.0, Matrix::new(x, n, width), weight.t()))
                })?;
            if let Some(bias) = self.bias {
                with_values([bias], NAME, |[bias]| {
                    rowwise::add_bias(part, &bias[first..first + count]);
                    Ok(())
                })?;
            }
            if let Some(pair) = self.pair {
                let r = pair.a.dim(0)?;
                with_values([pair.b.as_tensor()], NAME, |[b]| {
                    let inner = Matrix::new(&inner.values, n, r);
                    let b = Matrix::new(&b[first * r..], count, r);
                    multiply((part, count), WriteMode::Add, pair.scale, inner, b.t());
                    Ok(())
                })?;
            }
            first += count;
        }
        Ok(())
    }

    /// Gradients of A and B, where those of the output's parts are `grads`; that of x `[n, in]` is
    /// added to `dx`, an empty one counting as 0, if it is wanted.
    pub fn backward<T: Real>(
        &self,
        x: &[T],
        inner: Inner<T>,
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
                let range = first * width..(first + count) * width;
                with_wide(self.weight, range, NAME, |weight| {
                    let weight = Matrix::new(weight, *count, width);
                    if dx.is_empty() {
                        **dx = product(1.0, *grad, weight);
                    } else {
                        multiply((&mut **dx, width), WriteMode::Add, 1.0, *grad, weight);
                    }
                    Ok(())
                })?;
            }
        }
        let Some(pair) = self.pair else { return Ok(None) };
        let r = pair.a.dim(0)?;
        with_values([pair.a.as_tensor(), pair.b.as_tensor()], NAME, |[a, b]| {
            let mut up = vec![T::of(0.0); n * r];
            let mut db = vec![T::of(0.0); out * r];
            for (first, count, grad) in parts {
                let b = Matrix::new(&b[first * r..], count, r);
                multiply((&mut up, r), WriteMode::Add, pair.scale, grad, b);
                let inner = Matrix::new(&inner.values, n, r);
                let db = &mut db[first * r..];
                multiply((db, r), WriteMode::Replace, pair.scale, grad.t(), inner);
            }
            let (up, a) = (Matrix::new(&up, n, r), Matrix::new(a, r, width));
            let mask = inner.dropout.and_then(|mut dropout| dropout.mask(x.len()));
            let dropped = mask.as_ref().map(|mask| masked(x, mask));
            let seen = Matrix::new(dropped.as_deref().unwrap_or(x), n, width);
            let da = product(1.0, up.t(), seen);
            match (dx, mask) {
                (None, _) => {}
                (Some(dx), None) => multiply((dx, width), WriteMode::Add, 1.0, up, a),
                (Some(dx), Some(mask)) => {
                    rowwise::add(dx, &masked(&product(1.0, up, a), &mask), width);
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
