//! Products of small matrices of which each row is some distance after the one before: the factors of adapters, which
//! are for a few tokens of a batch.
//!
//! `out[i, j] += sum_k a[i, k] b[k, j]`, one term after another with k ascending. Vectors are along `j`, and a product
//! of two numbers does not depend on their order, so the bits of an element are the same with tokens along `i` as with
//! tokens along `j`. They do not depend on the other elements either.

use pulp::{Arch, Simd, WithSimd};

use hone_core::threads::pause_point;

/// The left factor `[rows, inner]`: element `[i, k]` is `values[i * row + k * step]`.
#[derive(Clone, Copy)]
pub struct StridedFactor<'a> {
    /// The values.
    pub values: &'a [f32],
    /// Distance of rows.
    pub row: usize,
    /// Distance of the values of a row.
    pub step: usize,
}

/// Computes `out += a b` on the current thread, for these `[rows, inner, columns]`. The rows of `out` and `b` are as many
/// values apart as the number beside them says.
///
/// # Panics
/// If a matrix has too few values.
pub fn add_strided(
    (out, out_row): (&mut [f32], usize),
    a: StridedFactor<'_>,
    (b, b_row): (&[f32], usize),
    [rows, inner, columns]: [usize; 3],
) {
    if rows > 0 && inner > 0 && columns > 0 {
        assert!((rows - 1) * a.row + (inner - 1) * a.step < a.values.len(), "{rows} x {inner}");
        Arch::new().dispatch(AddStrided { out, out_row, a, b, b_row, rows, inner, columns });
    }
    pause_point();
}

struct AddStrided<'a> {
    out: &'a mut [f32],
    out_row: usize,
    a: StridedFactor<'a>,
    b: &'a [f32],
    b_row: usize,
    rows: usize,
    inner: usize,
    columns: usize,
}

impl WithSimd for AddStrided<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut column = 0;
        while column < self.columns {
            column += match (self.columns - column) / S::F32_LANES {
                4.. => self.rows::<S, 4, 4, false>(simd, column),
                1.. => self.rows::<S, 8, 1, false>(simd, column),
                0 => self.rows::<S, 8, 1, true>(simd, column),
            };
        }
    }
}

impl AddStrided<'_> {
    /// Computes all rows of `N` vectors of columns, `M` rows at a time, or with `PART` of less than one vector.
    /// Returns the number of columns.
    #[inline(always)]
    fn rows<S: Simd, const M: usize, const N: usize, const PART: bool>(
        &mut self,
        simd: S,
        column: usize,
    ) -> usize {
        let lanes = if PART { self.columns - column } else { N * S::F32_LANES };
        let mut row = 0;
        while row + M <= self.rows {
            self.tile::<S, M, N, PART>(simd, (row, column), lanes);
            row += M;
        }
        while row + 4 <= self.rows {
            self.tile::<S, 4, N, PART>(simd, (row, column), lanes);
            row += 4;
        }
        while row < self.rows {
            self.tile::<S, 1, N, PART>(simd, (row, column), lanes);
            row += 1;
        }
        lanes
    }

    /// Computes `M` rows of `lanes` columns.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const N: usize, const PART: bool>(
        &mut self,
        simd: S,
        (row, column): (usize, usize),
        lanes: usize,
    ) {
        let mut sums = [[simd.splat_f32s(0.0); N]; M];
        for (m, sums) in sums.iter_mut().enumerate() {
            let out = &self.out[(row + m) * self.out_row + column..][..lanes];
            load::<S, N, PART>(simd, out, sums);
        }
        let a = &self.a.values[row * self.a.row..];
        for k in 0..self.inner {
            let mut b = [simd.splat_f32s(0.0); N];
            load::<S, N, PART>(simd, &self.b[k * self.b_row + column..][..lanes], &mut b);
            for (m, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the row is below `rows` and `k` below `inner`, for which `add_strided` asserts that the values
                // exist.
                let a = unsafe { *a.get_unchecked(m * self.a.row + k * self.a.step) };
                let a = simd.splat_f32s(a);
                let pairs = sums.iter_mut().zip(b);
                pairs.for_each(|(sum, b)| *sum = simd.mul_add_e_f32s(a, b, *sum));
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            let out = &mut self.out[(row + m) * self.out_row + column..][..lanes];
            if PART {
                simd.partial_store_f32s(out, sums[0]);
            } else {
                S::as_mut_simd_f32s(out).0.copy_from_slice(sums);
            }
        }
    }
}

