//! The kernels, without a GPU: compiled by NVRTC for several architectures, and run by an emulator of thread
//! blocks against references in f64.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

mod attention;
mod device;
mod elementwise;
mod emulator;
mod fake;
mod head;
mod learner;
mod nvrtc;
mod products;
mod rows;
mod sampler;
mod sampling;
mod trainer;

use std::process::Command;

/// A program with this crate starts without CUDA, as its dynamic section names no library of CUDA.
#[test]
fn a_program_needs_no_cuda_library_to_start() {
    let program = std::env::current_exe().unwrap();
    let Ok(output) = Command::new("readelf").arg("-d").arg(program).output() else {
        return emulator::skip("no readelf");
    };
    let text = String::from_utf8_lossy(&output.stdout).to_lowercase();
    let needed: Vec<&str> = text.lines().filter(|line| line.contains("(needed)")).collect();
    let is_cuda = |line: &&str| ["cuda", "nvrtc", "cublas"].iter().any(|name| line.contains(name));
    assert!(!needed.is_empty() && !needed.iter().any(is_cuda), "{needed:?}");
}
