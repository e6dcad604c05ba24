//! A frozen linear layer and its adapter as one operation (CPU).

use candle_core::{CpuStorage, CustomOp1, CustomOp3, DType, Layout, Shape, Tensor};

use super::kernel::{Saved, slice, with_values};
use super::product::{Matrix, Store, multiply, product};
use super::real::Real;

type Result<T> = candle_core::Result<T>;

const NAME: &str = "linear";

/// `x W^T + bias` for a constant `W` `[out, in]`; with an adapter,
/// `+ scale (x A^T) B^T`. Only what is trained gets a gradient computed, which candle's own product
/// would do for `W` too and throw away.
#[derive(Clone)]
pub(super) struct Frozen {
    weight: Tensor,
    bias: Option<Tensor>,
    /// `alpha / r`
    scale: f64,
    /// `x A^T`
    down: Saved<CpuStorage>,
}

/// Inputs `[n, in]` and the adapter's factors A `[r, in]` and B `[out, r]`.
#[derive(Clone, Copy)]
struct Adapter<'a, T> {
    a: &'a [T],
    b: &'a [T],
    r: usize,
}

impl Frozen {
    pub fn new(weight: &Tensor, bias: Option<&Tensor>, scale: f64) -> Self {
        Self { weight: weight.clone(), bias: bias.cloned(), scale, down: Saved::empty() }
    }

    /// `(out, in)`, if `x` fits.
    fn dims(&self, x: &Layout) -> Result<(usize, usize, usize)> {
        let (n, inner) = x.shape().dims2()?;
        let (out, weight_inner) = self.weight.dims2()?;
        if inner != weight_inner {
            candle_core::bail!("linear: {inner} columns meet {weight_inner}");
        }
        Ok((n, inner, out))
    }

    fn forward<T: Real>(
        &self,
        x: &[T],
        (n, inner, out): (usize, usize, usize),
        adapter: Option<Adapter<'_, T>>,
    ) -> Result<CpuStorage> {
        let x = Matrix::new(x, n, inner);
        let mut y = with_values::<T, 1, _>([&self.weight], NAME, |[weight]| {
            Ok(product(1.0, x, Matrix::new(weight, out, inner).t()))
        })?;
        if let Some(bias) = &self.bias {
            with_values::<T, 1, _>([bias], NAME, |[bias]| {
                for row in y.chunks_exact_mut(out) {
                    row.iter_mut().zip(bias).for_each(|(y, bias)| *y += *bias);
                }
                Ok(())
            })?;
        }
        if let Some(Adapter { a, b, r }) = adapter {
            let down = product(1.0, x, Matrix::new(a, r, inner).t());
            let delta = Matrix::new(&down, n, r);
            multiply((&mut y, out), Store::Add, self.scale, delta, Matrix::new(b, out, r).t());
            self.down.put(T::to_cpu_storage_owned(down));
        }
        Ok(T::to_cpu_storage_owned(y))
    }

    /// `dx = g W`, plus `up A` where there is an adapter, for `up = s g B`.
    fn to_input<T: Real>(
        &self,
        grad: &[T],
        adapter: Option<(&[T], Adapter<'_, T>)>,
    ) -> Result<Vec<T>> {
        let (out, inner) = self.weight.dims2()?;
        let n = grad.len() / out.max(1);
        let mut dx = with_values::<T, 1, _>([&self.weight], NAME, |[weight]| {
            Ok(product(1.0, Matrix::new(grad, n, out), Matrix::new(weight, out, inner)))
        })?;
        if let Some((up, Adapter { a, r, .. })) = adapter {
            let (up, a) = (Matrix::new(up, n, r), Matrix::new(a, r, inner));
            multiply((&mut dx, inner), Store::Add, 1.0, up, a);
        }
        Ok(dx)
    }

    fn backward<T: Real>(
        &self,
        x: &Tensor,
        (a, b): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let ((n, inner), (out, r)) = (x.dims2()?, b.dims2()?);
        let device = x.device();
        let down = match self.down.take() {
            Some(down) => T::cpu_storage_data(down)?,
            None => candle_core::bail!("linear: the backward pass ran twice"),
        };
        let track = x.track_op();
        with_values::<T, 4, _>([x, a, b, grad], NAME, |[x, a, b, grad]| {
            let g = Matrix::new(grad, n, out);
            let up = product(self.scale, g, Matrix::new(b, out, r));
            let da = product(1.0, Matrix::new(&up, n, r).t(), Matrix::new(x, n, inner));
            let db = product(self.scale, g.t(), Matrix::new(&down, n, r));
            let dx = if track {
                let dx = self.to_input(grad, Some((&up, Adapter { a, b, r })))?;
                Some(Tensor::from_vec(dx, (n, inner), device)?)
            } else {
                None
            };
            let da = Tensor::from_vec(da, (r, inner), device)?;
            Ok([dx, Some(da), Some(Tensor::from_vec(db, (out, r), device)?)])
        })
    }
}

impl CustomOp1 for Frozen {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dims = self.dims(layout)?;
        let y = match storage {
            CpuStorage::F64(_) => self.forward::<f64>(slice(storage, layout, NAME)?, dims, None)?,
            _ => self.forward::<f32>(slice(storage, layout, NAME)?, dims, None)?,
        };
        Ok((y, Shape::from((dims.0, dims.2))))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        fn typed<T: Real>(op: &Frozen, arg: &Tensor, grad: &Tensor) -> Result<Tensor> {
            let dx = with_values::<T, 1, _>([grad], NAME, |[grad]| op.to_input(grad, None))?;
            Tensor::from_vec(dx, arg.shape(), arg.device())
        }
        let grad = grad.contiguous()?;
        Ok(Some(match grad.dtype() {
            DType::F64 => typed::<f64>(self, arg, &grad)?,
            _ => typed::<f32>(self, arg, &grad)?,
        }))
    }
}

/// Inputs: x `[n, in]`, A `[r, in]`, B `[out, r]`.
impl CustomOp3 for Frozen {
    fn name(&self) -> &'static str {
        "adapted-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let dims = self.dims(x_layout)?;
        let r = a_layout.shape().dims2()?.0;
        if b_layout.shape().dims2()? != (dims.2, r) {
            candle_core::bail!("linear: the adapter's factors do not fit");
        }
        macro_rules! run {
            ($type:ty) => {{
                let (a, b) = (slice(a, a_layout, NAME)?, slice(b, b_layout, NAME)?);
                self.forward::<$type>(slice(x, x_layout, NAME)?, dims, Some(Adapter { a, b, r }))?
            }};
        }
        let y = match x {
            CpuStorage::F64(_) => run!(f64),
            _ => run!(f32),
        };
        Ok((y, Shape::from((dims.0, dims.2))))
    }

    /// `dx = g W + s (g B) A`, `dA = s (g B)^T x`, `dB = s g^T (x A^T)`
    fn bwd(
        &self,
        x: &Tensor,
        a: &Tensor,
        b: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let [dx, da, db] = match grad.dtype() {
            DType::F64 => self.backward::<f64>(x, (a, b), &grad)?,
            _ => self.backward::<f32>(x, (a, b), &grad)?,
        };
        Ok((dx, da, db))
    }
}