/// Reads `N` vectors, or with `PART` less than one, whose other values are 0.
#[inline(always)]
fn load<S: Simd, const N: usize, const PART: bool>(simd: S, from: &[f32], to: &mut [S::f32s; N]) {
    if PART {
        to[0] = simd.partial_load_f32s(from);
    } else {
        to.copy_from_slice(S::as_simd_f32s(from).0);
    }
}

#[cfg(test)]
mod tests {
    use hone_core::simd::{SimdTask, dispatch, mul_add};
    use hone_core::testing::Instructions;

    use super::*;
    use crate::testing::waves;

    /// The definition, one element after another.
    struct Elements<'a>(AddStrided<'a>);

    impl SimdTask for Elements<'_> {
        type Output = ();

        #[inline(always)]
        fn run<const FUSED: bool>(self) {
            let AddStrided { out, out_row, a, b, b_row, rows, inner, columns } = self.0;
            for i in 0..rows {
                for j in 0..columns {
                    let terms =
                        (0..inner).map(|k| (a.values[i * a.row + k * a.step], b[k * b_row + j]));
                    let sum = &mut out[i * out_row + j];
                    *sum = terms.fold(*sum, |sum, (a, b)| mul_add::<FUSED>(a, b, sum));
                }
            }
        }
    }

    /// A product whose rows of `out` are three values longer than needed, and those of `b` one.
    fn task<'a>(
        out: &'a mut [f32],
        a: StridedFactor<'a>,
        b: &'a [f32],
        [rows, inner, columns]: [usize; 3],
    ) -> AddStrided<'a> {
        AddStrided { out, out_row: columns + 3, a, b, b_row: columns + 1, rows, inner, columns }
    }

    #[test]
    fn every_element_is_one_sum_in_ascending_order_and_others_stay() {
        let shapes =
            [[1, 1, 1], [3, 16, 5], [1, 33, 64], [5, 2, 70], [19, 7, 16], [9, 16, 31], [4, 0, 4]];
        for shape @ [rows, inner, columns] in shapes {
            for (row, step) in [(inner + 2, 1), (1, rows + 3)] {
                let (a, b) = (waves(40 * 40, 0.3), waves(40 * 80, 0.7));
                let a = StridedFactor { values: &a, row, step };
                let initial = waves(rows * (columns + 3), 1.1);
                for instructions in Instructions::all() {
                    let Instructions::Vector(arch) = instructions else { continue };
                    let (mut found, mut expected) = (initial.clone(), initial.clone());
                    arch.dispatch(task(&mut found, a, &b, shape));
                    let elements = Elements(task(&mut expected, a, &b, shape));
                    if matches!(arch, Arch::Scalar) {
                        elements.run::<false>();
                    } else {
                        elements.run::<true>();
                    }
                    assert_eq!(found, expected, "{shape:?}");
                }
                let (mut found, mut expected) = (initial.clone(), initial);
                add_strided((&mut found, columns + 3), a, (&b, columns + 1), shape);
                dispatch(Elements(task(&mut expected, a, &b, shape)));
                assert_eq!(found, expected, "{shape:?}");
            }
        }
    }

    #[test]
    fn tokens_along_rows_and_along_columns_have_the_same_bits() {
        let (tokens, inner, outputs) = (21, 17, 38);
        let (x, w) = (waves(tokens * inner, 0.3), waves(outputs * inner, 0.7));
        // `w` is `[inner, outputs]`, and `x` is `[inner, tokens]`.
        let (mut rows, mut columns) = (vec![0.5; tokens * outputs], vec![0.5; tokens * outputs]);
        let left = |values, row| StridedFactor { values, row: 1, step: row };
        add_strided(
            (&mut rows, outputs),
            left(&x, tokens),
            (&w, outputs),
            [tokens, inner, outputs],
        );
        add_strided(
            (&mut columns, tokens),
            left(&w, outputs),
            (&x, tokens),
            [outputs, inner, tokens],
        );
        for token in 0..tokens {
            for output in 0..outputs {
                let [a, b] = [rows[token * outputs + output], columns[output * tokens + token]];
                assert_eq!(a.to_bits(), b.to_bits());
            }
        }
    }
}
