//! The models that mistral.rs serves correctly, and the directory that it loads for one.
//!
//! The checks follow mistralrs-core 0.8.1 (`models/*.rs`, `layers.rs`, `layers_masker.rs`):
//!
//! - With a sliding window, its mask shows one position more than transformers during prefill and
//!   one fewer during decode, and some families apply the window to all layers instead of some.
//!   The context therefore ends at the window, within which it has no effect.
//! - Only Llama and SmolLM3 (linear, llama3) and Phi-3 (longrope) read rotary scaling, and only
//!   Qwen2 and Gemma 2 read biases. Elsewhere mistral.rs ignores them silently, so they are refused.
//!
//! It needs a directory of its own, because
//!
//! - it reads `rope_theta` and the defaults of transformers at the top level only, and other keys in forms of
//!   its own;
//! - it applies a `sliding_window` even if `use_sliding_window` is false;
//! - it reads end-of-sequence ids from `generation_config.json` only;
//! - its key-value cache grows by 512 positions and fails above `max_position_embeddings`;
//! - a chat template enables its parsers of thinking tags. Hone renders templates itself.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use hone_core::digest::{Digest, hex};
use hone_core::files::{FileError, at, remove_any, sync_dir, sync_parent, write_synced};
use hone_core::types::new_uuid;
use hone_engine::{EngineError, ModelDir};
use hone_model::spec::{Activation, RopeScaling, class, max_positions};
use hone_model::{ModelError, ModelSpec};

/// Positions by which mistral.rs grows the key-value cache of a sequence. It fails if the context is
/// not a multiple.
const CACHE_STEP: usize = 512;

pub(crate) struct ModelFiles {
    /// The directory.
    pub path: PathBuf,
    /// Context length in tokens, up to which every layer computes what transformers computes: the least of
    /// `max_position_embeddings`, a sliding window in use, and with longrope the length up to which the short
    /// factors apply.
    pub context: usize,
}

impl ModelFiles {
    /// Writes a directory below `cache_dir` that mistral.rs loads, unless it exists. It contains a
    /// `config.json` with all keys at the top level, the tokenizer, the stop tokens, and links to the weights
    /// (copies if the file system has no links).
    pub fn write(model: &ModelDir, cache_dir: &Path) -> Result<Self, EngineError> {
        if model.is_gguf() {
            let reason = "is a GGUF file, which cannot be served with adapters";
            return Err(refuse(&format!("{} {reason}", model.path.display())));
        }
        let spec = ModelSpec::from_config(&model.config)?;
        let longest = max_positions(&model.config)?;
        check(&spec, longest)?;
        let windows = spec.layers.iter().filter_map(|layer| layer.window);
        let context = windows.fold(model.context(), usize::min);
        let texts = [
            ("config.json", config(model, &spec, context)?.to_string()),
            ("generation_config.json", json!({ "eos_token_id": model.stop_ids }).to_string()),
            ("tokenizer_config.json", json!({ "chat_template": "" }).to_string()),
            ("tokenizer.json", lean_tokenizer(model.tokenizer_json()?)),
        ];
        let path = write(model, &texts, cache_dir).map_err(ModelError::from)?;
        Ok(Self { path, context })
    }
}

fn refuse(reason: &str) -> EngineError {
    EngineError::Model(format!("{reason} by mistral.rs: set engine.backend = \"native\""))
}

