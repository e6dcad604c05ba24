use half::{bf16, f16};
use pulp::Simd;

use hone_core::simd::{SimdTask, dispatch, mul_add};

use super::kernel::{AddMatmul, StoredWeight};
use super::{COLUMN_BLOCK, TokenColumns, WeightMatrix, add_matmul, add_matmul_serial};

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + seed) * 7919 % 1009) as f32 / 504.0) - 1.0).collect()
}

/// One output element, computed one term at a time.
#[derive(Clone, Copy)]
struct DotProduct<'a> {
    row: &'a [f32],
    x: TokenColumns<'a>,
    column: usize,
    initial: f32,
}

impl SimdTask for DotProduct<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<const FUSED: bool>(self) -> f32 {
        let x = |k: usize| self.x.values[k * self.x.width + self.column];
        let pairs = self.row.iter().enumerate();
        pairs.fold(self.initial, |sum, (k, w)| mul_add::<FUSED>(*w, x(k), sum))
    }
}

#[test]
fn every_element_is_one_sum_in_ascending_order() {
    let shapes =
        [(1, 1, 1), (5, 33, 1), (37, 48, 1), (16, 48, 2), (31, 7, 3), (50, 64, 6), (23, 100, 4)];
    for (outputs, inner, blocks) in shapes {
        let width = blocks * COLUMN_BLOCK;
        let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
        let x = TokenColumns { values: &x, width };
        let w_rows = WeightMatrix { values: &w, inner };
        for initial in [vec![0.0; outputs * width], values(outputs * width, 5)] {
            let mut out = initial.clone();
            add_matmul(&mut out, w_rows, x, 1);
            let mut scalar = initial.clone();
            Simd::vectorize(pulp::Scalar::new(), AddMatmul { out: &mut scalar, w: w_rows, x });
            #[cfg(target_arch = "x86_64")]
            if let Some(avx2) = pulp::x86::V3::try_new() {
                let mut narrow = initial.clone();
                Simd::vectorize(avx2, AddMatmul { out: &mut narrow, w: w_rows, x });
                assert_eq!(narrow, out);
            }
            for (o, row) in w.chunks_exact(inner).enumerate() {
                for column in 0..width {
                    let at = o * width + column;
                    let product = DotProduct { row, x, column, initial: initial[at] };
                    assert_eq!(scalar[at].to_bits(), product.run::<false>().to_bits());
                    assert_eq!(out[at].to_bits(), dispatch(product).to_bits());
                }
            }
        }
    }
}

#[test]
fn weights_of_16_bits_are_multiplied_as_their_exact_values() {
    for (outputs, inner, blocks) in [(5, 33, 1), (37, 48, 1), (21, 16, 2), (50, 70, 6)] {
        let width = blocks * COLUMN_BLOCK;
        let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
        let f16s: Vec<f16> = w.iter().map(|w| f16::from_f32(*w)).collect();
        let bf16s: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
        let x = TokenColumns { values: &x, width };
        let initial = values(outputs * width, 5);
        let wide = |wide: Vec<f32>| {
            let mut out = initial.clone();
            add_matmul(&mut out, WeightMatrix { values: &wide, inner }, x, 1);
            out
        };
        let mut out = initial.clone();
        add_matmul_serial(&mut out, WeightMatrix { values: &f16s, inner }, x);
        assert_eq!(out, wide(f16s.iter().map(|w| w.to_f32()).collect()));
        let mut out = initial.clone();
        add_matmul_serial(&mut out, WeightMatrix { values: &bf16s, inner }, x);
        assert_eq!(out, wide(bf16s.iter().map(|w| w.to_f32()).collect()));
    }
}

#[test]
fn every_16_bit_value_is_widened_exactly() {
    for bits in 0..=u16::MAX {
        let same = |found: f32, expected: f32| {
            found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan())
        };
        let value = f16::from_bits(bits);
        assert!(same(value.widen(), value.to_f32()), "{value}");
        let value = bf16::from_bits(bits);
        assert!(same(value.widen(), value.to_f32()), "{value}");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let (outputs, inner, width) = (1000, 130, 48);
    let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
    let run = |threads| {
        let mut out = vec![0.0; outputs * width];
        let (w, x) = (WeightMatrix { values: &w, inner }, TokenColumns { values: &x, width });
        add_matmul(&mut out, w, x, threads);
        out
    };
    assert_eq!(run(1), run(5));
}
