//! The matmul kernel for a few tokens, with AVX-512: vectors of 16 outputs instead of 16 columns.
//!
//! With one token, [`super::tiles`] wastes 15 of 16 columns, and the time is that of its arithmetic
//! instead of that of reading the weights. Here a vector has one weight of each of 16 rows, which are
//! transposed in registers. A sum still adds one term after another with k ascending, so its bits are
//! those of the other kernels.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_maskz_loadu_epi8, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_storeu_ps,
};

use crate::transpose::transpose_words;

/// Outputs of a vector.
pub(super) const LANES: usize = 16;

/// Columns up to which this kernel is the faster one.
pub(super) const MAX_COLUMNS: usize = 8;

/// Bytes that a row's first reads are ahead of its use: a few cache lines, because a line takes longer
/// to arrive than the sums of one line.
const AHEAD: usize = 320;

/// The columns that [`FewColumns`] computes for `columns` tokens: these, or one more.
pub(super) fn padded(columns: usize) -> usize {
    match columns {
        5 => 6,
        7 => 8,
        _ => columns,
    }
}

/// Stored weights of 16 rows, transposed: a vector has a word of 32 bits of each row.
pub(super) trait Transposed {
    /// Weights in a word.
    const PER_WORD: usize;

    /// Rows of activations that the weights of a word are multiplied with.
    const INPUTS: usize;

    /// Adds to the sums of each column the products of words with the activations at `x`, which are of row
    /// `i` of their [`Self::INPUTS`] rows.
    ///
    /// # Safety
    /// The processor has the features of [`FewColumns::run`], and `C` values can be read from `x`.
    unsafe fn add<const C: usize>(sums: &mut [__m512; C], words: __m512i, i: usize, x: *const f32);
}

/// Bytes of a row that are read at a time: a vector.
const STEP_BYTES: usize = size_of::<__m512i>();

/// Where 16 rows are. Rows after the last one are the last one again, and their sums are not stored.
#[derive(Clone, Copy)]
pub(super) struct RowPointers {
    pub first: *const u8,
    pub stride: usize,
    /// Index of the last row, at most 15.
    pub last: usize,
}

impl RowPointers {
    #[inline(always)]
    pub fn at(self, i: usize) -> *const u8 {
        self.first.wrapping_add(i.min(self.last) * self.stride)
    }

    /// The same rows, some bytes later.
    #[inline(always)]
    pub fn skip(self, bytes: usize) -> Self {
        Self { first: self.first.wrapping_add(bytes), ..self }
    }

    /// The first [`STEP_BYTES`] bytes, transposed: vector `p` has word `p` of each row. With `PART`, there are the
    /// first `bytes` bytes only, and the others count as 0.
    ///
    /// # Safety
    /// The processor has the features of [`FewColumns::run`], and the rows can be read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn read<const PART: bool>(self, bytes: usize) -> [__m512i; LANES] {
        let mut lines = [_mm512_setzero_si512(); LANES];
        for (i, line) in lines.iter_mut().enumerate() {
            // SAFETY: the caller guarantees that these bytes can be read.
            *line = unsafe {
                if PART {
                    _mm512_maskz_loadu_epi8((1 << bytes) - 1, self.at(i).cast())
                } else {
                    _mm512_loadu_si512(self.at(i).cast())
                }
            };
        }
        transpose_words(lines)
    }
}

/// The operands of a product of a few columns: `out += w x`.
///
/// Columns are the first ones of matrices whose rows are `width` values apart.
pub(super) struct FewColumns {
    /// `[outputs, width]`
    pub out: *mut f32,
    /// Rows of stored weights.
    pub w: *const u8,
    pub row_bytes: usize,
    /// `[inner, width]`, or with pairs of activations in a word, `[inner / 2, width]`
    pub x: *const f32,
    pub inner: usize,
    pub width: usize,
    pub outputs: usize,
}

