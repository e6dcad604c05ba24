//! One NVIDIA GPU, without a toolkit at build time and without CUDA libraries in the binary's dynamic
//! section: the driver, NVRTC and cuBLASLt are opened at run time.
//!
//! | module | what it does |
//! | --- | --- |
//! | `libraries` | finds the libraries and their versions |
//! | `inventory` | describes what is there; never fails |
//! | `device` | opens a device: context, streams, memory, staging |
//! | `arena` | one allocation for each purpose, by a plan that is checked against the device's memory |
//! | `compile` | compiles kernels to cubins, and keeps them in files |
//! | `launch` | kernels on a device, by name |
//! | `kernels` | the sources of the kernels, and the tables that attention reads |
//! | `products` | products of matrices |
//! | `decoder` | the shape of a decoder, and the places of its weights and of its adapter |
//! | `model` | a decoder's weights on a device |
//! | `queue` | what passes queue alike: products, norms, rotations, activations |
//! | `pass` | a forward and a backward pass over packed sequences |
//! | `trainer` | a decoder and its adapters on a device: training passes |
//! | `decode` | a pass over the next tokens of many sequences and over parts of prompts |
//! | `sampler` | pages of keys and values, adapters in slots, and sampling |
//!
//! Only host slices and addresses cross the crate's boundary. Invariant: no function of a library is called
//! before [`CudaLibrary::find`] has seen the library, because cudarc panics if one is missing.

mod arena;
mod compile;
mod decode;
mod decoder;
mod device;
mod error;
mod inventory;
mod kernels;
mod launch;
mod libraries;
mod model;
mod pass;
mod products;
mod queue;
mod sampler;
mod trainer;

pub use arena::{Arena, ArenaPlan, ArenaRegion, DeviceMemory};
pub use compile::{CompiledKernels, CubinCache, CubinTarget, compile};
pub use decode::{SamplerLimits, SequencePart};
pub use decoder::{AdapterLayout, AdapterModule, DecoderShape, HostFloats};
pub use device::{Gpu, PinnedBuffer, Staging, StreamPriority};
pub use error::{GpuError, Result};
pub use inventory::{DeviceInfo, DriverInfo, Inventory, inventory};
pub use kernels::{AttentionTables, DeviceFloat, KernelSource, PackedSegment};
pub use launch::{KernelArgument, LoadedKernels};
pub use libraries::{CudaLibrary, CudaVersion, LibraryError};
pub use model::{DeviceModel, ModelUpload};
pub use pass::{PassLimits, TokenBatch};
pub use products::{DeviceMatrix, ProductTerms, Products};
pub use sampler::{DeviceSampler, RowDraw, RowSample};
pub use trainer::{DevicePolicy, DeviceTrainer};
