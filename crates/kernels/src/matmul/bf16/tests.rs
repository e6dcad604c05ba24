//! Products against f64 loops over the rounded values, and for equal bits on any number of threads.

use half::bf16;

use hone_core::testing::skip_without;

use super::*;
use crate::parallel::with_threads;

/// Everything that this processor can multiply with. Without any, reports the calling test as skipped.
fn units() -> Vec<Bf16Unit> {
    let units: Vec<Bf16Unit> = Bf16Unit::all().collect();
    if units.is_empty() {
        skip_without("AMX or AVX-512 with bf16");
    }
    units
}

fn waves(count: usize, phase: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 1.3 + phase).sin() * 2.0).collect()
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|x| bf16::from_f32(*x)).collect()
}

/// A stored matrix `[rows, columns]`, or its transpose, as the right factor. Its type in memory is bf16
/// or f32.
fn right(
    unit: Bf16Unit,
    values: &[f32],
    (rows, columns): (usize, usize),
    transposed: bool,
    stored_in_16_bits: bool,
) -> PackedFactor {
    let half = rounded(values);
    PackedFactor::right(unit, (rows, columns), transposed, |rows, pack| {
        let range = rows.start * columns..rows.end * columns;
        if stored_in_16_bits {
            pack(UnpackedRows::Bf16(&half[range]));
        } else {
            pack(UnpackedRows::F32(&values[range]));
        }
    })
}

/// One row, whole and partial panels, several parts of the inner dimension, and nothing.
const SHAPES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (1, 40, 7),
    (33, 1, 65),
    (32, 32, 32),
    (64, 96, 64),
    (31, 47, 63),
    (70, 100, 1500),
    (65, 130, 769),
    (0, 5, 5),
    (5, 0, 5),
];

#[test]
fn products_equal_those_of_the_rounded_values() {
    for unit in units() {
        for (m, n, k) in SHAPES {
            for (transposed, half, mode) in [
                (false, false, WriteMode::Replace),
                (false, true, WriteMode::Add),
                (true, false, WriteMode::Add),
                (true, true, WriteMode::Replace),
            ] {
                // Rows of the left factor are 3 values longer than used, those of the output 7.
                let (left_stride, stride) = (k + 3, n + 7);
                let (x, w) = (waves(m * left_stride, 0.1), waves(n * k, 0.7));
                let start = waves(m * stride, 0.4);
                let mut out = start.clone();
                let left = PackedFactor::left(unit, Matrix::strided(&x, m, k, left_stride));
                let shape = if transposed { (n, k) } else { (k, n) };
                let right = right(unit, &w, shape, transposed, half);
                multiply((&mut out, stride), mode, &left, &right);
                let (x, w) = (rounded(&x), rounded(&w));
                for (i, row) in out.chunks(stride).enumerate() {
                    for (j, found) in row.iter().enumerate() {
                        let before = start[i * stride + j];
                        if j >= n {
                            assert_eq!(*found, before, "outside of the product");
                            continue;
                        }
                        let terms = (0..k).map(|l| {
                            let w = if transposed { w[j * k + l] } else { w[l * n + j] };
                            f64::from(x[i * left_stride + l]) * f64::from(w)
                        });
                        let added = if mode == WriteMode::Add { f64::from(before) } else { 0.0 };
                        let (sum, size) = terms.fold((added, added.abs()), |(sum, size), term| {
                            (sum + term, size + term.abs())
                        });
                        let error = (f64::from(*found) - sum).abs();
                        assert!(
                            error <= 1e-5 * size,
                            "{m} {n} {k}, transposed {transposed}: {error:e} of {size:e}"
                        );
                    }
                }
                if mode == WriteMode::Replace {
                    let packed: Vec<f32> =
                        out.chunks(stride).flat_map(|row| row[..n].to_vec()).collect();
                    assert_eq!(product(&left, &right), packed);
                }
            }
        }
    }
}

