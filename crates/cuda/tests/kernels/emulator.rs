//! Compiles kernels with `emulator.h` by the system's C++ compiler, and runs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;
use hone_cuda::KernelSource;

pub use super::fake::{built, skip};

const HEADER: &str = include_str!("emulator.h");

/// The list of kernels that `emulator.h` expects after a source.
fn registry(source: &KernelSource) -> String {
    let all: String =
        source.kernels().iter().map(|(name, _)| format!("KERNEL({name})\n")).collect();
    format!(
        "static const std::map<std::string, Kernel>& all_kernels() {{\n\
         static const std::map<std::string, Kernel> all = {{\n{all}}};\nreturn all;\n}}\n"
    )
}

/// Kernels of one source, with activations of one type.
pub struct Emulator {
    program: PathBuf,
    pub float: bool,
}

impl Emulator {
    /// One with activations in f32, and one in bf16; none without a C++ compiler.
    pub fn both(source: &KernelSource) -> Vec<Self> {
        [true, false].into_iter().filter_map(|float| Self::new(source, float)).collect()
    }

    pub fn new(source: &KernelSource, float: bool) -> Option<Self> {
        let text = format!("{HEADER}\n{}\n{}", source.text, registry(source));
        let dim = source.head_dim.map(|dim| format!("-DHEAD_DIM={dim}"));
        let mut flags =
            vec!["-O2", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", "-Wno-unused-function"];
        flags.extend(float.then_some("-DHONE_F32"));
        flags.extend(dim.as_deref());
        Some(Self { program: built(source.name, &text, &flags)?, float })
    }

    /// The largest error of a result, relative to its value and the mean magnitude.
    pub fn tolerance(&self) -> f64 {
        if self.float { 1e-5 } else { 1e-2 }
    }

    pub fn call<'e>(&'e self, kernel: &'e str, grid: [usize; 3], threads: usize) -> Call<'e> {
        Call {
            emulator: self,
            kernel,
            grid,
            threads,
            count: 0,
            arguments: Vec::new(),
            sizes: Vec::new(),
        }
    }

    fn bytes(&self, values: &[f64]) -> Vec<u8> {
        let float = |x: &f64| (*x as f32).to_le_bytes();
        if self.float {
            values.iter().flat_map(float).collect()
        } else {
            values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect()
        }
    }
}

/// A launch of a kernel. Arguments are added in their order.
pub struct Call<'e> {
    emulator: &'e Emulator,
    kernel: &'e str,
    grid: [usize; 3],
    threads: usize,
    count: u64,
    arguments: Vec<u8>,
    /// Bytes of each buffer.
    sizes: Vec<usize>,
}

impl Call<'_> {
    fn argument(mut self, is_buffer: bool, bytes: &[u8]) -> Self {
        for number in [u64::from(is_buffer), bytes.len() as u64] {
            self.arguments.extend(number.to_le_bytes());
        }
        self.arguments.extend(bytes);
        self.sizes.extend(is_buffer.then_some(bytes.len()));
        self.count += 1;
        self
    }

    /// A buffer of activations or weights.
    pub fn acts(self, values: &[f64]) -> Self {
        let bytes = self.emulator.bytes(values);
        self.argument(true, &bytes)
    }

    pub fn floats(self, values: &[f64]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        self.argument(true, &bytes)
    }

    pub fn doubles(self, values: &[f64]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.argument(true, &bytes)
    }

    pub fn ints(self, values: &[i32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.argument(true, &bytes)
    }

    /// A null pointer.
    pub fn null(self) -> Self {
        self.argument(true, &[])
    }

    /// A poisoned buffer of activations.
    pub fn out_acts(self, len: usize) -> Self {
        let bytes = vec![0xff; len * if self.emulator.float { 4 } else { 2 }];
        self.argument(true, &bytes)
    }

    /// A poisoned buffer of numbers of this many bytes.
    pub fn out(self, len: usize, bytes: usize) -> Self {
        self.argument(true, &vec![0xff; len * bytes])
    }

    pub fn int(self, value: usize) -> Self {
        self.argument(false, &(value as i32).to_le_bytes())
    }

    pub fn long(self, value: usize) -> Self {
        self.argument(false, &(value as i64).to_le_bytes())
    }

    pub fn float(self, value: f64) -> Self {
        self.argument(false, &(value as f32).to_le_bytes())
    }

    /// Runs the kernel with its threads in both orders, which must give the same bits.
    pub fn run(self) -> Buffers {
        let [first, second] = [0, 1].map(|order| self.run_in(order));
        assert!(first == second, "{}: the result depends on the order of threads", self.kernel);
        let mut rest = &first[..];
        let take = |size: &usize| {
            let (bytes, after) = rest.split_at(*size);
            rest = after;
            bytes.to_vec()
        };
        Buffers { float: self.emulator.float, bytes: self.sizes.iter().map(take).collect() }
    }

    fn run_in(&self, order: u64) -> Vec<u8> {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let mut request = Vec::new();
        let grid = self.grid.map(|size| size as u64);
        request.extend((self.kernel.len() as u64).to_le_bytes());
        request.extend(self.kernel.as_bytes());
        for number in [grid[0], grid[1], grid[2], self.threads as u64, order, self.count] {
            request.extend(number.to_le_bytes());
        }
        request.extend(&self.arguments);
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let name = format!("run-{}-{run}", std::process::id());
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::write(&file, request).unwrap();
        let output = Command::new(&self.emulator.program).arg(&file).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {}: {message}", self.kernel, output.status);
        let result = fs::read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(result.len(), self.sizes.iter().sum::<usize>());
        result
    }
}

