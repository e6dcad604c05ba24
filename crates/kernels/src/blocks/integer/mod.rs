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

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod columns;
mod formats;
mod kernel;
mod lanes;
mod portable;
#[cfg(target_arch = "x86_64")]
mod round_avx512;

use hone_core::threads::pause_point;

use super::{BlockFormat, GROUP_ROWS, QuantizedMatrix};
use crate::columns::COLUMN_BLOCK;
use crate::processor::IntegerInstructions;
use activations::LANES;
pub use columns::IntegerColumns;
use formats::{Q4_0, Q4_1, Q4K, Q6K, Q8_0, RowsFormat};
use kernel::Product;
use portable::Portable;

// The rows of a vector are those of the groups in memory, and its columns those of activations.
const _: () = assert!(LANES == GROUP_ROWS && LANES == COLUMN_BLOCK);

/// Computes `out = w x + bias` on the current thread, where `w` are the rows of a matrix from `first` on, as many
/// as `out` `[outputs, width]` has. `bias` has a value for each row of the matrix; none is 0.
///
/// # Panics
/// If shapes disagree.
pub fn product(
    out: &mut [f32],
    width: usize,
    (matrix, first): (&QuantizedMatrix, usize),
    bias: Option<&[f32]>,
    x: &IntegerColumns,
) {
    let mut product = Product { out, width, first, matrix, bias, x };
    product.fill_other_columns();
    match matrix.format() {
        BlockFormat::Q8_0 => run::<Q8_0>(&mut product),
        BlockFormat::Q4_0 => run::<Q4_0>(&mut product),
        BlockFormat::Q4_1 => run::<Q4_1>(&mut product),
        BlockFormat::Q4K => run::<Q4K>(&mut product),
        BlockFormat::Q6K => run::<Q6K>(&mut product),
    }
    pause_point();
}

/// Computes a product by the instructions that its activations are rounded for.
fn run<F: RowsFormat>(product: &mut Product<'_>) {
    let instructions = product.x.instructions();
    assert!(instructions.is_available(), "{instructions:?}");
    match instructions {
        // SAFETY: the assertion checked the processor.
        #[cfg(target_arch = "x86_64")]
        IntegerInstructions::Avx512Vnni => unsafe { avx512::run_avx512::<F>(product) },
        // SAFETY: the assertion checked the processor.
        #[cfg(target_arch = "x86_64")]
        IntegerInstructions::AvxVnni => unsafe { avx2::run_avx_vnni::<F>(product) },
        // SAFETY: the assertion checked the processor.
        #[cfg(target_arch = "x86_64")]
        IntegerInstructions::Avx2 => unsafe { avx2::run_avx2::<F>(product) },
        IntegerInstructions::Portable { fused: true } => {
            kernel::run::<_, F>(Portable::<true>, product);
        }
        IntegerInstructions::Portable { fused: false } => {
            kernel::run::<_, F>(Portable::<false>, product);
        }
    }
}

#[cfg(test)]
mod tests;
