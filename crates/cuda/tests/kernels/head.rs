//! Statistics of target tokens.

use hone_cuda::KernelSource;

use super::emulator::{Emulator, assert_close, dot, gradient, values};

/// `[ln p[target], entropy]`
fn stats(logits: &[f64], target: usize, temperature: f64, softcap: f64) -> [f64; 2] {
    let capped = |x: &f64| if softcap == 0.0 { *x } else { softcap * (x / softcap).tanh() };
    let scaled: Vec<f64> = logits.iter().map(|x| capped(x) / temperature).collect();
    let most = scaled.iter().copied().fold(f64::MIN, f64::max);
    let log_sum = most + scaled.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
    let logps = scaled.iter().map(|x| x - log_sum);
    [scaled[target] - log_sum, -logps.map(|logp| logp.exp() * logp).sum::<f64>()]
}

#[test]
fn statistics_and_gradients_of_logits() {
    for emulator in Emulator::both(&KernelSource::HEAD) {
        for (vocab, softcap) in [(1, 0.0), (5, 30.0), (513, 0.0), (777, 5.0)] {
            let (targets, temperatures) = ([0, vocab - 1, vocab / 2], [1.0, 0.5, 1.75]);
            let logits: Vec<f64> = values(3 * vocab, 1).iter().map(|x| 12.0 * x).collect();
            let ids = targets.map(|id| id as i32);
            let rows = || logits.chunks(vocab).zip(targets).zip(temperatures);
            let expected: Vec<f64> =
                rows().flat_map(|((x, target), t)| stats(x, target, t, softcap)).collect();
            let call = emulator.call("token_stats", [3, 1, 1], 512).floats(&logits).ints(&ids);
            let call = call.floats(&temperatures).out(6, 4).int(vocab).float(softcap);
            let found = call.run().floats(3);
            assert_close(&found, &expected, 1e-5, "statistics");

            let seeds = [1.0, 0.0, -0.5, 0.25, 0.0, -1.0];
            let call = emulator.call("token_stats_backward", [3, 1, 1], 512);
            let call = call.floats(&logits).ints(&ids).floats(&temperatures).floats(&expected);
            let call = call.floats(&seeds).out_acts(3 * vocab).int(vocab).float(softcap);
            let found = call.run().acts(5);
            for (i, ((x, target), t)) in rows().enumerate() {
                let expected =
                    gradient(x, |x| dot(&stats(x, target, t, softcap), &seeds[2 * i..][..2]));
                let found = &found[i * vocab..][..vocab];
                // Differences of central differences are of this size.
                let tolerance = emulator.tolerance().max(3e-5);
                assert_close(found, &expected, tolerance, "gradient of the logits");
            }
        }
    }
}

/// A token that a grammar forbids has a logit of minus infinity.
#[test]
fn forbidden_tokens_have_no_part_in_the_entropy() {
    for emulator in Emulator::both(&KernelSource::HEAD) {
        let logits = [0.5, f64::NEG_INFINITY, -0.25];
        let call = emulator.call("token_stats", [1, 1, 1], 512).floats(&logits).ints(&[2]);
        let found = call.floats(&[1.0]).out(2, 4).int(3).float(0.0).run().floats(3);
        assert_close(&found, &stats(&[0.5, -0.25], 1, 1.0, 0.0), 1e-6, "statistics");
        let call = emulator.call("token_stats_backward", [1, 1, 1], 512).floats(&logits).ints(&[2]);
        let call = call.floats(&[1.0]).floats(&found).floats(&[1.0, 1.0]).out_acts(3);
        let found = call.int(3).float(0.0).run().acts(5);
        assert!(found.iter().all(|x| x.is_finite()) && found[1] == 0.0, "{found:?}");
    }
}
