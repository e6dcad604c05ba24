//! What can go wrong with a device.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::libraries::{CudaLibrary, CudaVersion, LibraryError};

/// Results of this crate.
pub type Result<T, E = GpuError> = std::result::Result<T, E>;

/// Why a device cannot be used. Each message says what was looked for and what would help.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// A library is missing, or one of its functions failed.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A library is older than CUDA 12.
    #[error("{library} is of CUDA {found}, but must be of CUDA 12 or newer; {}", library.remedy())]
    OldLibrary {
        /// The library.
        library: CudaLibrary,
        /// Its version.
        found: CudaVersion,
    },
    /// Code that NVRTC compiles would not run with the driver.
    #[error(
        "the driver supports CUDA {driver}, but the NVRTC found is of CUDA {nvrtc}, whose code needs driver {} \
         or newer; install that driver, or NVRTC of CUDA {} in place of this one",
        nvrtc.least_driver(),
        driver.major
    )]
    OldDriver {
        /// The newest CUDA version that the driver supports.
        driver: CudaVersion,
        /// NVRTC's version.
        nvrtc: CudaVersion,
    },
    /// There is no device with this number.
    #[error("there is no device {ordinal}: the driver shows {found}, counted from 0")]
    NoDevice {
        /// The number that was asked for.
        ordinal: usize,
        /// Devices that the driver shows.
        found: usize,
    },
    /// The device does not have the instructions that kernels use.
    #[error(
        "device {ordinal} ({name}) has compute capability {}.{}, but kernels need 8.0 (Ampere) or newer",
        capability.0,
        capability.1
    )]
    OldDevice {
        /// The device's number.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Its compute capability.
        capability: (u32, u32),
    },
    /// A plan does not fit into the device's memory.
    #[error(
        "{} of device memory are needed, but {} are free{reserved}: {parts}",
        mib(*needed),
        mib(*available)
    )]
    PlanTooLarge {
        /// Bytes of all regions.
        needed: u64,
        /// Bytes that the device has free, without the reserve.
        available: u64,
        /// The reserve in words, or nothing.
        reserved: String,
        /// What needs how much.
        parts: String,
    },
    /// A region that no plan names, or data of another size.
    #[error("{0}")]
    Misuse(String),
    /// A kernel's source was not compiled.
    #[error("{kernels} did not compile for {architecture}: {log}")]
    Compile {
        /// Name of the source.
        kernels: &'static str,
        /// The architecture.
        architecture: String,
        /// The compiler's messages.
        log: String,
    },
    /// The cache of compiled kernels cannot be read or written.
    #[error("{}: {source}", path.display())]
    Cache {
        /// The file or directory.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
}

/// Bytes in MiB.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A function of a library that failed.
pub(crate) fn call(name: &'static str, error: impl fmt::Display) -> GpuError {
    GpuError::Library(LibraryError::call(name, error))
}