/// Refuses options for which mistral.rs would not compute what transformers computes.
fn check(spec: &ModelSpec, longest: usize) -> Result<(), EngineError> {
    use RopeScaling::{Default, Linear, Llama3, Long};
    let family = spec.architecture.as_str();
    let refused = |what: &str| Err(refuse(&format!("config.json: {what} cannot be served")));
    if (spec.output_bias && family != "gemma2") || spec.mlp_bias {
        let key = if spec.output_bias { "attention_bias" } else { "mlp_bias" };
        return refused(&format!("`{key}` is true, which"));
    }
    match (&spec.rope.scaling, family) {
        (Default, _) | (Linear { .. } | Llama3 { .. }, "llama" | "smollm3") => {}
        (Long { attention_factor, original, .. }, "phi3") => {
            // mistral.rs computes the factor from the two lengths.
            let (longest_f, original) = (longest as f64, *original as f64);
            let factor = (1.0 + (longest_f / original).ln() / original.ln()).sqrt().max(1.0);
            if (factor - attention_factor).abs() > 1e-9 {
                return refused(&format!(
                    "the attention factor of `rope_scaling` is {attention_factor}, not {factor}, which \
                     follows from the two lengths, and"
                ));
            }
            if !longest.is_multiple_of(CACHE_STEP) {
                return refused(&format!(
                    "`max_position_embeddings` is {longest}, with longrope no multiple of \
                     {CACHE_STEP}, which"
                ));
            }
        }
        (scaling @ (Linear { .. } | Llama3 { .. } | Long { .. }), _) => {
            let kind = match scaling {
                Linear { .. } => "linear",
                Llama3 { .. } => "llama3",
                _ => "longrope",
            };
            return refused(&format!(
                "`rope_scaling` has rope_type \"{kind}\", which for this architecture"
            ));
        }
    }
    let free_head_dim = matches!(family, "qwen3" | "mistral" | "gemma2");
    if !free_head_dim && spec.head_dim * spec.num_heads != spec.hidden_size {
        let head_dim = spec.head_dim;
        return refused(&format!(
            "`head_dim` is {head_dim}, which is not hidden_size / num_attention_heads and"
        ));
    }
    if family == "gemma2" && !spec.tie_word_embeddings {
        return refused("`tie_word_embeddings` is false, which");
    }
    Ok(())
}

/// The configuration that mistral.rs's loaders expect.
fn config(model: &ModelDir, spec: &ModelSpec, context: usize) -> Result<Value, EngineError> {
    let (family, rope) = (spec.architecture.as_str(), &spec.rope);
    let scaling = match &rope.scaling {
        RopeScaling::Default => Value::Null,
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3 { factor, low, high, original } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }),
        // The context ends where the long factors would begin.
        RopeScaling::Long { factors, .. } => {
            json!({ "type": "longrope", "short_factor": factors, "long_factor": factors })
        }
    };
    // The attention factor of longrope is computed from this number, so it must not change.
    let (longest, original) = match rope.scaling {
        RopeScaling::Long { original, .. } => (max_positions(&model.config)?, original),
        _ => (context.next_multiple_of(CACHE_STEP), context),
    };
    let activation = match spec.activation {
        Activation::Silu => "silu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
    };
    // Gemma 2's loader requires a number. No sequence is as long as this one.
    let window = (family == "gemma2").then_some(longest);
    let rotated: Vec<u8> = spec.layers.iter().map(|layer| u8::from(layer.rope)).collect();
    let own = json!({
        "architectures": [class(&model.config)?],
        "max_position_embeddings": longest,
        "original_max_position_embeddings": original,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": activation,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.qkv_bias && family == "gemma2",
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": null,
        "partial_rotary_factor": rope.rotary_dim as f64 / spec.head_dim as f64,
        "no_rope_layers": rotated,
        "no_rope_layer_interval": 4,
        "layer_types": null,
        "use_sliding_window": false,
        "sliding_window": window,
        "max_window_layers": spec.num_layers,
        "query_pre_attn_scalar": spec.attention_scale.powi(-2).round() as u64,
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.final_softcap,
        // Phi-3's loader accepts single ids only. Hone itself ends completions.
        "bos_token_id": null,
        "eos_token_id": null,
    });
    let mut written = model.config.clone();
    if let (Value::Object(written), Value::Object(own)) = (&mut written, own) {
        written.extend(own);
    }
    Ok(written)
}

