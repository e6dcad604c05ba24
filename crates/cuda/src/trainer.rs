//! Training passes on a device: a frozen decoder, an adapter with its gradient, and two more adapters.
//!
//! Losses and the optimizer stay on the host: [`DeviceTrainer::forward`] returns the statistics of the predicted tokens,
//! [`DeviceTrainer::backward`] takes the loss's derivatives by them, and adapters are small enough to be copied in each
//! step. Dropout of adapters (`train.lora.dropout`) is not there yet.

use std::sync::Arc;

use crate::arena::{Arena, ArenaPlan, ArenaRegion};
use crate::compile::CubinCache;
use crate::decoder::{AdapterLayout, AdapterModule, Allocate, DecoderShape, HostFloats};
use crate::device::{Gpu, Staging, StreamPriority};
use crate::error::{GpuError, Result};
use crate::kernels::{DeviceFloat, KernelSource};
use crate::model::DeviceModel;
use crate::pass::{DevicePass, PassBuffers, PassLimits, TokenBatch};
use crate::queue::PassQueue;

/// Bytes of each of the two buffers through which the host copies.
const STAGING: usize = 8 << 20;

/// The policy of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePolicy {
    /// The decoder alone.
    Base,
    /// The adapter under training.
    Adapter,
    /// The adapter of a reference policy, with the same modules.
    Reference,
    /// An adapter with the same modules that is scored between the passes of a step.
    Scored,
}

/// Adapters in the type of the weights, and the gradient of the first one in f32.
struct AdapterBuffers {
    gradient: ArenaRegion,
    adapter: ArenaRegion,
    reference: ArenaRegion,
    scored: ArenaRegion,
}

impl AdapterBuffers {
    fn new(values: usize, float: DeviceFloat, allocate: Allocate<'_>) -> Result<Self> {
        let mut take = |name: &str, bytes: u64| -> Result<ArenaRegion> {
            Ok(ArenaRegion { address: allocate(name, bytes)?, bytes })
        };
        let count = values as u64;
        Ok(Self {
            gradient: take("gradient", 4 * count)?,
            adapter: take("adapter", count * float.bytes())?,
            reference: take("reference", count * float.bytes())?,
            scored: take("scored", count * float.bytes())?,
        })
    }

    /// Where the adapter of a policy is; the base has none.
    fn of(&self, policy: DevicePolicy) -> Option<ArenaRegion> {
        match policy {
            DevicePolicy::Base => None,
            DevicePolicy::Adapter => Some(self.adapter),
            DevicePolicy::Reference => Some(self.reference),
            DevicePolicy::Scored => Some(self.scored),
        }
    }
}

/// Purposes of the memory, in the order of its arenas.
const PURPOSES: [&str; 2] = ["adapters to train", "training passes"];

/// Gives everything a place: the plan before there is memory, and the addresses afterwards.
fn lay_out(
    shape: &DecoderShape,
    adapter: &AdapterLayout,
    float: DeviceFloat,
    limits: &PassLimits,
    allocate: &mut dyn FnMut(usize, &str, u64) -> Result<u64>,
) -> Result<(AdapterBuffers, PassBuffers)> {
    let adapters =
        AdapterBuffers::new(adapter.values, float, &mut |name, bytes| allocate(0, name, bytes))?;
    let mut of_passes = |name: &str, bytes: u64| allocate(1, name, bytes);
    let buffers = PassBuffers::new(shape, adapter, float, limits, &mut of_passes)?;
    Ok((adapters, buffers))
}

/// A decoder and its adapters on a device.
pub struct DeviceTrainer {
    pass: DevicePass,
    staging: Staging,
    adapters: AdapterBuffers,
    /// The memory, which is freed last.
    _arenas: Vec<Arena<Gpu>>,
}

impl DeviceTrainer {
    /// The device memory that a trainer uses beside the model.
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

