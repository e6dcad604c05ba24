use super::super::simd::{Task, madd};
use super::{LANES, Lanes, Portable, Rows, Start, dispatch, product};

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + seed) * 7919 % 1009) as f32 / 504.0) - 1.0).collect()
}

/// One sum at a time.
struct Plain<'a>(&'a [f32], &'a [f32], usize, usize, f32);

impl Task for Plain<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<const FUSED: bool>(self) -> f32 {
        let Self(row, x, width, lane, start) = self;
        let pairs = row.iter().enumerate();
        pairs.fold(start, |sum, (k, w)| madd::<FUSED>(*w, x[k * width + lane], sum))
    }
}

#[test]
fn every_sum_has_the_same_bits_whatever_is_computed_beside_it() {
    for (outputs, inner, blocks) in [(1, 1, 1), (5, 33, 1), (16, 48, 2), (31, 7, 3), (50, 64, 6)] {
        let width = blocks * LANES;
        let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
        for start in [Start::Zero, Start::Output] {
            let before = values(outputs * width, 5);
            let mut out = before.clone();
            let (w_rows, lanes) = (Rows { values: &w, inner }, Lanes { values: &x, width });
            product(&mut out, w_rows, lanes, start, 1);
            let mut portable = before.clone();
            dispatch(Portable { out: &mut portable, w: w_rows, x: lanes, start });
            for (o, row) in w.chunks_exact(inner).enumerate() {
                for lane in 0..width {
                    let start = if start == Start::Zero { 0.0 } else { before[o * width + lane] };
                    let expected = dispatch(Plain(row, &x, width, lane, start));
                    assert_eq!(out[o * width + lane].to_bits(), expected.to_bits());
                    assert_eq!(portable[o * width + lane].to_bits(), expected.to_bits());
                }
            }
        }
    }
}

#[test]
fn threads_change_nothing() {
    let (outputs, inner, width) = (1000, 130, 48);
    let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
    let run = |threads| {
        let mut out = vec![0.0; outputs * width];
        let (w, x) = (Rows { values: &w, inner }, Lanes { values: &x, width });
        product(&mut out, w, x, Start::Zero, threads);
        out
    };
    assert_eq!(run(1), run(5));
}
