//! Computes the weights of all tokens in one vectorized pass, and draws without truncation in another.
//! Training samples are drawn without truncation.

use hone_core::simd::{SimdTask, dispatch};

/// Weights per partial sum.
const BLOCK: usize = 64;

/// Independent accumulators of a sum, so that it vectorizes.
const LANES: usize = 8;

/// The weights `exp((logit - max logit) / temperature)` of all tokens.
#[derive(Debug, Default)]
pub(super) struct SoftmaxWeights {
    values: Vec<f64>,
    /// The sum of each [`BLOCK`] of values; [`Self::pick`] skips whole blocks.
    sums: Vec<f64>,
}

impl SoftmaxWeights {
    /// Computes the weights and returns their sum; `max` is the greatest logit.
    pub fn fill(&mut self, logits: &[f32], max: f64, temperature: f64) -> f64 {
        self.values.resize(logits.len(), 0.0);
        self.sums.resize(logits.len().div_ceil(BLOCK), 0.0);
        let (values, sums) = (&mut self.values[..], &mut self.sums[..]);
        dispatch(WeighTask { values, sums, logits, max, inverse: 1.0 / temperature });
        self.sums.iter().sum()
    }

    /// The weight of each token.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The token at which the running sum of weights passes `target`, and its weight. If rounding
    /// leaves the sum below the target, it is the last token with a weight above 0.
    pub fn pick(&self, target: f64) -> Option<(usize, f64)> {
        let mut sum = 0.0;
        for (block, (values, block_sum)) in self.values.chunks(BLOCK).zip(&self.sums).enumerate() {
            if sum + block_sum <= target {
                sum += block_sum;
                continue;
            }
            let mut inner = sum;
            for (i, weight) in values.iter().enumerate() {
                inner += weight;
                if inner > target {
                    return Some((block * BLOCK + i, *weight));
                }
            }
            sum += block_sum;
        }
        let last = self.values.iter().rposition(|weight| *weight > 0.0)?;
        Some((last, self.values[last]))
    }
}

/// The weight of a token; `inverse` is the reciprocal of the temperature.
#[inline(always)]
fn weight(logit: f32, max: f64, inverse: f64) -> f64 {
    exp((f64::from(logit) - max) * inverse)
}

/// The greatest of logits without NaN; minus infinity if there are none.
pub(super) fn max_logit(logits: &[f32]) -> f32 {
    dispatch(MaxTask(logits))
}

/// The position of the first logit that is equal to `value`.
pub(super) fn position_of(logits: &[f32], value: f32) -> Option<usize> {
    // A search for the block has no exit within the block, so that it vectorizes.
    let has_value = |block: &&[f32]| block.iter().fold(false, |any, logit| any | (*logit == value));
    let block = logits.chunks(BLOCK).position(|block| has_value(&block))?;
    let first = block * BLOCK;
    logits[first..].iter().position(|logit| *logit == value).map(|at| first + at)
}

struct MaxTask<'a>(&'a [f32]);

impl SimdTask for MaxTask<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<const FUSED: bool>(self) -> f32 {
        let larger = |a: f32, b: f32| if b > a { b } else { a };
        let mut lanes = [f32::NEG_INFINITY; BLOCK];
        let chunks = self.0.chunks_exact(BLOCK);
        let rest = chunks.remainder().iter();
        for logits in chunks {
            for (lane, logit) in lanes.iter_mut().zip(logits) {
                *lane = larger(*lane, *logit);
            }
        }
        rest.chain(&lanes).fold(f32::NEG_INFINITY, |max, logit| larger(max, *logit))
    }
}

/// The sum of up to [`BLOCK`] weights.
#[inline(always)]
fn sum_of_block(values: &[f64]) -> f64 {
    let mut lanes = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().sum();
    for values in chunks {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += value;
        }
    }
    lanes.iter().sum::<f64>() + rest
}

struct WeighTask<'a> {
    values: &'a mut [f64],
    sums: &'a mut [f64],
    logits: &'a [f32],
    max: f64,
    inverse: f64,
}

