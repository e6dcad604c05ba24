//! The files of a model's weights: safetensors, or one GGUF file.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::quantized::QTensor;
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use hone_kernels::blocks::{BlockFormat, QuantizedMatrix};

use super::matrix::{BaseMatrix, WeightType};
use super::options::LoadOptions;
use crate::gguf::{GgufFile, GgufTensor, is_gguf};
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
                let view = files.get(name).map_err(|e| unreadable(name, &e))?;
                let dtype = DType::try_from(view.dtype());
                Ok(WeightType::Float(dtype.map_err(|e| unreadable(name, &e))?))
            }
        }
    }

    /// Reads all weights of a model, one after another, in the types that `options` choose.
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
        let RawWeight { dtype, shape, bytes } = self.read(name)?;
        let dims = || match shape[..] {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(ModelError::weights(format!("`{name}` has shape {shape:?}, not a matrix's"))),
        };
        Ok(match (dtype, held) {
            (WeightType::Blocks(format), held) => {
                let matrix = QuantizedMatrix::new(format, dims()?, bytes.into_owned());
                let matrix = matrix.map_err(ModelError::weights)?.into();
                if let WeightType::Blocks(_) = held { matrix } else { matrix.to_float()?.into() }
            }
            (WeightType::Float(dtype), WeightType::Blocks(format)) => {
                quantize(format, dims()?, dtype, &bytes)?.into()
            }
            (WeightType::Float(dtype), WeightType::Float(to)) => {
                let mut tensor = Tensor::from_raw_buffer(&bytes, dtype, &shape, device)?;
                tensor = tensor.to_dtype(to)?;
                // Norms of GGUF files include the model's offset.
                if matches!(self.0, Files::Gguf(_)) && name.ends_with("norm.weight") {
                    tensor = (tensor - spec.norm_offset)?;
                }
                tensor.into()
            }
        })
    }

    fn read(&self, name: &str) -> Result<RawWeight<'_>> {
        match &self.0 {
            Files::Gguf(file) => file.read(name),
            Files::Safetensors(files) => {
                let dtype = self.stored(name)?;
                let view = files.get(name).map_err(|e| unreadable(name, &e))?;
                let (shape, bytes) = (view.shape().to_vec(), view.data().into());
                Ok(RawWeight { dtype, shape, bytes })
            }
        }
    }
}

/// The bytes of a safetensors file. Equal tensors have equal bytes.
///
/// # Errors
/// If a tensor cannot be read.
pub fn safetensors_bytes(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>> {
    // transformers and PEFT require this entry.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(metadata))
        .map_err(|e| ModelError::Tensor(candle_core::Error::wrap(e)))
}

fn unreadable(name: &str, error: &candle_core::Error) -> ModelError {
    ModelError::weights(format!("`{name}`: {error}"))
}

// Quantizes matrices of floats, by candle's implementation of ggml's formats.

/// Values that a task converts to f32 and quantizes at a time, at least a row.
const TASK_VALUES: usize = 1 << 15;

/// Quantizes a matrix of floats, which `bytes` holds row by row in type `dtype`, on the threads of the
/// current pool. Memory holds f32 copies of a few rows at a time.
pub(super) fn quantize(
    format: BlockFormat,
    (rows, columns): (usize, usize),
    dtype: DType,
    bytes: &[u8],
) -> Result<QuantizedMatrix> {
    let group = (TASK_VALUES / columns.max(1)).max(1);
    let (from_row, to_row) = (columns * dtype.size_in_bytes(), format.row_bytes(columns));
    let mut blocks = vec![0; rows * to_row];
    let one = |(to, from): (&mut [u8], &[u8])| -> candle_core::Result<()> {
        let rows = to.len() / to_row;
        let floats = Tensor::from_raw_buffer(from, dtype, &[rows, columns], &Device::Cpu)?;
        let quantized = QTensor::quantize(&floats, format.ggml())?;
        to.copy_from_slice(&quantized.data()?);
        Ok(())
    };
    if to_row == 0 || bytes.len() != rows * from_row {
        let reason = format!("{} bytes of {dtype:?} are not a matrix", bytes.len());
        return Err(ModelError::weights(format!("{reason} [{rows}, {columns}] of whole blocks")));
    }
    let groups = blocks.par_chunks_mut(group * to_row);
    groups.zip(bytes.par_chunks(group * from_row)).try_for_each(one)?;
    QuantizedMatrix::new(format, (rows, columns), blocks).map_err(ModelError::weights)
}

// The weights of a GGUF file under their Hugging Face names, undoing the changes that llama.cpp's
// converter makes.

/// Architectures whose rows of queries and keys the converter permutes, from heads of two halves to heads
/// of pairs: it rotates values 2i and 2i + 1, transformers i and i + half.
const PERMUTED: [&str; 2] = ["llama", "smollm3"];

const MODULES: [(&str, &str); 16] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    // In families without norms of outputs.
    ("post_attention_layernorm", "ffn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
];

pub(super) struct GgufWeights {
    file: GgufFile,
    /// Query heads and key heads, if their rows are permuted.
    permuted: Option<[usize; 2]>,
    /// Whether outputs of attention and MLP have norms.
    output_norms: bool,
}

impl GgufWeights {
    pub fn open(spec: &ModelSpec, path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let architecture = file.required("general.architecture", GgufFile::text)?;
        let permuted = PERMUTED.contains(&architecture);
        let permuted = permuted.then_some([spec.num_heads, spec.num_kv_heads]);
        Ok(Self { file, permuted, output_norms: spec.output_norms })
    }

    /// The name in the file and the tensor.
    fn tensor(&self, name: &str) -> Result<(String, &GgufTensor)> {
        let stored = self.stored_name(name);
        let missing = || ModelError::weights(format!("`{name}` is missing"));
        let stored = stored.ok_or_else(missing)?;
        let absent = || {
            let reason = format!("`{name}` is missing: the file has no tensor `{stored}`");
            ModelError::weights(reason)
        };
        let tensor = self.file.tensors().get(&stored).ok_or_else(absent)?;
        Ok((stored, tensor))
    }

    fn stored_name(&self, name: &str) -> Option<String> {
        let (module, kind) = name.rsplit_once('.')?;
        let stored = match module {
            "model.embed_tokens" => "token_embd".to_owned(),
            "model.norm" => "output_norm".to_owned(),
            "lm_head" => "output".to_owned(),
            _ => {
                let (layer, module) = module.strip_prefix("model.layers.")?.split_once('.')?;
                let mut names = MODULES.iter().filter(|(known, _)| *known == module);
                let (first, last) = (names.next()?, names.next_back());
                let (_, stored) = last.filter(|_| self.output_norms).unwrap_or(first);
                format!("blk.{layer}.{stored}")
            }
        };
        Some(format!("{stored}.{kind}"))
    }

    pub fn stored(&self, name: &str) -> Result<WeightType> {
        let (stored, tensor) = self.tensor(name)?;
        tensor.dtype().map_err(|kind| {
            self.file.refuse(&format!(
                "tensor {stored} is of type {kind}; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K \
                 and Q6_K"
            ))
        })
    }

    /// Type, shape and bytes of a weight, with its rows in Hugging Face's order.
    fn read(&self, name: &str) -> Result<RawWeight<'_>> {
        let dtype = self.stored(name)?;
        let (stored, tensor) = self.tensor(name)?;
        let bytes = self.file.read(&stored, tensor)?;
        let heads = self.permuted.and_then(|[queries, keys]| {
            let of = |module: &str| name.contains(&format!(".self_attn.{module}."));
            if of("q_proj") { Some(queries) } else { of("k_proj").then_some(keys) }
        });
        let bytes = match heads {
            Some(heads) => halves_from_pairs(&bytes, heads, tensor.shape.first().copied()),
            None => bytes,
        };
        Ok(RawWeight { dtype, shape: tensor.shape.clone(), bytes: bytes.into() })
    }
}

