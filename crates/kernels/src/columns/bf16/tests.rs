use hone_core::testing::skip_without;

use super::*;
use crate::columns::padded_width;
use crate::testing::waves;

fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|x| bf16::from_f32(*x)).collect()
}

/// `initial + w x` for the first `tokens` columns of `x` `[inner, all]`.
fn product(
    initial: &[f32],
    w: WeightMatrix<'_, bf16>,
    (x, all): (&[f32], usize),
    tokens: usize,
) -> Vec<f32> {
    let width = padded_width(tokens);
    let padded = |rows: &[f32], all: usize| -> Vec<f32> {
        let row = |row: &[f32]| [&row[..tokens], &vec![0.0; width - tokens]].concat();
        rows.chunks_exact(all).flat_map(row).collect()
    };
    let (mut out, values) = (padded(initial, all), padded(x, all));
    let mut columns = Bf16Columns::default();
    columns.round(TokenColumns { values: &values, width, tokens }, w.inner, 1);
    add_product(&mut out, w, &columns);
    out.chunks_exact(width).flat_map(|row| row[..tokens].to_vec()).collect()
}

#[test]
fn values_are_rounded_as_by_the_library() {
    let special = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40];
    let ties = [1.003_906_3, 1.011_718_8, -1.003_906_3, -1.011_718_8];
    let values = [&special[..], &ties, &waves(4096, 0.7)].concat();
    for x in values {
        assert_eq!(rounded(x), u32::from(bf16::from_f32(x).to_bits()), "{x}");
    }
}

#[test]
fn columns_hold_pairs_of_rows_whatever_the_number_of_threads() {
    let (inner, width) = (600, 240);
    let values = waves(inner * width, 0.3);
    let x = TokenColumns { values: &values, width, tokens: width };
    let mut columns = Bf16Columns::default();
    let words = columns.round(x, inner, 1).words.clone();
    assert_eq!(size_of_val(&words[..]), Bf16Columns::bytes(width, inner));
    for (k, c) in [(0, 0), (3, 17), (299, 239)] {
        let [lower, upper] = [2 * k, 2 * k + 1].map(|row| rounded(values[row * width + c]));
        assert_eq!(words[k * width + c], lower | upper << 16);
    }
    assert_eq!(columns.round(x, inner, 3).words, words);
}

#[test]
fn an_element_is_the_sum_of_the_rounded_products() {
    if !has_fast_bf16_vectors() {
        return skip_without("fast products in bf16");
    }
    for (outputs, inner) in [(1, 2), (5, 34), (37, 48), (23, 130), (64, 64)] {
        let all = 70;
        let w = to_bf16(&waves(outputs * inner, 0.4));
        let (x, initial) = (waves(inner * all, 0.9), waves(outputs * all, 0.1));
        let found = product(&initial, WeightMatrix { values: &w, inner }, (&x, all), all);
        for (at, found) in found.iter().enumerate() {
            let (row, column) = (at / all, at % all);
            let terms = (0..inner).map(|k| {
                let x = bf16::from_f32(x[k * all + column]);
                f64::from(w[row * inner + k].to_f32()) * f64::from(x.to_f32())
            });
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let error = (f64::from(initial[at]) + sum - f64::from(*found)).abs();
            assert!(error <= 1e-5 * (1.0 + size), "{outputs} {inner}: {error:e}");
        }
    }
}

#[test]
fn bits_depend_neither_on_other_tokens_nor_on_parts_of_the_rows() {
    if !has_fast_bf16_vectors() {
        return skip_without("fast products in bf16");
    }
    for (outputs, inner) in [(5, 34), (37, 48), (71, 130)] {
        let all = 150;
        let values = to_bf16(&waves(outputs * inner, 0.4));
        let w = WeightMatrix { values: &values, inner };
        let (x, initial) = (waves(inner * all, 0.9), waves(outputs * all, 0.1));
        let expected = product(&initial, w, (&x, all), all);
        let of = |tokens: usize| -> Vec<f32> {
            expected.chunks_exact(all).flat_map(|row| row[..tokens].to_vec()).collect()
        };
        for tokens in (1..=17).chain([31, 32, 33, 47, 48, 64, 65, 80, 112]) {
            assert_eq!(product(&initial, w, (&x, all), tokens), of(tokens), "{tokens}");
        }
        let first = 3;
        let rows = WeightMatrix { values: &values[first * inner..], inner };
        let found = product(&initial[first * all..], rows, (&x, all), all);
        assert_eq!(found, expected[first * all..]);
    }
}
