//! What this machine has: the driver, its devices, and the libraries.

use std::fmt;

use cudarc::driver::{CudaContext, result as driver, sys};

use crate::error::{Result, call};
use crate::libraries::{CudaLibrary, CudaVersion, LibraryError};

/// The driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverInfo {
    /// The newest CUDA version that it supports.
    pub cuda: CudaVersion,
    /// Its release, such as `580.65.06`, where the system shows it.
    pub release: Option<String>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block can have.
    pub shared_memory: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of memory that no process uses, if it could be asked.
    pub free_memory: Option<u64>,
}

impl DeviceInfo {
    /// Asks the driver, without opening the device.
    pub(crate) fn read(ordinal: usize) -> Result<Self> {
        use sys::CUdevice_attribute_enum as Attribute;
        let device =
            driver::device::get(ordinal as i32).map_err(|error| call("cuDeviceGet", error))?;
        let attribute = |which| {
            // SAFETY: the driver returned the device.
            let value = unsafe { driver::device::get_attribute(device, which) };
            value.map(i32::unsigned_abs).map_err(|error| call("cuDeviceGetAttribute", error))
        };
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        // SAFETY: the driver returned the device.
        let memory = unsafe { driver::device::total_mem(device) };
        Ok(Self {
            ordinal,
            name: driver::device::get_name(device)
                .map_err(|error| call("cuDeviceGetName", error))?,
            capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            memory: memory.map_err(|error| call("cuDeviceTotalMem", error))? as u64,
            free_memory: None,
        })
    }

    /// The architecture that kernels are compiled for.
    pub fn architecture(&self) -> u32 {
        self.capability.0 * 10 + self.capability.1
    }
}

/// Initializes the driver and counts its devices.
pub(crate) fn device_count() -> Result<usize> {
    CudaLibrary::Driver.find()?;
    match driver::init() {
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
        other => other.map_err(|error| call("cuInit", error))?,
    }
    let count = driver::device::get_count().map_err(|error| call("cuDeviceGetCount", error))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What is there, or why it is not. [`fmt::Display`] gives the text of `hone device`.
#[derive(Debug)]
pub struct Inventory {
    /// The driver.
    pub driver: Result<DriverInfo, LibraryError>,
    /// NVRTC.
    pub nvrtc: Result<CudaVersion, LibraryError>,
    /// cuBLASLt.
    pub cublaslt: Result<CudaVersion, LibraryError>,
    /// The devices that the driver shows.
    pub devices: Result<Vec<DeviceInfo>>,
}

/// Describes the driver, the libraries and the devices. Opens each device to ask for its free memory.
pub fn inventory() -> Inventory {
    let driver = CudaLibrary::Driver.version();
    let devices = device_count().and_then(|count| (0..count).map(DeviceInfo::read).collect());
    let with_memory = |mut devices: Vec<DeviceInfo>| {
        for device in &mut devices {
            let context = CudaContext::new(device.ordinal).and_then(|open| open.mem_get_info());
            device.free_memory = context.ok().map(|(free, _)| free as u64);
        }
        devices
    };
    Inventory {
        driver: driver.map(|cuda| DriverInfo { cuda, release: driver_release() }),
        nvrtc: CudaLibrary::Nvrtc.version(),
        cublaslt: CudaLibrary::CublasLt.version(),
        devices: devices.map(with_memory),
    }
}

/// The driver's release, which its kernel module shows on Linux.
fn driver_release() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_release =
        |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    text.lines().next()?.split_whitespace().find(is_release).map(str::to_owned)
}

