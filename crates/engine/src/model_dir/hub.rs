//! Fetches a model from the Hugging Face hub.

use std::error::Error;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, CacheRepo};

use super::ModelDir;
use super::values::refuse;
use crate::error::EngineError;

/// Files other than weights. Only the first two are required.
const SMALL_FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

impl ModelDir {
    /// The directory of a model: `model` itself if that path exists, else the cached snapshot of a
    /// hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, whose files are fetched into `cache` if they
    /// are not there. Blocks while it downloads.
    ///
    /// # Errors
    /// [`EngineError::Model`] if `model` is neither a path nor a hub id, or
    /// [`EngineError::Component`] if it cannot be fetched.
    pub fn resolve(model: &str, cache: &Path) -> Result<PathBuf, EngineError> {
        if let Some(dir) = Self::local(model, cache) {
            return Ok(dir);
        }
        if !is_hub_id(model) {
            return Err(refuse(format!(
                "{model:?} is neither a directory nor a hub id of the form organization/name"
            )));
        }
        fetch(model, Cache::new(cache.to_path_buf())).map_err(|error| {
            let failed =
                format!("{model:?} is not a directory and could not be fetched from the hub");
            EngineError::component(failed, error)
        })
    }

    /// As [`Self::resolve`], but `None` for a model that would have to be fetched.
    pub fn local(model: &str, cache: &Path) -> Option<PathBuf> {
        let path = Path::new(model);
        if path.exists() {
            return Some(path.to_path_buf());
        }
        let cache = Cache::new(cache.to_path_buf());
        is_hub_id(model).then(|| cached_snapshot(&cache.model(model.to_owned()))).flatten()
    }
}

/// Whether `model` is `organization/name` in the hub's alphabet.
fn is_hub_id(model: &str) -> bool {
    let part = |text: &str| {
        !text.is_empty()
            && !text.starts_with('.')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    model.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// The directory of the cached snapshot, if it is complete.
fn cached_snapshot(cached: &CacheRepo) -> Option<PathBuf> {
    let config = cached.get("config.json")?;
    let dir = config.parent()?;
    ModelDir::open(dir).ok().map(|model| model.path)
}

fn fetch(model: &str, cache: Cache) -> Result<PathBuf, Box<dyn Error + Send + Sync>> {
    let api = ApiBuilder::from_cache(cache).with_progress(false).with_retries(2).build()?;
    let repo = api.model(model.to_owned());
    let files: Vec<String> = repo.info()?.siblings.into_iter().map(|file| file.rfilename).collect();
    let has = |name: &str| files.iter().any(|file| file == name);
    for name in SMALL_FILES.into_iter().filter(|name| has(name)) {
        get(&repo, name)?;
    }
    if has("model.safetensors") {
        get(&repo, "model.safetensors")?;
    } else {
        get(&repo, "model.safetensors.index.json")?;
        let shard = |f: &&String| f.starts_with("model-") && f.ends_with(".safetensors");
        for file in files.iter().filter(shard) {
            get(&repo, file)?;
        }
    }
    let config = get(&repo, "config.json")?;
    Ok(config.parent().ok_or("the cache has no directory")?.to_path_buf())
}

fn get(repo: &ApiRepo, file: &str) -> Result<PathBuf, EngineError> {
    tracing::info!(file, "fetching from the hub");
    repo.get(file).map_err(|error| EngineError::component(file, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_distinguished_from_paths() {
        assert!(is_hub_id("Qwen/Qwen2.5-0.5B-Instruct"));
        for path in ["./qwen", "/models/qwen", "a/b/c", "qwen", "a/", "a b/c", "../x"] {
            assert!(!is_hub_id(path), "{path}");
        }
    }

    #[test]
    fn an_unknown_model_is_named_in_the_error() {
        let cache = tempfile::tempdir().unwrap();
        let error = ModelDir::resolve("no such model", cache.path()).unwrap_err().to_string();
        assert!(error.contains("\"no such model\" is neither a directory nor a hub id"), "{error}");
        let here = cache.path().to_str().unwrap();
        assert_eq!(ModelDir::resolve(here, cache.path()).unwrap(), cache.path());
    }
}
