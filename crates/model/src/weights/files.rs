//! The files of a model's weights: safetensors, or one GGUF file.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};

use super::format::WeightType;
use super::gguf::GgufWeights;
use super::matrix::{BaseMatrix, QuantizedMatrix};
use super::options::LoadOptions;
use super::quantize::quantize;
use crate::{ModelError, ModelSpec, Result};

/// The weights in a model's files, by Hugging Face name.
pub struct WeightFiles(Files);

enum Files {
    Safetensors(MmapedSafetensors),
    Gguf(GgufWeights),
}

/// The values of a weight as they are stored.
struct RawWeight<'a> {
    dtype: WeightType,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

/// Whether a path names a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

impl WeightFiles {
    /// Opens a model's safetensors files, or its GGUF file. Reads the headers only.
    ///
    /// # Errors
    /// If a file cannot be read, or there are several and one of them is GGUF.
    pub fn open(spec: &ModelSpec, files: &[PathBuf]) -> Result<Self> {
        match files {
            [path] if is_gguf(path) => Ok(Self(Files::Gguf(GgufWeights::open(spec, path)?))),
            files if files.iter().any(|path| is_gguf(path)) => {
                Err(ModelError::weights("a model in several GGUF files cannot be read"))
            }
            files => {
                // SAFETY: the mapping is read only. If a file changes meanwhile, the values can be
                // wrong, as with any other read of it.
                Ok(Self(Files::Safetensors(unsafe { MmapedSafetensors::multi(files) }?)))
            }
        }
    }

    /// The type that a weight is stored in.
    ///
    /// # Errors
    /// If the weight is missing or its type cannot be read.
    pub fn stored(&self, name: &str) -> Result<WeightType> {
        match &self.0 {
            Files::Gguf(file) => file.stored(name),
            Files::Safetensors(files) => {
                let view = files.get(name).map_err(|e| unreadable(name, e))?;
                let dtype = DType::try_from(view.dtype());
                Ok(WeightType::Float(dtype.map_err(|e| unreadable(name, e))?))
            }
        }
    }

    /// Reads all weights of a model, one after another, in the types that `options` choose.
    ///
    /// # Errors
    /// If a weight is missing or damaged, or a quantized matrix is not for the CPU.
    pub(crate) fn load_all(
        &self,
        spec: &ModelSpec,
        options: &LoadOptions,
        device: &Device,
    ) -> Result<HashMap<String, BaseMatrix>> {
        let mut weights = HashMap::new();
        let mut fallbacks: BTreeMap<&'static str, usize> = BTreeMap::new();
        for (name, shape) in spec.weight_shapes() {
            let weight = self.load((&name, &shape), spec, options, device)?;
            let was_float = matches!(self.stored(&name)?, WeightType::Float(_));
            if shape.len() == 2 && was_float && options.is_fallback(spec, &name, weight.stored()) {
                *fallbacks.entry(weight.stored().as_str()).or_default() += 1;
            }
            weights.insert(name, weight);
        }
        if !fallbacks.is_empty() {
            let asked = options.quantize.as_str();
            tracing::info!(asked, ?fallbacks, "rows of some matrices are not whole blocks");
        }
        Ok(weights)
    }

    /// Reads a weight of the given shape in the type that `options` choose. Weights that are quantized
    /// meanwhile need memory for a few rows only.
    ///
    /// # Errors
    /// If the weight is missing or damaged, or a quantized matrix is not for the CPU.
    fn load(
        &self,
        (name, shape): (&str, &[usize]),
        spec: &ModelSpec,
        options: &LoadOptions,
        device: &Device,
    ) -> Result<BaseMatrix> {
        let held = options.in_memory(spec, name, shape, self.stored(name)?);
        if let (WeightType::Blocks(format), false) = (held, device.is_cpu()) {
            return Err(ModelError::Unsupported(format!(
                "`{name}` would be quantized ({}), which only the CPU can compute with",
                format.as_str()
            )));
        }
        if let (Files::Safetensors(files), WeightType::Float(dtype)) = (&self.0, held) {
            let tensor = files.load(name, device).map_err(|e| unreadable(name, e))?;
            return Ok(tensor.to_dtype(dtype)?.into());
        }
        let RawWeight { dtype, shape, bytes } = self.read(name)?;
        let dims = || match shape[..] {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(ModelError::weights(format!("`{name}` has shape {shape:?}, not a matrix's"))),
        };
        Ok(match (dtype, held) {
            (WeightType::Blocks(format), held) => {
                let matrix = QuantizedMatrix::new(format, dims()?, bytes.into_owned())?.into();
                if let WeightType::Blocks(_) = held { matrix } else { matrix.to_float()?.into() }
            }
            (WeightType::Float(dtype), WeightType::Blocks(format)) => {
                quantize(format, dims()?, dtype, &bytes)?.into()
            }
            (WeightType::Float(dtype), WeightType::Float(to)) => {
                let mut tensor = Tensor::from_raw_buffer(&bytes, dtype, &shape, device)?;
                tensor = tensor.to_dtype(to)?;
                if shape.len() == 1 && name.ends_with("norm.weight") {
                    tensor = self.without_offset(&tensor, spec)?;
                }
                tensor.into()
            }
        })
    }

    fn read(&self, name: &str) -> Result<RawWeight<'_>> {
        match &self.0 {
            Files::Gguf(file) => {
                let (dtype, shape, bytes) = file.read(name)?;
                Ok(RawWeight { dtype, shape, bytes: bytes.into() })
            }
            Files::Safetensors(files) => {
                let dtype = self.stored(name)?;
                let view = files.get(name).map_err(|e| unreadable(name, e))?;
                let (shape, bytes) = (view.shape().to_vec(), view.data().into());
                Ok(RawWeight { dtype, shape, bytes })
            }
        }
    }

    /// A norm's weight as Hugging Face stores it: GGUF files include the model's offset.
    fn without_offset(&self, weight: &Tensor, spec: &ModelSpec) -> candle_core::Result<Tensor> {
        match self.0 {
            Files::Gguf(_) if spec.norm_offset != 0.0 => weight - spec.norm_offset,
            _ => Ok(weight.clone()),
        }
    }
}

fn unreadable(name: &str, error: candle_core::Error) -> ModelError {
    ModelError::weights(format!("`{name}`: {error}")).caused_by(error)
}
