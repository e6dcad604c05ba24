//! The shape and the options of a decoder, read from `config.json`.

pub(crate) mod family;
mod fields;
mod linear_kind;
mod rope;

use serde_json::Value;

use crate::{ModelError, Result};
use family::{AttentionBias, ModelFamily};
use fields::{flag_or, get, invalid, number_or, optional_number, size, size_or, wrong};

pub use linear_kind::LinearKind;
pub(crate) use rope::RopeTables;
pub use rope::{RopeScaling, RopeSpec};

/// The shape of a decoder-only model, and the options of its blocks.
///
/// Checkpoints contain a hash of this type's `Debug` text ([`Model::digest`](crate::Model::digest)). A
/// new name of a type, field or variant in it makes existing checkpoints unreadable.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// `model_type`.
    pub architecture: String,
    /// Logits per position.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the gated MLP.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon inside RMSNorm.
    pub rms_norm_eps: f64,
    /// Rotary position embedding, for layers with [`LayerSpec::rope`].
    pub rope: RopeSpec,
    /// Options that differ between layers; one entry per layer.
    pub layers: Vec<LayerSpec>,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether q, k and v are one layer (`qkv_proj`), and gate and up another (`gate_up_proj`).
    pub fused: bool,
    /// Whether queries and keys pass an RMSNorm over each head before their rotation (Qwen3).
    pub head_norms: bool,
    /// Whether the outputs of attention and MLP pass an RMSNorm before the residual sum (Gemma 2).
    pub output_norms: bool,
    /// Added to the weights of RMSNorms: 1 in Gemma, else 0.
    pub norm_offset: f64,
    /// The gate's activation.
    pub activation: Activation,
    /// Factor of the embedding's output, rounded to the float type of the computation.
    pub embedding_scale: Option<f64>,
    /// Factor of the attention scores.
    pub attention_scale: f64,
    /// Soft cap of the attention scores.
    pub attention_softcap: Option<f64>,
    /// Soft cap c of the logits: `c tanh(logit / c)`.
    pub final_softcap: Option<f64>,
    /// Whether the output layer uses the embedding's weight.
    pub tie_word_embeddings: bool,
}

/// Options of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Whether queries and keys are rotated by their positions.
    pub rope: bool,
    /// Positions that a query attends to, including its own; without a window all up to its own.
    pub window: Option<usize>,
}

/// Activation of the gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu,
    /// `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`, called `gelu_pytorch_tanh`.
    GeluTanh,
}

/// Most layers of a model, so that a wrong number does not fill the memory.
const MOST_LAYERS: usize = 65_536;

impl ModelSpec {
    /// Reads a parsed `config.json` as written by transformers 4 or 5. Absent fields have the defaults
    /// of transformers' configuration class.
    ///
    /// # Errors
    /// If the architecture or one of its options is not supported, or a field is missing or wrong.
    pub fn from_config(config: &Value) -> Result<Self> {
        let family = ModelFamily::of(config)?;
        reject_unsupported(config, family)?;
        let hidden_size = size(config, "hidden_size")?;
        let num_heads = size(config, "num_attention_heads")?;
        let num_layers = size(config, "num_hidden_layers")?;
        if num_layers > MOST_LAYERS {
            return Err(invalid("num_hidden_layers", num_layers, "at most 65536"));
        }
        let has_head_dim = config.get("head_dim").is_some_and(|dim| !dim.is_null());
        if !has_head_dim && family.head_dim.is_none() && !hidden_size.is_multiple_of(num_heads) {
            return Err(invalid("num_attention_heads", num_heads, "a divisor of `hidden_size`"));
        }
        let head_dim =
            size_or(config, "head_dim", family.head_dim.unwrap_or(hidden_size / num_heads))?;
        check_heads(config, num_heads, head_dim)?;
        let rope_layers = family.rope_layers(config, num_layers)?;
        let windows = family.windows(config, &rope_layers)?;
        let attention_bias = match family.attention_bias {
            AttentionBias::Configured => flag_or(config, "attention_bias", false)?,
            AttentionBias::Inputs | AttentionBias::Never => false,
        };
        let gemma = family.gemma;
        let score_width = if gemma {
            number_or(config, "query_pre_attn_scalar", 256.0)?
        } else {
            head_dim as f64
        };
        let cap = |field, default| match config.get(field) {
            None if gemma => Ok(Some(default)),
            _ if gemma => optional_number(config, field),
            _ => Ok(None),
        };
        Ok(Self {
            architecture: family.model_type.to_owned(),
            vocab_size: size(config, "vocab_size")?,
            hidden_size,
            intermediate_size: size(config, "intermediate_size")?,
            num_layers,
            num_heads,
            num_kv_heads: size_or(config, "num_key_value_heads", num_heads)?,
            head_dim,
            rms_norm_eps: number_or(config, "rms_norm_eps", family.rms_norm_eps)?,
            rope: RopeSpec::from_config(config, head_dim, family.rope_theta, family.fused)?,
            layers: rope_layers
                .into_iter()
                .zip(windows)
                .map(|(rope, window)| LayerSpec { rope, window })
                .collect(),
            qkv_bias: attention_bias || family.attention_bias == AttentionBias::Inputs,
            output_bias: attention_bias,
            mlp_bias: family.mlp_bias && flag_or(config, "mlp_bias", false)?,
            fused: family.fused,
            head_norms: family.head_norms,
            output_norms: gemma,
            norm_offset: if gemma { 1.0 } else { 0.0 },
            activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
            embedding_scale: gemma.then(|| (hidden_size as f64).sqrt()),
            attention_scale: 1.0 / score_width.sqrt(),
            attention_softcap: cap("attn_logit_softcapping", 50.0)?,
            final_softcap: cap("final_logit_softcapping", 30.0)?,
            tie_word_embeddings: flag_or(config, "tie_word_embeddings", family.tied)?,
        })
    }

