//! Reductions that the compiler can vectorize, for loops that [`hone_core::simd`] dispatches.
//!
//! Each runs over a fixed number of lanes and sums use no fused multiply-adds, so every instruction
//! set returns the same bits.

use super::float::Real;

/// Partial results of a reduction.
pub(crate) const LANES: usize = 16;

/// `sum a_i b_i`
#[inline(always)]
pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    lanes(a, b, |a, b| a * b)
}

/// `sum a_i`
#[inline(always)]
pub(crate) fn sum<T: Real>(a: &[T]) -> T {
    lanes(a, a, |a, _| a)
}

/// `sum f(a_i, b_i)`
#[inline(always)]
fn lanes<T: Real>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut sums = [T::of(0.0); LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for i in 0..LANES {
            sums[i] += f(a[i], b[i]);
        }
    }
    let mut total = T::of(0.0);
    for (a, b) in rest {
        total += f(*a, *b);
    }
    sums.iter().fold(total, |total, sum| total + *sum)
}

/// The largest value; minus infinity if there are no values.
#[inline(always)]
pub(crate) fn max<T: Real>(a: &[T]) -> T {
    let larger = |x: T, y: T| if y > x { y } else { x };
    let mut most = [T::of(f64::NEG_INFINITY); LANES];
    let chunks = a.chunks_exact(LANES);
    let rest = chunks.remainder();
    for a in chunks {
        for i in 0..LANES {
            most[i] = larger(most[i], a[i]);
        }
    }
    let start = rest.iter().fold(T::of(f64::NEG_INFINITY), |m, x| larger(m, *x));
    most.iter().fold(start, |m, x| larger(m, *x))
}
