//! The kernels.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_dpbf16_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;

use half::bf16;

use crate::matmul::is_narrow;
use crate::matmul::kernel::{COLUMN_BLOCK, WeightMatrix};
use crate::matmul::narrow::{FewColumns, RowPointers, Transposed};

/// Words of a cache line.
const LINE: usize = 16;

/// Activations in bf16, two to a word.
pub(super) struct WordColumns<'a> {
    /// `[inner / 2, width]`
    pub words: &'a [u32],
    pub width: usize,
    pub tokens: usize,
}

/// Computes a product.
///
/// # Safety
/// The processor has AVX-512 with bf16. `out` has a number of rows of `x.width` values, and `w` has as many rows
/// or more, of as many values as `x` has.
pub(super) unsafe fn add_product(out: &mut [f32], w: WeightMatrix<'_, bf16>, x: WordColumns<'_>) {
    let (width, outputs) = (x.width, out.len() / x.width.max(1));
    if is_narrow(x.tokens) {
        let few = FewColumns {
            out: out.as_mut_ptr(),
            w: w.values.as_ptr().cast(),
            row_bytes: w.inner * size_of::<bf16>(),
            x: x.words.as_ptr().cast(),
            inner: w.inner,
            width,
            outputs,
        };
        // SAFETY: the caller's guarantees. The caller has `inner / 2` rows of words, and pads the width
        // for this kernel.
        return unsafe { few.run::<PairedWeight>(x.tokens) };
    }
    assert!(width.is_multiple_of(COLUMN_BLOCK));
    let mut column = 0;
    while column < width {
        let count = ((width - column) / COLUMN_BLOCK).min(4);
        // SAFETY: the caller's guarantees; `column < width`.
        unsafe {
            let blocks = PairedBlocks {
                out: out.as_mut_ptr().add(column),
                w: w.values.as_ptr().cast(),
                x: x.words.as_ptr().add(column.min(x.words.len())),
                words: w.inner / 2,
                width,
                outputs,
            };
            match count {
                4 => blocks.rows::<6, 4>(),
                3 => blocks.rows::<8, 3>(),
                2 => blocks.rows::<12, 2>(),
                _ => blocks.rows::<16, 1>(),
            }
        }
        column += count * COLUMN_BLOCK;
    }
}

/// Weights in bf16 that are multiplied in pairs.
struct PairedWeight;

impl Transposed for PairedWeight {
    const STEP: usize = <bf16 as Transposed>::STEP;
    const STEP_BYTES: usize = <bf16 as Transposed>::STEP_BYTES;
    const PER_WORD: usize = 2;
    const INPUTS: usize = 1;

    type Words = <bf16 as Transposed>::Words;

    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn read<const PART: bool>(rows: RowPointers, bytes: usize) -> Self::Words {
        // SAFETY: the caller's guarantees.
        unsafe { <bf16 as Transposed>::read::<PART>(rows, bytes) }
    }

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

/// All outputs of some blocks of columns. The pointers of `out` and `x` are at the first column.
struct PairedBlocks {
    out: *mut f32,
    /// `[outputs, words]`, not aligned
    w: *const i32,
    /// `[words, width]`
    x: *const u32,
    words: usize,
    width: usize,
    outputs: usize,
}

impl PairedBlocks {
    /// Computes all outputs of `N` blocks, `M` at a time, then fewer.
    ///
    /// # Safety
    /// The processor has AVX-512 with bf16; `outputs` rows of weights and of `out`, `words` rows of `x`, and
    /// `N` blocks of columns exist.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn rows<const M: usize, const N: usize>(&self) {
        let mut row = 0;
        // SAFETY: as for this function; every call stays below `outputs`.
        unsafe {
            while row + M <= self.outputs {
                self.tile::<M, N>(row);
                row += M;
            }
            while row + 4 <= self.outputs {
                self.tile::<4, N>(row);
                row += 4;
            }
            while row < self.outputs {
                self.tile::<1, N>(row);
                row += 1;
            }
        }
    }

    /// Computes `M` outputs of `N` blocks.
    ///
    /// # Safety
    /// As for [`Self::rows`]; `row + M` rows exist.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn tile<const M: usize, const N: usize>(&self, row: usize) {
        let (words, width) = (self.words, self.width);
        // SAFETY: the caller guarantees that rows below row + M, words below `words` and columns below
        // N * COLUMN_BLOCK exist. A prefetch accesses no memory, for any address.
        unsafe {
            let w = self.w.add(row * words);
            let out = self.out.add(row * width);
            let mut sums = [[_mm512_setzero_ps(); N]; M];
            for (m, sums) in sums.iter_mut().enumerate() {
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_loadu_ps(out.add(m * width + n * COLUMN_BLOCK));
                }
            }
            for line in (0..words).step_by(LINE) {
                for m in 0..M {
                    // The same line of the next tile. Rows are too short for the processor to
                    // recognize the access pattern in time.
                    _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add((m + M) * words + line).cast());
                }
                for i in line..words.min(line + LINE) {
                    let x: [__m512bh; N] = std::array::from_fn(|n| {
                        let x = self.x.add(i * width + n * COLUMN_BLOCK);
                        transmute(_mm512_loadu_si512(x.cast()))
                    });
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let w = _mm512_set1_epi32(w.add(m * words + i).read_unaligned());
                        let w: __m512bh = transmute(w);
                        for (sum, x) in sums.iter_mut().zip(x) {
                            // The instruction can read a word and repeat it as its last operand. A separate
                            // instruction that does so makes one block a third slower (Zen 4).
                            *sum = _mm512_dpbf16_ps(*sum, x, w);
                        }
                    }
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    _mm512_storeu_ps(out.add(m * width + n * COLUMN_BLOCK), *sum);
                }
            }
        }
    }
}