fn write(
    model: &ModelDir,
    texts: &[(&str, String)],
    cache_dir: &Path,
) -> Result<PathBuf, FileError> {
    let target = cache_dir.join(directory_name(model, texts)?);
    if target.is_dir() {
        return Ok(target);
    }
    // Several processes may write the same directory, so each has its own temporary one.
    let temporary = cache_dir.join(format!(".normalize-{}", new_uuid().simple()));
    fs::create_dir_all(&temporary).map_err(at(&temporary))?;
    for (name, text) in texts {
        write_synced(&temporary.join(name), text.as_bytes())?;
    }
    for source in &model.weights {
        let name = source.file_name().unwrap_or_default();
        link(source, &temporary.join(name)).map_err(at(source))?;
    }
    sync_dir(&temporary)?;
    match fs::rename(&temporary, &target) {
        Ok(()) => sync_parent(&target)?,
        // Another process was faster. A directory of the same name has the same content.
        Err(_) if target.is_dir() => remove_any(&temporary)?,
        Err(error) => return Err(at(&target)(error)),
    }
    Ok(target)
}

/// Removes everything from a `tokenizer.json` except its tokens. Text that is not a tokenizer is
/// returned unchanged.
///
/// Hone encodes prompts itself. mistral.rs would parse the tokenizer, compile its expressions and
/// index its merges once per replica and policy version.
fn lean_tokenizer(text: String) -> String {
    let Ok(mut tokenizer) = serde_json::from_str::<Value>(&text) else { return text };
    let Some(parts) = tokenizer.as_object_mut() else { return text };
    for part in ["normalizer", "pre_tokenizer", "post_processor"] {
        parts.insert(part.to_owned(), Value::Null);
    }
    if let Some(merges) = parts.get_mut("model").and_then(|model| model.get_mut("merges")) {
        *merges = json!([]);
    }
    tokenizer.to_string()
}

/// The model's name and a digest of everything from which the directory is made.
fn directory_name(model: &ModelDir, texts: &[(&str, String)]) -> Result<String, FileError> {
    let mut digest = Digest::new();
    for (name, text) in texts {
        digest = digest.bytes(name).bytes(text);
    }
    for path in &model.weights {
        let describe = || {
            let real = path.canonicalize()?;
            let meta = fs::metadata(&real)?;
            io::Result::Ok(format!("{real:?} {} {:?}", meta.len(), meta.modified()?))
        };
        digest = digest.bytes(describe().map_err(at(path))?);
    }
    let name = model.path.file_name().unwrap_or_default().to_string_lossy();
    Ok(format!("{name}-{}", hex(&digest.prefix::<8>())))
}

