//! Products of matrices, with the cuBLASLt of `fake_cuda.cpp`.

use std::sync::Arc;

use half::bf16;
use hone_cuda::{
    Arena, ArenaPlan, DeviceFloat, DeviceMatrix, Gpu, ProductTerms, Products, Staging,
    StreamPriority,
};

use super::device::{ALL, run};
use super::emulator::{assert_close, values};

fn bytes(values: &[f64], float: DeviceFloat) -> Vec<u8> {
    match float {
        DeviceFloat::F32 => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        DeviceFloat::Bf16 => values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
    }
}

fn floats(bytes: &[u8], float: DeviceFloat) -> Vec<f64> {
    match float {
        DeviceFloat::F32 => {
            bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x).into()).collect()
        }
        DeviceFloat::Bf16 => {
            bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f64()).collect()
        }
    }
}

#[test]
fn matrices_are_multiplied_in_all_layouts() {
    run("products::multiply", &ALL, &[]);
}

#[test]
#[ignore = "started by `matrices_are_multiplied_in_all_layouts`"]
fn multiply() {
    let gpu = Arc::new(Gpu::open(0).unwrap());
    let mut plan = ArenaPlan::new("matrices");
    ["a", "b", "out", "bias", "workspace"].iter().for_each(|name| plan.add(name, 4096));
    let arena = &Arena::allocate(&gpu, vec![plan], 0).unwrap()[0];
    let [a, b, out, bias, workspace] =
        ["a", "b", "out", "bias", "workspace"].map(|name| arena.region(name).unwrap());
    let stream = gpu.stream(StreamPriority::Training).unwrap();
    let mut staging = Staging::new(&gpu, &stream, 4096).unwrap();
    let products = Products::new(&gpu, &stream, workspace).unwrap();

    let (m, k, n) = (5, 7, 11);
    let [x, y, z, row] = [m * k, k * n, m * n, n].map(|count| values(count, count as u64));
    let transposed = |x: &[f64], rows: usize, columns: usize| -> Vec<f64> {
        (0..columns).flat_map(|c| (0..rows).map(move |r| x[r * columns + c])).collect()
    };
    use DeviceFloat::{Bf16, F32};
    let mut case = 0;
    for (float, result) in [(F32, F32), (Bf16, Bf16), (Bf16, F32)] {
        for [a_turned, b_turned, is_part] in
            [0, 1, 2, 3, 4, 5, 6, 7].map(|bits| [1, 2, 4].map(|bit| bits & bit != 0))
        {
            case += 1;
            // Some cases add to what is there, some add a bias, some do both.
            let (beta, adds_row) = ([0.0, 0.5, 1.0][case % 3], case % 2 == 0);
            let in_memory = |x: &[f64], rows, columns, turned| match turned {
                true => (transposed(x, rows, columns), [columns, rows]),
                false => (x.to_vec(), [rows, columns]),
            };
            let (a_values, a_shape) = in_memory(&x, m, k, a_turned);
            let (b_values, b_shape) = in_memory(&y, k, n, b_turned);
            staging.upload(&bytes(&a_values, float), a).unwrap();
            staging.upload(&bytes(&b_values, float), b).unwrap();
            staging.upload(&bytes(&row, result), bias).unwrap();
            // The result may be columns 3 to 14 of wider rows, whose other values are left alone.
            let (first, stride) = if is_part { (3, 16) } else { (0, n) };
            let before = vec![9.0; m * stride];
            let place = |all: &[f64]| -> Vec<f64> {
                all.chunks(stride).flat_map(|row| row[first..first + n].to_vec()).collect()
            };
            let mut filled = before.clone();
            for (to, from) in filled.chunks_mut(stride).zip(z.chunks(n)) {
                to[first..first + n].copy_from_slice(from);
            }
            // Without a factor, values are not read.
            let poison = vec![f64::NAN; m * stride];
            let start = if beta == 0.0 && !is_part { &poison } else { &filled };
            staging.upload(&bytes(start, result), out).unwrap();
            let turn = |matrix: DeviceMatrix, turned| if turned { matrix.t() } else { matrix };
            let a_matrix = turn(DeviceMatrix::new(a.address, a_shape, float), a_turned);
            let b_matrix = turn(DeviceMatrix::new(b.address, b_shape, float), b_turned);
            let to = DeviceMatrix::new(out.address, [m, stride], result).columns(first, n);
            let bias = if adds_row { bias.address } else { 0 };
            let terms = ProductTerms { alpha: 0.25, beta, bias };
            // Twice, so that the second uses what the first prepared.
            for _ in 0..2 {
                staging.upload(&bytes(start, result), out).unwrap();
                // SAFETY: the regions have room for the matrices.
                unsafe { products.multiply(to, a_matrix, b_matrix, terms) }.unwrap();
            }
            let mut found = bytes(&before, result);
            staging.download(out, &mut found).unwrap();
            let found = floats(&found, result);
            let expected: Vec<f64> = (0..m * n)
                .map(|i| {
                    let dot: f64 = (0..k).map(|j| x[i / n * k + j] * y[j * n + i % n]).sum();
                    let added = if adds_row { row[i % n] } else { 0.0 };
                    0.25 * dot + f64::from(beta) * z[i] + added
                })
                .collect();
            let tolerance = if result == F32 { 1e-6 } else { 1e-2 };
            let what = format!("{float:?} to {result:?}, case {case}");
            assert_close(&place(&found), &expected, tolerance, &what);
            let beside = found.chunks(stride).flat_map(|row| [&row[..first], &row[first + n..]]);
            assert!(beside.flatten().all(|x| *x == 9.0), "{what}");
        }
    }

    let matrix = |shape| DeviceMatrix::new(a.address, shape, F32);
    let result = DeviceMatrix::new(out.address, [2, 3], F32);
    // SAFETY: the regions have room for the matrices.
    let multiply = |a, b| unsafe { products.multiply(result, a, b, ProductTerms::REPLACE) };
    let error = multiply(matrix([2, 4]), matrix([5, 3])).unwrap_err().to_string();
    assert!(error.contains("is no product of"), "{error}");
    assert!(multiply(matrix([2, 4]), DeviceMatrix::new(b.address, [4, 3], Bf16)).is_err());
    // No rows are no work.
    let empty = DeviceMatrix::new(out.address, [0, 3], F32);
    // SAFETY: nothing is read or written.
    unsafe { products.multiply(empty, matrix([0, 4]), matrix([4, 3]), ProductTerms::REPLACE) }
        .unwrap();
}