#[test]
fn values_are_rounded_to_the_nearest_and_ties_to_even() {
    for unit in units() {
        // Every pattern of the bits around the last one that bf16 keeps, with several exponents.
        let exponents = [1_u32, 60, 127, 128, 200, 254];
        let bits = exponents.iter().flat_map(|exponent| {
            (0..64).flat_map(move |low: u32| {
                let bits = (exponent << 23) | (0x2a_0000 + (low << 13));
                [bits, bits + 1, bits | 1 << 31]
            })
        });
        let x: Vec<f32> = bits.map(f32::from_bits).collect();
        let left = PackedFactor::left(unit, Matrix::new(&x, x.len(), 1));
        let expected: Vec<f32> = rounded(&x).into_iter().map(f32::from).collect();
        assert_eq!(product(&left, &right(unit, &[1.0], (1, 1), true, false)), expected);
        let right = right(unit, &x, (1, x.len()), false, false);
        let one = PackedFactor::left(unit, Matrix::new(&[1.0], 1, 1));
        assert_eq!(product(&one, &right), expected);
    }
}

#[test]
fn infinities_and_nan_reach_only_their_own_sums() {
    for unit in units() {
        let mut x = waves(3 * 40, 0.3);
        (x[5], x[45]) = (f32::INFINITY, f32::NAN);
        let left = PackedFactor::left(unit, Matrix::new(&x, 3, 40));
        let found = product(&left, &right(unit, &[1.0; 80], (2, 40), true, false));
        assert_eq!(found[..2], [f32::INFINITY; 2]);
        assert!(found[2..4].iter().all(|x| x.is_nan()));
        assert!(found[4..].iter().all(|x| x.is_finite()));
    }
}

#[test]
fn an_inner_dimension_of_zero_makes_a_product_of_zeros() {
    for unit in units() {
        let left = PackedFactor::left(unit, Matrix::new(&[], 2, 0));
        let right = right(unit, &[], (3, 0), true, false);
        assert_eq!(product(&left, &right), [0.0; 6]);
        let mut out = [1.0; 6];
        multiply((&mut out, 3), WriteMode::Add, &left, &right);
        assert_eq!(out, [1.0; 6]);
        multiply((&mut out, 3), WriteMode::Replace, &left, &right);
        assert_eq!(out, [0.0; 6]);
    }
}

#[test]
fn products_have_the_same_bits_on_any_number_of_threads() {
    for unit in units() {
        for (m, n, k) in [(300, 200, 900), (700, 40, 100), (20, 600, 2000)] {
            let (x, w) = (waves(m * k, 0.6), waves(n * k, 0.9));
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let multiplied = || {
                    let left = PackedFactor::left(unit, Matrix::new(&x, m, k));
                    let mut out = product(&left, &right(unit, &w, (n, k), true, true));
                    let right = right(unit, &w, (k, n), false, false);
                    multiply((&mut out, n), WriteMode::Add, &left, &right);
                    out
                };
                pool.install(|| with_threads(threads, multiplied))
            };
            let one = run(1);
            assert!(one.iter().any(|x| *x != 0.0));
            for threads in [2, 3, 8] {
                assert_eq!(one, run(threads), "{m} {n} {k} on {threads}");
            }
        }
    }
}

#[test]
fn tasks_cover_every_panel_once() {
    for (count, parts) in [(1, 1), (7, 3), (57, 4), (16, 16)] {
        let all: Vec<usize> = (0..parts).flat_map(|i| share(count, parts, i)).collect();
        assert_eq!(all, (0..count).collect::<Vec<_>>());
    }
    assert_eq!(task_panels(57, 48, 1), TASK_PANELS);
    let (height, width) = task_panels(6, 29, 2);
    assert!(6_usize.div_ceil(height) * 29_usize.div_ceil(width) >= 8);
    // No more tasks than blocks.
    assert_eq!(task_panels(1, 1, 64), (1, 1));
}
