//! What passes of training and of sampling queue alike: products, norms, rotations and activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::arena::ArenaRegion;
use crate::compile::CubinCache;
use crate::decoder::DecoderShape;
use crate::device::StreamPriority;
use crate::error::Result;
use crate::kernels::KernelSource;
use crate::launch::{KernelArgument, LoadedKernels, arguments};
use crate::model::DeviceModel;
use crate::products::{DeviceMatrix, ProductTerms, Products};

/// Threads of a block that computes a row, and of one that computes heads or values.
pub(crate) const ROW_THREADS: u32 = 256;
pub(crate) const BLOCK_THREADS: u32 = 128;
/// Warps of a block of the second kind, each of which computes a head or a value.
pub(crate) const WARPS: usize = 4;
/// Blocks of the kernels over whole buffers.
pub(crate) const FLAT_BLOCKS: usize = 256;

/// A model, and the stream on which passes over it are queued. Addresses are of arenas that outlive it.
pub(crate) struct PassQueue {
    pub model: Arc<DeviceModel>,
    pub stream: Arc<CudaStream>,
    kernels: LoadedKernels,
    products: Products,
}

impl PassQueue {
    /// A queue for these kernels and those of rows and of attention, compiled or from the cache.
    pub fn open(
        model: &Arc<DeviceModel>,
        cache: &CubinCache,
        sources: [KernelSource; 2],
        priority: StreamPriority,
        workspace: ArenaRegion,
    ) -> Result<Self> {
        let DeviceModel { gpu, shape, float, .. } = &**model;
        let [first, second] = sources;
        let sources = [KernelSource::ROWS, first, second, KernelSource::attention(shape.head_dim)?]
            .map(|source| KernelSource { float: *float, ..source });
        let kernels = LoadedKernels::load(gpu, cache, &sources)?;
        let stream = gpu.stream(priority)?;
        let products = Products::new(gpu, &stream, workspace)?;
        Ok(Self { model: Arc::clone(model), stream, kernels, products })
    }

    /// The residual stream of tokens, before the first layer.
    pub fn embed(&self, tokens: usize, ids: u64, out: u64) -> Result<()> {
        let DeviceModel { shape, weights, .. } = &*self.model;
        let (hidden, scale) = (shape.hidden, shape.embedding_scale);
        self.rows("embed", tokens, arguments![ids, weights.embedding, out, hidden, scale])
    }

    /// Norms the rows of x.
    pub fn norm(&self, tokens: usize, x: u64, weight: u64, normed: u64) -> Result<()> {
        let DecoderShape { hidden, eps, norm_offset, .. } = self.model.shape;
        let null = 0_u64;
        let arguments = arguments![x, null, weight, null, normed, hidden, eps, norm_offset];
        self.rows("residual_norm", tokens, arguments)
    }

    /// `sum = x + out`, or `x + norm(out)` in families that have that norm, and the norm of the sum by `next`.
    pub fn residual(
        &self,
        tokens: usize,
        [x, out, sum]: [u64; 3],
        output_norm: Option<u64>,
        [next, normed]: [u64; 2],
    ) -> Result<()> {
        let DecoderShape { hidden, eps, norm_offset, .. } = self.model.shape;
        let Some(norm) = output_norm else {
            let arguments = arguments![x, out, next, sum, normed, hidden, eps, norm_offset];
            return self.rows("residual_norm", tokens, arguments);
        };
        let arguments = arguments![x, out, norm, sum, hidden, eps, norm_offset];
        self.rows("norm_residual", tokens, arguments)?;
        self.norm(tokens, sum, next, normed)
    }

    /// The product of the activated gate and up.
    pub fn activate(&self, tokens: usize, gate_up: u64, product: u64) -> Result<()> {
        let DecoderShape { intermediate, is_gelu, .. } = self.model.shape;
        let arguments = arguments![gate_up, product, intermediate, usize::from(is_gelu)];
        self.rows("gated_activation", tokens, arguments)
    }

    /// A kernel that reads queries and keys of a layer in `qkv`, and writes those at `out`, which may be the same.
    pub fn rotate(
        &self,
        kernel: &str,
        index: usize,
        tokens: usize,
        positions: u64,
        [qkv, out]: [u64; 2],
    ) -> Result<()> {
        let DeviceModel { shape, weights, .. } = &*self.model;
        let DecoderShape { head_dim, eps, norm_offset, .. } = *shape;
        let pairs = if shape.layers[index].0 { shape.rotated_pairs } else { 0 };
        let (stride, cosines, sines) = (shape.qkv(), weights.cosines, weights.sines);
        let (x, out) = (self.qkv_parts(qkv), self.qkv_parts(out));
        for (i, heads) in [shape.heads, shape.key_heads].into_iter().enumerate() {
            let norm = weights.layers[index].head_norms[i];
            let arguments = arguments![
                x[i],
                norm,
                cosines,
                sines,
                positions,
                out[i],
                tokens,
                heads,
                head_dim,
                pairs,
                stride,
                stride,
                eps,
                norm_offset
            ];
            let blocks = (tokens * heads).div_ceil(WARPS);
            self.launch(kernel, [blocks, 1, 1], BLOCK_THREADS, arguments)?;
        }
        Ok(())
    }

    /// Addresses of queries, keys and values in rows of all three.
    pub fn qkv_parts(&self, qkv: u64) -> [u64; 3] {
        let [q, k] = self.model.shape.widths();
        [qkv, self.value(qkv, q), self.value(qkv, q + k)]
    }

    /// The address of a value after a first one, both in the type of the weights.
    pub fn value(&self, first: u64, index: usize) -> u64 {
        first + index as u64 * self.model.float.bytes()
    }

    /// A matrix in the type of the weights.
    pub fn matrix(&self, address: u64, shape: [usize; 2]) -> DeviceMatrix {
        DeviceMatrix::new(address, shape, self.model.float)
    }

    /// Queues a product ([`Products::multiply`]).
    pub fn multiply(
        &self,
        out: DeviceMatrix,
        a: DeviceMatrix,
        b: DeviceMatrix,
        terms: ProductTerms,
    ) -> Result<()> {
        // SAFETY: all matrices are in regions of the plan, which has room for a pass within the limits.
        unsafe { self.products.multiply(out, a, b, terms) }
    }

    /// Queues a kernel of which each block computes a row.
    pub fn rows(&self, kernel: &str, rows: usize, arguments: &[KernelArgument]) -> Result<()> {
        self.launch(kernel, [rows, 1, 1], ROW_THREADS, arguments)
    }

    /// Queues a kernel; no blocks are an error to the driver.
    pub fn launch(
        &self,
        kernel: &str,
        grid: [usize; 3],
        threads: u32,
        arguments: &[KernelArgument],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: addresses are of regions of the plan, which has room for a pass within the limits.
        unsafe {
            self.kernels.launch(&self.stream, kernel, grid.map(|n| n as u32), threads, arguments)
        }
    }
}
