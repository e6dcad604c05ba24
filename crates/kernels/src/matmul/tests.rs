//! Products against plain loops, and for equal bits on any number of threads.

use super::{Matrix, WriteMode, multiply, product};
use crate::parallel::with_threads;

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

#[cfg(target_os = "linux")]
#[test]
fn products_in_pieces_have_the_bits_of_whole_products() {
    use hone_core::threads::{
        BackgroundPriority, Serving, must_pause_often, set_background, to_background,
    };

    set_background(BackgroundPriority::Idle);
    for (m, n, k) in [(700, 500, 400), (33, 3000, 900), (20_000, 7, 600), (300, 400, 3000)] {
        assert_ne!(super::pieces(m, n, k, super::MAX_PIECE), (1, 1), "{m} {n} {k}");
        let [left, right] = [m * k, k * n]
            .map(|count| -> Vec<f32> { wave(count).into_iter().map(|x| x as f32).collect() });
        let run = |background: bool| {
            let product = || {
                if background {
                    to_background();
                    drop(Serving::begin());
                }
                assert_eq!(must_pause_often(), background);
                let mut sums = wave(m * n).into_iter().map(|x| x as f32).collect::<Vec<f32>>();
                let (left, right) = (Matrix::new(&left, m, k), Matrix::new(&right, n, k).t());
                multiply((&mut sums, n), WriteMode::Add, 0.5, left, right);
                (product(1.0, left, right), sums)
            };
            std::thread::scope(|scope| scope.spawn(product).join().unwrap())
        };
        assert!(run(false) == run(true), "{m} {n} {k}");
    }
}

#[test]
fn pieces_are_small_and_their_sides_are_not_short() {
    for (m, n, k) in [(1024, 1536, 576), (100, 49_152, 576), (1, 1, 1), (1000, 576, 49_152)] {
        let (bands, strips) = super::pieces(m, n, k, super::MAX_PIECE);
        let (height, width) = (m.div_ceil(bands), n.div_ceil(strips));
        assert!(height * width * k <= 2 * super::MAX_PIECE || height.min(width) <= super::MIN_SIDE);
        assert!(height >= m.min(super::MIN_SIDE / 2) && width >= n.min(super::MIN_SIDE / 2));
        assert_eq!(super::pieces(m, n, k, usize::MAX), (1, 1));
    }
}
