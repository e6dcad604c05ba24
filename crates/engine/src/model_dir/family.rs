//! Which of a family's options mistral.rs serves, and how its loaders want them written.
//!
//! What mistralrs-core 0.8.1 does that shapes this file (its `models/*.rs`, `layers.rs`,
//! `layers_masker.rs`): a sliding window's mask shows one position more than transformers while a
//! prompt is read and the cache one fewer afterwards, and some families apply it to all layers where
//! only some have one. Hence a context never reaches beyond a window, within which every layer is
//! the same as without one. Rotary scaling is read by Llama and SmolLM3 (linear, llama3) and by Phi-3
//! (longrope) only; biases by Qwen2 and Gemma 2 only. Anything else is ignored without a word there,
//! so it is refused here.

use serde_json::{Map, Value, json};

use super::refuse_value;
use crate::EngineError;

type Config = Map<String, Value>;

/// One family that is served.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineFamily {
    /// `architectures[0]`.
    pub class: &'static str,
    /// Defaults of transformers' configuration class that differ from [`COMMON`].
    defaults: &'static [(&'static str, f64)],
    /// Rotary scaling that mistral.rs computes.
    rope_types: &'static [&'static str],
    /// Whether heads can have another width than `hidden_size / num_attention_heads`.
    free_head_dim: bool,
    /// Whether `attention_bias` is read.
    attention_bias: bool,
    tied: Tied,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Tied {
    /// As the file says, `false` without a word.
    Optional,
    /// As the file says, `true` without a word.
    ByDefault,
    /// Always.
    Always,
}

const PLAIN: EngineFamily = EngineFamily {
    class: "Qwen2ForCausalLM",
    defaults: &[("max_position_embeddings", 32_768.0)],
    rope_types: &[],
    free_head_dim: false,
    attention_bias: false,
    tied: Tied::Optional,
};

/// Every family that can be served.
pub(super) const FAMILIES: [EngineFamily; 7] = [
    PLAIN,
    EngineFamily {
        class: "Qwen3ForCausalLM",
        defaults: &[("max_position_embeddings", 32_768.0), ("head_dim", 128.0)],
        free_head_dim: true,
        ..PLAIN
    },
    EngineFamily {
        class: "LlamaForCausalLM",
        defaults: &[("max_position_embeddings", 2048.0)],
        rope_types: &["linear", "llama3"],
        ..PLAIN
    },
    EngineFamily {
        class: "MistralForCausalLM",
        defaults: &[("max_position_embeddings", 131_072.0), ("sliding_window", 4096.0)],
        free_head_dim: true,
        ..PLAIN
    },
    EngineFamily {
        class: "SmolLM3ForCausalLM",
        defaults: &[
            ("max_position_embeddings", 32_768.0),
            ("rope_theta", 2_000_000.0),
            ("no_rope_layer_interval", 4.0),
        ],
        rope_types: &["linear", "llama3"],
        tied: Tied::ByDefault,
        ..PLAIN
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
        tied: Tied::Always,
        ..PLAIN
    },
    EngineFamily {
        class: "Phi3ForCausalLM",
        defaults: &[
            ("max_position_embeddings", 4096.0),
            ("original_max_position_embeddings", 4096.0),
            ("rms_norm_eps", 1e-5),
        ],
        rope_types: &["longrope", "su"],
        ..PLAIN
    },
];

/// Positions by which mistral.rs grows a sequence's key-value cache; it fails at a context that is no
/// multiple.
const CACHE_STEP: u64 = 512;

fn get<'a>(config: &'a Config, key: &str) -> &'a Value {
    config.get(key).unwrap_or(&Value::Null)
}

fn whole(config: &Config, key: &str) -> u64 {
    get(config, key).as_u64().unwrap_or(0)
}

impl EngineFamily {
    /// The family whose class is named.
    pub(super) fn of(class: &str) -> Option<Self> {
        FAMILIES.into_iter().find(|family| family.class == class)
    }

