//! Embedding, norms, rotation and gated activations.

use hone_cuda::KernelSource;

use super::emulator::{Emulator, assert_close, dot, gradient, values};

const EPS: f64 = 1e-6;

fn rms_norm(x: &[f64], weight: &[f64], offset: f64) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + EPS).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * (w + offset)).collect()
}

/// Of rows as wide as the weight.
fn norm_rows(x: &[f64], weight: &[f64], offset: f64) -> Vec<f64> {
    x.chunks(weight.len()).flat_map(|row| rms_norm(row, weight, offset)).collect()
}

#[test]
fn tokens_are_embedded() {
    for emulator in Emulator::both(&KernelSource::ROWS) {
        for width in [1, 130, 300] {
            let (table, ids) = (values(7 * width, 1), [6, 0, 3, 3]);
            let call = emulator.call("embed", [4, 1, 1], 256).ints(&ids).acts(&table);
            let found = call.out(4 * width, 4).int(width).float(1.5).run().floats(2);
            let rows = ids.iter().flat_map(|id| &table[*id as usize * width..][..width]);
            let expected: Vec<f64> = rows.map(|x| x * 1.5).collect();
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn rows_are_gathered_and_their_gradients_added() {
    for emulator in Emulator::both(&KernelSource::ROWS) {
        for width in [1, 300] {
            let x = values(5 * width, 1);
            // A row of one, of none, of two, and of one again.
            let (starts, rows) = ([0, 1, 1, 3, 4], [4, 0, 3, 4]);
            let call = emulator.call("sum_rows", [4, 1, 1], 256).acts(&x).ints(&starts).ints(&rows);
            let found = call.out_acts(4 * width).int(width).run().acts(3);
            let sum = |row: usize| {
                let rows = &rows[starts[row] as usize..starts[row + 1] as usize];
                let x = &x;
                (0..width).map(move |i| rows.iter().map(|row| x[*row as usize * width + i]).sum())
            };
            let expected: Vec<f64> = (0..4).flat_map(sum).collect();
            assert_close(&found, &expected, emulator.tolerance(), "sums of rows");
        }
    }
}

#[test]
fn norms_of_the_residual_stream_and_their_gradients() {
    for emulator in Emulator::both(&KernelSource::ROWS) {
        let tolerance = emulator.tolerance();
        for (width, offset) in [(3, 0.0), (64, 1.0), (130, 0.0), (555, 1.0)] {
            let rows = 3;
            let grid = [rows, 1, 1];
            let [x, added, g] = [1, 2, 3].map(|seed| values(rows * width, seed));
            let weight = values(width, 4);
            let sum: Vec<f64> = x.iter().zip(&added).map(|(x, y)| x + y).collect();

            let call =
                emulator.call("residual_norm", grid, 256).floats(&x).acts(&added).floats(&weight);
            let call = call.out(rows * width, 4).out_acts(rows * width);
            let result = call.int(width).float(EPS).float(offset).run();
            assert_close(&result.floats(3), &sum, 1e-6, "sum");
            let expected = norm_rows(&sum, &weight, offset);
            assert_close(&result.acts(4), &expected, tolerance, "norm of the sum");

            let call = emulator.call("residual_norm", grid, 256).floats(&x).null().floats(&weight);
            let call = call.null().out_acts(rows * width);
            let result = call.int(width).float(EPS).float(offset).run();
            let expected = norm_rows(&x, &weight, offset);
            assert_close(&result.acts(4), &expected, tolerance, "norm");

            let call = emulator.call("residual_norm_backward", grid, 256);
            let call = call.floats(&x).acts(&g).floats(&weight).floats(&added);
            let result = call.int(width).float(EPS).float(offset).run();
            let dx = gradient(&x, |x| dot(&norm_rows(x, &weight, offset), &g));
            let expected: Vec<f64> =
                dx.iter().zip(&added).map(|(dx, before)| dx + before).collect();
            assert_close(&result.floats(3), &expected, 1e-5, "gradient of the norm");

            let call =
                emulator.call("norm_residual", grid, 256).floats(&x).acts(&added).floats(&weight);
            let call = call.out(rows * width, 4).int(width).float(EPS).float(offset);
            let normed = norm_rows(&added, &weight, offset);
            let expected: Vec<f64> = x.iter().zip(&normed).map(|(x, y)| x + y).collect();
            assert_close(&call.run().floats(3), &expected, 1e-5, "sum with a norm");

            let call = emulator.call("norm_residual_backward", grid, 256);
            let call = call.acts(&added).floats(&g).floats(&weight).out_acts(rows * width);
            let result = call.int(width).float(EPS).float(offset).run();
            let expected = gradient(&added, |y| dot(&norm_rows(y, &weight, offset), &g));
            assert_close(&result.acts(3), &expected, tolerance, "gradient of a sum with a norm");
        }
    }
}

/// Heads of tokens at these positions, rotated; `norm` is weight and offset.
fn rotated(
    x: &[f64],
    dim: usize,
    heads: usize,
    angles: &[Vec<f64>],
    norm: Option<(&[f64], f64)>,
) -> Vec<f64> {
    let rotate = |(i, head): (usize, &[f64])| {
        let mut head =
            norm.map_or(head.to_vec(), |(weight, offset)| rms_norm(head, weight, offset));
        let angles = &angles[i / heads];
        let half = angles.len();
        for (j, angle) in angles.iter().enumerate() {
            let (a, b) = (head[j], head[j + half]);
            head[j] = a * angle.cos() - b * angle.sin();
            head[j + half] = b * angle.cos() + a * angle.sin();
        }
        head
    };
    x.chunks(dim).enumerate().flat_map(rotate).collect()
}

#[test]
fn heads_are_normalized_and_rotated_and_back() {
    let positions = [3, 0, 1, 2, 6];
    for emulator in Emulator::both(&KernelSource::ROWS) {
        for (dim, half, heads, with_norm) in [
            (64, 32, 3, true),
            (80, 16, 2, false),
            (96, 0, 1, true),
            (128, 64, 2, false),
            (10, 3, 1, true),
        ] {
            let tokens = positions.len();
            // Heads are a part of wider rows.
            let (width, stride) = (heads * dim, heads * dim + 24);
            let [rows, grads] = [1, 2].map(|seed| values(tokens * stride, seed));
            let take = |rows: &[f64]| -> Vec<f64> {
                rows.chunks(stride).flat_map(|row| row[..width].to_vec()).collect()
            };
            let (x, g) = (take(&rows), take(&grads));
            let weight = values(dim, 3);
            let angle = |p: usize, j: usize| p as f64 * 0.7_f64.powi(j as i32);
            let table = |f: fn(f64) -> f64| -> Vec<f64> {
                (0..7).flat_map(|p| (0..half).map(move |j| f(angle(p, j)))).collect()
            };
            let angles: Vec<Vec<f64>> = positions
                .iter()
                .map(|p| (0..half).map(|j| angle(*p as usize, j)).collect())
                .collect();
            let norm = with_norm.then_some((&weight[..], 1.0));
            let blocks = [(tokens * heads).div_ceil(4), 1, 1];
            let call = |name, first: &[f64]| {
                let call = emulator.call(name, blocks, 128).acts(first);
                let call = if with_norm { call.floats(&weight) } else { call.null() };
                call.floats(&table(f64::cos)).floats(&table(f64::sin)).ints(&positions)
            };
            let expected = rotated(&x, dim, heads, &angles, norm);
            let finish = |call: super::emulator::Call<'_>, last_stride| {
                let call =
                    call.int(tokens).int(heads).int(dim).int(half).int(stride).int(last_stride);
                call.float(EPS).float(1.0).run()
            };
            let result = finish(call("rotate_heads", &rows).out_acts(tokens * width), width);
            assert_close(&result.acts(5), &expected, emulator.tolerance(), "rotation");
            assert_eq!(take(&result.acts(0)), x);

            let result = finish(call("rotate_heads_backward", &rows).acts(&grads), stride);
            let expected = gradient(&x, |x| dot(&rotated(x, dim, heads, &angles, norm), &g));
            let found = result.acts(5);
            assert_close(&take(&found), &expected, emulator.tolerance(), "gradient of rotation");
            // What is beside the heads is left alone.
            for (found, before) in found.chunks(stride).zip(grads.chunks(stride)) {
                assert_eq!(found[width..], before[width..]);
            }
        }
    }
}

#[test]
fn gated_activations_and_their_gradients() {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let gelu = |x: f64| 0.5 * x * (1.0 + (root * (x + 0.044715 * x * x * x)).tanh());
    let activations: [&dyn Fn(f64) -> f64; 2] = [&silu, &gelu];
    for emulator in Emulator::both(&KernelSource::ROWS) {
        for (kind, width) in [(0, 1), (0, 300), (1, 77), (1, 256)] {
            let rows = 3;
            let gate_up: Vec<f64> = values(rows * 2 * width, 5).iter().map(|x| 8.0 * x).collect();
            let g = values(rows * width, 6);
            let apply = |x: &[f64]| -> Vec<f64> {
                let product = |row: &[f64], i: usize| activations[kind](row[i]) * row[width + i];
                x.chunks(2 * width)
                    .flat_map(|row| (0..width).map(move |i| product(row, i)))
                    .collect()
            };
            let call = emulator.call("gated_activation", [rows, 1, 1], 256).acts(&gate_up);
            let result = call.out_acts(rows * width).int(width).int(kind).run();
            assert_close(&result.acts(1), &apply(&gate_up), emulator.tolerance(), "activation");
            let call = emulator.call("gated_activation_backward", [rows, 1, 1], 256).acts(&gate_up);
            let result = call.acts(&g).int(width).int(kind).run();
            let expected = gradient(&gate_up, |x| dot(&apply(x), &g));
            assert_close(
                &result.acts(0),
                &expected,
                emulator.tolerance(),
                "gradient of activation",
            );
        }
    }
}
