//! Training on a device: a frozen decoder, an adapter with its gradient and moments, and passes.
//!
//! The losses stay on the host: [`DeviceTrainer::forward`] returns the statistics of the predicted tokens, and
//! [`DeviceTrainer::backward`] takes the loss's derivatives by them. Dropout of adapters (`train.lora.dropout`) is
//! not there yet.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::arena::{Arena, ArenaPlan, ArenaRegion};
use crate::compile::CubinCache;
use crate::decoder::{
    AdapterLayout, AdapterModule, Allocate, DecoderShape, DecoderWeights, HostFloats,
};
use crate::device::{Gpu, Staging, StreamPriority};
use crate::error::{GpuError, Result};
use crate::kernels::{DeviceFloat, KernelSource};
use crate::launch::{KernelArgument, LoadedKernels};
use crate::pass::{DevicePass, FLAT_BLOCKS, PassBuffers, PassLimits, ROW_THREADS, TokenBatch};
use crate::products::Products;

/// Bytes of each of the two buffers through which the host copies.
const STAGING: usize = 8 << 20;

/// A step of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamStep {
    /// The learning rate.
    pub learning_rate: f64,
    /// Decay of the values by the learning rate.
    pub weight_decay: f64,
    /// Decay of the gradient's mean.
    pub beta1: f64,
    /// Decay of the mean of its square.
    pub beta2: f64,
    /// Added to the root of that.
    pub eps: f64,
    /// Factor of the gradient, which bounds its norm.
    pub gradient_scale: f64,
}

/// The adapter, its gradient and moments in f32, and its copy in the type of the weights.
struct AdapterBuffers {
    values: ArenaRegion,
    gradient: ArenaRegion,
    first: ArenaRegion,
    second: ArenaRegion,
    copy: u64,
    /// One number for each block of a kernel.
    results: ArenaRegion,
}

impl AdapterBuffers {
    fn new(values: usize, float: DeviceFloat, allocate: Allocate<'_>) -> Result<Self> {
        let mut take = |name: &str, bytes: u64| -> Result<ArenaRegion> {
            Ok(ArenaRegion { address: allocate(name, bytes)?, bytes })
        };
        let count = values as u64;
        Ok(Self {
            values: take("values", 4 * count)?,
            gradient: take("gradient", 4 * count)?,
            first: take("first moment", 4 * count)?,
            second: take("second moment", 4 * count)?,
            copy: take("copy", count * float.bytes())?.address,
            results: take("results", 8 * FLAT_BLOCKS as u64)?,
        })
    }
}

/// Purposes of the memory, in the order of its arenas.
const PURPOSES: [&str; 3] = ["the model", "the adapter", "passes"];

/// Gives everything a place: the plan before there is memory, and the addresses afterwards.
fn lay_out(
    shape: &DecoderShape,
    adapter: &AdapterLayout,
    float: DeviceFloat,
    limits: &PassLimits,
    allocate: &mut dyn FnMut(usize, &str, u64) -> Result<u64>,
) -> Result<(DecoderWeights, AdapterBuffers, PassBuffers)> {
    let weights = DecoderWeights::new(shape, float, &mut |name, bytes| allocate(0, name, bytes))?;
    let flat =
        AdapterBuffers::new(adapter.values, float, &mut |name, bytes| allocate(1, name, bytes))?;
    let mut of_passes = |name: &str, bytes: u64| allocate(2, name, bytes);
    let buffers = PassBuffers::new(shape, adapter, float, limits, &mut of_passes)?;
    Ok((weights, flat, buffers))
}

/// A decoder and its adapter on a device.
pub struct DeviceTrainer {
    pass: DevicePass,
    staging: Staging,
    flat: AdapterBuffers,
    /// Weights that were not uploaded yet.
    missing: BTreeSet<String>,
    updates: u64,
    /// The memory, which is freed last.
    _arenas: Vec<Arena<Gpu>>,
}

impl DeviceTrainer {
    /// All device memory that a trainer uses.
    ///
    /// # Errors
    /// If kernels cannot compute the shape, or the decoder does not have a module.
    pub fn plan(
        shape: &DecoderShape,
        modules: &[AdapterModule],
        float: DeviceFloat,
        limits: &PassLimits,
    ) -> Result<Vec<ArenaPlan>> {
        check(shape, limits)?;
        let mut plans = PURPOSES.map(ArenaPlan::new);
        let adapter = AdapterLayout::new(shape, modules)?;
        lay_out(shape, &adapter, float, limits, &mut |purpose, name, bytes| {
            plans[purpose].add(name, bytes);
            Ok(0)
        })?;
        Ok(plans.into())
    }