/// Makes a symbolic link, else a hard link, else a copy.
fn link(source: &Path, target: &Path) -> io::Result<()> {
    let real = source.canonicalize()?;
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(&real, target);
    #[cfg(windows)]
    let linked = std::os::windows::fs::symlink_file(&real, target);
    linked.or_else(|_| fs::hard_link(&real, target)).or_else(|_| {
        fs::copy(&real, target)?;
        File::open(target)?.sync_all()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use hone_core::digest::sha256;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
    }

    fn object(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    /// A family's model with one key of its configuration changed.
    fn changed(name: &str, key: &str, value: Value) -> ModelDir {
        let mut model = ModelDir::open(&fixture("families").join(name)).unwrap();
        model.config[key] = value;
        model
    }

    fn error(model: &ModelDir) -> String {
        let cache = tempfile::tempdir().unwrap();
        ModelFiles::write(model, cache.path()).err().unwrap().to_string()
    }

    #[test]
    fn the_directory_is_written_once() {
        let cache = tempfile::tempdir().unwrap();
        let mut model = ModelDir::open(&fixture("qwen2-tiny")).unwrap();
        model.config["sliding_window"] = json!(64);
        let written = ModelFiles::write(&model, cache.path()).unwrap();
        assert_eq!(written.context, 256);
        let written = written.path;
        let config = object(&written.join("config.json"));
        assert_eq!(config["rope_theta"], 50_000.0);
        assert_eq!(
            (&config["max_position_embeddings"], &config["sliding_window"]),
            (&json!(512), &Value::Null)
        );
        let generation = object(&written.join("generation_config.json"));
        assert_eq!(generation["eos_token_id"], json!([2, 0]));
        let weights = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
        assert_eq!(weights(&written), weights(&model.path));
        assert_eq!(ModelFiles::write(&model, cache.path()).unwrap().path, written);
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1, "no temporary one remains");
        // A changed model at the same path gets another directory.
        model.config["rope_parameters"] = json!({ "rope_theta": 2.0 });
        assert_ne!(ModelFiles::write(&model, cache.path()).unwrap().path, written);
    }

    #[test]
    fn every_family_is_written() {
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
            let model = ModelDir::open(&fixture("families").join(name)).unwrap();
            let files = ModelFiles::write(&model, cache.path()).unwrap();
            assert_eq!(files.context, context, "{name}");
            let written = files.path;
            let tokenizer = |dir: &Path| object(&dir.join("tokenizer.json"));
            let (lean, whole) = (tokenizer(&written), tokenizer(&model.path));
            assert_eq!(lean["model"]["vocab"], whole["model"]["vocab"], "{name}: every token");
            assert_eq!(lean["added_tokens"], whole["added_tokens"], "{name}");
            assert_eq!(lean["pre_tokenizer"], Value::Null);
            assert_eq!(lean["model"]["merges"], json!([]));
            let config = object(&written.join("config.json"));
            assert_eq!(config["max_position_embeddings"], 512, "{name}");
            assert!(config["rope_theta"].is_f64() && config["rope_parameters"].is_null());
            let window = if name == "gemma2" { json!(512) } else { Value::Null };
            assert_eq!(config["sliding_window"], window, "{name}: the loader must not apply one");
            match name {
                "llama3" => assert_eq!(config["rope_scaling"]["rope_type"], "llama3"),
                "phi3-longrope" => {
                    assert_eq!(config["rope_scaling"]["type"], "longrope");
                    assert_eq!(config["partial_rotary_factor"], 0.5);
                    assert_eq!(config["original_max_position_embeddings"], 64);
                }
                "phi3" => assert!(config["eos_token_id"].is_null()),
                "qwen3" => {
                    assert_eq!(config["head_dim"], 12);
                    assert_eq!(config["max_window_layers"], 2);
                }
                "gemma2" => assert_eq!(config["hidden_act"], "gelu_pytorch_tanh"),
                "smollm3" => assert_eq!(config["no_rope_layers"], json!([1, 0, 1, 0])),
                _ => {}
            }
        }
    }

    #[test]
    fn options_that_mistral_rs_ignores_are_refused() {
        let linear = || json!({"rope_type": "linear", "factor": 2.0});
        for (name, key, value, expected) in [
            ("llama-biases", "x", json!(1), "`attention_bias` is true"),
            (
                "mistral",
                "rope_scaling",
                linear(),
                "rope_type \"linear\", which for this architecture",
            ),
            ("llama3", "head_dim", json!(16), "`head_dim` is 16"),
            ("gemma2", "tie_word_embeddings", json!(false), "`tie_word_embeddings` is false"),
            ("phi3-longrope", "max_position_embeddings", json!(500), "is 500"),
        ] {
            let error = error(&changed(name, key, value));
            assert!(error.contains(expected), "{name}: {error}");
            assert!(error.ends_with("by mistral.rs: set engine.backend = \"native\""), "{error}");
        }
        let gguf = ModelDir::open(&fixture("gguf/qwen2-q8_0.gguf")).unwrap();
        assert!(error(&gguf).ends_with("set engine.backend = \"native\""));
    }

    /// The digest of equal contents must not change, so that a directory is written once.
    #[test]
    fn the_directory_name_is_a_digest_of_its_texts() {
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