impl fmt::Display for Inventory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Ok(DriverInfo { cuda, release }) => {
                let release = release.as_deref().unwrap_or("of unknown release");
                writeln!(f, "{} {release}, for CUDA {cuda}", CudaLibrary::Driver)?;
            }
            Err(error) => writeln!(f, "{error}")?,
        }
        for (library, version) in
            [(CudaLibrary::Nvrtc, &self.nvrtc), (CudaLibrary::CublasLt, &self.cublaslt)]
        {
            match version {
                Ok(version) => writeln!(f, "{library} {version}")?,
                Err(error) => writeln!(f, "{error}")?,
            }
        }
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        match &self.devices {
            Ok(devices) if devices.is_empty() => writeln!(f, "no devices"),
            Ok(devices) => devices.iter().try_for_each(|device| {
                let DeviceInfo { ordinal, name, capability: (major, minor), .. } = device;
                let free = match device.free_memory {
                    Some(free) => format!("{:.1} GiB free", gib(free)),
                    None => "free unknown".to_owned(),
                };
                writeln!(
                    f,
                    "cuda:{ordinal} {name}, compute capability {major}.{minor}, {} multiprocessors, \
                     {:.1} GiB of memory, {free}",
                    device.multiprocessors,
                    gib(device.memory),
                )
            }),
            // The driver's line says it already.
            Err(_) if self.driver.is_err() => writeln!(f, "no devices"),
            Err(error) => writeln!(f, "no devices: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inventory_lists_devices_or_what_is_missing() {
        let missing = |library| LibraryError::Missing { library };
        let device = DeviceInfo {
            ordinal: 0,
            name: "NVIDIA H100 80GB HBM3".into(),
            capability: (9, 0),
            multiprocessors: 132,
            shared_memory: 232_448,
            memory: 85_520_809_984,
            free_memory: Some(84_825_604_096),
        };
        let cuda = CudaVersion { major: 13, minor: 0 };
        let other = DeviceInfo { ordinal: 1, free_memory: None, ..device.clone() };
        let complete = Inventory {
            driver: Ok(DriverInfo { cuda, release: Some("580.65.06".into()) }),
            nvrtc: Ok(cuda),
            cublaslt: Err(missing(CudaLibrary::CublasLt)),
            devices: Ok(vec![device, other]),
        };
        let expected = "\
CUDA driver 580.65.06, for CUDA 13.0
NVRTC 13.0
cuBLASLt not found: looked for libcublasLt.so, libcublasLt.so.13, libcublasLt.so.12; install the CUDA toolkit, \
or the Python package nvidia-cublas and name its folder in LD_LIBRARY_PATH
cuda:0 NVIDIA H100 80GB HBM3, compute capability 9.0, 132 multiprocessors, 79.6 GiB of memory, 79.0 GiB free
cuda:1 NVIDIA H100 80GB HBM3, compute capability 9.0, 132 multiprocessors, 79.6 GiB of memory, free unknown
";
        assert_eq!(complete.to_string(), expected);
        let nothing = Inventory {
            driver: Err(missing(CudaLibrary::Driver)),
            nvrtc: Err(missing(CudaLibrary::Nvrtc)),
            cublaslt: Ok(cuda),
            devices: Err(missing(CudaLibrary::Driver).into()),
        };
        let expected = "\
CUDA driver not found: looked for libcuda.so, libcuda.so.1; install NVIDIA's driver, 525 or newer
NVRTC not found: looked for libnvrtc.so, libnvrtc.so.13, libnvrtc.so.12; install the CUDA toolkit, or the Python \
package nvidia-cuda-nvrtc and name its folder in LD_LIBRARY_PATH
cuBLASLt 13.0
no devices
";
        assert_eq!(nothing.to_string(), expected);
    }

    /// With and without a device: no call panics, and the parts agree.
    #[test]
    fn an_inventory_of_this_machine_never_fails() {
        let found = inventory();
        assert_eq!(
            found.to_string().lines().count(),
            4.max(found.devices.map_or(0, |d| d.len() + 3))
        );
        if found.driver.is_err() {
            let library = CudaLibrary::Driver;
            assert_eq!(library.find(), Err(LibraryError::Missing { library }));
        }
    }
}