    fn is(&self, class: &str) -> bool {
        self.class == class
    }

    /// Writes defaults of transformers' configuration class where a file leaves them out. A key that
    /// is there and `null` keeps its meaning where `null` has one (windows and caps: none).
    pub(super) fn fill_defaults(&self, config: &mut Config) {
        let heads = get(config, "num_attention_heads").clone();
        for (key, value) in self.defaults {
            let number = if value.fract() == 0.0 && *key != "rope_theta" && *value >= 1.0 {
                json!(*value as u64)
            } else {
                json!(value)
            };
            let null_counts = key.ends_with("softcapping") || *key == "sliding_window";
            let slot = config.entry(*key).or_insert_with(|| number.clone());
            if slot.is_null() && !null_counts {
                *slot = number;
            }
        }
        let activation = if self.is("Gemma2ForCausalLM") {
            // Files have both names; transformers goes by this one, mistral.rs by `hidden_act`.
            let named = get(config, "hidden_activation").clone();
            config.insert("hidden_act".to_owned(), named);
            "gelu_pytorch_tanh"
        } else {
            "silu"
        };
        for (key, value) in [
            ("rope_theta", json!(10_000.0)),
            ("rms_norm_eps", json!(1e-6)),
            ("hidden_act", json!(activation)),
            ("num_key_value_heads", heads),
            ("tie_word_embeddings", json!(self.tied != Tied::Optional)),
            ("use_sliding_window", json!(false)),
            ("attention_bias", json!(false)),
        ] {
            let slot = config.entry(key).or_insert(Value::Null);
            if slot.is_null() {
                *slot = value;
            }
        }
    }

    /// Refuses what mistral.rs would compute otherwise than transformers.
    pub(super) fn check(&self, config: &Config) -> Result<(), EngineError> {
        let rope = get(config, "rope_scaling");
        let kind = get_in(rope, "rope_type");
        if !rope.is_null() && !self.rope_types.iter().any(|known| kind == *known) {
            let wanted = match self.rope_types {
                [] => "only plain rotary embeddings (\"default\") can be served".to_owned(),
                known => format!("\"default\" or one of {} can be served", known.join(", ")),
            };
            return Err(refuse_value("rope_scaling.rope_type", &kind, &wanted));
        }
        let phi3 = self.is("Phi3ForCausalLM");
        let partial = get(config, "partial_rotary_factor");
        if !phi3 && !partial.is_null() && partial.as_f64() != Some(1.0) {
            return Err(refuse_value("partial_rotary_factor", partial, "only 1.0 can be served"));
        }
        if phi3 && !rope.is_null() {
            check_longrope(config, rope)?;
        }
        let even = whole(config, "hidden_size") / whole(config, "num_attention_heads").max(1);
        let head_dim = get(config, "head_dim");
        if !self.free_head_dim && !head_dim.is_null() && head_dim.as_u64() != Some(even) {
            let wanted = format!("hidden_size / num_attention_heads = {even} was expected");
            return Err(refuse_value("head_dim", head_dim, &wanted));
        }
        let activation = if self.is("Gemma2ForCausalLM") { "gelu_pytorch_tanh" } else { "silu" };
        let biases = [("attention_bias", self.attention_bias), ("mlp_bias", false)];
        for (key, served) in biases {
            if !served && !self.is("Qwen2ForCausalLM") && *get(config, key) == Value::Bool(true) {
                return Err(refuse_value(key, get(config, key), "only false can be served"));
            }
        }
        if get(config, "hidden_act") != activation {
            let wanted = format!("only {} can be served", json!(activation));
            return Err(refuse_value("hidden_act", get(config, "hidden_act"), &wanted));
        }
        if self.tied == Tied::Always && get(config, "tie_word_embeddings") == false {
            return Err(refuse_value(
                "tie_word_embeddings",
                &json!(false),
                "only true can be served for this architecture",
            ));
        }
        let known = |kind: &Value| *kind == "full_attention" || *kind == "sliding_attention";
        let layers = get(config, "layer_types").as_array();
        match layers.into_iter().flatten().find(|kind| !known(kind)) {
            None => Ok(()),
            Some(kind) => {
                let wanted = "only \"full_attention\" and \"sliding_attention\" can be served";
                Err(refuse_value("layer_types", kind, wanted))
            }
        }
    }