    /// Context length of a parsed `config.json` in tokens: `max_position_embeddings`, or with longrope the length
    /// up to which the frequencies of [`RopeSpec`] apply.
    ///
    /// # Errors
    /// As [`Self::from_config`].
    pub fn context(config: &Value) -> Result<usize> {
        let longest = max_positions(config)?;
        Ok(match Self::from_config(config)?.rope.scaling {
            RopeScaling::Long { original, .. } => longest.min(original),
            _ => longest,
        })
    }

    pub(crate) fn heads(&self) -> HeadLayout {
        HeadLayout { queries: self.num_heads, keys: self.num_kv_heads, dim: self.head_dim }
    }

    /// Options of one layer's attention.
    pub fn attention_options(&self, layer: usize) -> AttentionOptions {
        AttentionOptions {
            scale: self.attention_scale,
            softcap: self.attention_softcap,
            window: self.layers.get(layer).and_then(|layer| layer.window),
        }
    }

    /// Bytes of the keys and values of one position in all layers, as the native engine's cache stores them: in
    /// `f32`, or in integers of 16 bits with a scale for each head's key and value if weights are quantized.
    pub fn cache_position_bytes(&self, is_quantized: bool) -> usize {
        let dim = self.head_dim;
        let vector = if is_quantized { dim * 2 + size_of::<f32>() } else { dim * size_of::<f32>() };
        2 * self.num_layers * self.num_kv_heads * vector
    }

    /// Checks that a sequence of `tokens` tokens uses the rotary frequencies of [`RopeSpec`].
    ///
    /// # Errors
    /// If the model's longrope scaling has other frequencies at this length.
    pub fn check_length(&self, tokens: usize) -> Result<()> {
        match self.rope.scaling {
            RopeScaling::Long { original, .. } if tokens > original => {
                Err(ModelError::Unsupported(format!(
                    "a sequence of {tokens} tokens: with longrope, sequences of more than \
                     original_max_position_embeddings = {original} tokens cannot be trained on"
                )))
            }
            _ => Ok(()),
        }
    }

    /// The linear layers of a block and their `(out_features, in_features)`, in file order. All blocks
    /// have the same; a layer beyond the last has none.
    pub fn linears(&self, layer: usize) -> impl Iterator<Item = (LinearKind, (usize, usize))> {
        use LinearKind::{DownProj, GateUpProj, OProj, QkvProj};
        let kinds: &[LinearKind] = match layer < self.num_layers {
            false => &[],
            true if self.fused => &[OProj, QkvProj, DownProj, GateUpProj],
            true => &LinearKind::ALL,
        };
        kinds.iter().map(|kind| (*kind, self.linear_shape(*kind)))
    }

    /// `(out_features, in_features)` of a linear layer.
    pub fn linear_shape(&self, kind: LinearKind) -> (usize, usize) {
        let (q, kv) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        match kind {
            LinearKind::QProj => (q, self.hidden_size),
            LinearKind::KProj | LinearKind::VProj => (kv, self.hidden_size),
            LinearKind::QkvProj => (q + 2 * kv, self.hidden_size),
            LinearKind::OProj => (self.hidden_size, q),
            LinearKind::GateProj | LinearKind::UpProj => (self.intermediate_size, self.hidden_size),
            LinearKind::GateUpProj => (2 * self.intermediate_size, self.hidden_size),
            LinearKind::DownProj => (self.hidden_size, self.intermediate_size),
        }
    }

    pub(crate) fn has_bias(&self, kind: LinearKind) -> bool {
        use LinearKind::{KProj, OProj, QProj, QkvProj, VProj};
        match kind {
            QProj | KProj | VProj | QkvProj => self.qkv_bias,
            OProj => self.output_bias,
            _ => self.mlp_bias,
        }
    }

