//! An open device: its context, streams, memory and modules.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaEvent, CudaModule, CudaStream, DriverError, result as driver,
};
use cudarc::nvrtc::Ptx;

use crate::arena::{ArenaRegion, DeviceMemory};
use crate::compile::CubinTarget;
use crate::error::{GpuError, Result, call};
use crate::inventory::{DeviceInfo, device_count};
use crate::libraries::{CudaLibrary, CudaVersion};

/// The oldest CUDA whose libraries are used.
const OLDEST: CudaVersion = CudaVersion { major: 12, minor: 0 };

/// What runs on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPriority {
    /// Requests of clients: blocks of its kernels start before those of other streams.
    Serving,
    /// Training, and a judge of samples.
    Training,
}

/// An open device. Its memory comes from [`Arena`](crate::Arena)s.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    info: DeviceInfo,
    nvrtc: CudaVersion,
}

/// Whether code of this NVRTC runs with this driver.
fn check_versions(driver: CudaVersion, nvrtc: CudaVersion, cublaslt: CudaVersion) -> Result<()> {
    let libraries = [(CudaLibrary::Nvrtc, nvrtc), (CudaLibrary::CublasLt, cublaslt)];
    for (library, found) in [(CudaLibrary::Driver, driver)].into_iter().chain(libraries) {
        if found < OLDEST {
            return Err(GpuError::OldLibrary { library, found });
        }
    }
    if driver.major < nvrtc.major {
        return Err(GpuError::OldDriver { driver, nvrtc });
    }
    Ok(())
}

impl Gpu {
    /// Opens the device with this number.
    ///
    /// # Errors
    /// If the driver, NVRTC or cuBLASLt is missing or does not fit the others, there is no such device, or it is
    /// older than compute capability 8.0.
    pub fn open(ordinal: usize) -> Result<Self> {
        let found = device_count()?;
        if ordinal >= found {
            return Err(GpuError::NoDevice { ordinal, found });
        }
        let info = DeviceInfo::read(ordinal)?;
        if info.capability < (8, 0) {
            let DeviceInfo { name, capability, .. } = info;
            return Err(GpuError::OldDevice { ordinal, name, capability });
        }
        let [driver, nvrtc, cublaslt] = [
            CudaLibrary::Driver.version()?,
            CudaLibrary::Nvrtc.version()?,
            CudaLibrary::CublasLt.version()?,
        ];
        check_versions(driver, nvrtc, cublaslt)?;
        let context =
            CudaContext::new(ordinal).map_err(|error| call("cuDevicePrimaryCtxRetain", error))?;
        // SAFETY: events only order uses of cudarc's own buffers on several streams. There are none: memory comes
        // from arenas, and streams wait for each other where the callers say so.
        unsafe { context.disable_event_tracking() };
        Ok(Self { context, info, nvrtc })
    }

    /// The device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What its kernels are compiled for.
    pub fn target(&self) -> CubinTarget {
        CubinTarget { architecture: self.info.architecture(), nvrtc: self.nvrtc }
    }

    /// A new stream, which does not wait for the default stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn stream(&self, priority: StreamPriority) -> Result<Arc<CudaStream>> {
        let (least, greatest) =
            self.checked("cuCtxGetStreamPriorityRange", driver::stream::get_priority_range)?;
        let priority = match priority {
            StreamPriority::Serving => greatest,
            StreamPriority::Training => least,
        };
        let stream = self.context.new_stream_with_priority(priority);
        stream.map_err(|error| call("cuStreamCreateWithPriority", error))
    }

    /// Loads compiled kernels.
    ///
    /// # Errors
    /// If the driver refuses them.
    pub fn load(&self, cubin: Vec<u8>) -> Result<Arc<CudaModule>> {
        let module = self.context.load_module(Ptx::from_binary(cubin));
        module.map_err(|error| call("cuModuleLoadData", error))
    }

    /// Queues zeros for a region.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear(&self, stream: &Arc<CudaStream>, region: ArenaRegion) -> Result<()> {
        // SAFETY: the region has these bytes.
        self.checked("cuMemsetD8Async", || unsafe {
            driver::memset_d8_async(region.address, 0, region.bytes as usize, stream.cu_stream())
        })
    }

    /// Queues a copy of a region to another one of as many bytes, which does not overlap it.
    ///
    /// # Errors
    /// If the numbers of bytes differ, or the driver refuses.
    pub fn copy(&self, stream: &Arc<CudaStream>, from: ArenaRegion, to: ArenaRegion) -> Result<()> {
        if from.bytes != to.bytes {
            let [from, to] = [from.bytes, to.bytes];
            return Err(GpuError::Misuse(format!("a copy of {from} bytes to {to}")));
        }
        let bytes = from.bytes as usize;
        // SAFETY: the regions have these bytes.
        self.checked("cuMemcpyDtoDAsync", || unsafe {
            driver::memcpy_dtod_async(to.address, from.address, bytes, stream.cu_stream())
        })
    }

    /// Makes this device's context that of the calling thread, for libraries that use it.
    pub(crate) fn bind(&self) -> Result<()> {
        self.checked("cuCtxSetCurrent", || Ok(()))
    }

    /// Calls the driver with this device's context.
    fn checked<T>(
        &self,
        name: &'static str,
        f: impl FnOnce() -> std::result::Result<T, DriverError>,
    ) -> Result<T> {
        self.context.bind_to_thread().and_then(|()| f()).map_err(|error| call(name, error))
    }
}

