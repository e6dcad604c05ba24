//! Weights times activations whose columns are the tokens of a batch.
//!
//! For weights `w` `[out, inner]` in the layout of the model's files and activations `x`
//! `[inner, width]`, `y[o, c] += sum_k w[o, k] x[k, c]`, one term after another with k ascending. The
//! bits of an element do not depend on the other columns, on the tile that computes it, or on the
//! number of threads.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod narrow;
#[cfg(target_arch = "x86_64")]
mod q8_0;
#[cfg(target_arch = "x86_64")]
mod vector_weight;

use std::convert::Infallible;

use pulp::Arch;
use rayon::prelude::*;

use hone_core::threads::pause_point;

#[cfg(target_arch = "x86_64")]
use kernel::AddMatmul;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) use kernel::StoredWeight as VectorWeight;
pub(crate) use kernel::{COLUMN_BLOCK, TokenColumns, WeightMatrix};
#[cfg(target_arch = "x86_64")]
pub(crate) use vector_weight::VectorWeight;

/// Multiplications that pay for another thread.
const MIN_WORK_PER_THREAD: usize = 1 << 19;

/// The outputs of a parallel part are a multiple of this, so that few tiles are partial.
const PART_OUTPUTS: usize = 16;

/// Computes `out += w x` on up to `threads` threads of the current pool. `out` is `[outputs, width]`.
pub(crate) fn add_matmul(
    out: &mut [f32],
    w: WeightMatrix<'_>,
    x: TokenColumns<'_>,
    threads: usize,
) {
    let Ok(()) = par_outputs(out, x.width, w.inner, threads, |first, out| {
        let values = &w.values[first * w.inner..];
        add_matmul_serial(out, WeightMatrix { values, ..w }, x);
        Ok::<(), Infallible>(())
    });
}

/// [`add_matmul`] on the current thread, for weights of any stored type. Uses as many rows of `w` as
/// `out` has.
pub(crate) fn add_matmul_serial<W: VectorWeight>(
    out: &mut [f32],
    w: WeightMatrix<'_, W>,
    x: TokenColumns<'_>,
) {
    let task = AddMatmul { out, w, x };
    match Arch::new() {
        #[cfg(target_arch = "x86_64")]
        Arch::V4(token) => avx512::add_matmul(token, task),
        arch => arch.dispatch(task),
    }
    pause_point();
}

/// Computes `out += w x` on the current thread for weights of the format Q8_0, as far as a kernel reads
/// their blocks directly. Returns the number of first outputs that it computed; the others need
/// dequantized weights. `w` has the blocks of as many rows as `out` has.
pub(crate) fn add_q8_0_serial(
    out: &mut [f32],
    w: WeightMatrix<'_, u8>,
    x: TokenColumns<'_>,
) -> usize {
    #[cfg(target_arch = "x86_64")]
    if (1..=narrow::MAX_COLUMNS).contains(&x.tokens)
        && w.inner.is_multiple_of(q8_0::BLOCK)
        && let Arch::V4(_) = Arch::new()
    {
        let outputs = out.len() / x.width;
        let row_bytes = w.inner / q8_0::BLOCK * q8_0::BLOCK_BYTES;
        assert!(x.width.is_multiple_of(COLUMN_BLOCK) && x.values.len() >= w.inner * x.width);
        assert!(w.values.len() >= outputs * row_bytes);
        let few = q8_0::FewColumnsQ8 {
            out: out.as_mut_ptr(),
            w: w.values.as_ptr(),
            x: x.values.as_ptr(),
            inner: w.inner,
            width: x.width,
            outputs,
        };
        // SAFETY: `V4` proves the features, and the assertions keep every access within the three
        // slices.
        return unsafe { few.run(x.tokens) };
    }
    let _ = (out, w, x);
    0
}

/// Splits `out` `[outputs, width]` into parts and calls `f(first output, part)` on up to `threads`
/// threads of the current pool. An output takes `inner` multiplications for each column.
///
/// # Errors
/// The first error of `f`.
pub(crate) fn par_outputs<E: Send>(
    out: &mut [f32],
    width: usize,
    inner: usize,
    threads: usize,
    f: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let threads = threads.min(out.len() * inner / MIN_WORK_PER_THREAD).max(1);
    if threads == 1 {
        return f(0, out);
    }
    // Two parts per thread, because another process may delay one of the threads.
    let outputs = (out.len() / width).div_ceil(threads * 2).next_multiple_of(PART_OUTPUTS);
    out.par_chunks_mut(outputs * width).enumerate().try_for_each(|(i, out)| f(i * outputs, out))
}

#[cfg(test)]
mod tests;
