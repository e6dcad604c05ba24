//! Writes the directory that mistral.rs accepts.
//!
//! mistralrs-core 0.8.1 needs one, because
//!
//! - it reads `rope_theta` at the top level only, and other keys in forms of its own (`family.rs`);
//! - it applies a `sliding_window` even if `use_sliding_window` is false;
//! - it reads end-of-sequence ids from `generation_config.json` only;
//! - its key-value cache grows by 512 positions and fails above `max_position_embeddings`;
//! - a chat template enables its parsers of thinking tags. Hone renders templates itself.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::{Value, json};

use hone_core::digest::{Digest, hex};
use hone_core::files::{FileError, at, remove_any, sync_dir, sync_parent, write_synced};

use super::ModelDir;
use super::family::EngineFamily;
use super::values::refuse;
use crate::error::EngineError;

impl ModelDir {
    /// Writes a directory below `cache_dir` that mistral.rs loads, unless it exists, and returns
    /// its path. It contains a `config.json` with all keys at the top level, the tokenizer, the
    /// stop tokens, and links to the weights (copies if the file system has no links).
    ///
    /// # Errors
    /// [`EngineError::Component`] if a file cannot be read or written, or [`EngineError::Model`] for a
    /// GGUF file, which mistral.rs cannot serve with adapters.
    pub fn write_normalized(&self, cache_dir: &Path) -> Result<PathBuf, EngineError> {
        if self.is_gguf() {
            let path = self.path.display();
            let reason =
                "mistral.rs cannot serve it with adapters: set engine.backend = \"native\"";
            return Err(refuse(format!("{path} is a GGUF file; {reason}")));
        }
        let texts = texts(self)?;
        let target = cache_dir.join(directory_name(self, &texts)?);
        if target.is_dir() {
            return Ok(target);
        }
        // Several processes may write the same directory, so each has its own temporary one.
        let name = format!(".normalize-{}", uuid::Uuid::now_v7().simple());
        let temporary = cache_dir.join(name);
        fs::create_dir_all(&temporary).map_err(at(&temporary))?;
        for (name, text) in &texts {
            write_synced(&temporary.join(name), text.as_bytes())?;
        }
        for source in &self.weights {
            let name = source.file_name().unwrap_or_default();
            link(source, &temporary.join(name)).map_err(at(source))?;
        }
        sync_dir(&temporary)?;
        match fs::rename(&temporary, &target) {
            Ok(()) => sync_parent(&target)?,
            // Another process was faster. A directory of the same name has the same content.
            Err(_) if target.is_dir() => remove_any(&temporary)?,
            Err(error) => return Err(at(&target)(error).into()),
        }
        Ok(target)
    }
}

/// The small files: name and text.
fn texts(model: &ModelDir) -> Result<Vec<(&'static str, String)>, EngineError> {
    let config = match model.config.as_object() {
        Some(config) => EngineFamily::of(config)?.for_engine(config),
        None => return Err(refuse("config.json is not an object".to_owned())),
    };
    let tokenizer = model.tokenizer_json()?;
    Ok(vec![
        ("config.json", Value::Object(config).to_string()),
        ("generation_config.json", json!({ "eos_token_id": model.stop_ids }).to_string()),
        ("tokenizer_config.json", json!({ "chat_template": "" }).to_string()),
        ("tokenizer.json", lean_tokenizer(tokenizer)),
    ])
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
fn directory_name(model: &ModelDir, texts: &[(&'static str, String)]) -> Result<String, FileError> {
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