    /// Allocates what [`Self::plan`] says, beside a reserve of bytes, and compiles the kernels. Adapters are 0.
    ///
    /// # Errors
    /// As [`Self::plan`], or if the memory is too small, or a library refuses.
    pub fn open(
        model: &Arc<DeviceModel>,
        cache: &CubinCache,
        modules: &[AdapterModule],
        limits: &PassLimits,
        reserve: u64,
    ) -> Result<Self> {
        let DeviceModel { gpu, shape, float, .. } = &**model;
        let plans = Self::plan(shape, modules, *float, limits)?;
        let adapter = AdapterLayout::new(shape, modules)?;
        let arenas = Arena::allocate(gpu, plans, reserve)?;
        let (adapters, buffers) =
            lay_out(shape, &adapter, *float, limits, &mut |purpose, name, _| {
                Ok(arenas[purpose].region(name)?.address)
            })?;
        let (sources, priority) =
            ([KernelSource::HEAD, KernelSource::FLAT], StreamPriority::Training);
        let queue = PassQueue::open(model, cache, sources, priority, buffers.workspace)?;
        let AdapterBuffers { gradient, adapter: own, reference, scored } = adapters;
        for region in [gradient, own, reference, scored] {
            gpu.clear(&queue.stream, region)?;
        }
        let staging = Staging::new(gpu, &queue.stream, STAGING)?;
        let pass = DevicePass {
            queue,
            limits: *limits,
            adapter,
            policy: adapters.adapter.address,
            gradient: adapters.gradient.address,
            buffers,
            saved: None,
        };
        Ok(Self { pass, staging, adapters, _arenas: arenas })
    }

    /// Where the matrices of an adapter are in its values and in its gradient.
    pub fn layout(&self) -> &AdapterLayout {
        &self.pass.adapter
    }

    /// Replaces the values of an adapter, which are rounded to the type of the weights.
    ///
    /// # Errors
    /// If their number is not that of the layout, or the policy is the base.
    pub fn set_adapter(&mut self, policy: DevicePolicy, values: &[f32]) -> Result<()> {
        let expected = self.pass.adapter.values;
        if values.len() != expected {
            let found = values.len();
            return Err(GpuError::Misuse(format!("an adapter of {found} values, not {expected}")));
        }
        let none = || GpuError::Misuse("the base has no adapter".into());
        let region = self.adapters.of(policy).ok_or_else(none)?;
        let bytes = HostFloats::F32(values).bytes(self.pass.queue.model.float);
        self.staging.upload(&bytes, region)
    }

    /// The gradient of the adapter.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn gradient(&mut self) -> Result<Vec<f32>> {
        let mut bytes = vec![0; self.adapters.gradient.bytes as usize];
        self.staging.download(self.adapters.gradient, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect())
    }

    /// Sets the gradient to 0, at the beginning of a step.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear_gradient(&mut self) -> Result<()> {
        self.pass.queue.model.gpu.clear(&self.pass.queue.stream, self.adapters.gradient)
    }

    /// The log-probability and the entropy, in nats, of the rows of a batch by a policy. With that of the adapter,
    /// [`Self::backward`] may follow.
    ///
    /// # Errors
    /// If the batch does not fit the limits, or a library refuses.
    pub fn forward(
        &mut self,
        batch: &TokenBatch<'_>,
        policy: DevicePolicy,
    ) -> Result<Vec<[f32; 2]>> {
        self.pass.policy = self.adapters.of(policy).map_or(0, |region| region.address);
        let stats = self.pass.forward(&mut self.staging, batch);
        if policy != DevicePolicy::Adapter {
            self.pass.saved = None;
        }
        stats
    }

    /// Adds the gradient of the adapter for the last batch to [`Self::gradient`], from the derivatives of the loss by
    /// the statistics that [`Self::forward`] returned.
    ///
    /// # Errors
    /// If no forward pass with the adapter of as many rows precedes, or a library refuses.
    pub fn backward(&mut self, seeds: &[[f32; 2]]) -> Result<()> {
        self.pass.backward(&mut self.staging, seeds)
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
