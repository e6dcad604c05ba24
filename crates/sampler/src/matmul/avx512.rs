//! Tiles of up to 24 vectors of sums, which stay in registers.

use std::arch::x86_64::{
    __m512, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use half::{bf16, f16};
use pulp::x86::V4;

use super::{LANES, Lanes, Rows, Start};

/// Weights of a row that are taken at a time: a vector, and of f32 a cache line.
const LINE: usize = 16;

/// What weights are stored in.
pub(super) trait Stored: Copy {
    /// They need no widening.
    const WIDE: bool = false;

    /// A weight.
    fn one(self) -> f32;

    /// [`LINE`] weights, as f32.
    ///
    /// # Safety
    /// The processor has AVX-512, and as many weights lie behind `from`.
    unsafe fn line(from: *const Self) -> __m512;
}

impl Stored for f32 {
    const WIDE: bool = true;

    fn one(self) -> f32 {
        self
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn line(from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }
}

impl Stored for bf16 {
    fn one(self) -> f32 {
        self.to_f32()
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn line(from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
}

impl Stored for f16 {
    fn one(self) -> f32 {
        self.to_f32()
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn line(from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
    }
}

/// [`super::product`] on one thread. The token proves that the processor has AVX-512.
pub(super) fn product<W: Stored>(
    _: V4,
    out: &mut [f32],
    w: Rows<'_, W>,
    x: Lanes<'_>,
    start: Start,
) {
    let (outputs, blocks) = (out.len() / x.width.max(1), x.width / LANES);
    assert!(x.width.is_multiple_of(LANES) && out.len() == outputs * x.width);
    assert!(w.values.len() >= outputs * w.inner && x.values.len() >= w.inner * x.width);
    let mut block = 0;
    while block < blocks {
        let taken = (blocks - block).min(4);
        let place = Place { out: out.as_mut_ptr(), w, x, start, lane: block * LANES, outputs };
        // SAFETY: the `V4` token proves that the features exist. The assertions above keep
        // what the tiles touch within the three slices: rows below `outputs`, lanes from
        // `block * LANES` to `(block + taken) * LANES`, at most the width, and k below `inner`.
        unsafe {
            match taken {
                4 => place.rows::<6, 4>(),
                3 => place.rows::<8, 3>(),
                2 => place.rows::<12, 2>(),
                _ => place.rows::<16, 1>(),
            }
        }
        block += taken;
    }
}

struct Place<'a, W> {
    out: *mut f32,
    w: Rows<'a, W>,
    x: Lanes<'a>,
    start: Start,
    lane: usize,
    outputs: usize,
}

impl<W: Stored> Place<'_, W> {
    /// All outputs of `N` blocks of lanes, `M` at a time, then fewer.
    ///
    /// # Safety
    /// The processor has AVX-512; `outputs` rows of weights and of output exist, and lanes up to
    /// `lane + N * LANES`.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn rows<const M: usize, const N: usize>(&self) {
        let mut row = 0;
        // SAFETY: as for this function; every call stays below `outputs`.
        unsafe {
            let lines = self.w.inner > 0 && self.w.inner.is_multiple_of(LINE);
            if lines && self.x.width == LANES {
                while row + LINE <= self.outputs {
                    self.stream(row);
                    row += LINE;
                }
            }
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

    /// `M` outputs of `N` blocks.
    ///
    /// # Safety
    /// As for [`Self::rows`], for rows below `row + M`.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn tile<const M: usize, const N: usize>(&self, row: usize) {
        let (inner, width) = (self.w.inner, self.x.width);
        // SAFETY: the caller's promise covers every index: rows below row + M, k below inner, lanes
        // below lane + N * LANES. Prefetching touches nothing, so its address may be anywhere.
        unsafe {
            let w = self.w.values.as_ptr().add(row * inner);
            let x = self.x.values.as_ptr().add(self.lane);
            let out = self.out.add(row * width + self.lane);
            let mut sums = [[_mm512_setzero_ps(); N]; M];
            if self.start == Start::Output {
                for (m, sums) in sums.iter_mut().enumerate() {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm512_loadu_ps(out.add(m * width + n * LANES));
                    }
                }
            }
            let mut wide = [[0.0_f32; LINE]; M];
            let mut k = 0;
            while k < inner {
                let end = (k + LINE).min(inner);
                for m in 0..M {
                    // The same place of the next tile: rows are too short for the processor to find
                    // out by itself, and weights that come from memory are most of the time.
                    _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add((m + M) * inner + k).cast());
                }
                // Where the weights of the first row are, and how far apart rows are.
                let (first, stride) = if W::WIDE {
                    (w.add(k).cast::<f32>(), inner)
                } else {
                    for (m, wide) in wide.iter_mut().enumerate() {
                        let w = w.add(m * inner + k);
                        if end - k == LINE {
                            _mm512_storeu_ps(wide.as_mut_ptr(), W::line(w));
                        } else {
                            (0..end - k).for_each(|i| wide[i] = (*w.add(i)).one());
                        }
                    }
                    (wide.as_ptr().cast(), LINE)
                };
                for i in 0..end - k {
                    let x: [__m512; N] = std::array::from_fn(|n| {
                        _mm512_loadu_ps(x.add((k + i) * width + n * LANES))
                    });
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let w = _mm512_set1_ps(*first.add(m * stride + i));
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum = _mm512_fmadd_ps(x, w, *sum);
                        }
                    }
                }
                k = end;
            }
            for (m, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    _mm512_storeu_ps(out.add(m * width + n * LANES), *sum);
                }
            }
        }
    }

    /// [`LINE`] outputs of the only block, where the inner dimension is a multiple of [`LINE`]. So few
    /// lanes use a weight only once, and what counts is how soon it is there: weights are copied a line
    /// ahead, a row between the sums of one k and those of the next. They are then at known places too,
    /// where sixteen rows of a matrix need more addresses than there are registers.
    ///
    /// # Safety
    /// As for [`Self::rows`], for rows below `row + LINE`.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn stream(&self, row: usize) {
        let inner = self.w.inner;
        // SAFETY: as in `tile`; a line begins at a multiple of `LINE` below `inner`.
        unsafe {
            let w = self.w.values.as_ptr().add(row * inner);
            let x = self.x.values.as_ptr();
            let out = self.out.add(row * LANES);
            let mut sums = [_mm512_setzero_ps(); LINE];
            if self.start == Start::Output {
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_loadu_ps(out.add(m * LANES));
                }
            }
            let mut lines = [[[0.0_f32; LINE]; LINE]; 2];
            let [now, next] = &mut lines;
            let (mut now, mut next) = (now, next);
            for (m, line) in now.iter_mut().enumerate() {
                _mm512_storeu_ps(line.as_mut_ptr(), W::line(w.add(m * inner)));
            }
            let mut k = 0;
            while k < inner {
                // Behind the last line, that one again.
                let mut ahead = w.add((k + LINE).min(inner - LINE));
                let mut later = w.wrapping_add(LINE * inner + k);
                // By index: so the compiler unrolls it, without which it takes twice the time.
                for i in 0..LINE {
                    // The same place of the next rows, as in `tile`.
                    _mm_prefetch::<_MM_HINT_T1>(later.cast());
                    _mm512_storeu_ps(next[i].as_mut_ptr(), W::line(ahead));
                    (ahead, later) = (ahead.wrapping_add(inner), later.wrapping_add(inner));
                    let x = _mm512_loadu_ps(x.add((k + i) * LANES));
                    for (m, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm512_fmadd_ps(x, _mm512_set1_ps(now[m][i]), *sum);
                    }
                }
                std::mem::swap(&mut now, &mut next);
                k += LINE;
            }
            for (m, sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(out.add(m * LANES), *sum);
            }
        }
    }
}
