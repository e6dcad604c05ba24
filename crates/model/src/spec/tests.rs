//! Reading `config.json`, and rejected configurations.

use serde_json::{Value, json};

use super::family::tests::{config, spec};
use crate::ModelSpec;

#[test]
fn both_layouts_of_the_configuration_are_equivalent() {
    for (name, scaling) in [
        (
            "llama3",
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
        ),
        ("llama-biases", json!({"type": "linear", "factor": 3.0})),
        (
            "phi3-longrope",
            json!({"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 7.0]}),
        ),
        ("qwen2", Value::Null),
    ] {
        let mut old = config(name);
        let rope = old["rope_parameters"].clone();
        let fields = old.as_object_mut().unwrap();
        fields.remove("rope_parameters");
        fields.remove("layer_types");
        fields.insert("rope_theta".to_owned(), rope["rope_theta"].clone());
        fields.insert("rope_scaling".to_owned(), scaling);
        if name == "phi3-longrope" {
            fields.insert("partial_rotary_factor".to_owned(), json!(0.5));
        }
        assert_eq!(ModelSpec::from_config(&old).unwrap(), spec(name), "{name}");
    }
}

/// A configuration with sizes only.
fn bare(model_type: &str) -> Value {
    json!({"model_type": model_type, "vocab_size": 16, "hidden_size": 64, "intermediate_size": 8,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2})
}

#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let spec = |kind: &str| ModelSpec::from_config(&bare(kind)).unwrap();
    assert_eq!((spec("qwen3").head_dim, spec("llama").head_dim), (128, 16));
    assert_eq!(spec("mistral").layers[3].window, Some(4096));
    assert_eq!(spec("phi3").layers[3].window, None);
    let windows: Vec<bool> = spec("gemma2").layers.iter().map(|l| l.window.is_some()).collect();
    assert_eq!(windows, [true, false, true, false, true, false, true, false]);
    let rope: Vec<bool> = spec("smollm3").layers.iter().map(|l| l.rope).collect();
    assert_eq!(rope, [true, true, true, false, true, true, true, false]);
    assert!((spec("smollm3").rope.theta - 2e6).abs() < 1e-9 && spec("smollm3").tie_word_embeddings);
    let gemma = spec("gemma2");
    assert_eq!((gemma.attention_softcap, gemma.final_softcap), (Some(50.0), Some(30.0)));
    assert!((gemma.attention_scale - 1.0 / 16.0).abs() < 1e-15 && gemma.tie_word_embeddings);
    assert!((spec("phi3").rms_norm_eps - 1e-5).abs() < 1e-15);
}

#[test]
fn sliding_layers_come_from_any_of_their_keys() {
    let windows = |edit: Value, kind: &str| {
        let mut config = bare(kind);
        config.as_object_mut().unwrap().extend(edit.as_object().unwrap().clone());
        let spec = ModelSpec::from_config(&config).unwrap();
        spec.layers.iter().map(|layer| layer.window).collect::<Vec<_>>()
    };
    let (no, yes) = (None, Some(9));
    let off = json!({"use_sliding_window": false, "sliding_window": 9, "max_window_layers": 2});
    assert_eq!(windows(off, "qwen2"), [no; 8]);
    let on = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 5});
    assert_eq!(windows(on, "qwen3"), [no, no, no, no, no, yes, yes, yes]);
    let all = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 0});
    assert_eq!(windows(all, "qwen2"), [yes; 8]);
    let types = |kind: &str| json!(vec![kind; 8]);
    let named = json!({"use_sliding_window": true, "sliding_window": 9,
        "layer_types": types("sliding_attention")});
    assert_eq!(windows(named, "qwen2"), [yes; 8]);
    assert_eq!(windows(json!({"sliding_window": null}), "mistral"), [no; 8]);
    assert_eq!(windows(json!({"layer_types": types("full_attention")}), "gemma2"), [no; 8]);
    let without_rope = json!({"use_sliding_window": true, "sliding_window": 9});
    assert_eq!(windows(without_rope, "smollm3"), [no, no, no, yes, no, no, no, yes]);
}

