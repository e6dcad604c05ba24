//! The arithmetic of products with the matrices of the frozen base (CPU).

use std::ops::Range;

use candle_core::Result;
#[cfg(target_arch = "x86_64")]
use candle_core::WithDType;

pub use hone_core::config::Compute;

use hone_kernels::float::Real;
#[cfg(target_arch = "x86_64")]
use hone_kernels::matmul::bf16::{self, PackedFactor, UnpackedRows};
use hone_kernels::matmul::{Matrix, WriteMode, multiply, product};
#[cfg(target_arch = "x86_64")]
use hone_kernels::parallel::with_threads;
#[cfg(target_arch = "x86_64")]
use hone_kernels::processor::Bf16Unit;

use super::storage::with_upcast;
#[cfg(target_arch = "x86_64")]
use super::storage::{StoredValues, widened, with_stored};
use crate::weights::BaseMatrix;

const NAME: &str = "product with a weight";

/// What this process computes products of matrices in where `compute` is configured: [`Compute::F32`] instead
/// of [`Compute::Bf16`] if the processor is not faster with bf16, or Linux does not permit AMX.
///
/// [`Compute::Bf16`] needs x86-64: with Linux and AMX (Intel from Sapphire Rapids on), or a processor of AMD's
/// with AVX-512 for bf16 (from Zen 4 on). The instruction of AVX-512 for bf16 (`vdpbf16ps`) is used on AMD's
/// processors only. On Sapphire Rapids it has half the throughput of the one for f32.
#[must_use]
pub fn available(compute: Compute) -> Compute {
    #[cfg(target_arch = "x86_64")]
    if compute == Compute::Bf16 && Bf16Unit::get().is_some() {
        return Compute::Bf16;
    }
    let _ = compute;
    Compute::F32
}

/// Rows of a matrix of the base, as the right factor of a product.
pub(crate) struct WeightRows<'a> {
    pub weight: &'a BaseMatrix,
    pub rows: Range<usize>,
    /// Whether the factor is the transpose of these rows.
    pub transposed: bool,
}

/// The left factor of products with weights, `[n, inner]`: activations or gradients.
pub(crate) enum LeftFactor<'a, T> {
    Exact(Matrix<'a, T>),
    /// For products in bf16. Packed once, for several products.
    #[cfg(target_arch = "x86_64")]
    Rounded(PackedFactor),
}

impl<'a, T: Real> LeftFactor<'a, T> {
    /// Prepares a matrix that is not transposed. [`Compute::Bf16`] has an effect on f32 alone, where it
    /// is [available].
    pub fn new(compute: Compute, matrix: Matrix<'a, T>) -> Self {
        #[cfg(target_arch = "x86_64")]
        if compute == Compute::Bf16
            && let (Some(unit), Some(matrix)) = (Bf16Unit::get(), matrix.as_f32())
        {
            return Self::Rounded(PackedFactor::left(unit, matrix));
        }
        let _ = compute;
        Self::Exact(matrix)
    }

    pub fn product(&self, right: &WeightRows<'_>) -> Result<Vec<T>> {
        match self {
            Self::Exact(left) => right.read(|right| product(1.0, *left, right)),
            #[cfg(target_arch = "x86_64")]
            Self::Rounded(left) => {
                Ok(T::from_f32(bf16::product(left, &right.packed(left.unit())?)))
            }
        }
    }

    /// Writes or adds the product to `out`, whose rows start `stride` values apart.
    pub fn multiply(
        &self,
        (out, stride): (&mut [T], usize),
        mode: WriteMode,
        right: &WeightRows<'_>,
    ) -> Result<()> {
        match self {
            Self::Exact(left) => {
                right.read(|right| multiply((out, stride), mode, 1.0, *left, right))
            }
            #[cfg(target_arch = "x86_64")]
            Self::Rounded(left) => {
                let right = right.packed(left.unit())?;
                let Some(out) = T::as_f32_mut(out) else {
                    candle_core::bail!("{NAME}: the factor is in f32, but not the output");
                };
                bf16::multiply((out, stride), mode, left, &right);
                Ok(())
            }
        }
    }
}

impl WeightRows<'_> {
    /// Number of columns of the stored matrix, and the range of the values of the rows.
    fn values(&self) -> Result<(usize, Range<usize>)> {
        let (_, columns) = self.weight.dims2()?;
        Ok((columns, self.rows.start * columns..self.rows.end * columns))
    }

    /// Calls `f` with the factor in `T`.
    fn read<T: Real, R>(&self, f: impl FnOnce(Matrix<'_, T>) -> R) -> Result<R> {
        let (columns, values) = self.values()?;
        with_upcast(self.weight, values, NAME, |values| {
            let stored = Matrix::new(values, self.rows.len(), columns);
            Ok(f(if self.transposed { stored.t() } else { stored }))
        })
    }

    /// The factor in bf16. Values that are stored in bf16 are copied; others are rounded.
    #[cfg(target_arch = "x86_64")]
    fn packed(&self, unit: Bf16Unit) -> Result<PackedFactor> {
        let (columns, values) = self.values()?;
        let shape = (self.rows.len(), columns);
        let range = |rows: Range<usize>| rows.start * columns..rows.end * columns;
        with_stored(self.weight, values, NAME, |stored| {
            let packed = |read: &ReadRows<'_>| {
                PackedFactor::right(unit, shape, self.transposed, |rows, pack| read(rows, pack))
            };
            Ok(match stored {
                StoredValues::Bf16(values) => {
                    packed(&|rows, pack| pack(UnpackedRows::Bf16(&values[range(rows)])))
                }
                StoredValues::F16(values) => packed(&|rows, pack| {
                    let values = &values[range(rows)];
                    let widen = |at, to: &mut [f32]| f32::upcast_f16(to, &values[at..][..to.len()]);
                    // The panels are shared among the threads already.
                    with_threads(1, || {
                        widened(values.len(), widen, |values| pack(UnpackedRows::F32(values)));
                    });
                }),
                StoredValues::Quantized(matrix, first) => packed(&|rows, pack| {
                    let range = range(rows);
                    let first = first + range.start;
                    let widen = |at, to: &mut [f32]| f32::dequantize(matrix, first + at, to);
                    // The panels are shared among the threads already.
                    with_threads(1, || {
                        widened(range.len(), widen, |values| pack(UnpackedRows::F32(values)));
                    });
                }),
                StoredValues::Wide(storage, all) => {
                    let values = &f32::cpu_storage_as_slice(storage)?[all];
                    packed(&|rows, pack| pack(UnpackedRows::F32(&values[range(rows)])))
                }
            })
        })
    }
}

/// Calls its second argument with the values of these rows.
#[cfg(target_arch = "x86_64")]
type ReadRows<'a> = dyn Fn(Range<usize>, &dyn Fn(UnpackedRows<'_>)) + Sync + 'a;

#[cfg(test)]
mod tests;
