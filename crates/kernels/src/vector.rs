//! Operations on numbers that the compiler can vectorize: they have no branches and detect no features.

use half::bf16;

/// The value of a bf16.
#[inline(always)]
pub(crate) fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The value of an f16 with these bits. Unlike [`half::f16::to_f32`], which detects the processor's features in each call,
/// this can be vectorized.
#[inline(always)]
pub(crate) fn widen_f16(bits: u16) -> f32 {
    const INFINITE: u32 = 31 << 23;
    // The sign, and the exponent and mantissa at their positions in an f32.
    let bits = (i32::from(bits.cast_signed()) << 13).cast_unsigned() & 0x8fff_e000;
    // Corrects the exponent's bias from 15 to 127; exact for subnormal numbers too.
    let value = f32::from_bits(bits) * f32::from_bits((127 + 112) << 23);
    let special = if bits & INFINITE == INFINITE { 0xff << 23 } else { 0 };
    f32::from_bits(value.to_bits() | special)
}

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

// Rounding to integers times a scale.

/// Values smaller than this count as 0 where all of those that share a scale are, because the reciprocal of
/// the scale may not be finite.
pub(crate) const LEAST_MAGNITUDE: f32 = 1e-30;

/// The bits of the magnitude. They are in the order of the magnitudes; those of NaN are greater than all others.
#[inline(always)]
pub fn magnitude_bits(x: f32) -> u32 {
    x.to_bits() & (u32::MAX >> 1)
}

/// The scale with which a magnitude of these bits becomes the integer `most`, and its reciprocal. If the magnitude is
/// infinite or NaN, so is the scale, and products with it are infinite or NaN.
#[inline(always)]
pub fn scale_and_factor(magnitude: u32, most: f32) -> (f32, f32) {
    let magnitude = f32::from_bits(magnitude);
    if magnitude < LEAST_MAGNITUDE {
        (0.0, 0.0)
    } else {
        (magnitude * (1.0 / most), most / magnitude)
    }
}

/// The nearest integer to a number of at most 2^22, ties to even; the least integer for NaN, as the instruction
/// of x86-64 returns.
#[inline(always)]
pub fn nearest(x: f32) -> i32 {
    // 1.5 2^23: a sum with it has no bits after the point.
    const POINT: f32 = 12_582_912.0;
    let integer = (x + POINT).to_bits().wrapping_sub(POINT.to_bits()).cast_signed();
    if x.is_nan() { i32::MIN } else { integer }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

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

    #[test]
    fn every_16_bit_value_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let same = |found: f32, expected: f32| {
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan())
            };
            let value = f16::from_bits(bits);
            assert!(same(widen_f16(bits), value.to_f32()), "{value}");
            let value = bf16::from_bits(bits);
            assert!(same(widen_bf16(value), value.to_f32()), "{value}");
        }
    }
}
