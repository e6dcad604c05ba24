//! What `config.json` says about a decoder.

use serde_json::Value;

use crate::config::LinearKind;
use crate::train::error::{LearnError, Result};

/// `model_type`s that the trainer knows.
pub const SUPPORTED: [&str; 1] = ["qwen2"];

/// The shape of a decoder-only model, and which of the block's options it uses.
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
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output layer is the embedding transposed.
    pub tie_word_embeddings: bool,
}

impl ModelSpec {
    /// Reads a parsed `config.json`, as transformers 4 or 5 writes it.
    ///
    /// # Errors
    /// If the architecture or one of its options is not supported, or a field is missing or wrong.
    pub fn from_config(config: &Value) -> Result<Self> {
        let architecture = config.get("model_type").and_then(Value::as_str).unwrap_or("unknown");
        if !SUPPORTED.contains(&architecture) {
            return Err(LearnError::Unsupported(format!(
                "cannot train a model of type `{architecture}`; supported: {}",
                SUPPORTED.join(", ")
            )));
        }
        refuse_unsupported(config)?;
        let hidden_size = size(config, "hidden_size")?;
        let num_heads = size(config, "num_attention_heads")?;
        let spec = Self {
            architecture: architecture.to_owned(),
            vocab_size: size(config, "vocab_size")?,
            hidden_size,
            intermediate_size: size(config, "intermediate_size")?,
            num_layers: size(config, "num_hidden_layers")?,
            num_heads,
            num_kv_heads: size_or(config, "num_key_value_heads", num_heads)?,
            head_dim: size_or(config, "head_dim", hidden_size / num_heads)?,
            rms_norm_eps: number(config, "rms_norm_eps", Some(1e-6))?,
            rope_theta: rope_theta(config)?,
            qkv_bias: true,
            tie_word_embeddings: config
                .get("tie_word_embeddings")
                .and_then(Value::as_bool)
                .unwrap_or(false),
        };
        spec.validate()?;
        Ok(spec)
    }

    fn validate(&self) -> Result<()> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(LearnError::Spec {
                field: "num_key_value_heads",
                value: self.num_kv_heads.to_string(),
                expected: "a divisor of `num_attention_heads`",
            });
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(LearnError::Spec {
                field: "head_dim",
                value: self.head_dim.to_string(),
                expected: "an even number above 0",
            });
        }
        Ok(())
    }

    /// `(out_features, in_features)` of a linear layer.
    pub fn linear_shape(&self, kind: LinearKind) -> (usize, usize) {
        let (q, kv) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        match kind {
            LinearKind::QProj => (q, self.hidden_size),
            LinearKind::KProj | LinearKind::VProj => (kv, self.hidden_size),
            LinearKind::OProj => (self.hidden_size, q),
            LinearKind::GateProj | LinearKind::UpProj => (self.intermediate_size, self.hidden_size),
            LinearKind::DownProj => (self.hidden_size, self.intermediate_size),
        }
    }

    /// Whether a linear layer has a bias.
    pub fn has_bias(&self, kind: LinearKind) -> bool {
        self.qkv_bias && matches!(kind, LinearKind::QProj | LinearKind::KProj | LinearKind::VProj)
    }

    /// Name and shape of every weight, as Hugging Face names them, in file order.
    pub fn weight_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let mut names =
            vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, self.hidden_size])];
        for layer in 0..self.num_layers {
            let prefix = format!("model.layers.{layer}");
            names.push((format!("{prefix}.input_layernorm.weight"), vec![self.hidden_size]));
            for kind in LinearKind::ALL {
                let (out, inp) = self.linear_shape(kind);
                let module = format!("{prefix}.{}.{}", kind.parent(), kind.as_str());
                names.push((format!("{module}.weight"), vec![out, inp]));
                if self.has_bias(kind) {
                    names.push((format!("{module}.bias"), vec![out]));
                }
            }
            names.push((
                format!("{prefix}.post_attention_layernorm.weight"),
                vec![self.hidden_size],
            ));
        }
        names.push(("model.norm.weight".to_owned(), vec![self.hidden_size]));
        if !self.tie_word_embeddings {
            names.push(("lm_head.weight".to_owned(), vec![self.vocab_size, self.hidden_size]));
        }
        names
    }
}

/// Options that would change the forward pass in ways it does not implement.
fn refuse_unsupported(config: &Value) -> Result<()> {
    if config.get("use_sliding_window").and_then(Value::as_bool) == Some(true) {
        return Err(LearnError::Spec {
            field: "use_sliding_window",
            value: "true".to_owned(),
            expected: "false: sliding-window attention is not supported",
        });
    }
    if let Some(act) = config.get("hidden_act").and_then(Value::as_str)
        && act != "silu"
    {
        return Err(LearnError::Spec {
            field: "hidden_act",
            value: format!("`{act}`"),
            expected: "`silu`",
        });
    }
    for field in ["rope_scaling", "rope_parameters"] {
        let rope = config.get(field);
        let kind = rope.and_then(|r| r.get("rope_type").or_else(|| r.get("type")));
        match kind.and_then(Value::as_str) {
            None | Some("default") => {}
            Some(other) => {
                return Err(LearnError::Unsupported(format!(
                    "config.json: `{field}` has rope_type `{other}`; only `default` is supported"
                )));
            }
        }
    }
    Ok(())
}

/// Top level (transformers 4) or under `rope_parameters` (transformers 5); 10 000 where absent.
fn rope_theta(config: &Value) -> Result<f64> {
    match config.get("rope_parameters") {
        Some(nested) if nested.get("rope_theta").is_some() => number(nested, "rope_theta", None),
        _ => number(config, "rope_theta", Some(10_000.0)),
    }
}

fn found(value: Option<&Value>) -> String {
    value.map_or_else(|| "missing".to_owned(), Value::to_string)
}

fn size(config: &Value, field: &'static str) -> Result<usize> {
    let value = config.get(field);
    value
        .and_then(Value::as_u64)
        .and_then(|n| usize::try_from(n).ok())
        .filter(|n| *n > 0)
        .ok_or_else(|| LearnError::Spec {
            field,
            value: found(value),
            expected: "a whole number above 0",
        })
}

fn size_or(config: &Value, field: &'static str, default: usize) -> Result<usize> {
    match config.get(field) {
        None | Some(Value::Null) => Ok(default),
        Some(_) => size(config, field),
    }
}

fn number(config: &Value, field: &'static str, default: Option<f64>) -> Result<f64> {
    let value = config.get(field).filter(|v| !v.is_null());
    match (value, default) {
        (None, Some(default)) => Ok(default),
        _ => value.and_then(Value::as_f64).filter(|n| n.is_finite() && *n > 0.0).ok_or_else(|| {
            LearnError::Spec { field, value: found(value), expected: "a number above 0" }
        }),
    }
}
