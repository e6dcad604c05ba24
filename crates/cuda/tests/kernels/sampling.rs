//! Tokens drawn from logits.

use hone_core::types::SamplingParams;
use hone_cuda::KernelSource;
use hone_engine::Token;
use hone_engine::sampling::TokenSampler;

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

/// The host's sampler and the kernel draw the same tokens with the same random numbers. Fewer threads than a device uses are
/// faster in the emulator.
#[test]
fn a_hundred_thousand_tokens_are_those_of_the_host() {
    let Some(emulator) = Emulator::new(&KernelSource::SAMPLE, true) else { return };
    let rows = 50;
    let mut at_boundaries = 0;
    for (vocab, count, threads, temperature) in [
        (40, 76_000, 32, 1.0),
        (300, 20_000, 64, 0.7),
        (1_000, 3_600, 128, 1.5),
        (2_000, 400, 512, 1.0),
    ] {
        let params = SamplingParams { temperature, seed: vocab as u64, ..Default::default() };
        let [mut host, mut device] = [(); 2].map(|()| TokenSampler::new(&params, 0).unwrap());
        let logits: Vec<f64> = values(rows * vocab, count as u64).iter().map(|x| 9.0 * x).collect();
        let of_row: Vec<i32> = (0..count).map(|i| (i % rows) as i32).collect();
        let draws: Vec<_> = (0..count).map(|_| device.plain_draw(vocab).unwrap()).collect();
        let inverse = 1.0 / f64::from(temperature);
        let numbers: Vec<f64> = draws.iter().flat_map(|draw| [inverse, draw.uniform]).collect();
        let call = emulator.call("sample_rows", [count, 1, 1], threads).floats(&logits);
        let call = call.ints(&of_row).doubles(&numbers).out(2 * count, 4).int(vocab);
        for (i, (id, logp)) in samples(&call.run(), 3).into_iter().enumerate() {
            let row = &logits[i % rows * vocab..][..vocab];
            let of_host: Vec<f32> = row.iter().map(|x| *x as f32).collect();
            let expected = host.draw(&of_host).unwrap();
            let found = device.accept(id as u32, logp as f32).unwrap();
            if found.id == expected.id {
                let error = (found.logprob - expected.logprob).abs();
                assert!(error < 1e-6, "{found:?} {expected:?}");
                assert_eq!(Token { logprob: expected.logprob, ..found }, expected);
            } else {
                let (sums, first) = (sums(row, inverse), found.id.min(expected.id) as usize);
                let distance = sums[first] / sums[vocab - 1] - draws[i].uniform;
                assert!(distance.abs() < 1e-12, "{found:?} {expected:?}");
                at_boundaries += 1;
            }
        }
    }
    assert!(at_boundaries < 3);
}

/// The first of the greatest logits, of which rows have up to all tokens.
#[test]
fn greedy_tokens_are_those_of_the_host() {
    let Some(emulator) = Emulator::new(&KernelSource::SAMPLE, true) else { return };
    let params = SamplingParams { temperature: 0.0, ..Default::default() };
    for (vocab, rows, threads) in [(1, 2, 32), (40, 300, 32), (777, 60, 64), (2_000, 12, 512)] {
        let scales = [1.0, 3.0, 9.0, 40.0];
        let logits: Vec<f64> = values(rows * vocab, 7)
            .iter()
            .enumerate()
            .map(|(i, x)| {
                let row = i / vocab;
                // In every third row a few levels, so that there are ties.
                let x = x * scales[row % 4];
                if row % 3 == 0 { x.round().clamp(-1.0, 1.0) } else { x }
            })
            .collect();
        let of_row: Vec<i32> = (0..rows as i32).collect();
        let call = emulator.call("sample_rows", [rows, 1, 1], threads).floats(&logits);
        let call = call.ints(&of_row).doubles(&vec![0.0; 2 * rows]).out(2 * rows, 4).int(vocab);
        let mut ties = 0;
        for ((id, logp), row) in samples(&call.run(), 3).into_iter().zip(logits.chunks(vocab)) {
            let of_host: Vec<f32> = row.iter().map(|x| *x as f32).collect();
            let [mut host, mut device] = [(); 2].map(|()| TokenSampler::new(&params, 0).unwrap());
            assert!(device.plain_draw(vocab).is_some());
            let expected = host.draw(&of_host).unwrap();
            let found = device.accept(id as u32, logp as f32).unwrap();
            let error = (found.logprob - expected.logprob).abs();
            assert!(error < 1e-6 * (1.0 + expected.logprob.abs()), "{found:?} {expected:?}");
            assert_eq!(Token { logprob: expected.logprob, ..found }, expected);
            let most = row.iter().copied().fold(f64::MIN, f64::max);
            ties += usize::from(row.iter().filter(|x| **x == most).count() > 1);
        }
        assert!(vocab == 1 || ties >= rows / 3, "{ties}");
    }
}

#[test]
fn tokens_without_weight_are_not_drawn() {
    let Some(emulator) = Emulator::new(&KernelSource::SAMPLE, true) else { return };
    let none = f64::NEG_INFINITY;
    let mut logits = vec![none; 3 * 600];
    // One token has all the weight; one row is all forbidden, and one has a value that is no number.
    (logits[599], logits[1_200 + 7]) = (-40.0, f64::NAN);
    let rows = [0, 0, 1, 2, 0, 1, 2];
    let call = emulator.call("sample_rows", [7, 1, 1], 512).floats(&logits).ints(&rows);
    let draws = [1.0, 0.0, 1.0, 1.0 - f64::EPSILON / 2.0, 1.0, 0.5, 1.0, 0.5];
    let draws = [&draws[..], &[0.0; 6]].concat();
    let found = samples(&call.doubles(&draws).out(14, 4).int(600).run(), 3);
    let (last, none) = ((599, 0.0), (-1, 0.0));
    assert_eq!(found, [last, last, none, none, last, none, none]);
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
