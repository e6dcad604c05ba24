//! Whole buffers, and adapters by slot.

use hone_cuda::KernelSource;

use super::emulator::{Emulator, assert_close, dot, values};

const GRID: [usize; 3] = [3, 1, 1];

#[test]
fn buffers_are_rounded() {
    for emulator in Emulator::both(&KernelSource::FLAT) {
        for n in [1, 255, 1_537] {
            let x = values(n, 1);
            let call = emulator.call("round_values", GRID, 256).floats(&x).out_acts(n);
            let halves: Vec<f64> = x.iter().map(|x| x * 0.5).collect();
            assert_eq!(call.long(n).float(0.5).run().acts(1), halves);
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
