use std::convert::Infallible;

use half::{bf16, f16};
use pulp::Arch;

use hone_core::simd::{SimdTask, dispatch, mul_add};
use hone_core::testing::Instructions;

use super::kernel::AddMatmul;
#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::{
    COLUMN_BLOCK, TokenColumns, VectorWeight, WeightMatrix, add_matmul_serial, padded_width,
    par_outputs,
};

/// [`add_matmul_serial`] on up to `threads` threads.
fn add_matmul(out: &mut [f32], w: WeightMatrix<'_>, x: TokenColumns<'_>, threads: usize) {
    let Ok(()) = par_outputs(out, (x.width, w.inner), (threads, 1 << 19), |first, out| {
        let values = &w.values[first * w.inner..];
        add_matmul_serial(out, WeightMatrix { values, ..w }, x);
        Ok::<(), Infallible>(())
    });
}

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

/// `initial + w x` by every kernel that this processor can run. Also returns whether it fuses.
fn by_every_kernel<W: VectorWeight>(
    initial: &[f32],
    w: WeightMatrix<'_, W>,
    x: TokenColumns<'_>,
) -> Vec<(bool, Vec<f32>)> {
    let run = |kernel: &dyn Fn(AddMatmul<'_, W>)| {
        let mut out = initial.to_vec();
        kernel(AddMatmul { out: &mut out, w, x });
        out
    };
    let mut all = Vec::new();
    for instructions in Instructions::all() {
        let Instructions::Vector(arch) = instructions else { continue };
        let is_fused = !matches!(arch, Arch::Scalar);
        all.push((is_fused, run(&|task| arch.dispatch(task))));
        #[cfg(target_arch = "x86_64")]
        if let Arch::V4(token) = arch {
            all.push((is_fused, run(&|task| tiles::add_matmul(token, task))));
        }
    }
    all
}

#[test]
fn every_element_is_one_sum_in_ascending_order() {
    let shapes =
        [(1, 1, 1), (5, 33, 1), (37, 48, 1), (16, 48, 2), (31, 7, 3), (50, 64, 6), (23, 100, 4)];
    for (outputs, inner, blocks) in shapes {
        let width = blocks * COLUMN_BLOCK;
        let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
        let x = TokenColumns { values: &x, width, tokens: width };
        let w_rows = WeightMatrix { values: &w, inner };
        for initial in [vec![0.0; outputs * width], values(outputs * width, 5)] {
            let mut out = initial.clone();
            add_matmul(&mut out, w_rows, x, 1);
            let kernels = by_every_kernel(&initial, w_rows, x);
            for (o, row) in w.chunks_exact(inner).enumerate() {
                for column in 0..width {
                    let at = o * width + column;
                    let product = DotProduct { row, x, column, initial: initial[at] };
                    let (fused, plain) = (product.run::<true>(), product.run::<false>());
                    for (is_fused, found) in &kernels {
                        let expected = if *is_fused { fused } else { plain };
                        assert_eq!(found[at].to_bits(), expected.to_bits());
                    }
                    assert_eq!(out[at].to_bits(), dispatch(product).to_bits());
                }
            }
        }
    }
}

#[test]
fn weights_of_16_bits_are_multiplied_as_their_exact_values() {
    fn check<W: VectorWeight>(narrow: fn(f32) -> W, widen: fn(&W) -> f32) {
        for (outputs, inner, blocks) in [(5, 33, 1), (37, 48, 1), (21, 16, 2), (50, 70, 6)] {
            let width = blocks * COLUMN_BLOCK;
            let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
            let stored: Vec<W> = w.into_iter().map(narrow).collect();
            let wide: Vec<f32> = stored.iter().map(widen).collect();
            let x = TokenColumns { values: &x, width, tokens: width };
            let initial = values(outputs * width, 5);
            let (mut out, mut expected) = (initial.clone(), initial.clone());
            let (w, wide) =
                (WeightMatrix { values: &stored, inner }, WeightMatrix { values: &wide, inner });
            add_matmul(&mut expected, wide, x, 1);
            add_matmul_serial(&mut out, w, x);
            assert_eq!(out, expected);
            assert_eq!(by_every_kernel(&initial, w, x), by_every_kernel(&initial, wide, x));
        }
    }
    check(f16::from_f32, |w| w.to_f32());
    check(bf16::from_f32, |w| w.to_f32());
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let width = 48;
    // Many outputs, and fewer than parts of the usual size would give to every thread.
    for (outputs, inner) in [(1000, 130), (40, 2000)] {
        let (w, x) = (values(outputs * inner, 3), values(inner * width, 11));
        let run = |threads| {
            let mut out = vec![0.0; outputs * width];
            let x = TokenColumns { values: &x, width, tokens: width };
            add_matmul(&mut out, WeightMatrix { values: &w, inner }, x, threads);
            out
        };
        assert_eq!(run(1), run(5), "{outputs} outputs");
    }
}

#[test]
fn a_few_tokens_have_the_bits_of_many() {
    fn check<W: VectorWeight>(outputs: usize, inner: usize, convert: impl Fn(f32) -> W) {
        let width = COLUMN_BLOCK;
        let w: Vec<W> = values(outputs * inner, 3).into_iter().map(convert).collect();
        let (x, initial) = (values(inner * width, 11), values(outputs * width, 5));
        let w = WeightMatrix { values: &w, inner };
        let run = |tokens| {
            let mut out = initial.clone();
            add_matmul_serial(&mut out, w, TokenColumns { values: &x, width, tokens });
            out
        };
        let all = run(width);
        for tokens in 0..=width {
            let some = run(tokens);
            for (some, all) in some.chunks_exact(width).zip(all.chunks_exact(width)) {
                assert_eq!(some[..tokens], all[..tokens], "{tokens} tokens");
            }
        }
        for tokens in 1..=width {
            let narrow = padded_width(tokens);
            let columns = |from: &[f32]| -> Vec<f32> {
                from.chunks_exact(width).flat_map(|row| &row[..narrow]).copied().collect()
            };
            let (x, mut out) = (columns(&x), columns(&initial));
            add_matmul_serial(&mut out, w, TokenColumns { values: &x, width: narrow, tokens });
            for (some, all) in out.chunks_exact(narrow).zip(all.chunks_exact(width)) {
                assert_eq!(some[..tokens], all[..tokens], "{tokens} tokens");
            }
        }
    }
    // Whole tiles, fewer vectors of outputs, outputs beyond these, and lines that are not whole.
    let shapes =
        [(64, 32), (128, 96), (83, 64), (7, 32), (0, 32), (80, 48), (70, 33), (20, 8), (112, 1)];
    for (outputs, inner) in shapes {
        check(outputs, inner, |w| w);
        check(outputs, inner, f16::from_f32);
        check(outputs, inner, bf16::from_f32);
    }
}
