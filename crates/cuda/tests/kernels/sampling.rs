//! Tokens drawn from logits.

use hone_cuda::KernelSource;

use super::emulator::{Buffers, Emulator, assert_close, values};

/// Ids and log-probabilities.
fn samples(buffers: &Buffers, argument: usize) -> Vec<(i32, f64)> {
    let ids = buffers.ints(argument).into_iter().step_by(2);
    ids.zip(buffers.floats(argument).into_iter().skip(1).step_by(2)).collect()
}

/// The running sums of the weights, as hone-engine's `TokenSampler` defines them.
fn sums(logits: &[f64], inverse: f64) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::MIN, f64::max);
    let weights = logits.iter().map(|x| ((x - most) * inverse).exp());
    weights
        .scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        })
        .collect()
}

#[test]
fn tokens_are_those_at_which_the_running_sum_passes_the_target() {
    let Some(emulator) = Emulator::new(&KernelSource::SAMPLE, true) else { return };
    for (vocab, count) in [(1, 3), (31, 40), (512, 40), (777, 200), (5_000, 60)] {
        let rows = 3;
        let logits: Vec<f64> = values(rows * vocab, 1).iter().map(|x| 9.0 * x).collect();
        let of_row: Vec<i32> = (0..count).map(|i| (i * 2 % rows) as i32).collect();
        let temperatures = [1.0, 0.7, 1.5, 0.05];
        let uniforms = values(count, 2);
        let draws: Vec<f64> = (0..count)
            .flat_map(|i| {
                // Both ends, too.
                let uniform =
                    [0.0, 1.0 - f64::EPSILON / 2.0, uniforms[i].abs(), 0.5 + uniforms[i] / 2.0];
                [
                    1.0 / f64::from(temperatures[i % 4] as f32),
                    uniform[i / 2 % 4].min(1.0 - f64::EPSILON / 2.0),
                ]
            })
            .collect();
        let call = emulator.call("sample_rows", [count, 1, 1], 512).floats(&logits).ints(&of_row);
        let found = call.doubles(&draws).out(2 * count, 4).int(vocab).run();
        for (i, (id, logp)) in samples(&found, 3).into_iter().enumerate() {
            let row = &logits[of_row[i] as usize * vocab..][..vocab];
            let (sums, target) = (sums(row, draws[2 * i]), draws[2 * i + 1]);
            let (id, total) = (id as usize, sums[vocab - 1]);
            let before = if id == 0 { 0.0 } else { sums[id - 1] };
            assert!(
                before / total <= target + 1e-12 && target < sums[id] / total + 1e-12,
                "{id} of {vocab}"
            );
            // The difference of sums has too few digits.
            let most = row.iter().copied().fold(f64::MIN, f64::max);
            let expected = (row[id] - most) * draws[2 * i] - total.ln();
            assert!((logp - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{logp} {expected}");
        }
    }
}

#[test]
fn tokens_without_weight_are_not_drawn() {
    let Some(emulator) = Emulator::new(&KernelSource::SAMPLE, true) else { return };
    let none = f64::NEG_INFINITY;
    let mut logits = vec![none; 3 * 600];
    // One token has all the weight; one row is all forbidden, and one has a value that is no number.
    (logits[599], logits[1_200 + 7]) = (-40.0, f64::NAN);
    let call = emulator.call("sample_rows", [4, 1, 1], 512).floats(&logits).ints(&[0, 0, 1, 2]);
    let draws = [1.0, 0.0, 1.0, 1.0 - f64::EPSILON / 2.0, 1.0, 0.5, 1.0, 0.5];
    let found = samples(&call.doubles(&draws).out(8, 4).int(600).run(), 3);
    assert_eq!(found, [(599, 0.0), (599, 0.0), (-1, 0.0), (-1, 0.0)]);
    logits[1_200 + 7] = f64::INFINITY;
    let call = emulator.call("sample_rows", [1, 1, 1], 512).floats(&logits).ints(&[2]);
    assert_eq!(samples(&call.doubles(&[1.0, 0.5]).out(2, 4).int(600).run(), 3), [(-1, 0.0)]);
}

#[test]
fn logits_are_capped() {
    let Some(emulator) = Emulator::new(&KernelSource::SAMPLE, true) else { return };
    let logits: Vec<f64> = values(700, 1).iter().map(|x| 50.0 * x).collect();
    let expected: Vec<f64> = logits.iter().map(|x| 30.0 * (x / 30.0).tanh()).collect();
    let call = emulator.call("cap_logits", [2, 1, 1], 256).floats(&logits).long(700).float(30.0);
    assert_close(&call.run().floats(0), &expected, 1e-6, "capped");
}
