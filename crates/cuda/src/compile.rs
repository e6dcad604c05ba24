//! Compiles kernels with NVRTC to cubins for one architecture, and keeps them in files.
//!
//! Cubins rather than PTX: a driver refuses PTX of a newer NVRTC, while a cubin runs with every driver of the
//! same major version of CUDA.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::nvrtc::sys;
use sha2::{Digest, Sha256};

use crate::error::{GpuError, Result, call};
use crate::kernels::{DeviceFloat, KernelSource};
use crate::libraries::{CudaLibrary, CudaVersion};

/// What kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub struct CubinTarget {
    /// 90 for compute capability 9.0.
    pub architecture: u32,
    /// The version of the NVRTC that compiles.
    pub nvrtc: CudaVersion,
}

/// Compiled kernels.
#[derive(Clone, Debug)]
pub struct CompiledKernels {
    /// The binary for the driver.
    pub cubin: Vec<u8>,
    /// Messages of the compiler.
    pub log: String,
}

fn options(source: &KernelSource, target: &CubinTarget) -> Vec<String> {
    let mut options =
        vec![format!("--gpu-architecture=sm_{}", target.architecture), "--std=c++17".to_owned()];
    options.extend(source.head_dim.map(|dim| format!("-DHEAD_DIM={dim}")));
    options.extend((source.float == DeviceFloat::F32).then(|| "-DHONE_F32".to_owned()));
    options
}

/// A program of NVRTC, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: NVRTC made the program, and nothing uses it any more.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

impl Program {
    fn log(&self) -> Result<String> {
        let mut size = 0;
        // SAFETY: the program is alive and the pointer is valid for the call.
        unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut size) }
            .result()
            .map_err(|error| call("nvrtcGetProgramLogSize", error))?;
        let mut log = vec![0_u8; size];
        // SAFETY: NVRTC writes as many bytes as it said.
        unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast::<c_char>()) }
            .result()
            .map_err(|error| call("nvrtcGetProgramLog", error))?;
        let text = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        Ok(text.to_string_lossy().trim().to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive and the pointer is valid for the call.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut size) }
            .result()
            .map_err(|error| call("nvrtcGetCUBINSize", error))?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: NVRTC writes as many bytes as it said.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>()) }
            .result()
            .map_err(|error| call("nvrtcGetCUBIN", error))?;
        Ok(cubin)
    }
}

/// Compiles `source`. Needs NVRTC, but neither a driver nor a device. `more` are further options, such as
/// `--ptxas-options=-v`, which adds registers and spills to the log.
///
/// # Errors
/// If NVRTC is missing or refuses the source.
pub fn compile(
    source: &KernelSource,
    target: &CubinTarget,
    more: &[&str],
) -> Result<CompiledKernels> {
    CudaLibrary::Nvrtc.find()?;
    let zero = |_| GpuError::Misuse(format!("{} or its options contain a zero byte", source.name));
    let text = CString::new(source.text).map_err(zero)?;
    let name = CString::new(source.name).map_err(zero)?;
    let options = options(source, target).into_iter().chain(more.iter().map(|o| (*o).to_owned()));
    let options =
        options.map(|o| CString::new(o).map_err(zero)).collect::<Result<Vec<CString>>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = Program(ptr::null_mut());
    // SAFETY: the library is there; both strings end with 0; there are no headers.
    unsafe {
        let (text, name) = (text.as_ptr(), name.as_ptr());
        sys::nvrtcCreateProgram(&raw mut program.0, text, name, 0, ptr::null(), ptr::null())
    }
    .result()
    .map_err(|error| call("nvrtcCreateProgram", error))?;
    // SAFETY: the program is alive, and so are the options that the pointers name.
    let compiled =
        unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr()) };
    let log = program.log()?;
    if let Err(error) = compiled.result() {
        let architecture = format!("sm_{}", target.architecture);
        let log = if log.is_empty() { error.to_string() } else { log };
        return Err(GpuError::Compile { kernels: source.name, architecture, log });
    }
    Ok(CompiledKernels { cubin: program.cubin()?, log })
}

/// Compiled kernels in files, by source, options, architecture and compiler.
#[derive(Clone, Debug)]
pub struct CubinCache {
    directory: PathBuf,
}

/// Bytes of the digest at the start of a file.
const DIGEST: usize = 32;

