//! The weights of a GGUF file under their Hugging Face names, undoing the changes that llama.cpp's
//! converter makes.

use std::path::Path;

use hone_core::gguf::{GgufFile, GgufTensor, GgufValue};

use super::format::WeightType;
use crate::{ModelError, ModelSpec, Result};

/// Architectures whose rows of queries and keys the converter permutes, from heads of two halves to heads
/// of pairs: it rotates values 2i and 2i + 1, transformers i and i + half.
const PERMUTED: [&str; 2] = ["llama", "smollm3"];

/// Names of the modules of a layer.
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

/// A GGUF file of a model.
pub(super) struct GgufWeights {
    file: GgufFile,
    /// Query heads and key heads, if their rows are permuted.
    permuted: Option<[usize; 2]>,
    /// Whether outputs of attention and MLP have norms.
    output_norms: bool,
}

impl GgufWeights {
    /// Reads the header.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn open(spec: &ModelSpec, path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let permuted = match file.metadata().get("general.architecture") {
            Some(GgufValue::Text(name)) => PERMUTED.contains(&name.as_str()),
            _ => return Err(ModelError::model(path, "has no `general.architecture`")),
        };
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

    /// The type of a weight.
    ///
    /// # Errors
    /// If it is missing or Hone does not read its type.
    pub fn stored(&self, name: &str) -> Result<WeightType> {
        let (stored, tensor) = self.tensor(name)?;
        let dtype = tensor.dtype().map_err(|kind| {
            ModelError::Unsupported(format!(
                "{}: tensor {stored} is of type {kind}; supported are F32, F16, BF16, Q8_0, Q4_0, \
                 Q4_1, Q4_K and Q6_K",
                self.file.path().display()
            ))
        })?;
        Ok(dtype.into())
    }

    /// Type, shape and bytes of a weight, with its rows in Hugging Face's order.
    ///
    /// # Errors
    /// As [`Self::stored`], or if the file cannot be read.
    pub fn read(&self, name: &str) -> Result<(WeightType, Vec<usize>, Vec<u8>)> {
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
        Ok((dtype, tensor.shape.clone(), bytes))
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
    use super::*;

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
