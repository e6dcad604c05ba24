//! Kernels on a device, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};

use crate::compile::CubinCache;
use crate::device::Gpu;
use crate::error::{GpuError, Result, call};
use crate::kernels::KernelSource;

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum KernelArgument {
    /// An address on the device; 0 is a null pointer.
    Address(u64),
    /// An `int`.
    Int(i32),
    /// An `offset`, of 64 bits.
    Long(i64),
    /// A `float`.
    Float(f32),
}

impl KernelArgument {
    /// Whether it fits a parameter, such as `const float* x`.
    fn fits(&self, parameter: &str) -> bool {
        match self {
            Self::Address(_) => parameter.contains('*'),
            Self::Int(_) => parameter.starts_with("int "),
            Self::Long(_) => parameter.starts_with("offset "),
            Self::Float(_) => parameter.starts_with("float "),
        }
    }
}

impl From<u64> for KernelArgument {
    fn from(address: u64) -> Self {
        Self::Address(address)
    }
}

impl From<usize> for KernelArgument {
    /// Sizes; plans refuse those that are no `int`.
    fn from(size: usize) -> Self {
        Self::Int(size as i32)
    }
}

impl From<f32> for KernelArgument {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// A slice of arguments of any of their types.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => { &[$($crate::launch::KernelArgument::from($value)),*] };
}
pub(crate) use arguments;

/// Kernels, whose names differ.
#[derive(Debug)]
pub struct LoadedKernels {
    /// With the parameters of each.
    functions: BTreeMap<&'static str, (CudaFunction, Vec<&'static str>)>,
}

impl LoadedKernels {
    /// Loads the kernels of these sources, compiled or from the cache.
    ///
    /// # Errors
    /// If they do not compile, or the driver refuses them.
    pub fn load(gpu: &Gpu, cache: &CubinCache, sources: &[KernelSource]) -> Result<Self> {
        let mut functions = BTreeMap::new();
        for source in sources {
            let module = gpu.load(cache.cubin(source, &gpu.target())?)?;
            for (name, parameters) in source.kernels() {
                let function = module.load_function(name);
                let function = function.map_err(|error| call("cuModuleGetFunction", error))?;
                functions.insert(name, (function, parameters));
            }
        }
        Ok(Self { functions })
    }

    /// Queues a kernel: `grid` blocks of `threads` threads.
    ///
    /// # Safety
    /// The addresses must be of memory that the kernel may use as its source says, until the stream is done.
    ///
    /// # Errors
    /// If there is no such kernel, it has other parameters, or the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Arc<CudaStream>,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        arguments: &[KernelArgument],
    ) -> Result<()> {
        let Some((function, parameters)) = self.functions.get(kernel) else {
            return Err(GpuError::Misuse(format!("no kernel `{kernel}`")));
        };
        let fit = arguments.iter().zip(parameters).all(|(argument, of)| argument.fits(of));
        if !fit || arguments.len() != parameters.len() {
            let parameters = parameters.join(", ");
            return Err(GpuError::Misuse(format!("{kernel}({parameters}) with {arguments:?}")));
        }
        let mut launch = stream.launch_builder(function);
        for argument in arguments {
            match argument {
                KernelArgument::Address(value) => launch.arg(value),
                KernelArgument::Int(value) => launch.arg(value),
                KernelArgument::Long(value) => launch.arg(value),
                KernelArgument::Float(value) => launch.arg(value),
            };
        }
        let config =
            LaunchConfig { grid_dim: grid.into(), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the parameters have these types, and the caller answers for the addresses.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).map_err(|error| call("cuLaunchKernel", error))
    }
}