impl SimdTask for WeighTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { values, sums, logits, max, inverse } = self;
        for (value, logit) in values.iter_mut().zip(logits) {
            *value = weight(*logit, max, inverse);
        }
        for (sum, values) in sums.iter_mut().zip(values.chunks(BLOCK)) {
            *sum = sum_of_block(values);
        }
    }
}

/// `e^x` for `x <= 0`, within 2 units in the last place: `2^n e^r` with `x = n ln 2 + r`,
/// `|r| <= ln 2 / 2`, and the Taylor polynomial of `e^r` of degree 13 (its remainder is below
/// 5e-18). It has no branches, so that a loop over it vectorizes.
#[inline(always)]
fn exp(x: f64) -> f64 {
    // 1.5 * 2^52: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // ln 2 in two parts. Products of the first with small integers are exact.
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
    // The result is 0 below this bound.
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
    // 2^n as two factors, because it may be subnormal.
    let half = n >> 1;
    let power = |n: i64| f64::from_bits((n.wrapping_add(1023) as u64) << 52);
    p * power(half) * power(n.wrapping_sub(half))
}

#[cfg(test)]
mod tests {
    use hone_core::testing::assert_same_bits;

    use super::*;

    #[test]
    fn every_instruction_set_computes_the_same_weights() {
        for n in [1, 7, 64, 65, 300] {
            let logits: Vec<f32> = (0..n).map(|i| (i * 7919 % 1009) as f32 / 20.0).collect();
            assert_same_bits(|instructions| {
                let (mut values, mut sums) = (vec![0.0; n], vec![0.0; n.div_ceil(BLOCK)]);
                instructions.run(WeighTask {
                    values: &mut values,
                    sums: &mut sums,
                    logits: &logits,
                    max: 50.4,
                    inverse: 1.0 / 0.7,
                });
                [values, sums].concat()
            });
        }
    }

    #[test]
    fn the_greatest_logit_is_found_at_every_position() {
        for n in [1, 15, 16, 17, 64, 65, 130] {
            for at in 0..n {
                let mut logits = vec![-3.0; n];
                logits[at..].iter_mut().step_by(2).for_each(|logit| *logit = -1.0);
                assert_eq!(max_logit(&logits), -1.0, "position {at} of {n}");
                assert_eq!(position_of(&logits, -1.0), Some(at));
                assert_eq!(position_of(&logits, -2.0), None);
            }
        }
        assert_eq!((max_logit(&[]), position_of(&[], 0.0)), (f32::NEG_INFINITY, None));
    }

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
    fn pick_returns_the_token_at_which_the_running_sum_passes_the_target() {
        let logits: Vec<f32> = (0..300).map(|i| ((i * 7919 % 1009) as f32 / 200.0) - 3.0).collect();
        let mut weights = SoftmaxWeights::default();
        let sum = weights.fill(&logits, 2.04, 0.9);
        let naive: Vec<f64> = logits.iter().map(|l| ((f64::from(*l) - 2.04) / 0.9).exp()).collect();
        let total: f64 = naive.iter().sum();
        assert!((sum / total - 1.0).abs() < 1e-13);
        for step in 0..1000 {
            let share = (f64::from(step) + 0.5) / 1000.0;
            let mut running = 0.0;
            let expected = naive.iter().position(|w| {
                running += w;
                running > share * total
            });
            assert_eq!(weights.pick(share * sum).map(|p| p.0), expected);
        }
        // A target between the sum of a block, added in lanes, and the sum of its values in turn:
        // each 2^-54 is lost beside 1. The next block continues from the block's own sum.
        let mut values = vec![2.0_f64.powi(-54); BLOCK];
        values[0] = 1.0;
        values.resize(2 * BLOCK, 0.5);
        let sums = vec![1.0 + 7.0 * 2.0_f64.powi(-51), 32.0];
        assert_eq!(SoftmaxWeights { values, sums }.pick(1.0), Some((BLOCK, 0.5)));
        // A target beyond the sum picks the last token with weight.
        weights.fill(&[0.0, 1.0, f32::NEG_INFINITY], 1.0, 1.0);
        assert_eq!(weights.pick(9.0).map(|p| p.0), Some(1));
        assert_eq!(weights.pick(0.0).map(|p| p.0), Some(0));
    }
}
