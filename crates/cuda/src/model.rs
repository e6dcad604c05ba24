//! A decoder's weights on a device, for all that compute with them.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::arena::{Arena, ArenaPlan};
use crate::decoder::{DecoderShape, DecoderWeights, HostFloats};
use crate::device::{Gpu, Staging, StreamPriority};
use crate::error::{GpuError, Result};
use crate::kernels::DeviceFloat;

/// Bytes of each of the two buffers through which the host copies weights.
const STAGING: usize = 8 << 20;

/// Weights on a device, whole and never written.
#[derive(Debug)]
pub struct DeviceModel {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) shape: DecoderShape,
    /// The type of matrices and biases.
    pub(crate) float: DeviceFloat,
    /// Addresses in the memory.
    pub(crate) weights: DecoderWeights,
    /// Keeps the memory.
    _arena: Arena<Gpu>,
}

/// A model whose weights are being uploaded.
pub struct ModelUpload {
    model: DeviceModel,
    staging: Staging,
    /// Weights that were not uploaded yet.
    missing: BTreeSet<String>,
}

impl DeviceModel {
    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The decoder's shape.
    pub fn shape(&self) -> &DecoderShape {
        &self.shape
    }

    /// The type of matrices and biases.
    pub fn float(&self) -> DeviceFloat {
        self.float
    }

    /// The device memory that the weights take.
    ///
    /// # Errors
    /// If a region has no place.
    pub fn plan(shape: &DecoderShape, float: DeviceFloat) -> Result<ArenaPlan> {
        let mut plan = ArenaPlan::new("the model");
        DecoderWeights::new(shape, float, &mut |name, bytes| {
            plan.add(name, bytes);
            Ok(0)
        })?;
        Ok(plan)
    }

    /// Allocates what [`Self::plan`] says, beside a reserve of bytes.
    ///
    /// # Errors
    /// If the memory is too small, or the driver refuses.
    pub fn open(
        gpu: &Arc<Gpu>,
        shape: &DecoderShape,
        float: DeviceFloat,
        reserve: u64,
    ) -> Result<ModelUpload> {
        let plan = Self::plan(shape, float)?;
        let arenas = Arena::allocate(gpu, vec![plan], reserve)?;
        let none = || GpuError::Misuse("no memory for the model".into());
        let arena = arenas.into_iter().next().ok_or_else(none)?;
        let weights =
            DecoderWeights::new(shape, float, &mut |name, _| Ok(arena.region(name)?.address))?;
        let stream = gpu.stream(StreamPriority::Training)?;
        let staging = Staging::new(gpu, &stream, STAGING)?;
        let missing = weights.places.keys().cloned().collect();
        let (gpu, shape) = (Arc::clone(gpu), shape.clone());
        let model = Self { gpu, shape, float, weights, _arena: arena };
        Ok(ModelUpload { model, staging, missing })
    }
}

impl ModelUpload {
    /// Uploads a weight by its Hugging Face name, or the tables of angles, `cosines` and `sines` `[positions, pairs]`.
    ///
    /// # Errors
    /// If the model has no such weight, or it has another number of values.
    pub fn upload(&mut self, name: &str, values: HostFloats<'_>) -> Result<()> {
        let place = self.model.weights.places.get(name);
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

    /// The model, once its weights are on the device.
    ///
    /// # Errors
    /// If one was not uploaded.
    pub fn finish(self) -> Result<Arc<DeviceModel>> {
        let Self { model, staging, missing } = self;
        if let Some(name) = missing.first() {
            return Err(GpuError::Misuse(format!("`{name}` was not uploaded")));
        }
        // This waits for the copies.
        drop(staging);
        Ok(Arc::new(model))
    }
}
