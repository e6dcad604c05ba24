//! The model families that mistral.rs serves correctly, and the form of configuration that its
//! loaders expect.
//!
//! The checks follow mistralrs-core 0.8.1 (`models/*.rs`, `layers.rs`, `layers_masker.rs`):
//!
//! - With a sliding window, its mask shows one position more than transformers during prefill and
//!   one fewer during decode, and some families apply the window to all layers instead of some.
//!   The context therefore ends at the window, within which it has no effect.
//! - Only Llama and SmolLM3 (linear, llama3) and Phi-3 (longrope) read rotary scaling, and only
//!   Qwen2 and Gemma 2 read biases. Elsewhere mistral.rs ignores them silently, so they are refused.

use serde_json::{Value, json};

use super::values::{Config, get, refuse_value};
use crate::error::EngineError;

/// A served family.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineFamily {
    /// `architectures[0]`.
    class: &'static str,
    /// Defaults of transformers' configuration class that differ from those of the other families.
    defaults: &'static [(&'static str, f64)],
    /// The kinds of rotary scaling that mistral.rs computes.
    rope_types: &'static [&'static str],
    /// Whether the width of a head may differ from `hidden_size / num_attention_heads`.
    free_head_dim: bool,
    /// Whether mistral.rs reads `attention_bias`.
    attention_bias: bool,
    /// The default of `tie_word_embeddings`.
    tied: bool,
    /// Whether mistral.rs ties the embeddings even if the file disables it.
    always_tied: bool,
}

const QWEN2: EngineFamily = EngineFamily {
    class: "Qwen2ForCausalLM",
    defaults: &[("max_position_embeddings", 32_768.0)],
    rope_types: &[],
    free_head_dim: false,
    attention_bias: false,
    tied: false,
    always_tied: false,
};

const FAMILIES: [EngineFamily; 7] = [
    QWEN2,
    EngineFamily {
        class: "Qwen3ForCausalLM",
        defaults: &[("max_position_embeddings", 32_768.0), ("head_dim", 128.0)],
        free_head_dim: true,
        ..QWEN2
    },
    EngineFamily {
        class: "LlamaForCausalLM",
        defaults: &[("max_position_embeddings", 2048.0)],
        rope_types: &["linear", "llama3"],
        ..QWEN2
    },
    EngineFamily {
        class: "MistralForCausalLM",
        defaults: &[("max_position_embeddings", 131_072.0), ("sliding_window", 4096.0)],
        free_head_dim: true,
        ..QWEN2
    },
    EngineFamily {
        class: "SmolLM3ForCausalLM",
        defaults: &[
            ("max_position_embeddings", 32_768.0),
            ("rope_theta", 2_000_000.0),
            ("no_rope_layer_interval", 4.0),
        ],
        rope_types: &["linear", "llama3"],
        tied: true,
        ..QWEN2
    },
    EngineFamily {
        class: "Gemma2ForCausalLM",
        defaults: &[
            ("max_position_embeddings", 8192.0),
            ("head_dim", 256.0),
            ("query_pre_attn_scalar", 256.0),
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
            ("sliding_window", 4096.0),
        ],
        free_head_dim: true,
        attention_bias: true,
        tied: true,
        always_tied: true,
        ..QWEN2
    },
    EngineFamily {
        class: "Phi3ForCausalLM",
        defaults: &[
            ("max_position_embeddings", 4096.0),
            ("original_max_position_embeddings", 4096.0),
            ("rms_norm_eps", 1e-5),
        ],
        rope_types: &["longrope", "su"],
        ..QWEN2
    },
];

/// Positions by which mistral.rs grows the key-value cache of a sequence. It fails if the context is
/// not a multiple.
const CACHE_STEP: u64 = 512;

fn whole(config: &Config, key: &str) -> u64 {
    get(config, key).as_u64().unwrap_or(0)
}

fn get_in(object: &Value, key: &str) -> Value {
    object.get(key).cloned().unwrap_or(Value::Null)
}

