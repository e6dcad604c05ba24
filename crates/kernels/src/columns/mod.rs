//! Weights times activations whose columns are the tokens of a batch. Kernels for quantized weights are in
//! [`blocks::integer`](crate::blocks::integer).
//!
//! For weights `w` `[out, inner]` in the layout of the model's files and activations `x`
//! `[inner, width]`, `y[o, c] += sum_k w[o, k] x[k, c]`, one term after another with k ascending. The
//! bits of an element do not depend on the other columns, on the tile that computes it, or on the
//! number of threads.

pub mod bf16;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod narrow;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod vector_weight;

use pulp::Arch;

use hone_core::threads::pause_point;

use crate::hot_team::{FirstError, for_each_chunk};

#[cfg(target_arch = "x86_64")]
use crate::processor::avx512;
use kernel::AddMatmul;
#[cfg(not(target_arch = "x86_64"))]
pub use kernel::StoredWeight as VectorWeight;
pub use kernel::{COLUMN_BLOCK, TokenColumns, WeightMatrix};
#[cfg(target_arch = "x86_64")]
pub use vector_weight::VectorWeight;

/// The outputs of a parallel part are a multiple of this, so that few tiles are partial.
const PART_OUTPUTS: usize = 16;

/// The same where there are few outputs: those of the kernels' smaller tiles.
const SMALL_PART_OUTPUTS: usize = 4;

/// The same for the kernels for a few tokens, which compute vectors of outputs, and two or more of them
/// faster than one.
const NARROW_PART_OUTPUTS: usize = 2 * PART_OUTPUTS;

/// The width that activations of `tokens` tokens need: a few columns for the kernels for a few tokens,
/// else a multiple of [`COLUMN_BLOCK`].
pub fn padded_width(tokens: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_narrow(tokens) {
        return narrow::padded(tokens);
    }
    tokens.next_multiple_of(COLUMN_BLOCK)
}

/// Whether the kernels for a few tokens compute this many.
#[cfg(target_arch = "x86_64")]
fn is_narrow(tokens: usize) -> bool {
    (1..=narrow::MAX_COLUMNS).contains(&tokens) && avx512().is_some()
}

/// Computes `out += w x` on the current thread, for weights of any stored type. `out` is `[outputs, width]`;
/// uses as many rows of `w` as it has.
pub fn add_matmul_serial<W: VectorWeight>(
    out: &mut [f32],
    w: WeightMatrix<'_, W>,
    x: TokenColumns<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    if is_narrow(x.tokens) {
        add_narrow(out, w, x);
        return pause_point();
    }
    let task = AddMatmul { out, w, x };
    #[cfg(target_arch = "x86_64")]
    if let Some(proof) = avx512() {
        tiles::add_matmul(proof, task);
        return pause_point();
    }
    Arch::new().dispatch(task);
    pause_point();
}

/// Computes `out += w x` by the kernel for a few tokens.
#[cfg(target_arch = "x86_64")]
fn add_narrow<W: VectorWeight>(out: &mut [f32], w: WeightMatrix<'_, W>, x: TokenColumns<'_>) {
    let outputs = out.len() / x.width;
    assert!(x.width >= narrow::padded(x.tokens) && x.values.len() >= w.inner * x.width);
    assert!(w.values.len() >= outputs * w.inner);
    let few = narrow::FewColumns {
        out: out.as_mut_ptr(),
        w: w.values.as_ptr().cast(),
        row_bytes: w.inner * size_of::<W>(),
        x: x.values.as_ptr(),
        inner: w.inner,
        width: x.width,
        outputs,
    };
    // SAFETY: the caller checked that the processor has AVX-512. The assertions
    // keep every access within the three slices.
    unsafe { few.run::<W>(x.tokens) }
}

/// Splits `out` `[outputs, width]` into parts and calls `f(first output, part)` on up to `threads`
/// threads of the current pool, each with at least `min_work` multiplications. An output takes `inner`
/// multiplications for each column.
///
/// # Errors
/// The first error of `f`.
pub fn par_outputs<E: Send>(
    out: &mut [f32],
    (width, inner): (usize, usize),
    split: (usize, usize),
    f: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let part = outputs_of_part(out.len() / width, (width, inner), split);
    par_parts(out, (width, part), f)
}

/// [`par_outputs`] in parts of `part` outputs, which threads take one after another.
///
/// # Errors
/// The first error of `f`.
pub fn par_parts<E: Send>(
    out: &mut [f32],
    (width, part): (usize, usize),
    f: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    if part >= out.len() / width {
        return f(0, out);
    }
    let error = FirstError::default();
    for_each_chunk(out, part * width, |i, out| error.keep(f(i * part, out)));
    error.into_result()
}

/// The number of outputs of a part, if up to `threads` threads share `outputs`, each with at least `min_work`
/// multiplications.
pub fn outputs_of_part(
    outputs: usize,
    (width, inner): (usize, usize),
    (threads, min_work): (usize, usize),
) -> usize {
    let work = outputs * width.max(COLUMN_BLOCK) * inner;
    let threads = threads.min(work / min_work).max(1);
    if threads == 1 {
        outputs
    } else if width < COLUMN_BLOCK {
        // A part takes microseconds, and its first rows arrive late.
        outputs.div_ceil(threads).next_multiple_of(NARROW_PART_OUTPUTS)
    } else if outputs < threads * 2 * PART_OUTPUTS {
        // Such parts would leave some threads without work.
        outputs.div_ceil(threads).next_multiple_of(SMALL_PART_OUTPUTS)
    } else {
        // Two parts per thread, because another process may delay one of the threads.
        outputs.div_ceil(threads * 2).next_multiple_of(PART_OUTPUTS)
    }
}

#[cfg(test)]
mod tests;