impl FewColumns {
    /// Computes the first `columns` columns, and those of [`padded`].
    ///
    /// # Safety
    /// The processor has the features below; `outputs` rows of `w` and `out`, `inner` rows of `x`, and
    /// the padded columns exist; there are at most [`MAX_COLUMNS`]; `row_bytes` are those of `inner`
    /// weights.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    pub unsafe fn run<W: Transposed>(&self, columns: usize) {
        // SAFETY: the caller's guarantees.
        unsafe {
            // Several vectors of outputs give enough independent sums to hide the latency of an
            // addition.
            match padded(columns) {
                0 => {}
                1 => self.rows::<W, 4, 1>(),
                2 => self.rows::<W, 2, 2>(),
                3 => self.rows::<W, 2, 3>(),
                4 => self.rows::<W, 2, 4>(),
                6 => self.rows::<W, 1, 6>(),
                _ => self.rows::<W, 1, 8>(),
            }
        }
    }

    /// Computes `C` columns, `R` vectors of outputs at a time, then fewer.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn rows<W: Transposed, const R: usize, const C: usize>(&self) {
        let mut row = 0;
        // SAFETY: each call stays below `outputs`.
        unsafe {
            while row + R * LANES <= self.outputs {
                self.tile::<W, R, C, true>(row);
                row += R * LANES;
            }
            if R > 2 && row + 2 * LANES <= self.outputs {
                self.tile::<W, 2, C, true>(row);
                row += 2 * LANES;
            }
            if R > 1 && row + LANES <= self.outputs {
                self.tile::<W, 1, C, true>(row);
                row += LANES;
            }
            if row < self.outputs {
                self.tile::<W, 1, C, false>(row);
            }
        }
    }

    /// Computes `C` columns of `R` vectors of outputs, or with `WHOLE` = false of one vector's first
    /// outputs.
    ///
    /// # Safety
    /// As for [`Self::run`]; an output exists in each vector, and with `WHOLE` all of them do.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn tile<W: Transposed, const R: usize, const C: usize, const WHOLE: bool>(
        &self,
        row: usize,
    ) {
        let last = if WHOLE { LANES - 1 } else { self.outputs - row - 1 };
        let tile_bytes = R * LANES * self.row_bytes;
        let has_next = row + 2 * R * LANES <= self.outputs;
        // SAFETY: rows are at most `row + last` and below row + R * LANES, steps are within a row, k is
        // below `inner`, and columns are below C. A prefetch accesses no memory, for any address.
        unsafe {
            let out = self.out.add(row * self.width);
            let rows: [RowPointers; R] = std::array::from_fn(|r| RowPointers {
                first: self.w.wrapping_add((row + r * LANES) * self.row_bytes),
                stride: self.row_bytes,
                last,
            });
            let mut sums = [[_mm512_setzero_ps(); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = load_columns(out.add(r * LANES * self.width), self.width, last);
            }
            let steps = self.inner / (LANES * W::PER_WORD);
            for step in 0..steps {
                let x = self.x.add(step * LANES * W::INPUTS * self.width);
                for (sums, rows) in sums.iter_mut().zip(rows) {
                    let rows = rows.skip(step * STEP_BYTES);
                    // Rows are too short for the processor to recognize the access pattern in time.
                    // So the same step of the next tile is prefetched, and for the first tile, later
                    // steps of the same rows.
                    for i in 0..LANES {
                        if row == 0 {
                            _mm_prefetch::<_MM_HINT_T1>(rows.at(i).wrapping_add(AHEAD).cast());
                        }
                        if has_next {
                            let next = rows.at(i).wrapping_add(tile_bytes);
                            _mm_prefetch::<_MM_HINT_T1>(next.cast());
                        }
                    }
                    let words = rows.read::<false>(STEP_BYTES);
                    for (p, words) in words.iter().enumerate() {
                        for i in 0..W::INPUTS {
                            let x = x.add((p * W::INPUTS + i) * self.width);
                            W::add(sums, *words, i, x);
                        }
                    }
                }
            }
            let rest = self.inner - steps * LANES * W::PER_WORD;
            if rest > 0 {
                let x = self.x.add(steps * LANES * W::INPUTS * self.width);
                let from = steps * STEP_BYTES;
                for (sums, rows) in sums.iter_mut().zip(rows) {
                    let words = rows.skip(from).read::<true>(self.row_bytes - from);
                    // Weights fill whole words unless each has its own row of activations.
                    for row in 0..rest * W::INPUTS / W::PER_WORD {
                        let words = words[row / W::INPUTS];
                        W::add(sums, words, row % W::INPUTS, x.add(row * self.width));
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                store_columns(out.add(r * LANES * self.width), self.width, sums, last);
            }
        }
    }
}

/// Adds to the sums of each column the products of the weights `w` and the activation at `x`.
///
/// # Safety
/// The processor has AVX-512, and `C` values can be read from `x`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add_product<const C: usize>(sums: &mut [__m512; C], w: __m512, x: *const f32) {
    for (c, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's guarantee.
        *sum = _mm512_fmadd_ps(_mm512_set1_ps(unsafe { *x.add(c) }), w, *sum);
    }
}

/// Reads the rows up to `last` of the first `C` columns, one column a vector.
///
/// # Safety
/// The processor has AVX-512, and these values can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_columns<const C: usize>(from: *const f32, width: usize, last: usize) -> [__m512; C] {
    let mut columns = [[0.0_f32; LANES]; C];
    for lane in 0..=last {
        for (c, column) in columns.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            column[lane] = unsafe { *from.add(lane * width + c) };
        }
    }
    // SAFETY: each column has as many values as a vector.
    columns.map(|column| unsafe { _mm512_loadu_ps(column.as_ptr()) })
}

/// Writes what [`load_columns`] reads.
///
/// # Safety
/// The processor has AVX-512, and these values can be written.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_columns<const C: usize>(
    to: *mut f32,
    width: usize,
    columns: &[__m512; C],
    last: usize,
) {
    for (c, column) in columns.iter().enumerate() {
        let mut values = [0.0_f32; LANES];
        // SAFETY: the array has as many values as a vector.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), *column) };
        for (lane, value) in values.into_iter().enumerate().take(last + 1) {
            // SAFETY: the caller's guarantee.
            unsafe { *to.add(lane * width + c) = value };
        }
    }
}
