//! A model and its adapters in the form that `hone-cuda` takes: shape, weights and flat values.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use half::bf16;

use hone_cuda::{
    AdapterLayout, AdapterModule, CubinCache, DecoderShape, DeviceFloat, DeviceMemory, DeviceModel,
    Gpu, HostFloats,
};

use crate::adapter::weights::{LoraWeights, factor_names, plan};
use crate::adapter::{LoraConfig, ModuleScale};
use crate::kernels::compute::Compute;
use crate::spec::Activation;
use crate::weights::{BaseMatrix, WeightType};
use crate::{Model, ModelError, ModelSpec, Result};

/// The shape of a model for sequences of up to `positions` tokens.
pub fn decoder_shape(spec: &ModelSpec, positions: usize) -> DecoderShape {
    DecoderShape {
        vocab: spec.vocab_size,
        hidden: spec.hidden_size,
        intermediate: spec.intermediate_size,
        heads: spec.num_heads,
        key_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        rotated_pairs: spec.rope.rotary_dim / 2,
        positions,
        layers: spec.layers.iter().map(|l| (l.rope, l.window.unwrap_or(0))).collect(),
        eps: spec.rms_norm_eps as f32,
        norm_offset: spec.norm_offset as f32,
        qkv_bias: spec.qkv_bias,
        output_bias: spec.output_bias,
        mlp_bias: spec.mlp_bias,
        is_fused: spec.fused,
        head_norms: spec.head_norms,
        output_norms: spec.output_norms,
        is_gelu: spec.activation == Activation::GeluTanh,
        is_tied: spec.tie_word_embeddings,
        embedding_scale: spec.embedding_scale.unwrap_or(1.0) as f32,
        attention_scale: spec.attention_scale as f32,
        attention_softcap: spec.attention_softcap.unwrap_or(0.0) as f32,
        final_softcap: spec.final_softcap.unwrap_or(0.0) as f32,
    }
}

/// Bytes of device memory that are left to the driver and to other processes; of a small device less.
const RESERVE: u64 = 512 << 20;

/// Bytes of cuBLASLt's workspace, which NVIDIA recommends for Hopper; on a small device less.
const WORKSPACE: u64 = 32 << 20;

/// A GPU, as `model.device` names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Its number, from 0.
    pub ordinal: usize,
    /// Directory of compiled kernels.
    pub kernels: PathBuf,
}

/// A frozen base on a GPU, which the trainer's passes and the native engine share.
#[derive(Clone, Debug)]
pub struct DeviceBase {
    /// The weights.
    pub model: Arc<DeviceModel>,
    /// The compiled kernels.
    pub kernels: CubinCache,
    /// Bytes of the memory that stay free.
    pub reserve: u64,
    /// Bytes of a workspace for products.
    pub workspace: u64,
}

/// The memory of a device before anything of Hone is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRoom {
    /// Free bytes.
    pub free: u64,
    /// Bytes of them that stay free.
    pub reserve: u64,
    /// Bytes of a workspace for products.
    pub workspace: u64,
}

/// The type of weights and activations on a device: 32 bits if all weights are and `compute` is f32, and otherwise bf16.
pub fn device_float(compute: Compute, is_f32: bool) -> DeviceFloat {
    if is_f32 && compute == Compute::F32 { DeviceFloat::F32 } else { DeviceFloat::Bf16 }
}

impl CudaDevice {
    /// Opens the device.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn open(&self) -> Result<(Arc<Gpu>, DeviceRoom)> {
        let gpu = Arc::new(Gpu::open(self.ordinal)?);
        let free = gpu.free_bytes()?;
        let (reserve, workspace) = (RESERVE.min(free / 16), WORKSPACE.min(free / 64));
        Ok((gpu, DeviceRoom { free, reserve, workspace }))
    }

    /// Opens the device and copies a model with angles of as many positions to it. Matrices are in 32 bits if all of them
    /// are and `compute` is f32, and otherwise in bf16.
    ///
    /// # Errors
    /// If the device cannot be used, a matrix is quantized, or the memory is too small.
    pub fn load(&self, model: &Model, compute: Compute, positions: usize) -> Result<DeviceBase> {
        let (gpu, DeviceRoom { reserve, workspace, .. }) = self.open()?;
        let is_f32 =
            |(_, weight): (String, BaseMatrix)| weight.stored() == WeightType::Float(DType::F32);
        let float = device_float(compute, model.weights().all(is_f32));
        let shape = decoder_shape(model.spec(), positions);
        let mut all = DeviceModel::open(&gpu, &shape, float, reserve)?;
        upload(model, positions, |name, values| all.upload(name, values))?;
        tracing::info!(device = %gpu.info().name, weights = ?float, "the model is on the GPU");
        let kernels = CubinCache::new(&self.kernels);
        Ok(DeviceBase { model: all.finish()?, kernels, reserve, workspace })
    }
}

