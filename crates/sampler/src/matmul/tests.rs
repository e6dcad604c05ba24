use half::{bf16, f16};

use hone_core::simd::{SimdTask, mul_add};

use super::{Half, LANES, Lanes, Portable, Rows, Start, dispatch, half_part, product};

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + seed) * 7919 % 1009) as f32 / 504.0) - 1.0).collect()
}

/// One sum at a time.
struct Plain<'a>(&'a [f32], &'a [f32], usize, usize, f32);

impl SimdTask for Plain<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<const FUSED: bool>(self) -> f32 {
        let Self(row, x, width, lane, start) = self;
        let pairs = row.iter().enumerate();
        pairs.fold(start, |sum, (k, w)| mul_add::<FUSED>(*w, x[k * width + lane], sum))
    }
}

#[test]
fn every_sum_has_the_same_bits_whatever_is_computed_beside_it() {
    let shapes = [(1, 1, 1), (5, 33, 1), (37, 48, 1), (16, 48, 2), (31, 7, 3), (50, 64, 6)];
    for (outputs, inner, blocks) in shapes {
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
fn weights_in_16_bits_give_the_sums_of_their_values() {
    for (outputs, inner, blocks) in [(5, 33, 1), (37, 48, 1), (21, 16, 2), (50, 70, 6)] {
        let width = blocks * LANES;
        let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
        let f16s: Vec<f16> = w.iter().map(|w| f16::from_f32(*w)).collect();
        let bf16s: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
        let wide16: Vec<f32> = f16s.iter().map(|w| w.to_f32()).collect();
        let wide_b16: Vec<f32> = bf16s.iter().map(|w| w.to_f32()).collect();
        let lanes = Lanes { values: &x, width };
        for (half, wide) in [(Half::F16(&f16s), &wide16), (Half::Bf16(&bf16s), &wide_b16)] {
            let mut expected = values(outputs * width, 5);
            let mut out = expected.clone();
            product(&mut expected, Rows { values: wide, inner }, lanes, Start::Output, 1);
            if half_part(&mut out, (half, inner), lanes, Start::Output) {
                assert_eq!(out, expected, "{outputs} {inner} {width}");
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