    /// Positions of prompt and completion together for which every layer computes what transformers
    /// does: `max_position_embeddings`, a sliding window that is in use, and, with longrope, the
    /// length up to which the short factors hold, whichever is least.
    pub(super) fn context(&self, config: &Config) -> u64 {
        let window = get(config, "sliding_window").as_u64();
        let optional =
            !matches!(self.class, "MistralForCausalLM" | "Phi3ForCausalLM" | "Gemma2ForCausalLM");
        let window = match self.class {
            "LlamaForCausalLM" => None,
            _ if optional && *get(config, "use_sliding_window") != Value::Bool(true) => None,
            _ => window,
        };
        let longrope = (!get(config, "rope_scaling").is_null() && self.is("Phi3ForCausalLM"))
            .then(|| whole(config, "original_max_position_embeddings"));
        let longest = whole(config, "max_position_embeddings");
        [window, longrope].into_iter().flatten().fold(longest, u64::min)
    }

    /// The configuration as mistral.rs's loader of this family wants it.
    pub(super) fn for_engine(&self, config: &Config) -> Config {
        let mut written = config.clone();
        let mut put = |key: &str, value: Value| drop(written.insert(key.to_owned(), value));
        let rope = get(config, "rope_scaling");
        let longrope = self.is("Phi3ForCausalLM") && !rope.is_null();
        // longrope's attention factor comes from this number, which must stay what it is.
        let longest = if longrope {
            whole(config, "max_position_embeddings")
        } else {
            self.context(config).next_multiple_of(CACHE_STEP)
        };
        put("max_position_embeddings", json!(longest));
        put("layer_types", Value::Null);
        put("use_sliding_window", json!(false));
        // Gemma 2's loader needs a number; one that no sequence reaches hides nothing.
        let gemma = self.is("Gemma2ForCausalLM");
        put("sliding_window", if gemma { json!(longest) } else { Value::Null });
        match self.class {
            "Qwen3ForCausalLM" => {
                put("max_window_layers", get(config, "num_hidden_layers").clone())
            }
            "Phi3ForCausalLM" => {
                // Its loader takes single ids only; which ids end a completion is Hone's to know.
                put("eos_token_id", Value::Null);
                put("bos_token_id", Value::Null);
                if longrope {
                    let factors = |key: &str| get_in(rope, key);
                    put(
                        "rope_scaling",
                        json!({
                            "type": "longrope",
                            "short_factor": factors("short_factor"),
                            "long_factor": factors("long_factor"),
                        }),
                    );
                }
            }
            _ => {}
        }
        written
    }
}

/// mistral.rs derives the attention factor itself, from the two lengths.
fn check_longrope(config: &Config, rope: &Value) -> Result<(), EngineError> {
    for key in ["factor", "attention_factor"] {
        let value = get_in(rope, key);
        if !value.is_null() {
            let wanted = "only the factor that follows from max_position_embeddings can be served";
            return Err(refuse_value(&format!("rope_scaling.{key}"), &value, wanted));
        }
    }
    let longest = get(config, "max_position_embeddings");
    if !longest.as_u64().is_some_and(|longest| longest.is_multiple_of(CACHE_STEP)) {
        let wanted = format!("with longrope, only multiples of {CACHE_STEP} can be served");
        return Err(refuse_value("max_position_embeddings", longest, &wanted));
    }
    Ok(())
}

fn get_in(object: &Value, key: &str) -> Value {
    object.get(key).cloned().unwrap_or(Value::Null)
}