#[test]
fn errors_name_the_field_and_the_reason() {
    let message = |kind: &str, edit: Value| {
        let mut config = bare(kind);
        config.as_object_mut().unwrap().extend(edit.as_object().unwrap().clone());
        ModelSpec::from_config(&config).unwrap_err().to_string()
    };
    insta::assert_snapshot!(message("mixtral", json!({"architectures": ["MixtralForCausalLM"]})), @"a model of type `mixtral` with architecture `MixtralForCausalLM` cannot be used; supported: `Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `LlamaForCausalLM`, `MistralForCausalLM`, `SmolLM3ForCausalLM`, `Gemma2ForCausalLM`, `Phi3ForCausalLM`");
    insta::assert_snapshot!(message("qwen2", json!({"architectures": ["Qwen2ForSequenceClassification"]})), @"a model of type `qwen2` with architecture `Qwen2ForSequenceClassification` cannot be used; supported: `Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `LlamaForCausalLM`, `MistralForCausalLM`, `SmolLM3ForCausalLM`, `Gemma2ForCausalLM`, `Phi3ForCausalLM`");
    insta::assert_snapshot!(message("llama", json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}})), @r#"config.json: `rope_scaling` has rope_type "dynamic"; supported: default, linear, llama3, longrope"#);
    insta::assert_snapshot!(message("llama", json!({"partial_rotary_factor": 0.5})), @"config.json: `partial_rotary_factor` is 0.5, but must be 1 for this architecture");
    insta::assert_snapshot!(message("llama", json!({"rope_scaling": {"rope_type": "linear"}})), @"config.json: `factor` is missing, but must be a number above 0");
    insta::assert_snapshot!(message("llama", json!({"quantization_config": {"bits": 4}})), @r#"config.json: `quantization_config` is {"bits":4}, but must be absent: quantized weights are read from GGUF files only"#);
    insta::assert_snapshot!(message("llama", json!({"hidden_act": "gelu"})), @r#"config.json: `hidden_act` is "gelu", but must be `silu`"#);
    insta::assert_snapshot!(message("gemma2", json!({"hidden_activation": "gelu"})), @r#"config.json: `hidden_activation` is "gelu", but must be `gelu_pytorch_tanh`"#);
    insta::assert_snapshot!(message("llama", json!({"hidden_size": 33, "num_attention_heads": 4})), @"config.json: `num_attention_heads` is 4, but must be a divisor of `hidden_size`");
    insta::assert_snapshot!(message("llama", json!({"num_hidden_layers": 1_u64 << 60})), @"config.json: `num_hidden_layers` is 1152921504606846976, but must be at most 4294967295");
    insta::assert_snapshot!(message("llama", json!({"num_hidden_layers": 1 << 20})), @"config.json: `num_hidden_layers` is 1048576, but must be at most 65536");
    insta::assert_snapshot!(message("gemma2", json!({"use_bidirectional_attention": true})), @"config.json: `use_bidirectional_attention` is true, but must be false: only causal attention is supported");
    insta::assert_snapshot!(message("gemma2", json!({"sliding_window": null})), @"config.json: `sliding_window` is null, but must be a whole number above 0 (and in use), because some layers have sliding attention");
    insta::assert_snapshot!(message("gemma2", json!({"layer_types": ["chunked_attention"]})), @r#"config.json: `layer_types` is ["chunked_attention"], but must be a list of `full_attention` or `sliding_attention`, one per layer"#);
    insta::assert_snapshot!(message("smollm3", json!({"no_rope_layers": [1, 0]})), @"config.json: `no_rope_layers` is [1,0], but must be a list of one 0 or 1 per layer");
    insta::assert_snapshot!(message("phi3", json!({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}})), @"config.json: `short_factor` is a list of 1, but must be one factor for every two rotated values of a head");
    insta::assert_snapshot!(
        message("qwen2", json!({"layer_types": vec!["sliding_attention"; 8]})), @"config.json: `sliding_window` is missing, but must be a whole number above 0 (and in use), because some layers have sliding attention");
    insta::assert_snapshot!(
        message("mistral", json!({"layer_types": vec!["full_attention"; 8]})), @r#"config.json: `layer_types` is ["full_attention","full_attention","full_attention","full_attention","full_attention","full_attention","full_attention","full_attention"], but must be the same for every layer and consistent with `sliding_window` for this architecture"#);
    insta::assert_snapshot!(
        message("gemma2", json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}})), @r#"config.json: `rope_parameters` is {"full_attention":{"rope_theta":1.0}}, but only one set of rotary parameters for all layers is supported"#);
    insta::assert_snapshot!(message("llama", json!({"hidden_size": "wide"})), @r#"config.json: `hidden_size` is "wide", but must be a whole number above 0"#);
    insta::assert_snapshot!(message("llama", json!({"num_key_value_heads": 3})), @"config.json: `num_key_value_heads` is 3, but must be a divisor of `num_attention_heads`");
}
