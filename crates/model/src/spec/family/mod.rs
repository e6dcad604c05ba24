//! Differences between the families of decoders, from transformers' configuration classes.

use serde_json::Value;

use super::fields::{flag_or, get, optional_size, size, size_or, wrong};
use crate::{ModelError, Result};

/// The defaults and the fixed properties of a family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelFamily {
    /// `model_type`.
    pub model_type: &'static str,
    /// `architectures[0]`.
    pub class: &'static str,
    /// Default of `max_position_embeddings`.
    pub max_positions: usize,
    /// Default of `rope_theta`.
    pub rope_theta: f64,
    /// Default of `rms_norm_eps`.
    pub rms_norm_eps: f64,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Default of `head_dim`; `None` for `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    pub attention_bias: AttentionBias,
    pub mlp_bias: bool,
    /// Whether queries and keys have an RMSNorm over each head.
    pub head_norms: bool,
    /// Whether q, k, v are one projection, and gate and up another.
    pub fused: bool,
    /// Gemma's scaled embedding, norms by 1 + weight, norms of the outputs of attention and MLP, tanh
    /// GELU, and soft caps.
    pub gemma: bool,
    /// Whether layers can lack rotary position embedding.
    pub no_rope_layers: bool,
    pub windows: Windows,
}

/// Which projections of the attention have biases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AttentionBias {
    /// No projection.
    Never,
    /// Those of q, k and v.
    Inputs,
    /// All four if `attention_bias` is true.
    Configured,
}

/// Which layers have a sliding window, unless `layer_types` decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Windows {
    /// No layer; `layer_types` must agree.
    Never,
    /// All if there is a `sliding_window` (or this default); `layer_types` must agree.
    Everywhere { default: Option<usize> },
    /// Those from `max_window_layers` on, if `use_sliding_window`.
    FromLayer,
    /// Those without rotary position embedding, if `use_sliding_window`.
    WithoutRope,
    /// Every second layer, from the first.
    Alternating,
}

const LLAMA: ModelFamily = ModelFamily {
    model_type: "llama",
    class: "LlamaForCausalLM",
    max_positions: 2048,
    rope_theta: 10_000.0,
    rms_norm_eps: 1e-6,
    tied: false,
    head_dim: None,
    attention_bias: AttentionBias::Configured,
    mlp_bias: true,
    head_norms: false,
    fused: false,
    gemma: false,
    no_rope_layers: false,
    windows: Windows::Never,
};

const QWEN2: ModelFamily = ModelFamily {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    max_positions: 32_768,
    attention_bias: AttentionBias::Inputs,
    mlp_bias: false,
    windows: Windows::FromLayer,
    ..LLAMA
};

static FAMILIES: [ModelFamily; 7] = [
    QWEN2,
    ModelFamily {
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        head_dim: Some(128),
        attention_bias: AttentionBias::Configured,
        head_norms: true,
        ..QWEN2
    },
    LLAMA,
    ModelFamily {
        model_type: "mistral",
        class: "MistralForCausalLM",
        max_positions: 131_072,
        attention_bias: AttentionBias::Never,
        mlp_bias: false,
        windows: Windows::Everywhere { default: Some(4096) },
        ..LLAMA
    },
    ModelFamily {
        model_type: "smollm3",
        class: "SmolLM3ForCausalLM",
        max_positions: 32_768,
        rope_theta: 2_000_000.0,
        tied: true,
        no_rope_layers: true,
        windows: Windows::WithoutRope,
        ..LLAMA
    },
    ModelFamily {
        model_type: "gemma2",
        class: "Gemma2ForCausalLM",
        max_positions: 8192,
        tied: true,
        head_dim: Some(256),
        mlp_bias: false,
        gemma: true,
        windows: Windows::Alternating,
        ..LLAMA
    },
    ModelFamily {
        model_type: "phi3",
        class: "Phi3ForCausalLM",
        max_positions: 4096,
        rms_norm_eps: 1e-5,
        attention_bias: AttentionBias::Never,
        mlp_bias: false,
        fused: true,
        windows: Windows::Everywhere { default: None },
        ..LLAMA
    },
];

impl ModelFamily {
    /// The family of a parsed `config.json`.
    pub(crate) fn of(config: &Value) -> Result<&'static Self> {
        let model_type = get(config, "model_type").and_then(Value::as_str);
        let class = get(config, "architectures").and_then(|list| list.get(0)?.as_str());
        let family = FAMILIES.iter().find(|family| Some(family.model_type) == model_type);
        // A file without `architectures` counts as the model that generates text.
        match family {
            Some(family) if class.is_none_or(|class| class == family.class) => Ok(family),
            _ => Err(ModelError::Unsupported(format!(
                "a model of type `{}` with architecture `{}` cannot be used; supported: {}",
                model_type.unwrap_or("unknown"),
                class.unwrap_or("unknown"),
                FAMILIES.each_ref().map(|family| format!("`{}`", family.class)).join(", ")
            ))),
        }
    }

    /// Which layers have rotary position embedding.
    pub(crate) fn rope_layers(&self, config: &Value, layers: usize) -> Result<Vec<bool>> {
        const FIELD: &str = "no_rope_layers";
        if !self.no_rope_layers {
            return Ok(vec![true; layers]);
        }
        let Some(value) = get(config, FIELD) else {
            let interval = size_or(config, "no_rope_layer_interval", 4)?;
            return Ok((1..=layers).map(|layer| layer % interval != 0).collect());
        };
        // Despite the name, 1 means a layer with rotary position embedding.
        let flag = |x: &Value| x.as_u64().filter(|x| *x < 2).map(|x| x == 1);
        let flags = value.as_array().and_then(|list| list.iter().map(flag).collect());
        flags
            .filter(|flags: &Vec<bool>| flags.len() == layers)
            .ok_or_else(|| wrong(FIELD, Some(value), "a list of one 0 or 1 per layer"))
    }

    /// The sliding window of every layer, in tokens.
    pub(crate) fn windows(&self, config: &Value, rope: &[bool]) -> Result<Vec<Option<usize>>> {
        let types = layer_types(config, rope.len())?;
        let used = || flag_or(config, "use_sliding_window", false);
        let window_or = |default| match config.get("sliding_window") {
            Some(_) => optional_size(config, "sliding_window"),
            None => Ok(default),
        };
        let window = match self.windows {
            Windows::Everywhere { default } => window_or(default)?,
            Windows::FromLayer if used()? => window_or(Some(4096))?,
            Windows::WithoutRope if used()? => window_or(None)?,
            Windows::Alternating => window_or(Some(4096))?,
            Windows::Never | Windows::FromLayer | Windows::WithoutRope => None,
        };
        let mut sliding: Vec<bool> = match self.windows {
            Windows::Never => vec![false; rope.len()],
            Windows::Everywhere { .. } => vec![window.is_some(); rope.len()],
            Windows::FromLayer => {
                let first = match get(config, "max_window_layers") {
                    Some(Value::Number(n)) if n.as_u64() == Some(0) => 0,
                    Some(_) => size(config, "max_window_layers")?,
                    None => 28,
                };
                (0..rope.len()).map(|layer| window.is_some() && layer >= first).collect()
            }
            Windows::WithoutRope => rope.iter().map(|rope| window.is_some() && !rope).collect(),
            Windows::Alternating => (0..rope.len()).map(|layer| layer % 2 == 0).collect(),
        };
        if let Some(types) = types {
            let fixed = matches!(self.windows, Windows::Never | Windows::Everywhere { .. });
            if fixed && types != sliding {
                let expected = "the same for every layer and consistent with `sliding_window` for \
                                this architecture";
                return Err(wrong("layer_types", config.get("layer_types"), expected));
            }
            sliding = types;
        }
        if window.is_none() && sliding.contains(&true) {
            let expected =
                "a whole number above 0 (and in use), because some layers have sliding attention";
            return Err(wrong("sliding_window", config.get("sliding_window"), expected));
        }
        Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
    }
}

/// Which layers have sliding attention according to `layer_types`.
fn layer_types(config: &Value, layers: usize) -> Result<Option<Vec<bool>>> {
    const FIELD: &str = "layer_types";
    let Some(value) = get(config, FIELD) else { return Ok(None) };
    let sliding = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Some(false),
        Some("sliding_attention") => Some(true),
        _ => None,
    };
    let list: Option<Vec<bool>> =
        value.as_array().and_then(|list| list.iter().map(sliding).collect());
    let expected = "a list of `full_attention` or `sliding_attention`, one per layer";
    let list = list.filter(|list| list.len() == layers);
    list.ok_or_else(|| wrong(FIELD, Some(value), expected)).map(Some)
}

#[cfg(test)]
pub(crate) mod tests;