impl EngineFamily {
    /// The family that `architectures` names.
    pub(super) fn of(config: &Config) -> Result<Self, EngineError> {
        let value = get(config, "architectures");
        let classes: Vec<&str> =
            value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let found = match classes[..] {
            [class] => FAMILIES.into_iter().find(|family| family.class == class),
            _ => None,
        };
        let Some(family) = found else {
            let classes = FAMILIES.map(|family| family.class).join(", ");
            let expected = format!("supported is one of {classes}");
            return Err(refuse_value("architectures", value, &expected));
        };
        let quantization = get(config, "quantization_config");
        if !quantization.is_null() {
            let expected = "quantized weights are read from GGUF files only";
            return Err(refuse_value("quantization_config", quantization, expected));
        }
        Ok(family)
    }

    fn is(&self, class: &str) -> bool {
        self.class == class
    }

    fn activation(&self) -> &'static str {
        if self.is("Gemma2ForCausalLM") { "gelu_pytorch_tanh" } else { "silu" }
    }

    /// Inserts the defaults of transformers' configuration class for missing keys. A `null` is kept
    /// if it has a meaning of its own (no window, no cap).
    pub(super) fn fill_defaults(&self, config: &mut Config) {
        for (key, value) in self.defaults {
            let number = if value.fract() == 0.0 && *key != "rope_theta" {
                json!(*value as u64)
            } else {
                json!(value)
            };
            let null_means_none = key.ends_with("softcapping") || *key == "sliding_window";
            let slot = config.entry(*key).or_insert_with(|| number.clone());
            if slot.is_null() && !null_means_none {
                *slot = number;
            }
        }
        if self.is("Gemma2ForCausalLM") {
            // Files have both keys. transformers reads this one, mistral.rs reads `hidden_act`.
            let activation = get(config, "hidden_activation").clone();
            config.insert("hidden_act".to_owned(), activation);
        }
        let heads = get(config, "num_attention_heads").clone();
        for (key, value) in [
            ("rope_theta", json!(10_000.0)),
            ("rms_norm_eps", json!(1e-6)),
            ("hidden_act", json!(self.activation())),
            ("num_key_value_heads", heads),
            ("tie_word_embeddings", json!(self.tied)),
            ("use_sliding_window", json!(false)),
            ("attention_bias", json!(false)),
        ] {
            let slot = config.entry(key).or_insert(Value::Null);
            if slot.is_null() {
                *slot = value;
            }
        }
    }

    /// Refuses options for which mistral.rs would not compute what transformers computes.
    pub(super) fn check(&self, config: &Config) -> Result<(), EngineError> {
        let refuse = |key: &str, expected: &str| Err(refuse_value(key, get(config, key), expected));
        let rope = get(config, "rope_scaling");
        let kind = get_in(rope, "rope_type");
        if !rope.is_null() && !self.rope_types.iter().any(|known| kind == *known) {
            let expected = match self.rope_types {
                [] => "only plain rotary embeddings (\"default\") can be served".to_owned(),
                known => format!("\"default\" or one of {} can be served", known.join(", ")),
            };
            return Err(refuse_value("rope_scaling.rope_type", &kind, &expected));
        }
        let partial = get(config, "partial_rotary_factor");
        if self.is("Phi3ForCausalLM") {
            check_longrope(config, rope)?;
        } else if !partial.is_null() && partial.as_f64() != Some(1.0) {
            return refuse("partial_rotary_factor", "only 1.0 can be served");
        }
        let even = whole(config, "hidden_size") / whole(config, "num_attention_heads").max(1);
        let head_dim = get(config, "head_dim");
        if !self.free_head_dim && !head_dim.is_null() && head_dim.as_u64() != Some(even) {
            let expected = format!("hidden_size / num_attention_heads = {even} was expected");
            return refuse("head_dim", &expected);
        }
        for (key, served) in [("attention_bias", self.attention_bias), ("mlp_bias", false)] {
            if !served && !self.is("Qwen2ForCausalLM") && *get(config, key) == true {
                return refuse(key, "only false can be served");
            }
        }
        if get(config, "hidden_act") != self.activation() {
            let expected = format!("only {:?} can be served", self.activation());
            return refuse("hidden_act", &expected);
        }
        if self.always_tied && get(config, "tie_word_embeddings") == false {
            let expected = "only true can be served for this architecture";
            return refuse("tie_word_embeddings", expected);
        }
        let known = |kind: &Value| *kind == "full_attention" || *kind == "sliding_attention";
        let mut layers = get(config, "layer_types").as_array().into_iter().flatten();
        layers.find(|kind| !known(kind)).map_or(Ok(()), |kind| {
            let expected = "only \"full_attention\" and \"sliding_attention\" can be served";
            Err(refuse_value("layer_types", kind, expected))
        })
    }

    /// Positions, prompt and completion together, up to which every layer computes what
    /// transformers computes: the least of `max_position_embeddings`, a sliding window in use, and
    /// with longrope the length up to which the short factors apply.
    pub(super) fn context(&self, config: &Config) -> u64 {
        let uses_window = match self.class {
            "LlamaForCausalLM" => false,
            "MistralForCausalLM" | "Phi3ForCausalLM" | "Gemma2ForCausalLM" => true,
            _ => *get(config, "use_sliding_window") == true,
        };
        let window = get(config, "sliding_window").as_u64().filter(|_| uses_window);
        let longrope =
            self.uses_longrope(config).then(|| whole(config, "original_max_position_embeddings"));
        let longest = whole(config, "max_position_embeddings");
        [window, longrope].into_iter().flatten().fold(longest, u64::min)
    }

    fn uses_longrope(&self, config: &Config) -> bool {
        self.is("Phi3ForCausalLM") && !get(config, "rope_scaling").is_null()
    }

    /// The configuration that mistral.rs's loader of this family expects.
    pub(super) fn for_engine(&self, config: &Config) -> Config {
        let mut written = config.clone();
        let mut put = |key: &str, value: Value| drop(written.insert(key.to_owned(), value));
        let longrope = self.uses_longrope(config);
        // The attention factor of longrope is computed from this number, so it must not change.
        let longest = if longrope {
            whole(config, "max_position_embeddings")
        } else {
            self.context(config).next_multiple_of(CACHE_STEP)
        };
        put("max_position_embeddings", json!(longest));
        put("layer_types", Value::Null);
        put("use_sliding_window", json!(false));
        // Gemma 2's loader requires a number. No sequence is as long as this one.
        let gemma = self.is("Gemma2ForCausalLM");
        put("sliding_window", if gemma { json!(longest) } else { Value::Null });
        match self.class {
            "Qwen3ForCausalLM" => {
                put("max_window_layers", get(config, "num_hidden_layers").clone())
            }
            "Phi3ForCausalLM" => {
                // The loader accepts single ids only. Hone itself ends completions.
                put("eos_token_id", Value::Null);
                put("bos_token_id", Value::Null);
                if longrope {
                    let factors = |key| get_in(get(config, "rope_scaling"), key);
                    let scaling = json!({
                        "type": "longrope",
                        "short_factor": factors("short_factor"),
                        "long_factor": factors("long_factor"),
                    });
                    put("rope_scaling", scaling);
                }
            }
            _ => {}
        }
        written
    }
}

/// Refuses explicit attention factors of longrope: mistral.rs computes the factor from the two
/// lengths.
fn check_longrope(config: &Config, rope: &Value) -> Result<(), EngineError> {
    if rope.is_null() {
        return Ok(());
    }
    for key in ["factor", "attention_factor"] {
        let value = get_in(rope, key);
        if !value.is_null() {
            let expected =
                "only the factor that follows from max_position_embeddings can be served";
            return Err(refuse_value(&format!("rope_scaling.{key}"), &value, expected));
        }
    }
    let longest = get(config, "max_position_embeddings");
    if !longest.as_u64().is_some_and(|longest| longest.is_multiple_of(CACHE_STEP)) {
        let expected = format!("with longrope, only multiples of {CACHE_STEP} can be served");
        return Err(refuse_value("max_position_embeddings", longest, &expected));
    }
    Ok(())
}
