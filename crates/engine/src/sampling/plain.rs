//! Plain temperature sampling, which is all that training does: one pass for the weights, in vectors,
//! and one for the choice.

use hone_core::simd::{SimdTask, dispatch};

/// Exponentials whose sum is kept.
const BLOCK: usize = 64;

/// Sums side by side.
const LANES: usize = 8;

/// Exponentials `exp((logit - greatest logit) / temperature)` of all tokens.
#[derive(Debug, Default)]
pub(super) struct Exponentials {
    values: Vec<f64>,
    /// Of [`BLOCK`] weights each.
    sums: Vec<f64>,
    total: f64,
}

impl Exponentials {
    /// Computes them; `greatest` is the greatest logit.
    pub fn fill(&mut self, logits: &[f32], greatest: f64, temperature: f64) {
        self.values.resize(logits.len(), 0.0);
        self.sums.resize(logits.len().div_ceil(BLOCK), 0.0);
        let (values, sums) = (&mut self.values[..], &mut self.sums[..]);
        dispatch(Weigh { values, sums, logits, greatest, inverse: 1.0 / temperature });
        self.total = self.sums.iter().sum();
    }

    /// Their sum.
    pub fn total(&self) -> f64 {
        self.total
    }

    /// The token at which the running sum of weights passes `target`, and its weight; the last one
    /// with any where rounding leaves the sum below the target.
    pub fn pick(&self, target: f64) -> Option<(usize, f64)> {
        let mut sum = 0.0;
        for (block, (values, of_block)) in self.values.chunks(BLOCK).zip(&self.sums).enumerate() {
            if sum + of_block <= target {
                sum += of_block;
                continue;
            }
            let mut inner = sum;
            for (i, weight) in values.iter().enumerate() {
                inner += weight;
                if inner > target {
                    return Some((block * BLOCK + i, *weight));
                }
            }
            sum += of_block;
        }
        let last = self.values.iter().rposition(|weight| *weight > 0.0)?;
        Some((last, *self.values.get(last)?))
    }
}

/// The greatest logit, none of which is NaN; minus infinity of nothing.
pub(super) fn most(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 2 * LANES];
    let chunks = logits.chunks_exact(2 * LANES);
    let rest = chunks.remainder().iter();
    for logits in chunks {
        for (lane, logit) in lanes.iter_mut().zip(logits) {
            *lane = larger(*lane, *logit);
        }
    }
    rest.chain(&lanes).fold(f32::NEG_INFINITY, |most, logit| larger(most, *logit))
}

struct Weigh<'a> {
    values: &'a mut [f64],
    sums: &'a mut [f64],
    logits: &'a [f32],
    greatest: f64,
    inverse: f64,
}

impl SimdTask for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { values, sums, logits, greatest, inverse } = self;
        for (value, logit) in values.iter_mut().zip(logits) {
            *value = exp((f64::from(*logit) - greatest) * inverse);
        }
        for (sum, values) in sums.iter_mut().zip(values.chunks(BLOCK)) {
            let mut lanes = [0.0; LANES];
            let chunks = values.chunks_exact(LANES);
            let rest: f64 = chunks.remainder().iter().sum();
            for values in chunks {
                for (lane, value) in lanes.iter_mut().zip(values) {
                    *lane += value;
                }
            }
            *sum = lanes.iter().sum::<f64>() + rest;
        }
    }
}

/// `e^x` for x up to 0, within 2 units in the last place: `2^n e^r` with `x = n ln 2 + r`,
/// `|r| <= ln 2 / 2`, and the Taylor series of `e^r` to the thirteenth power (its remainder is below
/// 5e-18). No branches, so that a loop over it vectorises.
#[inline(always)]
fn exp(x: f64) -> f64 {
    // Adding it rounds to a whole number, which then stands in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // ln 2 in two parts: products of the first with small whole numbers are exact.
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const TERMS: [f64; 12] = [
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
    ];
    // Below, the result is 0.
    let x = if x < -746.0 { -746.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 6_227_020_800.0;
    for term in TERMS {
        p = p * r + term;
    }
    p = p * r + 1.0;
    let n = (shifted.to_bits() as i64).wrapping_sub(ROUND.to_bits() as i64);
    // 2^n as two factors, as it may be below the normal numbers.
    let half = n >> 1;
    let power = |n: i64| f64::from_bits((n.wrapping_add(1023) as u64) << 52);
    p * power(half) * power(n.wrapping_sub(half))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        let (mut x, mut worst) = (-700.0_f64, 0.0_f64);
        while x <= 0.0 {
            let (exact, got) = (x.exp(), exp(x));
            let unit = f64::from_bits(exact.to_bits() + 1) - exact;
            worst = worst.max(((got - exact) / unit).abs());
            x += 0.013_7;
        }
        assert!(worst <= 2.0, "{worst} units");
        assert_eq!(exp(0.0).to_bits(), 1.0_f64.to_bits());
        assert_eq!(exp(f64::NEG_INFINITY).to_bits(), 0.0_f64.to_bits());
        assert!((exp(-720.0) / (-720.0_f64).exp() - 1.0).abs() < 1e-9, "a subnormal number");
    }

    #[test]
    fn a_choice_is_that_of_a_running_sum() {
        let logits: Vec<f32> = (0..300).map(|i| ((i * 7919 % 1009) as f32 / 200.0) - 3.0).collect();
        let mut weights = Exponentials::default();
        weights.fill(&logits, 2.04, 0.9);
        let naive: Vec<f64> = logits.iter().map(|l| ((f64::from(*l) - 2.04) / 0.9).exp()).collect();
        let total: f64 = naive.iter().sum();
        assert!((weights.total() / total - 1.0).abs() < 1e-13);
        for step in 0..1000 {
            let share = (f64::from(step) + 0.5) / 1000.0;
            let mut sum = 0.0;
            let expected = naive.iter().position(|w| {
                sum += w;
                sum > share * total
            });
            assert_eq!(weights.pick(share * weights.total()).map(|p| p.0), expected);
        }
        // Beyond the sum is the last with any weight.
        weights.fill(&[0.0, 1.0, f32::NEG_INFINITY], 1.0, 1.0);
        assert_eq!(weights.pick(9.0).map(|p| p.0), Some(1));
        assert_eq!(weights.pick(0.0).map(|p| p.0), Some(0));
    }
}
