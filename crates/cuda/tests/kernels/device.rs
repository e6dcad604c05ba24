//! The whole way from opening a device to the result of a kernel, with the driver of `fake_cuda.cpp`.

use std::env;
use std::fs;
use std::sync::Arc;

use hone_cuda::{
    Arena, ArenaPlan, CubinCache, CudaLibrary, DeviceMemory, Gpu, KernelArgument, KernelSource,
    LoadedKernels, Staging, StreamPriority, inventory,
};

use super::emulator::skip;
pub use super::fake::{ALL, run};

#[test]
fn a_kernel_runs_on_a_device() {
    run("device::run_a_kernel", &ALL, &[]);
}

#[test]
#[ignore = "started by `a_kernel_runs_on_a_device`"]
fn run_a_kernel() {
    assert_eq!(
        inventory().to_string(),
        "CUDA driver of unknown release, for CUDA 13.0\nNVRTC 13.0\ncuBLASLt 13.0\n\
         cuda:0 Emulated, compute capability 9.0, 4 multiprocessors, 0.0 GiB of memory, 0.0 GiB free\n"
    );
    let error = Gpu::open(1).unwrap_err().to_string();
    assert_eq!(error, "there is no device 1: the driver shows 1, counted from 0");
    let gpu = Arc::new(Gpu::open(0).unwrap());
    assert_eq!(gpu.target().architecture, 90);
    let free = gpu.free_bytes().unwrap();
    let plan = |bytes| {
        let mut plan = ArenaPlan::new("activations");
        plan.add("wide", bytes);
        plan.add("rounded", 2_000);
        vec![plan]
    };
    let error = Arena::allocate(&gpu, plan(1 << 24), 1 << 20).unwrap_err().to_string();
    assert_eq!(
        error,
        "16.0 MiB of device memory are needed, but 15.0 MiB are free beside a reserve of 1.0 MiB: activations 16.0 MiB"
    );
    let mut arena = Arena::allocate(&gpu, plan(4_000), 0).unwrap();
    for _ in 0..1_000 {
        arena = Arena::allocate(&gpu, plan(4_000), 0).unwrap();
    }
    let [wide, rounded] = ["wide", "rounded"].map(|name| arena[0].region(name).unwrap());

    let stream = gpu.stream(StreamPriority::Training).unwrap();
    // Data of several pieces, the last of which is not whole.
    let mut staging = Staging::new(&gpu, &stream, 300).unwrap();
    let values: Vec<f32> = (0..1_000_u16).map(|i| f32::from(i) / 7.0).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    staging.upload(&bytes, wide).unwrap();
    assert!(staging.upload(&bytes, rounded).is_err());
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(folder.path());
    let kernels = LoadedKernels::load(&gpu, &cache, &[KernelSource::FLAT]).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    use KernelArgument::{Address, Float, Int, Long};
    let launch = |name, arguments: &[KernelArgument]| {
        // SAFETY: the regions have 1,000 values.
        unsafe { kernels.launch(&stream, name, [3, 1, 1], 256, arguments) }
    };
    let addresses = [Address(wide.address), Address(rounded.address)];
    let arguments = [addresses[0], addresses[1], Long(1_000), Float(0.5)];
    launch("round_values", &arguments).unwrap();
    let mut result = vec![0; 2_000];
    staging.download(rounded, &mut result).unwrap();
    let expected = values.iter().flat_map(|x| half::bf16::from_f32(x * 0.5).to_le_bytes());
    assert_eq!(result, expected.collect::<Vec<u8>>());

    let error = launch("round_values", &arguments[..3]).unwrap_err().to_string();
    assert!(
        error.starts_with("round_values(const float* x, act* out, offset n, float scale) with [")
    );
    let wrong = [addresses[0], addresses[1], Int(1_000), Float(0.5)];
    assert!(launch("round_values", &wrong).is_err());
    assert_eq!(launch("sort", &[]).unwrap_err().to_string(), "no kernel `sort`");
    // Broken code is refused with the compiler's message.
    let broken = KernelSource::new("broken.cu", "int x = y;");
    let error = LoadedKernels::load(&gpu, &cache, &[broken]).unwrap_err().to_string();
    assert!(error.starts_with("broken.cu did not compile for sm_90: "), "{error}");
    drop(arena);
    assert_eq!(gpu.free_bytes().unwrap(), free);
}

#[test]
fn a_device_that_cannot_be_used_is_refused_with_the_reason() {
    let refusal = |expected, libraries: &[&str], settings: &[(&str, &str)]| {
        run("device::refuse", libraries, &[&[("HONE_EXPECTED", expected)], settings].concat());
    };
    refusal("there is no device 0: the driver shows 0", &ALL, &[("HONE_FAKE_DEVICES", "0")]);
    refusal(
        "device 0 (Emulated) has compute capability 7.5, but kernels need 8.0",
        &ALL,
        &[("HONE_FAKE_CAPABILITY", "75")],
    );
    refusal(
        "the driver supports CUDA 12.8, but the NVRTC found is of CUDA 13.0, whose code needs driver 580",
        &ALL,
        &[("HONE_FAKE_DRIVER", "12080")],
    );
    refusal("NVRTC is of CUDA 11.8, but must be of CUDA 12", &ALL, &[("HONE_FAKE_NVRTC", "1108")]);
    refusal("cuBLASLt is of CUDA 11.5", &ALL, &[("HONE_FAKE_CUBLASLT", "110502")]);
    if CudaLibrary::Nvrtc.find().is_ok() || CudaLibrary::CublasLt.find().is_ok() {
        return skip("CUDA libraries are installed, so none can be missing");
    }
    refusal("NVRTC not found: looked for libnvrtc.so, libnvrtc.so.13", &["libcuda.so.1"], &[]);
    refusal("cuBLASLt not found", &["libcuda.so.1", "libnvrtc.so.12"], &[]);
}

#[test]
#[ignore = "started by `a_device_that_cannot_be_used_is_refused_with_the_reason`"]
fn refuse() {
    let error = Gpu::open(0).unwrap_err().to_string();
    let expected = env::var("HONE_EXPECTED").unwrap();
    assert!(error.starts_with(&expected), "{error}");
    // The inventory says the same in its own lines, and does not fail.
    assert!(inventory().to_string().lines().count() >= 4);
}