impl CubinCache {
    /// A cache in this directory, which is made when it is needed.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// The cubin of `source`, compiled if it is not in the cache, or not whole.
    ///
    /// # Errors
    /// If it does not compile, or the cache cannot be written.
    pub fn cubin(&self, source: &KernelSource, target: &CubinTarget) -> Result<Vec<u8>> {
        self.cubin_with(source, target, || compile(source, target, &[]).map(|done| done.cubin))
    }

    fn cubin_with(
        &self,
        source: &KernelSource,
        target: &CubinTarget,
        compile: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let path = self.path(source, target);
        match fs::read(&path) {
            Ok(bytes) => {
                if let Some((digest, cubin)) = bytes.split_first_chunk::<DIGEST>()
                    && Sha256::digest(cubin)[..] == digest[..]
                {
                    return Ok(cubin.to_owned());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(GpuError::Cache { path, source }),
        }
        let cubin = compile()?;
        self.write(&path, &cubin).map_err(|source| GpuError::Cache { path, source })?;
        Ok(cubin)
    }

    fn path(&self, source: &KernelSource, target: &CubinTarget) -> PathBuf {
        let mut digest = Sha256::new();
        let nvrtc = target.nvrtc.to_string();
        let options = options(source, target);
        let parts = [source.text, &nvrtc].into_iter().chain(options.iter().map(String::as_str));
        for part in parts {
            // With its length, so that no two lists of parts have the same bytes.
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        self.directory.join(format!("{:x}.cubin", digest.finalize()))
    }

    /// Writes a file beside the path and renames it, so that readers see all of it or nothing.
    fn write(&self, path: &Path, cubin: &[u8]) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.directory)?;
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{number}", std::process::id()));
        let written = File::create(&temporary).and_then(|mut file| {
            file.write_all(&Sha256::digest(cubin))?;
            file.write_all(cubin)?;
            file.sync_all()?;
            fs::rename(&temporary, path)
        });
        if written.is_err() {
            // The error of the write says more than one of this removal.
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const TARGET: CubinTarget =
        CubinTarget { architecture: 90, nvrtc: CudaVersion { major: 13, minor: 0 } };

    #[test]
    fn a_cubin_is_compiled_once_for_each_key() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(&directory.path().join("cubins"));
        let compiled = Cell::new(0_u8);
        let get = |source: &KernelSource, target: &CubinTarget| {
            let compile = || {
                compiled.set(compiled.get() + 1);
                Ok(vec![compiled.get(); 100])
            };
            cache.cubin_with(source, target, compile).unwrap()[0]
        };
        assert_eq!([get(&KernelSource::ROWS, &TARGET), get(&KernelSource::ROWS, &TARGET)], [1, 1]);
        let newer = CudaVersion { minor: 1, ..TARGET.nvrtc };
        let others = [
            (KernelSource::HEAD, TARGET),
            (KernelSource::attention(64).unwrap(), TARGET),
            (KernelSource::attention(128).unwrap(), TARGET),
            (KernelSource::ROWS, CubinTarget { architecture: 80, ..TARGET }),
            (KernelSource::ROWS, CubinTarget { nvrtc: newer, ..TARGET }),
        ];
        for (i, (source, target)) in others.iter().enumerate() {
            assert_eq!(usize::from(get(source, target)), i + 2);
        }
        assert_eq!(get(&KernelSource::ROWS, &TARGET), 1);
        // No temporary file is left.
        let names = fs::read_dir(&cache.directory).unwrap().map(|e| e.unwrap().file_name());
        let names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        assert!(names.len() == 6 && names.iter().all(|name| name.ends_with(".cubin")), "{names:?}");
    }

    #[test]
    fn a_broken_file_is_compiled_again() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path());
        let get = |value| cache.cubin_with(&KernelSource::FLAT, &TARGET, || Ok(vec![value; 50]));
        assert_eq!(get(1).unwrap(), [1; 50]);
        let path = cache.path(&KernelSource::FLAT, &TARGET);
        let whole = fs::read(&path).unwrap();
        let mut changed = whole.clone();
        changed[60] ^= 1;
        for (i, broken) in [&whole[..70], &whole[..10], &[], &changed].into_iter().enumerate() {
            fs::write(&path, broken).unwrap();
            assert_eq!(get(i as u8 + 2).unwrap(), [i as u8 + 2; 50]);
        }
        assert_eq!(get(9).unwrap(), [5; 50]);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let cache = CubinCache::new(&file.join("cubins"));
        let error = cache.cubin_with(&KernelSource::FLAT, &TARGET, || Ok(Vec::new())).unwrap_err();
        assert!(error.to_string().starts_with(file.to_str().unwrap()), "{error}");
    }
}