/// Moves the rows of each head: row `2i + half` goes to row `half * width / 2 + i`, where `width` is the
/// head's width. Rows of blocks move as a whole, so this is exact. Rows that are not whole heads stay;
/// the model refuses their shape.
fn halves_from_pairs(bytes: &[u8], heads: usize, rows: Option<usize>) -> Vec<u8> {
    let rows = rows.unwrap_or(0);
    if heads == 0 || rows == 0 || !rows.is_multiple_of(2 * heads) {
        return bytes.to_vec();
    }
    let (width, row_bytes) = (rows / heads, bytes.len() / rows);
    let mut moved = Vec::with_capacity(bytes.len());
    for row in 0..rows {
        let (head, row) = (row / width, row % width);
        let from = head * width + 2 * (row % (width / 2)) + row / (width / 2);
        moved.extend_from_slice(&bytes[from * row_bytes..][..row_bytes]);
    }
    moved
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::QTensor;
    use half::bf16;

    use super::*;
    use crate::weights::BaseMatrix;

    #[test]
    fn quantizes_as_candle_does_the_whole_matrix() {
        // Several groups of rows, the last of them partial.
        let (rows, columns) = (301, 256);
        let value = |i: usize| bf16::from_f32(((i * 7919) % 1009) as f32 / 504.5 - 1.0);
        let values: Vec<bf16> = (0..rows * columns).map(value).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let floats = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
        for format in [BlockFormat::Q8_0, BlockFormat::Q4K, BlockFormat::Q6K] {
            let found = quantize(format, (rows, columns), DType::BF16, &bytes).unwrap();
            let expected = QTensor::quantize(&floats, format.ggml()).unwrap();
            let found = BaseMatrix::from(found).to_float().unwrap();
            let values = |floats: &Tensor| floats.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let expected = expected.dequantize(&Device::Cpu).unwrap();
            assert_eq!(values(&found), values(&expected), "{format:?}");
            let error = (found - floats.to_dtype(DType::F32).unwrap()).unwrap().abs().unwrap();
            let error = error.max_all().unwrap().to_scalar::<f32>().unwrap();
            let bound = if format == BlockFormat::Q4K { 0.2 } else { 0.04 };
            assert!(error > 0.0 && error < bound, "{format:?}: {error}");
        }
        assert!(quantize(BlockFormat::Q8_0, (3, 40), DType::F32, &[0; 480]).is_err());
        assert!(quantize(BlockFormat::Q8_0, (3, 32), DType::F32, &[0; 4]).is_err());
    }

    mod gguf {
        use super::super::*;

        #[test]
        fn rows_of_heads_move_to_halves() {
            // Two heads of width 4, one byte a row: pairs (0, 1) and (2, 3) of each.
            let pairs = [0, 2, 1, 3, 4, 6, 5, 7];
            assert_eq!(halves_from_pairs(&pairs, 2, Some(8)), [0, 1, 2, 3, 4, 5, 6, 7]);
            let rows: Vec<u8> = pairs.iter().flat_map(|x| [*x, *x + 10]).collect();
            assert_eq!(halves_from_pairs(&rows, 2, Some(8))[2..6], [1, 11, 2, 12]);
            assert_eq!(halves_from_pairs(&pairs, 3, Some(8)), pairs);
        }
    }
}
