//! CPU kernels of the transformer over plain slices, and candle graphs of the same operations.

pub mod compute;
pub(crate) mod float;
pub(crate) mod linear;
pub mod matmul;
pub(crate) mod ops;
pub mod parallel;
pub(crate) mod reductions;
pub(crate) mod rowwise;
pub mod storage;
#[cfg(target_arch = "x86_64")]
pub mod transpose;

// An exponential function that the compiler can vectorize.

/// `e^x` within 2 units in the last place: `2^n e^r` with `x = n ln 2 + r`, `|r| <= ln 2 / 2`, and
/// the Taylor series of `e^r` to the seventh power (its remainder is below 6e-9).
///
/// It has no branches, so that a loop over it vectorizes. Infinities, subnormal results and NaN are
/// as in `f32::exp`.
#[inline(always)]
pub fn exp_f32(x: f32) -> f32 {
    // 1.5 * 2^23. Adding it rounds to an integer, which is then in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: products of the first with small integers are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * (r * r) + r + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    // 2^n as two factors: n may be outside the exponents of normal numbers while the result is normal.
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    p * power(half) * power(n.wrapping_sub(half))
}

#[cfg(test)]
mod tests {
    use super::exp_f32;

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        let mut worst = 0.0_f64;
        let mut x = -87.0_f32;
        while x < 88.7 {
            let exact = f64::from(x).exp();
            let got = exp_f32(x);
            let unit = f64::from(f32::from_bits(got.to_bits() + 1) - got);
            worst = worst.max((f64::from(got) - exact).abs() / unit);
            x += 0.001_37;
        }
        assert!(worst < 2.0, "{worst} units");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp_f32(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp_f32(f32::NEG_INFINITY).to_bits(), 0.0_f32.to_bits());
        assert_eq!(exp_f32(-1e30).to_bits(), 0.0_f32.to_bits());
        assert!(exp_f32(f32::INFINITY).is_infinite() && exp_f32(1e30).is_infinite());
        assert!(exp_f32(f32::NAN).is_nan());
        // A subnormal number.
        assert!((exp_f32(-95.0) / (-95.0_f32).exp() - 1.0).abs() < 1e-3);
    }
}
