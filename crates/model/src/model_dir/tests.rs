use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{ModelDir, object};
use crate::ModelSpec;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen2-tiny")
}

/// A copy of the fixture that a test may change.
fn copy() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    dir
}

fn set(dir: &Path, file: &str, key: &str, value: Value) {
    let mut json = object(&dir.join(file)).unwrap();
    json[key] = value;
    fs::write(dir.join(file), json.to_string()).unwrap();
}

fn error(dir: &Path) -> String {
    ModelDir::open(dir).unwrap_err().to_string()
}

#[test]
fn reads_the_format_of_transformers_5() {
    let model = ModelDir::open(&fixture()).unwrap();
    let spec = ModelSpec::from_config(&model.config).unwrap();
    assert!((spec.rope.theta - 50_000.0).abs() < 1e-9);
    assert_eq!(model.stop_ids, [2, 0]);
    assert_eq!((model.context(), model.vocab()), (256, 288));
    assert!(model.chat_template.contains("<|im_start|>"));
    assert_eq!(model.weights, [fixture().join("model.safetensors")]);
    assert_eq!(model.special_tokens["eos_token"], "<|im_end|>");
}

#[test]
fn stop_tokens_come_from_three_files() {
    let dir = copy();
    set(dir.path(), "generation_config.json", "eos_token_id", json!(7));
    set(dir.path(), "config.json", "eos_token_id", json!([7, 8]));
    set(dir.path(), "tokenizer_config.json", "eos_token", json!({ "content": "<|im_end|>" }));
    assert_eq!(ModelDir::open(dir.path()).unwrap().stop_ids, [7, 8, 2]);
    set(dir.path(), "config.json", "eos_token_id", json!(288));
    assert_eq!(error(dir.path()), "eos_token_id 288 is outside the vocabulary of 288 tokens");
    set(dir.path(), "config.json", "eos_token_id", json!("x"));
    assert_eq!(error(dir.path()), "config.json: eos_token_id is \"x\", not a token id");
    for file in ["generation_config.json", "config.json"] {
        set(dir.path(), file, "eos_token_id", Value::Null);
    }
    fs::remove_file(dir.path().join("tokenizer_config.json")).unwrap();
    assert!(error(dir.path()).contains("names no token that ends a completion"));
}

#[test]
fn the_chat_template_is_searched_in_three_files_in_order() {
    let dir = copy();
    let template = || ModelDir::open(dir.path()).map(|model| model.chat_template);
    fs::write(dir.path().join("chat_template.json"), r#"{"chat_template":"third"}"#).unwrap();
    let named =
        json!([{"name": "rag", "template": "x"}, {"name": "default", "template": "second"}]);
    set(dir.path(), "tokenizer_config.json", "chat_template", named);
    fs::write(dir.path().join("chat_template.jinja"), "first").unwrap();
    assert_eq!(template().unwrap(), "first");
    fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    assert_eq!(template().unwrap(), "second");
    set(dir.path(), "tokenizer_config.json", "chat_template", Value::Null);
    assert_eq!(template().unwrap(), "third");
    fs::remove_file(dir.path().join("chat_template.json")).unwrap();
    assert!(error(dir.path()).contains("has no chat template"));
}

#[test]
fn weights_come_from_the_index_and_not_from_an_adapter() {
    let dir = copy();
    fs::rename(dir.path().join("model.safetensors"), dir.path().join("adapter_model.safetensors"))
        .unwrap();
    assert!(error(dir.path()).contains("has neither model.safetensors nor"));
    let index = |map: Value| {
        let text = json!({ "weight_map": map }).to_string();
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
    };
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    index(json!({ "b": names[1], "a": names[0], "c": names[1] }));
    assert!(error(dir.path()).contains(&format!("has no {}", names[0])));
    for name in names {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let model = ModelDir::open(dir.path()).unwrap();
    assert_eq!(model.weights, names.map(|name| dir.path().join(name)));
    for evil in ["../secret.safetensors", "/etc/passwd", "weights.bin"] {
        index(json!({ "a": evil }));
        assert!(error(dir.path()).contains("not a safetensors file of this directory"), "{evil}");
    }
}

#[test]
fn errors_name_the_value_that_cannot_be_served() {
    for (key, value, expected) in [
        (
            "architectures",
            json!(["MambaForCausalLM"]),
            "`MambaForCausalLM` cannot be used; supported: `Qwen2ForCausalLM`, `Qwen3",
        ),
        ("model_type", json!("mamba"), "a model of type `mamba` with architecture `Qwen2For"),
        ("quantization_config", json!({ "bits": 4 }), "is {\"bits\":4}, but must be absent: quant"),
        ("rope_parameters", json!({ "rope_type": "yarn" }), "has rope_type \"yarn\"; supported"),
        ("rope_scaling", json!({ "type": "linear" }), "`factor` is missing, but must be"),
        ("partial_rotary_factor", json!(0.5), "`partial_rotary_factor` is 0.5, but must be 1"),
        ("layer_types", json!(["chunked_attention"]), "`layer_types` is [\"chunked_attention\"]"),
        ("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\", but must be `silu`"),
        ("hidden_size", json!(0), "`hidden_size` is 0, but must be a whole number above 0"),
        ("max_position_embeddings", json!(0), "`max_position_embeddings` is 0, but must be"),
        ("num_key_value_heads", json!(3), "`num_key_value_heads` is 3, but must be a divisor"),
        ("head_dim", json!(7), "`head_dim` is 7, but must be an even number above 0"),
        ("vocab_size", json!(-1), "`vocab_size` is -1, but must be a whole number above 0"),
        ("rms_norm_eps", json!("small"), "`rms_norm_eps` is \"small\", but must be a number"),
        ("tie_word_embeddings", json!(1), "`tie_word_embeddings` is 1, but must be true or false"),
    ] {
        let dir = copy();
        set(dir.path(), "config.json", key, value);
        assert!(error(dir.path()).contains(expected), "{key}: {}", error(dir.path()));
    }
    let dir = copy();
    fs::write(dir.path().join("config.json"), "{").unwrap();
    assert!(error(dir.path()).contains("config.json: EOF while parsing an object"));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(error(dir.path()).contains("config.json: No such file"));
    assert!(error(Path::new("/nowhere")).contains("/nowhere is not a directory"));
}

#[test]
fn every_family_has_its_whole_context() {
    let families = fixture().join("../families");
    for (name, context) in [
        ("qwen2", 256),
        ("qwen3", 256),
        ("llama-biases", 256),
        ("mistral", 256),
        ("gemma2", 256),
        ("phi3", 256),
        ("phi3-longrope", 64),
    ] {
        assert_eq!(ModelDir::open(&families.join(name)).unwrap().context(), context, "{name}");
    }
}