/// The buffers of a call after it, counted from 0 without the numbers between them.
pub struct Buffers {
    float: bool,
    pub bytes: Vec<Vec<u8>>,
}

impl Buffers {
    pub fn acts(&self, buffer: usize) -> Vec<f64> {
        if self.float {
            return self.floats(buffer);
        }
        let chunks = self.bytes[buffer].as_chunks::<2>().0.iter();
        chunks.map(|x| bf16::from_le_bytes(*x).to_f64()).collect()
    }

    pub fn floats(&self, buffer: usize) -> Vec<f64> {
        let chunks = self.bytes[buffer].as_chunks::<4>().0.iter();
        chunks.map(|x| f64::from(f32::from_le_bytes(*x))).collect()
    }

    pub fn ints(&self, buffer: usize) -> Vec<i32> {
        self.bytes[buffer].as_chunks::<4>().0.iter().map(|x| i32::from_le_bytes(*x)).collect()
    }
}

/// Asserts that all values are within `tolerance`, relative to the value and to the mean magnitude. Poison is
/// no number and fails.
#[track_caller]
pub fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let mean = expected.iter().map(|x| x.abs()).sum::<f64>() / expected.len().max(1) as f64;
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / (expected.abs() + mean).max(1e-30);
        assert!(error <= tolerance, "{what}: value {i} is {found}, not {expected}");
    }
}

/// `count` values between -1 and 1 that are exact in bf16; `seed` chooses them.
pub fn values(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f64((state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0).to_f64()
    };
    (0..count).map(next).collect()
}

/// The gradient of `f` at `x` by central differences.
pub fn gradient(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let (step, mut x, indices) = (1e-5, x.to_vec(), 0..x.len());
    let derivative = |i: usize| {
        let value = x[i];
        x[i] = value + step;
        let above = f(&x);
        x[i] = value - step;
        let below = f(&x);
        x[i] = value;
        (above - below) / (2.0 * step)
    };
    indices.map(derivative).collect()
}

/// The products of corresponding values, added.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A fault in a kernel must not pass: each of these breaks one rule.
#[test]
fn the_emulator_finds_faults() {
    let broken = |body: &str| {
        let text = format!(
            "extern \"C\" __global__ void __launch_bounds__(64) broken(int* x) {{ {body} }}"
        );
        let text = format!("{}\n{text}", KernelSource::FLAT.text);
        let source = KernelSource::new("broken", text.leak());
        let emulator = Emulator::new(&source, true)?;
        let run = move || emulator.call("broken", [2, 1, 1], 64).out(128, 4).run().ints(0);
        Some(std::panic::catch_unwind(run).map_err(|e| e.downcast_ref::<String>().unwrap().clone()))
    };
    let faults = [
        ("if (threadIdx.x) __syncthreads();", "a barrier that not all threads reach"),
        ("if (threadIdx.x) __syncthreads();\nelse __syncthreads();", "threads wait in lines"),
        ("x[threadIdx.x] = x[threadIdx.x ^ 1] + 1;", "depends on the order of threads"),
        // The first warp to write again does so before the other has read.
        (
            "SHARED(int, s, 2); for (int k = 0; k < 2; k++) { if (threadIdx.x % 32 == 0) \
             s[threadIdx.x / 32] = k; __syncthreads(); x[64 * k + threadIdx.x] = s[0] + s[1]; }",
            "depends on the order of threads",
        ),
        ("x[128 + threadIdx.x] = 0;", "signal"),
        ("SHARED(int, s, 64); s[threadIdx.x + 1] = 0;", "index 64 of shared memory"),
    ];
    for (body, expected) in faults {
        let Some(result) = broken(body) else { return };
        let error = result.unwrap_err();
        assert!(error.contains(expected), "{body}: {error}");
    }
    let unwritten =
        broken("SHARED(int, s, 64); x[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];");
    assert_eq!(unwritten.unwrap().unwrap(), [-1; 128]);
}