impl DeviceMemory for Gpu {
    fn free_bytes(&self) -> Result<u64> {
        self.checked("cuMemGetInfo", driver::mem_get_info).map(|(free, _)| free as u64)
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        // SAFETY: the memory has no content yet; an arena's user writes before it reads.
        self.checked("cuMemAlloc", || unsafe { driver::malloc_sync(bytes as usize) })
    }

    fn release(&self, address: u64) {
        // SAFETY: the address is of `allocate`, and the arena releases it once. The driver waits for running work.
        let freed = self.checked("cuMemFree", || unsafe { driver::free_sync(address) });
        // If that failed, the context is lost, and its next call says why.
        drop(freed);
    }
}

/// Memory of the host that the device reads and writes directly.
#[derive(Debug)]
pub struct PinnedBuffer {
    gpu: Arc<Gpu>,
    bytes: *mut u8,
    len: usize,
}

// SAFETY: the buffer owns its memory, and the driver's functions may be called by any thread.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// A buffer of `len` bytes, all 0.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        // SAFETY: the driver returns new memory.
        let bytes =
            gpu.checked("cuMemHostAlloc", || unsafe { driver::malloc_host(len.max(1), 0) })?;
        let bytes = bytes.cast::<u8>();
        // SAFETY: the memory has this length.
        unsafe { bytes.write_bytes(0, len) };
        Ok(Self { gpu: Arc::clone(gpu), bytes, len })
    }

    /// The bytes. No copy may be under way.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory has this length, was written by `new`, and the buffer is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.bytes, self.len) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it, and nothing uses it any more.
        drop(self.gpu.checked("cuMemFreeHost", || unsafe { driver::free_host(self.bytes.cast()) }));
    }
}

/// Copies between ordinary host memory and the device through two pinned buffers, so that one is filled while
/// the other is copied.
#[derive(Debug)]
pub struct Staging {
    gpu: Arc<Gpu>,
    stream: Arc<CudaStream>,
    /// Each with the event after its last copy.
    buffers: [(PinnedBuffer, CudaEvent); 2],
}

/// Ranges of at most `step` bytes.
fn pieces(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step.max(1)).map(move |first| first..len.min(first + step.max(1)))
}

