use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::ModelDir;
use super::object;

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

/// Edits one JSON file.
fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Map<String, Value>)) {
    let mut value = object(&dir.join(file)).unwrap();
    change(&mut value);
    fs::write(dir.join(file), Value::Object(value).to_string()).unwrap();
}

fn set(dir: &Path, file: &str, key: &str, value: Value) {
    edit(dir, file, |map| drop(map.insert(key.to_owned(), value)));
}

fn error(dir: &Path) -> String {
    ModelDir::open(dir).unwrap_err().to_string()
}

#[test]
fn reads_the_format_of_transformers_5() {
    let model = ModelDir::open(&fixture()).unwrap();
    assert_eq!(model.config["rope_theta"], 50_000.0);
    assert!(model.config.get("rope_parameters").is_none());
    assert_eq!(model.stop_ids, [2, 0]);
    assert_eq!((model.context(), model.vocab()), (256, 288));
    assert!(model.chat_template.contains("<|im_start|>"));
    assert_eq!(model.weights, [fixture().join("model.safetensors")]);
    assert_eq!(model.special_tokens["eos_token"], "<|im_end|>");
}

#[test]
fn reads_the_format_of_transformers_4() {
    let dir = copy();
    edit(dir.path(), "config.json", |config| {
        config.remove("rope_parameters");
        config.insert("rope_scaling".to_owned(), Value::Null);
        config.insert("rope_theta".to_owned(), json!(1e6));
        for key in ["layer_types", "rms_norm_eps", "hidden_act", "use_sliding_window"] {
            config.remove(key);
        }
    });
    let model = ModelDir::open(dir.path()).unwrap();
    assert_eq!(
        (&model.config["rope_theta"], &model.config["rms_norm_eps"]),
        (&json!(1e6), &json!(1e-6))
    );
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
            "supported is one of Qwen2ForCausalLM, Qwen3",
        ),
        ("architectures", Value::Null, "config.json: architectures is missing; supported"),
        ("quantization_config", json!({ "bits": 4 }), "{\"bits\":4}; quantized weights are read"),
        (
            "rope_parameters",
            json!({ "rope_type": "yarn" }),
            "rope_scaling.rope_type is \"yarn\"; only plain",
        ),
        ("rope_scaling", json!({ "type": "linear" }), "rope_scaling.rope_type is \"linear\""),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5; only 1.0"),
        ("layer_types", json!(["chunked_attention"]), "layer_types is \"chunked_attention\""),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\"; only \"silu\""),
        ("hidden_size", json!(33), "num_attention_heads is 4; it must divide hidden_size 33"),
        ("num_key_value_heads", json!(3), "num_key_value_heads is 3; it must divide"),
        ("head_dim", json!(64), "head_dim is 64; hidden_size / num_attention_heads = 8"),
        ("vocab_size", json!(-1), "vocab_size is -1; a positive whole number"),
        ("rms_norm_eps", json!("small"), "rms_norm_eps is \"small\"; a positive number"),
        ("tie_word_embeddings", json!(1), "tie_word_embeddings is 1; true or false"),
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
fn the_normalized_directory_is_written_once() {
    let dir = copy();
    edit(dir.path(), "config.json", |c| drop(c.insert("sliding_window".to_owned(), json!(64))));
    let cache = tempfile::tempdir().unwrap();
    let model = ModelDir::open(dir.path()).unwrap();
    let written = model.write_normalized(cache.path()).unwrap();
    let config = object(&written.join("config.json")).unwrap();
    assert_eq!(config["rope_theta"], 50_000.0);
    assert_eq!(
        (&config["max_position_embeddings"], &config["sliding_window"]),
        (&json!(512), &Value::Null)
    );
    assert_eq!(
        object(&written.join("generation_config.json")).unwrap()["eos_token_id"],
        json!([2, 0])
    );
    let weights = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
    assert_eq!(weights(&written), weights(dir.path()));
    assert_eq!(model.write_normalized(cache.path()).unwrap(), written);
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1, "no temporary directory remains");
    // A changed model at the same path gets another directory.
    set(dir.path(), "config.json", "rope_parameters", json!({ "rope_theta": 2.0 }));
    assert_ne!(
        ModelDir::open(dir.path()).unwrap().write_normalized(cache.path()).unwrap(),
        written
    );
}

fn families() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families")
}

/// The error for a family's `config.json` with one key changed.
fn family_error(name: &str, key: &str, value: Value) -> String {
    let dir = copy();
    fs::copy(families().join(name).join("config.json"), dir.path().join("config.json")).unwrap();
    set(dir.path(), "config.json", key, value);
    error(dir.path())
}

