//! Products against plain loops, and for equal bits on any number of threads.

use super::{Matrix, WriteMode, multiply, product};
use crate::kernels::parallel::with_threads;

fn wave(count: usize) -> Vec<f64> {
    (0..count).map(|i| (i as f64 * 1.3 + 0.2).sin()).collect()
}

#[test]
fn products_with_strides_and_sums_equal_loops() {
    let (m, n, k) = (5, 3, 4);
    let (left, right) = (wave(m * 6), wave(n * k));
    let start = wave(m * 4);
    for mode in [WriteMode::Replace, WriteMode::Add] {
        let mut out = start.clone();
        // Rows of the left matrix are 6 apart, those of the output 4; the right one is transposed.
        let (a, b) = (Matrix::strided(&left, m, k, 6), Matrix::new(&right, n, k).t());
        multiply((&mut out, 4), mode, 0.5, a, b);
        for i in 0..m {
            for j in 0..4 {
                let sum: f64 = (0..k).map(|l| left[i * 6 + l] * right[(j % n) * k + l]).sum();
                let before = start[i * 4 + j];
                let expected = match (j < n, mode) {
                    (false, _) => before,
                    (true, WriteMode::Add) => before + 0.5 * sum,
                    (true, WriteMode::Replace) => 0.5 * sum,
                };
                assert!((out[i * 4 + j] - expected).abs() < 1e-12);
            }
        }
    }
}

#[test]
fn an_inner_dimension_of_zero_makes_a_product_of_zeros() {
    let empty: [f64; 0] = [];
    let (left, right) = (Matrix::new(&empty, 2, 0), Matrix::new(&empty, 0, 3));
    assert_eq!(product(1.0, left, right), vec![0.0; 6]);
    let mut out = vec![1.0; 6];
    multiply((&mut out, 3), WriteMode::Replace, 1.0, left, right);
    assert_eq!(out, vec![0.0; 6]);
}

#[test]
fn products_have_the_same_bits_on_any_number_of_threads() {
    // Shapes of the forward and the backward pass, large enough for several threads.
    for (m, n, k) in [(700, 300, 900), (16, 500, 700), (900, 16, 700)] {
        let (left, right) = (wave(m * k), wave(k * n));
        let left: Vec<f32> = left.iter().map(|x| *x as f32).collect();
        let right: Vec<f32> = right.iter().map(|x| *x as f32).collect();
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (left, right) = (Matrix::new(&left, k, m).t(), Matrix::new(&right, k, n));
            pool.install(|| with_threads(threads, || product(1.0, left, right)))
        };
        let one = run(1);
        assert!(one.iter().any(|x| *x != 0.0));
        for threads in [2, 3, 8] {
            assert_eq!(one, run(threads), "{m} {n} {k} on {threads}");
        }
    }
}
