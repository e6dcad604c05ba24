//! Products of quantized weights with activations that are rounded to integers of 16 bits.
//!
//! Weights of 4 or 8 bits times integers are summed exactly, 32 at a time, and the sum is multiplied by the
//! scales of both: `y[o, c] += sum_b dot(w[o, b], q[b, c]) (scale[o, b] scale[b, c])`, one block after
//! another with b ascending. Formats with offsets subtract `offset[o, b] sum(q[b, c]) scale[b, c]`. llama.cpp
//! rounds activations to 8 bits; with 16, log-probabilities still agree with those of the trainer, which
//! computes in f32: logits differ by about 1e-4 of the largest one. The bits of an element do not depend on
//! the other columns or on the number of threads.

mod columns;
#[cfg(target_arch = "x86_64")]
mod formats;
#[cfg(target_arch = "x86_64")]
mod kernel;
mod layout;
#[cfg(target_arch = "x86_64")]
mod round;
mod support;

use hone_core::threads::pause_point;
use hone_model::weights::{BlockFormat, QuantizedMatrix};

pub(crate) use columns::IntegerColumns;
use support::has_instructions;

/// Whether [`add_product`] computes with weights of this format on this processor.
pub(crate) fn is_supported(format: BlockFormat) -> bool {
    format != BlockFormat::Q6K && has_instructions()
}

/// Computes `out += w x` on the current thread, where `w` are the rows of a matrix from `first` on, as many
/// as `out` `[outputs, width]` has.
///
/// # Panics
/// If the format [is not supported](is_supported), or shapes disagree.
pub(crate) fn add_product(
    out: &mut [f32],
    width: usize,
    (matrix, first): (&QuantizedMatrix, usize),
    x: &IntegerColumns,
) {
    assert!(is_supported(matrix.format()), "{matrix:?}");
    #[cfg(target_arch = "x86_64")]
    {
        let (w, (rows, _)) = (matrix.interleaved(), matrix.dims());
        let product = kernel::Product { out, width, first, w, rows, x };
        // SAFETY: the assertion above checked the processor.
        unsafe {
            match matrix.format() {
                BlockFormat::Q8_0 => product.run::<formats::Q8_0>(),
                BlockFormat::Q4_0 => product.run::<formats::Q4_0>(),
                BlockFormat::Q4_1 => product.run::<formats::Q4_1>(),
                BlockFormat::Q4K => product.run::<formats::Q4K>(),
                BlockFormat::Q6K => unreachable!("not supported"),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (out, width, first, x);
    pause_point();
}

#[cfg(test)]
mod tests;
