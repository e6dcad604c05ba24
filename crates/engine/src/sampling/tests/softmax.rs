use hone_core::testing::assert_same_bits;

use super::super::*;

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
