//! Transposition in the vector registers of AVX-512.

use std::arch::x86_64::{
    __m512i, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

/// Transposes 16 rows of 16 words.
///
/// # Safety
/// The processor has AVX-512 (F). Functions that enable it call this safely.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transpose_words(rows: [__m512i; 16]) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let mut pairs = [zero; 16];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // `quads[4 i + c]` has, in its 128-bit part l, word 4 l + c of the rows 4 i to 4 i + 3.
    let mut quads = [zero; 16];
    for i in (0..16).step_by(4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut words = [zero; 16];
    for c in 0..4 {
        // The parts 0 and 2, then 1 and 3, of the first and the last eight rows.
        let even_first = _mm512_shuffle_i32x4::<0x88>(quads[c], quads[4 + c]);
        let odd_first = _mm512_shuffle_i32x4::<0xdd>(quads[c], quads[4 + c]);
        let even_last = _mm512_shuffle_i32x4::<0x88>(quads[8 + c], quads[12 + c]);
        let odd_last = _mm512_shuffle_i32x4::<0xdd>(quads[8 + c], quads[12 + c]);
        words[c] = _mm512_shuffle_i32x4::<0x88>(even_first, even_last);
        words[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_first, odd_last);
        words[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_first, even_last);
        words[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_first, odd_last);
    }
    words
}