    /// Allocates what [`Self::plan`] says, beside a reserve of bytes, and compiles the kernels. Weights and adapter
    /// are still to be uploaded.
    ///
    /// # Errors
    /// As [`Self::plan`], or if the memory is too small, or a library refuses.
    pub fn open(
        gpu: &Arc<Gpu>,
        cache: &CubinCache,
        shape: &DecoderShape,
        modules: &[AdapterModule],
        float: DeviceFloat,
        limits: &PassLimits,
        reserve: u64,
    ) -> Result<Self> {
        let plans = Self::plan(shape, modules, float, limits)?;
        let adapter = AdapterLayout::new(shape, modules)?;
        let attention = KernelSource::attention(shape.head_dim)?;
        let sources = [KernelSource::ROWS, KernelSource::HEAD, KernelSource::FLAT, attention]
            .map(|source| KernelSource { float, ..source });
        let kernels = LoadedKernels::load(gpu, cache, &sources)?;
        let arenas = Arena::allocate(gpu, plans, reserve)?;
        let (weights, flat, buffers) =
            lay_out(shape, &adapter, float, limits, &mut |purpose, name, _| {
                Ok(arenas[purpose].region(name)?.address)
            })?;
        let stream = gpu.stream(StreamPriority::Training)?;
        for region in [flat.values, flat.gradient, flat.first, flat.second] {
            gpu.clear(&stream, region)?;
        }
        let products = Products::new(gpu, &stream, buffers.workspace)?;
        let staging = Staging::new(gpu, &stream, STAGING)?;
        let missing = weights.places.keys().cloned().collect();
        let pass = DevicePass {
            gpu: Arc::clone(gpu),
            stream,
            kernels,
            products,
            shape: shape.clone(),
            limits: *limits,
            float,
            weights,
            adapter,
            adapter_copy: flat.copy,
            gradient: flat.gradient.address,
            buffers,
            saved: None,
        };
        let trainer = Self { pass, staging, flat, missing, updates: 0, _arenas: arenas };
        trainer.round_adapter()?;
        Ok(trainer)
    }

    /// Uploads a weight by its Hugging Face name, or the tables of angles, `cosines` and `sines` `[positions, pairs]`.
    ///
    /// # Errors
    /// If the model has no such weight, or it has another number of values.
    pub fn upload(&mut self, name: &str, values: HostFloats<'_>) -> Result<()> {
        let place = self.pass.weights.places.get(name);
        let place = place.ok_or_else(|| GpuError::Misuse(format!("no weight `{name}`")))?;
        let bytes = values.bytes(place.float);
        if bytes.len() as u64 != place.region.bytes {
            let [found, expected] =
                [bytes.len() as u64, place.region.bytes].map(|n| n / place.float.bytes());
            return Err(GpuError::Misuse(format!("`{name}` has {found} values, not {expected}")));
        }
        self.staging.upload(&bytes, place.region)?;
        self.missing.remove(name);
        Ok(())
    }

    /// Where the matrices of the adapter are in its values and in its gradient.
    pub fn layout(&self) -> &AdapterLayout {
        &self.pass.adapter
    }

    /// Replaces the adapter's values; its moments stay.
    ///
    /// # Errors
    /// If their number is not that of the layout.
    pub fn set_adapter(&mut self, values: &[f32]) -> Result<()> {
        let expected = self.pass.adapter.values;
        if values.len() != expected {
            let found = values.len();
            return Err(GpuError::Misuse(format!("an adapter of {found} values, not {expected}")));
        }
        let bytes = HostFloats::F32(values).bytes(DeviceFloat::F32);
        self.staging.upload(&bytes, self.flat.values)?;
        self.round_adapter()
    }

