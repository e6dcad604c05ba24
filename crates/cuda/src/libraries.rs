//! The libraries that are opened at run time.

use std::fmt;

use cudarc::{cublaslt, driver, nvrtc};

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// 13 in 13.0.
    pub major: u32,
    /// 0 in 13.0.
    pub minor: u32,
}

impl CudaVersion {
    /// The oldest driver whose release runs code of this version ("CUDA compatibility", minor versions).
    pub fn least_driver(self) -> u32 {
        if self.major >= 13 { 580 } else { 525 }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaLibrary {
    /// The driver's library.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

impl fmt::Display for CudaLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "CUDA driver",
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
        })
    }
}

impl CudaLibrary {
    /// The names of the files that are looked for.
    pub fn searched(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so, libcuda.so.1",
            Self::Nvrtc => "libnvrtc.so, libnvrtc.so.13, libnvrtc.so.12",
            Self::CublasLt => "libcublasLt.so, libcublasLt.so.13, libcublasLt.so.12",
        }
    }

    /// What to install.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver, 525 or newer",
            Self::Nvrtc => {
                "install the CUDA toolkit, or the Python package nvidia-cuda-nvrtc and name its folder in \
                 LD_LIBRARY_PATH"
            }
            Self::CublasLt => {
                "install the CUDA toolkit, or the Python package nvidia-cublas and name its folder in \
                 LD_LIBRARY_PATH"
            }
        }
    }

    /// Checks that the library can be opened. cudarc's functions panic without it.
    ///
    /// # Errors
    /// If it is missing.
    pub fn find(self) -> Result<(), LibraryError> {
        // SAFETY: opening a library runs its initializers; these are NVIDIA's, which may run at any time.
        let is_present = unsafe {
            match self {
                Self::Driver => driver::sys::is_culib_present(),
                Self::Nvrtc => nvrtc::sys::is_culib_present(),
                Self::CublasLt => cublaslt::sys::is_culib_present(),
            }
        };
        if is_present { Ok(()) } else { Err(LibraryError::Missing { library: self }) }
    }

    /// The library's version; the driver's is the newest CUDA version that it supports.
    ///
    /// # Errors
    /// If it is missing or its function fails.
    pub fn version(self) -> Result<CudaVersion, LibraryError> {
        self.find()?;
        match self {
            Self::Driver => {
                let mut version = 0;
                // SAFETY: the library is there, and the pointer is valid for the call.
                unsafe { driver::sys::cuDriverGetVersion(&raw mut version) }
                    .result()
                    .map_err(|error| LibraryError::call("cuDriverGetVersion", error))?;
                let version = version.unsigned_abs();
                Ok(CudaVersion { major: version / 1000, minor: version % 1000 / 10 })
            }
            Self::Nvrtc => {
                let (mut major, mut minor) = (0, 0);
                // SAFETY: the library is there, and both pointers are valid for the call.
                unsafe { nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) }
                    .result()
                    .map_err(|error| LibraryError::call("nvrtcVersion", error))?;
                Ok(CudaVersion { major: major.unsigned_abs(), minor: minor.unsigned_abs() })
            }
            Self::CublasLt => {
                // SAFETY: the library is there; the function takes nothing. 12.8.4 is 120804.
                let version = unsafe { cublaslt::sys::cublasLtGetVersion() } as u32;
                Ok(CudaVersion { major: version / 10_000, minor: version % 10_000 / 100 })
            }
        }
    }
}

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It is not installed, or not where the system looks for libraries.
    #[error("{library} not found: looked for {}; {}", library.searched(), library.remedy())]
    Missing {
        /// The library.
        library: CudaLibrary,
    },
    /// One of its functions failed.
    #[error("{call}: {reason}")]
    Call {
        /// The function.
        call: &'static str,
        /// The library's name for the error.
        reason: String,
    },
}

impl LibraryError {
    /// A function that failed.
    pub(crate) fn call(call: &'static str, error: impl fmt::Display) -> Self {
        Self::Call { call, reason: error.to_string() }
    }
}
