//! Compiles all kernels with NVRTC for three architectures, without a driver.
//!
//! `HONE_NVRTC` names the folder of `libnvrtc.so.13`, as `tests/fetch-nvrtc` prints it. The registers and
//! spills of each kernel are in `registers.md`, which `HONE_REGISTERS=write` updates after a change of kernels.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use hone_cuda::{CubinTarget, CudaLibrary, KernelSource, compile};

use super::emulator::skip;

const ARCHITECTURES: [u32; 3] = [80, 90, 120];

fn sources() -> Vec<KernelSource> {
    use KernelSource as Source;
    let attention = [64, 80, 96, 128, 256].map(|dim| Source::attention(dim).unwrap());
    [Source::ROWS, Source::HEAD, Source::FLAT, Source::ADAPTERS, Source::SAMPLE]
        .into_iter()
        .chain(attention)
        .collect()
}

/// Registers, bytes of local memory and bytes of shared memory of each kernel, from the log of ptxas. Local
/// memory is the stack, where arrays are that registers do not hold, and spills.
fn usage(log: &str) -> BTreeMap<String, [u32; 3]> {
    let mut found: BTreeMap<String, [u32; 3]> = BTreeMap::new();
    let mut kernel = String::new();
    for line in log.lines() {
        let before = |word: &str| {
            let number = line.split(word).next().unwrap().split_whitespace().next_back().unwrap();
            number.parse::<u32>().unwrap_or(0)
        };
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap().to_owned();
        } else if line.contains("bytes spill stores") {
            let parts = [" bytes stack frame", " bytes spill stores", " bytes spill loads"];
            found.entry(kernel.clone()).or_default()[1] = parts.map(before).iter().sum();
        } else if line.contains(" registers") {
            let shared = if line.contains(" bytes smem") { before(" bytes smem") } else { 0 };
            let entry = found.entry(kernel.clone()).or_default();
            (entry[0], entry[2]) = (before(" registers"), shared);
        }
    }
    found
}

/// Runs in a process of its own, whose LD_LIBRARY_PATH has NVRTC.
#[test]
#[ignore = "started by `all_kernels_compile_for_all_architectures`"]
fn compile_with_nvrtc() {
    let nvrtc = CudaLibrary::Nvrtc.version().unwrap();
    let mut table = format!(
        "# Registers of the kernels\n\nNVRTC {nvrtc}: registers a thread, bytes of local memory (stack and spills) \
         and bytes of shared memory for each architecture. Written by `crates/cuda/tests/kernels/nvrtc.rs`.\n\n| kernel | sm_80 | sm_90 | sm_120 |\n\
         | --- | --- | --- | --- |\n"
    );
    for source in sources() {
        let usages = ARCHITECTURES.map(|architecture| {
            let target = CubinTarget { architecture, nvrtc };
            let compiled = compile(&source, &target, &["--ptxas-options=-v"]).unwrap();
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{}", source.name);
            let warnings = compiled.log.lines().filter(|line| line.contains("warning"));
            assert_eq!(warnings.collect::<Vec<_>>(), [""; 0], "{}", source.name);
            usage(&compiled.log)
        });
        for (name, _) in source.kernels() {
            let dim = source.head_dim.map_or(String::new(), |dim| format!(", {dim}"));
            write!(table, "| {name}{dim} |").unwrap();
            for (usage, architecture) in usages.iter().zip(ARCHITECTURES) {
                let [registers, local, shared] = usage[name];
                assert!(registers > 0, "{name} for sm_{architecture}");
                assert_eq!(local, 0, "{name}{dim} for sm_{architecture} uses local memory");
                assert!(
                    shared <= 48 << 10,
                    "{name}{dim} for sm_{architecture}: {shared} bytes shared"
                );
                write!(table, " {registers}, {local}, {shared} |").unwrap();
            }
            table.push('\n');
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/registers.md");
    if env::var_os("HONE_REGISTERS").is_some_and(|value| value == "write") {
        fs::write(&path, &table).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    // Another version of the compiler has other numbers.
    if committed.contains(&format!("NVRTC {nvrtc}:")) {
        assert_eq!(table, committed);
    }
}

#[test]
fn all_kernels_compile_for_all_architectures() {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "nvrtc::compile_with_nvrtc", "--ignored"]);
    match env::var_os("HONE_NVRTC") {
        Some(folder) => drop(child.env("LD_LIBRARY_PATH", folder)),
        None if CudaLibrary::Nvrtc.find().is_err() => {
            return skip("no NVRTC: set HONE_NVRTC to what tests/fetch-nvrtc prints");
        }
        None => {}
    }
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn a_log_of_ptxas_is_read() {
    let log = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'embed' for 'sm_90'\n\
        ptxas info    : Function properties for embed\n\
        \x20   8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
        ptxas info    : Used 22 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]\n";
    assert_eq!(usage(log), BTreeMap::from([("embed".to_owned(), [22, 24, 128])]));
}
