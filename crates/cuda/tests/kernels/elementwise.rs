//! Whole buffers, and adapters by slot.

use hone_cuda::KernelSource;

use super::emulator::{Emulator, assert_close, dot, values};

const GRID: [usize; 3] = [3, 1, 1];

#[test]
fn adamw_follows_its_formula_and_counts_bad_values() {
    let Some(emulator) = Emulator::new(&KernelSource::FLAT, true) else { return };
    let (beta1, beta2, eps, rate, decay, scale) = (0.9, 0.999, 1e-8, 0.01, 0.1, 0.5);
    for n in [1, 700, 2_000] {
        let mut expected = [values(n, 1), vec![0.0; n], vec![0.0; n]];
        let mut found = expected.clone();
        for t in 1..=3 {
            let g = values(n, 10 + t as u64);
            let (first, second) = (1.0 - f64::powi(beta1, t), 1.0 - f64::powi(beta2, t));
            let [p, m, v] = &mut expected;
            for i in 0..n {
                let g = g[i] * scale;
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                p[i] *= 1.0 - rate * decay;
                p[i] -= rate / first * m[i] / ((v[i] / second).sqrt() + eps);
            }
            let update = |gradient: &[f64], write| {
                let [p, m, v] = &found;
                let call = emulator.call("adamw", GRID, 256).floats(p).floats(m).floats(v);
                let call =
                    call.floats(gradient).out(3, 4).long(n).float(scale).float(1.0 - rate * decay);
                let call = call.float(beta1).float(1.0 - beta1).float(beta2).float(1.0 - beta2);
                call.float(rate / first).float(second.sqrt()).float(eps).int(write).run()
            };
            // With the second gradient only the second moment is infinite.
            for bad in [f64::INFINITY, 1e30] {
                let mut gradient = g.clone();
                gradient[n / 2] = bad;
                let checked = update(&gradient, 0);
                assert_eq!(checked.ints(4).iter().sum::<i32>(), 1);
                assert_eq!([0, 1, 2].map(|i| checked.floats(i)), found);
            }
            let updated = update(&g, 1);
            assert_eq!(updated.ints(4), [0; 3]);
            found = [0, 1, 2].map(|i| updated.floats(i));
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 1e-5, "AdamW");
            }
        }
    }
}

#[test]
fn buffers_are_summed_mixed_and_converted() {
    for emulator in Emulator::both(&KernelSource::FLAT) {
        for n in [1, 255, 1_537] {
            let (x, y) = (values(n, 1), values(n, 2));
            let sums = emulator.call("sum_squares", GRID, 256).floats(&x).out(3, 8).long(n).run();
            assert_close(&[sums.doubles(1).iter().sum()], &[dot(&x, &x)], 1e-14, "squares");
            let call = emulator.call("interpolate", GRID, 256).floats(&x).floats(&y);
            let mixed: Vec<f64> = x.iter().zip(&y).map(|(x, y)| x + 0.25 * (y - x)).collect();
            assert_close(&call.long(n).float(0.25).run().floats(0), &mixed, 1e-6, "mixed");
            let call = emulator.call("round_values", GRID, 256).floats(&x).out_acts(n);
            let halves: Vec<f64> = x.iter().map(|x| x * 0.5).collect();
            assert_eq!(call.long(n).float(0.5).run().acts(1), halves);
            let call = emulator.call("widen_values", GRID, 256).acts(&x).out(n, 4).long(n);
            assert_eq!(call.run().floats(1), x);
        }
    }
}

#[test]
fn rows_use_the_adapter_of_their_slot() {
    for emulator in Emulator::both(&KernelSource::ADAPTERS) {
        for (width, rank, outputs) in [(33, 3, 130), (256, 16, 40), (1, 1, 1)] {
            let (slots, rows, stride) = ([2, -1, 0, 2], 4, outputs + 6);
            let slot_size = rank * (width + outputs) + 5;
            let (x, weights) = (values(rows * width, 1), values(3 * slot_size, 2));
            let before = values(rows * stride, 3);
            let (low_before, b_at) = (values(rows * rank, 4), rank * width);
            // A warp's products are added in f32, and its sum is rounded.
            let (mut low, mut expected) = (low_before.clone(), before.clone());
            for (row, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let slot = &weights[*slot as usize * slot_size..];
                for r in 0..rank {
                    low[row * rank + r] =
                        dot(&x[row * width..][..width], &slot[r * width..][..width]);
                }
            }
            let grid = [rank.div_ceil(4), rows, 1];
            let call =
                emulator.call("adapter_down", grid, 128).acts(&x).acts(&weights).ints(&slots);
            let found = call.acts(&low_before).int(width).int(rank).long(slot_size).run();
            assert_close(&found.acts(3), &low, emulator.tolerance(), "down");
            // The values in the low-rank space of one of several linear layers, from the second on.
            let (low, part) = (found.acts(3), rank.div_ceil(2));
            let first = rank - part;
            for (row, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                for o in 0..outputs {
                    let b = &weights[*slot as usize * slot_size + b_at + o * part..][..part];
                    let sum = dot(&low[row * rank + first..][..part], b);
                    expected[row * stride + o] += 0.75 * sum;
                }
            }
            let grid = [outputs.div_ceil(128), rows, 1];
            // B begins within the slot.
            let call =
                emulator.call("adapter_up", grid, 128).acts(&low[first..]).acts(&weights[b_at..]);
            let call = call.ints(&slots).acts(&before).int(outputs).int(part).long(slot_size);
            let found = call.int(rank).int(stride).float(0.75).run().acts(3);
            assert_close(&found, &expected, emulator.tolerance(), "up");
        }
    }
}
