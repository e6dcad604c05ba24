use half::f16;

use super::activations::BLOCK;
use super::*;
use crate::columns::{TokenColumns, padded_width};
use crate::testing::waves;

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

fn bias(output: usize) -> f32 {
    0.5 + output as f32 / 4.0
}

/// The product of the rows from `first` on with `tokens` columns, and a bias.
fn product(
    instructions: IntegerInstructions,
    matrix: &QuantizedMatrix,
    (first, outputs): (usize, usize),
    x: TokenColumns<'_>,
) -> Vec<f32> {
    let mut integers = IntegerColumns::with(instructions);
    integers.round(x, matrix.dims().1, (1, 1));
    let mut out = vec![f32::NAN; outputs * x.width];
    let bias: Vec<f32> = (0..matrix.dims().0).map(bias).collect();
    super::product(&mut out, x.width, (matrix, first), Some(&bias), &integers);
    out
}

fn cases() -> impl Iterator<Item = (BlockFormat, IntegerInstructions)> {
    let unfused = IntegerInstructions::Portable { fused: false };
    let all: Vec<_> = IntegerInstructions::all().into_iter().chain([unfused]).collect();
    BlockFormat::ALL.into_iter().flat_map(move |format| {
        all.clone().into_iter().map(move |instructions| (format, instructions))
    })
}

#[test]
fn products_are_those_of_the_dequantized_weights() {
    for (format, instructions) in cases() {
        let (rows, inner) = (37, 2 * format.values().max(2 * BLOCK));
        let matrix = matrix(format, (rows, inner));
        let mut w = vec![0.0; rows * inner];
        matrix.dequantize(0, &mut w);
        for tokens in [1, 2, 3, 4, 6, 8, 16, 32] {
            let x = waves(inner * tokens, 0.9);
            let columns = TokenColumns { values: &x, width: tokens, tokens };
            let found = product(instructions, &matrix, (0, rows), columns);
            for (i, found) in found.iter().enumerate() {
                let (o, c) = (i / tokens, i % tokens);
                let terms =
                    (0..inner).map(|k| f64::from(w[o * inner + k]) * f64::from(x[k * tokens + c]));
                let (sum, size) = terms
                    .fold((f64::from(bias(o)), 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                let error = (f64::from(*found) - sum).abs();
                assert!(error < 2e-5 * size, "{format:?} {instructions:?} {o} {c}");
            }
        }
    }
}

#[test]
fn bits_depend_neither_on_other_tokens_nor_on_parts_of_the_rows() {
    for (format, instructions) in cases() {
        let (rows, inner, width) = (37, 2 * format.values(), 48);
        let matrix = matrix(format, (rows, inner));
        let x = waves(inner * width, 0.9);
        let columns = TokenColumns { values: &x, width, tokens: width };
        let all = product(instructions, &matrix, (0, rows), columns);
        for tokens in [1, 2, 3, 4, 5, 7, 8, 9, 16, 33_usize] {
            // As wide as this processor's kernels for f32 need it, and a multiple of 16.
            for narrow in [padded_width(tokens), tokens.next_multiple_of(COLUMN_BLOCK)] {
                let some: Vec<f32> =
                    x.chunks_exact(width).flat_map(|x| &x[..narrow]).copied().collect();
                let columns = TokenColumns { values: &some, width: narrow, tokens };
                for (first, outputs) in [(0, rows), (16, 21), (5, 3), (5, 30), (36, 1)] {
                    let found = product(instructions, &matrix, (first, outputs), columns);
                    for (found, all) in
                        found.chunks_exact(narrow).zip(all.chunks_exact(width).skip(first))
                    {
                        assert_eq!(
                            found[..tokens],
                            all[..tokens],
                            "{format:?} {instructions:?} {tokens} {first}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for format in BlockFormat::ALL {
        // A part of a group of rows, and whole ones alone.
        for rows in [37, 64] {
            let inner = 3 * format.values();
            let matrix = matrix(format, (rows, inner));
            for tokens in [1, 2, 3, 4, 6, 8, 16, 41_usize] {
                let width = tokens.next_multiple_of(COLUMN_BLOCK);
                let mut x = waves(inner * width, 1.7);
                // Blocks that are all zero, and others with a large activation.
                x[..BLOCK * width].fill(0.0);
                x[(inner - 5) * width..].iter_mut().for_each(|x| *x *= 1e4);
                let columns = TokenColumns { values: &x, width, tokens };
                let bits = |instructions| -> Vec<u32> {
                    let found = product(instructions, &matrix, (0, rows), columns);
                    found.iter().map(|x| x.to_bits()).collect()
                };
                let expected = bits(IntegerInstructions::Portable { fused: true });
                for instructions in IntegerInstructions::all() {
                    let found = bits(instructions);
                    assert_eq!(found, expected, "{format:?} {instructions:?} {tokens}");
                }
            }
        }
    }
}
