//! Writes the directory that mistral.rs accepts.
//!
//! Why one is needed (mistralrs-core 0.8.1): `rope_theta` must be at the top level, and so on with
//! other keys of each family (`family.rs`); a `sliding_window` is applied even where
//! `use_sliding_window` is false; end-of-sequence ids are read from `generation_config.json` only;
//! the key-value cache grows by 512 positions and fails above `max_position_embeddings`; and a chat
//! template switches on parsers of thinking tags, so that it gets an empty one (Hone renders
//! templates itself).

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{ModelDir, refuse};
use crate::EngineError;

/// See [`ModelDir::normalised`].
pub(super) fn write(model: &ModelDir, cache_dir: &Path) -> Result<PathBuf, EngineError> {
    let texts = texts(model)?;
    let target = cache_dir.join(directory_name(model, &texts)?);
    if target.is_dir() {
        return Ok(target);
    }
    // Written aside and renamed, so that a directory of this name is always whole.
    let aside = cache_dir.join(format!(".normalise-{}", uuid::Uuid::now_v7().simple()));
    let fail = |e: io::Error| refuse(format!("{}: {e}", aside.display()));
    fs::create_dir_all(&aside).map_err(fail)?;
    for (name, text) in &texts {
        fs::write(aside.join(name), text).map_err(fail)?;
    }
    for source in &model.weights {
        let name = source.file_name().unwrap_or_default();
        link(source, &aside.join(name)).map_err(fail)?;
    }
    match fs::rename(&aside, &target) {
        Ok(()) => Ok(target),
        // Another process was faster; what it wrote has the same name, so the same content.
        Err(_) if target.is_dir() => {
            fs::remove_dir_all(&aside).map_err(fail)?;
            Ok(target)
        }
        Err(e) => Err(fail(e)),
    }
}

/// The small files by name.
fn texts(model: &ModelDir) -> Result<Vec<(&'static str, String)>, EngineError> {
    let config = match model.config.as_object() {
        Some(config) => super::family(config)?.for_engine(config),
        None => return Err(refuse("config.json holds no object".to_owned())),
    };
    Ok(vec![
        ("config.json", Value::Object(config).to_string()),
        ("generation_config.json", json!({ "eos_token_id": model.stop_ids }).to_string()),
        ("tokenizer_config.json", json!({ "chat_template": "" }).to_string()),
        ("tokenizer.json", lean(super::files::read(&model.path.join("tokenizer.json"))?)),
    ])
}

/// A tokenizer that knows every token and splits no text, or what it was given where that is no
/// tokenizer.
///
/// Hone encodes prompts itself, and mistral.rs parses the tokenizer, compiles its expressions and
/// indexes its merges for every copy of the model that it loads: once a replica and policy version.
fn lean(text: String) -> String {
    let Ok(mut tokenizer) = serde_json::from_str::<Value>(&text) else { return text };
    let Some(parts) = tokenizer.as_object_mut() else { return text };
    for part in ["normalizer", "pre_tokenizer", "post_processor"] {
        parts.insert(part.to_owned(), Value::Null);
    }
    if let Some(model) = parts.get_mut("model").and_then(Value::as_object_mut)
        && model.contains_key("merges")
    {
        model.insert("merges".to_owned(), json!([]));
    }
    tokenizer.to_string()
}

/// The model's name and a digest of everything that the directory is made from.
fn directory_name(
    model: &ModelDir,
    texts: &[(&'static str, String)],
) -> Result<String, EngineError> {
    let mut digest = Sha256::new();
    for (name, text) in texts {
        digest.update(name);
        digest.update(text);
    }
    for path in &model.weights {
        let describe = || {
            let real = path.canonicalize()?;
            let meta = fs::metadata(&real)?;
            io::Result::Ok(format!("{real:?} {} {:?}", meta.len(), meta.modified()?))
        };
        digest.update(describe().map_err(|e| refuse(format!("{}: {e}", path.display())))?);
    }
    let digest: String = digest.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect();
    let name = model.path.file_name().unwrap_or_default().to_string_lossy();
    Ok(format!("{name}-{digest}"))
}

/// A symbolic link, else a hard link, else a copy.
fn link(source: &Path, target: &Path) -> io::Result<()> {
    let real = source.canonicalize()?;
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(&real, target);
    #[cfg(windows)]
    let linked = std::os::windows::fs::symlink_file(&real, target);
    linked.or_else(|_| fs::hard_link(&real, target)).or_else(|_| fs::copy(&real, target).map(drop))
}