/// Passes every weight of a model, and the tables of angles of as many positions, to `upload`, one after another.
///
/// # Errors
/// If a matrix is quantized, or the first error of `upload`.
pub fn upload(
    model: &Model,
    positions: usize,
    mut upload: impl FnMut(&str, HostFloats<'_>) -> hone_cuda::Result<()>,
) -> Result<()> {
    for (name, weight) in model.weights() {
        let BaseMatrix::Float(tensor) = weight else {
            return Err(ModelError::Unsupported(format!(
                "`{name}` is quantized, but a GPU computes with weights in 16 or 32 bits: set `model.quantize` to \
                 \"none\", or `model.device` to \"cpu\""
            )));
        };
        let tensor = tensor.flatten_all()?;
        if tensor.dtype() == DType::BF16 {
            upload(&name, HostFloats::Bf16(&tensor.to_vec1::<bf16>()?))?;
        } else {
            upload(&name, HostFloats::F32(&floats(&tensor)?))?;
        }
    }
    let (cosines, sines) = model.angles(positions)?;
    upload("cosines", HostFloats::F32(&floats(&cosines)?))?;
    upload("sines", HostFloats::F32(&floats(&sines)?))?;
    Ok(())
}

/// The linear layers that an adapter of these settings is on.
///
/// # Errors
/// If the settings do not fit the model.
pub fn planned_modules(spec: &ModelSpec, config: &LoraConfig) -> Result<Vec<AdapterModule>> {
    let modules = plan(spec, config)?.into_iter();
    Ok(modules.map(|((layer, kind), of)| module((kind.module(layer), of))).collect())
}

/// The linear layers that an adapter is on.
pub fn adapter_modules(lora: &LoraWeights) -> Vec<AdapterModule> {
    lora.module_scales().into_iter().map(module).collect()
}

fn module((name, of): (String, ModuleScale)) -> AdapterModule {
    AdapterModule { name, rank: of.r, scale: of.scale as f32 }
}

/// An adapter's values in the order of a layout for its modules.
///
/// # Errors
/// If a tensor operation fails.
pub fn adapter_values(lora: &LoraWeights, layout: &AdapterLayout) -> Result<Vec<f32>> {
    let parameters: BTreeMap<_, _> = lora.parameters().into_iter().collect();
    let mut values = vec![0.0; layout.values];
    for (module, places) in &layout.places {
        for (name, place) in factor_names(module).iter().zip(places) {
            let missing = || ModelError::Unsupported(format!("the adapter has no `{name}`"));
            let var = parameters.get(name).ok_or_else(missing)?;
            values[place.clone()].copy_from_slice(&floats(&var.as_detached_tensor())?);
        }
    }
    Ok(values)
}

/// Tensors by PEFT name, with the shapes and the type of an adapter's, from values in the order of a layout.
///
/// # Errors
/// If a tensor operation fails.
pub fn adapter_tensors(
    lora: &LoraWeights,
    layout: &AdapterLayout,
    values: &[f32],
) -> Result<BTreeMap<String, Tensor>> {
    let places =
        layout.places.iter().flat_map(|(module, at)| factor_names(module).into_iter().zip(at));
    let places: BTreeMap<String, _> = places.collect();
    let tensor = |(name, var): (String, &candle_core::Var)| {
        let missing = || ModelError::Unsupported(format!("the device has no `{name}`"));
        let place = places.get(&name).copied().ok_or_else(missing)?;
        let values = Tensor::from_slice(&values[place.clone()], var.shape(), &Device::Cpu)?;
        Ok((name, values.to_dtype(var.dtype())?))
    };
    lora.parameters().into_iter().map(tensor).collect()
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}