impl Staging {
    /// Copies on `stream`, through two buffers of `len` bytes.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(gpu: &Arc<Gpu>, stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        let buffer = || -> Result<(PinnedBuffer, CudaEvent)> {
            let event =
                gpu.context.new_event(None).map_err(|error| call("cuEventCreate", error))?;
            Ok((PinnedBuffer::new(gpu, len)?, event))
        };
        let buffers = [buffer()?, buffer()?];
        Ok(Self { gpu: Arc::clone(gpu), stream: Arc::clone(stream), buffers })
    }

    /// Copies bytes to the start of a region. Work that is queued on the stream afterwards sees them.
    ///
    /// # Errors
    /// If they do not fit, or the driver refuses.
    pub fn upload(&mut self, from: &[u8], to: ArenaRegion) -> Result<()> {
        self.check(from.len(), to)?;
        let step = self.buffers[0].0.len;
        for (i, piece) in pieces(from.len(), step).enumerate() {
            let (buffer, event) = &mut self.buffers[i % 2];
            event.synchronize().map_err(|error| call("cuEventSynchronize", error))?;
            let bytes = &mut buffer.bytes_mut()[..piece.len()];
            bytes.copy_from_slice(&from[piece.clone()]);
            let address = to.address + piece.start as u64;
            // SAFETY: the region has these bytes, and the buffer is not touched before the event.
            self.gpu.checked("cuMemcpyHtoDAsync", || unsafe {
                driver::memcpy_htod_async(address, bytes, self.stream.cu_stream())
            })?;
            event.record(&self.stream).map_err(|error| call("cuEventRecord", error))?;
        }
        Ok(())
    }

    /// Copies the start of a region, once all work that is queued on the stream is done.
    ///
    /// # Errors
    /// If it has fewer bytes, or the driver refuses.
    pub fn download(&mut self, from: ArenaRegion, to: &mut [u8]) -> Result<()> {
        self.check(to.len(), from)?;
        let step = self.buffers[0].0.len;
        for piece in pieces(to.len(), step) {
            let buffer = &mut self.buffers[0].0;
            let bytes = &mut buffer.bytes_mut()[..piece.len()];
            let address = from.address + piece.start as u64;
            // SAFETY: the region has these bytes. Uploads from the buffer precede the copy on the stream, and the
            // stream is done before the buffer is read.
            self.gpu.checked("cuMemcpyDtoHAsync", || unsafe {
                driver::memcpy_dtoh_async(bytes, address, self.stream.cu_stream())
            })?;
            self.stream.synchronize().map_err(|error| call("cuStreamSynchronize", error))?;
            to[piece].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn check(&self, len: usize, region: ArenaRegion) -> Result<()> {
        if len as u64 > region.bytes {
            let bytes = region.bytes;
            return Err(GpuError::Misuse(format!("{len} bytes for a region of {bytes}")));
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The driver may still read the buffers.
        let _ = self.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_must_fit_each_other() {
        let version = |major, minor| CudaVersion { major, minor };
        assert!(check_versions(version(12, 2), version(12, 9), version(12, 8)).is_ok());
        assert!(check_versions(version(13, 0), version(12, 9), version(13, 0)).is_ok());
        let error = check_versions(version(12, 8), version(13, 0), version(13, 0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the driver supports CUDA 12.8, but the NVRTC found is of CUDA 13.0, whose code needs driver 580 or \
             newer; install that driver, or NVRTC of CUDA 12 in place of this one"
        );
        let error = check_versions(version(11, 4), version(13, 0), version(13, 0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "CUDA driver is of CUDA 11.4, but must be of CUDA 12 or newer; install NVIDIA's driver, 525 or newer"
        );
        let error = check_versions(version(13, 0), version(11, 8), version(13, 0)).unwrap_err();
        assert!(matches!(error, GpuError::OldLibrary { library: CudaLibrary::Nvrtc, .. }));
    }

    #[test]
    fn pieces_cover_all_bytes() {
        assert_eq!(pieces(10, 4).collect::<Vec<_>>(), [0..4, 4..8, 8..10]);
        assert_eq!(pieces(8, 4).collect::<Vec<_>>(), [0..4, 4..8]);
        assert_eq!(pieces(0, 4).count(), 0);
    }

    /// Where there is a device, this opens it, copies to it and back, and closes it.
    #[test]
    fn a_device_opens_or_says_why_not() {
        let far = Gpu::open(1000).unwrap_err();
        match CudaLibrary::Driver.find() {
            Err(missing) => assert_eq!(far.to_string(), missing.to_string()),
            Ok(()) => assert!(matches!(far, GpuError::NoDevice { ordinal: 1000, .. }), "{far}"),
        }
        let Ok(gpu) = Gpu::open(0).map(Arc::new) else { return };
        let mut plan = crate::ArenaPlan::new("test");
        plan.add("bytes", 1000);
        let arena = &crate::Arena::allocate(&gpu, vec![plan], 0).unwrap()[0];
        let stream = gpu.stream(StreamPriority::Serving).unwrap();
        let mut staging = Staging::new(&gpu, &stream, 300).unwrap();
        let sent: Vec<u8> = (0..1000_u32).map(|i| (i % 251) as u8).collect();
        let mut received = vec![0; 1000];
        let region = arena.region("bytes").unwrap();
        staging.upload(&sent, region).unwrap();
        staging.download(region, &mut received).unwrap();
        assert_eq!(sent, received);
        assert!(staging.upload(&[0; 1001], region).is_err());
    }
}