#[test]
fn every_family_is_read_and_normalized() {
    let cache = tempfile::tempdir().unwrap();
    for (name, context) in [
        ("qwen2", 24),
        ("qwen3", 256),
        ("llama2", 256),
        ("llama3", 256),
        ("mistral", 24),
        ("smollm3", 256),
        ("gemma2", 24),
        ("phi3", 24),
        ("phi3-longrope", 64),
    ] {
        let model = ModelDir::open(&families().join(name)).unwrap();
        assert_eq!(model.context(), context, "{name}");
        let written = model.write_normalized(cache.path()).unwrap();
        let tokenizer = |dir: &Path| object(&dir.join("tokenizer.json")).unwrap();
        let (lean, whole) = (tokenizer(&written), tokenizer(&model.path));
        assert_eq!(lean["model"]["vocab"], whole["model"]["vocab"], "{name}: every token is known");
        assert_eq!(lean["added_tokens"], whole["added_tokens"], "{name}");
        assert_eq!((&lean["pre_tokenizer"], &lean["model"]["merges"]), (&Value::Null, &json!([])));
        let config = object(&written.join("config.json")).unwrap();
        assert_eq!(config["max_position_embeddings"], 512, "{name}");
        assert!(config["rope_theta"].is_f64() && config.get("rope_parameters").is_none());
        let window = if name == "gemma2" { json!(512) } else { Value::Null };
        assert_eq!(config["sliding_window"], window, "{name}: the loader must not apply a window");
        match name {
            "llama3" => assert_eq!(config["rope_scaling"]["rope_type"], "llama3"),
            "phi3-longrope" => {
                assert_eq!(config["rope_scaling"]["type"], "longrope");
                assert_eq!(config["partial_rotary_factor"], 0.5);
                assert_eq!(config["original_max_position_embeddings"], 64);
            }
            "phi3" => assert!(config["eos_token_id"].is_null()),
            "qwen3" => assert_eq!(
                (&config["head_dim"], &config["max_window_layers"]),
                (&json!(12), &json!(2))
            ),
            "gemma2" => assert_eq!(config["hidden_act"], "gelu_pytorch_tanh"),
            "smollm3" => assert_eq!(config["no_rope_layers"], json!([1, 0, 1, 0])),
            _ => {}
        }
    }
}

#[test]
fn options_that_mistral_rs_ignores_are_refused() {
    insta::assert_snapshot!(family_error("llama-biases", "x", json!(1)), @"config.json: attention_bias is true; only false can be served");
    insta::assert_snapshot!(
        family_error("mistral", "rope_scaling", json!({"type": "linear", "factor": 2.0})), @r#"config.json: rope_scaling.rope_type is "linear"; only plain rotary embeddings ("default") can be served"#);
    insta::assert_snapshot!(
        family_error("llama3", "rope_scaling", json!({"type": "dynamic", "factor": 2.0})), @r#"config.json: rope_scaling.rope_type is "dynamic"; "default" or one of linear, llama3 can be served"#);
    insta::assert_snapshot!(family_error("llama3", "head_dim", json!(16)), @"config.json: head_dim is 16; hidden_size / num_attention_heads = 8 was expected");
    insta::assert_snapshot!(family_error("gemma2", "tie_word_embeddings", json!(false)), @"config.json: tie_word_embeddings is false; only true can be served for this architecture");
    insta::assert_snapshot!(family_error("gemma2", "hidden_activation", json!("gelu")), @r#"config.json: hidden_act is "gelu"; only "gelu_pytorch_tanh" can be served"#);
    insta::assert_snapshot!(family_error("qwen3", "head_dim", json!(7)), @"config.json: head_dim is 7; an even whole number was expected");
    insta::assert_snapshot!(
        family_error("phi3-longrope", "max_position_embeddings", json!(500)), @"config.json: max_position_embeddings is 500; with longrope, only multiples of 512 can be served");
    insta::assert_snapshot!(
        family_error("gemma2", "rope_parameters", json!({"full_attention": {"rope_theta": 1.0}})), @r#"config.json: rope_parameters is {"full_attention":{"rope_theta":1.0}}; only one set of rotary parameters for all layers can be served"#);
}

mod normalize {
    use std::collections::BTreeMap;

    use hone_core::digest::sha256;

    use super::super::*;

    /// Directories of earlier versions are reused, so the digest must not change.
    #[test]
    fn the_directory_name_is_that_of_earlier_versions() {
        let model = ModelDir {
            path: PathBuf::from("/models/tiny"),
            name: String::new(),
            config: Value::Null,
            stop_ids: Vec::new(),
            chat_template: String::new(),
            weights: Vec::new(),
            special_tokens: BTreeMap::new(),
        };
        let texts = [("a", "b".to_owned()), ("c", "d".to_owned())];
        let digest = &sha256("abcd")[..16];
        assert_eq!(directory_name(&model, &texts).unwrap(), format!("tiny-{digest}"));
    }
}
