//! Products of quantized weights with activations that are rounded to integers of 16 bits.
//!
//! Weights of 4 to 8 bits times integers are summed exactly, and the sum is multiplied by the scales of both:
//! `y[o, c] = bias[o] + sum_b dot(w[o, b], q[b, c]) (scale[o, b] scale[b, c])`, one block after another with b
//! ascending. A block has as many weights as share a scale, but at most 32. Formats with offsets subtract
//! `offset[o, b] sum(q[b, c]) scale[b, c]`. llama.cpp rounds activations to 8 bits; with 16, log-probabilities
//! still agree with those of the trainer, which computes in f32: logits differ by about 1e-4 of the largest
//! one.
//!
//! The bits of an element do not depend on the other columns or on the number of threads. As long as the
//! processor has a fused multiply-add, they do not depend on its instructions either, because all that is
//! rounded is rounded in one order.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod columns;
mod formats;
mod lanes;
mod layout;
mod product;
mod round;
mod support;

use hone_core::threads::pause_point;
use hone_model::weights::{BlockFormat, GROUP_ROWS, QuantizedMatrix};

use super::kernel::COLUMN_BLOCK;
#[cfg(target_arch = "x86_64")]
use avx512::IntegerFormat;
pub(crate) use columns::IntegerColumns;
use formats::{Q4_0, Q4_1, Q4K, Q6K, Q8_0};
use lanes::{RowsFormat, run_portable};
use product::Product;
use support::IntegerInstructions;

// The rows of a vector are those of the groups in memory, and its columns those of activations.
const _: () = assert!(layout::LANES == GROUP_ROWS && layout::LANES == COLUMN_BLOCK);

/// Computes `out = w x + bias` on the current thread, where `w` are the rows of a matrix from `first` on, as many
/// as `out` `[outputs, width]` has. `bias` has a value for each row of the matrix; none is 0.
///
/// # Panics
/// If shapes disagree.
pub(crate) fn product(
    out: &mut [f32],
    width: usize,
    (matrix, first): (&QuantizedMatrix, usize),
    bias: Option<&[f32]>,
    x: &IntegerColumns,
) {
    let (w, (rows, _)) = (matrix.interleaved(), matrix.dims());
    let mut product = Product { out, width, first, w, rows, bias, x };
    product.fill_other_columns();
    match matrix.format() {
        BlockFormat::Q8_0 => run::<Q8_0>(product),
        BlockFormat::Q4_0 => run::<Q4_0>(product),
        BlockFormat::Q4_1 => run::<Q4_1>(product),
        BlockFormat::Q4K => run::<Q4K>(product),
        BlockFormat::Q6K => run::<Q6K>(product),
    }
    pause_point();
}

/// Computes a product by the instructions that its activations are rounded for.
#[cfg(target_arch = "x86_64")]
fn run<F: IntegerFormat + RowsFormat>(mut product: Product<'_>) {
    let instructions = product.x.instructions();
    assert!(instructions.is_available(), "{instructions:?}");
    match instructions {
        // SAFETY: the assertion checked the processor.
        IntegerInstructions::Avx512Vnni => unsafe { avx512::run::<F>(product) },
        // SAFETY: the assertion checked the processor.
        IntegerInstructions::AvxVnni => unsafe { lanes::run_avx_vnni::<F>(&mut product) },
        // SAFETY: the assertion checked the processor.
        IntegerInstructions::Avx2 => unsafe { lanes::run_avx2::<F>(&mut product) },
        IntegerInstructions::Portable { fused: true } => run_portable::<true, F>(&mut product),
        IntegerInstructions::Portable { fused: false } => run_portable::<false, F>(&mut product),
    }
}

/// Computes a product by the instructions that the compiler selects.
#[cfg(not(target_arch = "x86_64"))]
fn run<F: RowsFormat>(mut product: Product<'_>) {
    match product.x.instructions() {
        IntegerInstructions::Portable { fused: true } => run_portable::<true, F>(&mut product),
        IntegerInstructions::Portable { fused: false } => run_portable::<false, F>(&mut product),
    }
}

#[cfg(test)]
mod tests;
