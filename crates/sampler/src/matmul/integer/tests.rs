use half::f16;

use hone_core::testing::skip_without;
use hone_model::testing::waves;

use super::super::{TokenColumns, padded_width};
use super::layout::BLOCK;
use super::*;

/// A matrix of pseudorandom blocks with moderate scales.
fn matrix(format: BlockFormat, (rows, columns): (usize, usize)) -> QuantizedMatrix {
    let mut blocks: Vec<u8> =
        (0..rows * format.row_bytes(columns)).map(|i| (i * i % 251) as u8).collect();
    let at: &[usize] = match format {
        BlockFormat::Q8_0 | BlockFormat::Q4_0 => &[0],
        BlockFormat::Q4_1 | BlockFormat::Q4K => &[0, 2],
        BlockFormat::Q6K => &[208],
    };
    let scales = waves(blocks.len(), 0.4);
    let mut scales = scales.into_iter().map(|x| f16::from_f32(x * 0.02));
    for block in blocks.chunks_exact_mut(format.bytes()) {
        for (at, scale) in at.iter().zip(&mut scales) {
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    QuantizedMatrix::new(format, (rows, columns), blocks).unwrap()
}

fn supported() -> Vec<BlockFormat> {
    let formats: Vec<_> = BlockFormat::ALL.into_iter().filter(|f| is_supported(*f)).collect();
    if formats.is_empty() {
        skip_without("AVX-512 with VNNI");
    }
    formats
}

/// The product of the rows from `first` on with `tokens` columns.
fn product(
    matrix: &QuantizedMatrix,
    (first, outputs): (usize, usize),
    x: TokenColumns<'_>,
) -> Vec<f32> {
    let mut integers = IntegerColumns::default();
    integers.round(x, matrix.dims().1, 1);
    let mut out = vec![0.5; outputs * x.width];
    add_product(&mut out, x.width, (matrix, first), &integers);
    out
}

#[test]
fn products_are_those_of_the_dequantized_weights() {
    for format in supported() {
        let (rows, inner) = (37, 2 * format.values().max(2 * BLOCK));
        let matrix = matrix(format, (rows, inner));
        let mut w = vec![0.0; rows * inner];
        matrix.dequantize(0, &mut w);
        for tokens in [1, 2, 3, 4, 6, 8, 16, 32] {
            let x = waves(inner * tokens, 0.9);
            let columns = TokenColumns { values: &x, width: tokens, tokens };
            let found = product(&matrix, (0, rows), columns);
            for (i, found) in found.iter().enumerate() {
                let (o, c) = (i / tokens, i % tokens);
                let terms =
                    (0..inner).map(|k| f64::from(w[o * inner + k]) * f64::from(x[k * tokens + c]));
                let (sum, size) =
                    terms.fold((0.5, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                assert!((f64::from(*found) - sum).abs() < 2e-5 * size, "{format:?} {o} {c}");
            }
        }
    }
}

#[test]
fn bits_depend_neither_on_other_tokens_nor_on_parts_of_the_rows() {
    for format in supported() {
        let (rows, inner, width) = (37, 2 * format.values(), 48);
        let matrix = matrix(format, (rows, inner));
        let x = waves(inner * width, 0.9);
        let all = product(&matrix, (0, rows), TokenColumns { values: &x, width, tokens: width });
        for tokens in [1, 2, 3, 4, 5, 7, 8, 9, 16, 33] {
            let narrow = padded_width(tokens);
            let some: Vec<f32> =
                x.chunks_exact(width).flat_map(|x| &x[..narrow]).copied().collect();
            let columns = TokenColumns { values: &some, width: narrow, tokens };
            for (first, outputs) in [(0, rows), (16, 21), (5, 3), (5, 30), (36, 1)] {
                let found = product(&matrix, (first, outputs), columns);
                for (found, all) in
                    found.chunks_exact(narrow).zip(all.chunks_exact(width).skip(first))
                {
                    assert_eq!(found[..tokens], all[..tokens], "{format:?} {tokens} {first}");
                }
            }
        }
    }
}