    /// The adapter's values.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn adapter(&mut self) -> Result<Vec<f32>> {
        self.download(self.flat.values)
    }

    /// The gradient of the adapter.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn gradient(&mut self) -> Result<Vec<f32>> {
        self.download(self.flat.gradient)
    }

    /// Sets the gradient to 0, at the beginning of a step.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear_gradient(&mut self) -> Result<()> {
        self.pass.gpu.clear(&self.pass.stream, self.flat.gradient)
    }

    /// The log-probability and the entropy, in nats, of the rows of a batch, by the model with its adapter or without.
    /// With the adapter, [`Self::backward`] may follow.
    ///
    /// # Errors
    /// If a weight was not uploaded, the batch does not fit the limits, or a library refuses.
    pub fn forward(&mut self, batch: &TokenBatch<'_>, with_adapter: bool) -> Result<Vec<[f32; 2]>> {
        if let Some(name) = self.missing.first() {
            return Err(GpuError::Misuse(format!("`{name}` was not uploaded")));
        }
        self.pass.forward(&mut self.staging, batch, with_adapter)
    }

    /// Adds the gradient of the adapter for the last batch to [`Self::gradient`], from the derivatives of the loss by
    /// the statistics that [`Self::forward`] returned.
    ///
    /// # Errors
    /// If no forward pass with the adapter of as many rows precedes, or a library refuses.
    pub fn backward(&mut self, seeds: &[[f32; 2]]) -> Result<()> {
        self.pass.backward(&mut self.staging, seeds)
    }

    /// The Euclidean norm of the gradient.
    ///
    /// # Errors
    /// If a library refuses.
    pub fn gradient_norm(&mut self) -> Result<f64> {
        let count = KernelArgument::Long(self.pass.adapter.values as i64);
        let [gradient, sums] = [self.flat.gradient, self.flat.results].map(|r| r.address);
        self.flat_kernel("sum_squares", &[gradient.into(), sums.into(), count])?;
        let mut bytes = [0; 8 * FLAT_BLOCKS];
        self.staging.download(self.flat.results, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|sum| f64::from_le_bytes(*sum)).sum::<f64>().sqrt())
    }

    /// Updates the adapter by its gradient. Returns `false`, and changes nothing, if a value or a second moment would
    /// not be finite.
    ///
    /// # Errors
    /// If a library refuses.
    pub fn update(&mut self, step: &AdamStep) -> Result<bool> {
        let AdamStep { learning_rate, weight_decay, beta1, beta2, eps, gradient_scale } = *step;
        let t = i32::try_from(self.updates + 1).unwrap_or(i32::MAX);
        let size = learning_rate / (1.0 - beta1.powi(t));
        let root = (1.0 - beta2.powi(t)).sqrt();
        let keep = 1.0 - learning_rate * weight_decay;
        let factors =
            [gradient_scale, keep, beta1, 1.0 - beta1, beta2, 1.0 - beta2, size, root, eps];
        let flat = &self.flat;
        let regions = [flat.values, flat.first, flat.second, flat.gradient, flat.results];
        let mut arguments: Vec<KernelArgument> =
            regions.iter().map(|region| region.address.into()).collect();
        arguments.push(KernelArgument::Long(self.pass.adapter.values as i64));
        arguments.extend(factors.map(|factor| KernelArgument::Float(factor as f32)));
        // The first launch only counts values that are not finite.
        for write in [0_usize, 1] {
            self.flat_kernel("adamw", &[&arguments[..], &[write.into()]].concat())?;
            let mut bad = [0; 4 * FLAT_BLOCKS];
            if write == 0 {
                self.staging.download(self.flat.results, &mut bad)?;
            }
            if bad.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
        self.updates += 1;
        self.round_adapter()?;
        Ok(true)
    }

    /// Writes the copy of the adapter that products read.
    fn round_adapter(&self) -> Result<()> {
        let count = KernelArgument::Long(self.pass.adapter.values as i64);
        let [values, copy] = [self.flat.values.address, self.flat.copy].map(KernelArgument::from);
        self.flat_kernel("round_values", &[values, copy, count, 1.0_f32.into()])
    }

    fn flat_kernel(&self, kernel: &str, arguments: &[KernelArgument]) -> Result<()> {
        self.pass.launch(kernel, [FLAT_BLOCKS, 1, 1], ROW_THREADS, arguments)
    }

    fn download(&mut self, region: ArenaRegion) -> Result<Vec<f32>> {
        let mut bytes = vec![0; region.bytes as usize];
        self.staging.download(region, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect())
    }
}

/// Whether kernels can compute the shape: their sizes are `int`s.
fn check(shape: &DecoderShape, limits: &PassLimits) -> Result<()> {
    KernelSource::attention(shape.head_dim)?;
    let DecoderShape { vocab, hidden, intermediate, heads, key_heads, .. } = *shape;
    let most = i32::MAX as usize;
    let sizes = [vocab, hidden, 2 * intermediate, shape.qkv(), limits.tokens, limits.rows];
    let products = limits.tokens.checked_mul(heads);
    let fits = sizes.iter().all(|size| (1..=most).contains(size))
        && products.is_some_and(|product| product <= most)
        && limits.table_words <= most / 4
        && key_heads > 0
        && heads % key_heads == 0
        && 2 * shape.rotated_pairs <= shape.head_dim;
    if !fits {
        return Err(GpuError::Misuse(format!("kernels cannot compute {shape:?} with {limits:?}")));
    }
    Ok(())
}
