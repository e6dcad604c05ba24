//! The kernels.

use std::arch::asm;
use std::arch::x86_64::{__m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_set1_epi32};
use std::mem::transmute;

use half::bf16;

use crate::columns::is_narrow;
use crate::columns::kernel::{COLUMN_BLOCK, WeightMatrix};
use crate::columns::narrow::{FewColumns, Transposed};
use crate::columns::tiles::{ColumnBlocks, TileWeight};
use crate::columns::vector_weight::LINE;

/// Computes a product with the first `tokens` columns of `x` `[inner / 2, width]`, two activations in bf16 to a word.
///
/// # Safety
/// The processor has AVX-512 with bf16. `out` has a number of rows of `width` values, and `w` has as many rows
/// or more, of as many values as `x` has.
pub(super) unsafe fn add_product(
    out: &mut [f32],
    w: WeightMatrix<'_, bf16>,
    (x, width, tokens): (&[u32], usize, usize),
) {
    let outputs = out.len() / width.max(1);
    let (out, x) = (out.as_mut_ptr(), x.as_ptr().cast());
    if is_narrow(tokens) {
        let row_bytes = w.inner * size_of::<bf16>();
        let (w, inner) = (w.values.as_ptr().cast(), w.inner);
        let few = FewColumns { out, w, row_bytes, x, inner, width, outputs };
        // SAFETY: the caller's guarantees. The caller has `inner / 2` rows of words, and pads the width
        // for this kernel.
        return unsafe { few.run::<PairedWeight>(tokens) };
    }
    assert!(width.is_multiple_of(COLUMN_BLOCK));
    let (w, inner) = (w.values.as_ptr().cast::<PairedWeight>(), w.inner / 2);
    // SAFETY: the caller's guarantees.
    unsafe { ColumnBlocks { out, w, x, inner, width, outputs }.run() }
}

/// Weights in bf16 that are multiplied in pairs.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct PairedWeight([bf16; 2]);

impl Transposed for PairedWeight {
    const PER_WORD: usize = 2;
    const INPUTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn add<const C: usize>(sums: &mut [__m512; C], words: __m512i, _: usize, x: *const f32) {
        for (c, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the caller guarantees the words. The instruction changes `sum` only. `FewColumns` is
            // compiled for processors without it too, into which the intrinsic would not be inlined.
            unsafe {
                let x = _mm512_set1_epi32(*x.cast::<i32>().add(c));
                asm!(
                    "vdpbf16ps {sum}, {words}, {x}",
                    sum = inout(zmm_reg) *sum,
                    words = in(zmm_reg) words,
                    x = in(zmm_reg) x,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
        }
    }
}

impl TileWeight for PairedWeight {
    const IN_PLACE: bool = true;

    unsafe fn widen(_: *const Self, _: usize, _: &mut [f32; LINE]) {}

    #[inline(always)]
    unsafe fn add_products<const N: usize>(sums: &mut [__m512; N], x: &[__m512; N], w: *const f32) {
        // The instruction can read a word and repeat it as its last operand. A separate instruction that does so
        // makes one block a third slower (Zen 4).
        // SAFETY: the caller's guarantees; vectors of all types have 64 bytes.
        unsafe {
            let w = _mm512_set1_epi32(w.cast::<i32>().read_unaligned());
            let w: __m512bh = transmute(w);
            for (sum, x) in sums.iter_mut().zip(x) {
                let x: __m512bh = transmute(*x);
                *sum = _mm512_dpbf16_ps(*sum, x, w);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn tile<const M: usize, const N: usize>(blocks: &ColumnBlocks<Self>, row: usize) {
        // SAFETY: the caller's guarantees.
        unsafe { blocks.compute::<M, N>(row) }
    }
}