    /// Names of a block's norms before attention and MLP, and, with [`Self::output_norms`], of their
    /// outputs.
    pub(crate) fn norm_names(&self) -> ([&'static str; 2], Option<[&'static str; 2]>) {
        if self.output_norms {
            let outputs = ["post_attention_layernorm", "post_feedforward_layernorm"];
            (["input_layernorm", "pre_feedforward_layernorm"], Some(outputs))
        } else {
            (["input_layernorm", "post_attention_layernorm"], None)
        }
    }

    /// Whether a weight is that of the output layer, which may be the embedding.
    pub(crate) fn is_head(&self, name: &str) -> bool {
        let tied = self.tie_word_embeddings;
        name == if tied { "model.embed_tokens.weight" } else { "lm_head.weight" }
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.weight_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Hugging Face name and shape of every weight.
    pub fn weight_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let embedding = vec![self.vocab_size, self.hidden_size];
        let mut names = vec![("model.embed_tokens.weight".to_owned(), embedding.clone())];
        let (inputs, outputs) = self.norm_names();
        for layer in 0..self.num_layers {
            let prefix = format!("model.layers.{layer}");
            for (kind, (out, inp)) in self.linears(layer) {
                let module = kind.module(layer);
                names.push((format!("{module}.weight"), vec![out, inp]));
                if self.has_bias(kind) {
                    names.push((format!("{module}.bias"), vec![out]));
                }
            }
            for norm in ["q_norm", "k_norm"].iter().filter(|_| self.head_norms) {
                names.push((format!("{prefix}.self_attn.{norm}.weight"), vec![self.head_dim]));
            }
            for norm in inputs.into_iter().chain(outputs.into_iter().flatten()) {
                names.push((format!("{prefix}.{norm}.weight"), vec![self.hidden_size]));
            }
        }
        names.push(("model.norm.weight".to_owned(), vec![self.hidden_size]));
        if !self.tie_word_embeddings {
            names.push(("lm_head.weight".to_owned(), embedding));
        }
        names
    }
}

/// `max_position_embeddings`.
///
/// # Errors
/// If the architecture is not supported, or the field is wrong.
pub fn max_positions(config: &Value) -> Result<usize> {
    size_or(config, "max_position_embeddings", ModelFamily::of(config)?.max_positions)
}

/// `architectures[0]` of a supported model.
///
/// # Errors
/// If the architecture is not supported.
pub fn class(config: &Value) -> Result<&'static str> {
    Ok(ModelFamily::of(config)?.class)
}

fn check_heads(config: &Value, num_heads: usize, head_dim: usize) -> Result<()> {
    const KV_HEADS: &str = "num_key_value_heads";
    if !num_heads.is_multiple_of(size_or(config, KV_HEADS, num_heads)?) {
        let expected = "a divisor of `num_attention_heads`";
        return Err(wrong(KV_HEADS, config.get(KV_HEADS), expected));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(invalid("head_dim", head_dim, "an even number above 0"));
    }
    Ok(())
}

/// Rejects options that change the forward pass and are not implemented.
fn reject_unsupported(config: &Value, family: &ModelFamily) -> Result<()> {
    if let Some(value) = get(config, "quantization_config") {
        let expected = "absent: quantized weights are read from GGUF files only";
        return Err(wrong("quantization_config", Some(value), expected));
    }
    // Gemma 2 files have both fields; transformers reads the second.
    let (field, only, expected) = if family.gemma {
        ("hidden_activation", "gelu_pytorch_tanh", "`gelu_pytorch_tanh`")
    } else {
        ("hidden_act", "silu", "`silu`")
    };
    if let Some(value) = get(config, field).filter(|value| **value != only) {
        return Err(wrong(field, Some(value), expected));
    }
    let field = "use_bidirectional_attention";
    match flag_or(config, field, false)? {
        true => Err(invalid(field, true, "false: only causal attention is supported")),
        false => Ok(()),
    }
}

// The options and the shape of one layer's attention.

/// How scores become weights: `softmax(mask(cap(scale * q k^T)))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Soft cap c on the scaled scores: `c tanh(score / c)` (Gemma 2).
    pub softcap: Option<f64>,
    /// A query at position i attends to the keys from `i - window + 1` to i; without a window to all
    /// keys up to i.
    pub window: Option<usize>,
}

/// Counts and width of the heads of a layer.
#[derive(Clone, Copy)]
pub(crate) struct HeadLayout {
    pub queries: usize,
    /// Key and value heads; divides `queries`.
    pub keys: usize,
    pub dim: usize,
}

#[cfg(test)]
mod tests;
