//! Fetches a model from the Hugging Face hub.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, CacheRepo};

use super::refuse;
use crate::EngineError;

/// Files besides weights; only the first two must exist.
const SMALL: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// See [`super::ModelDir::resolve`].
pub(super) fn resolve(model: &str, cache: &Path) -> Result<PathBuf, EngineError> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(path.to_path_buf());
    }
    if !is_hub_id(model) {
        return Err(refuse(format!(
            "{model:?} is neither a directory nor a hub id of the form organisation/name"
        )));
    }
    let cache = Cache::new(cache.to_path_buf());
    if let Some(dir) = complete(&cache.model(model.to_owned())) {
        return Ok(dir);
    }
    fetch(model, cache).map_err(|reason| {
        refuse(format!(
            "{model:?} is no directory here and could not be fetched from the hub: {reason}"
        ))
    })
}

/// `organisation/name` in the hub's alphabet.
fn is_hub_id(model: &str) -> bool {
    let part = |text: &str| {
        !text.is_empty()
            && !text.starts_with('.')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    model.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// The cached snapshot's directory, if every file it needs is there.
fn complete(cached: &CacheRepo) -> Option<PathBuf> {
    let config = cached.get("config.json")?;
    let dir = config.parent()?.to_path_buf();
    super::ModelDir::open(&dir).ok().map(|_| dir)
}

fn fetch(model: &str, cache: Cache) -> Result<PathBuf, String> {
    let api = ApiBuilder::from_cache(cache)
        .with_progress(false)
        .with_retries(2)
        .build()
        .map_err(|e| e.to_string())?;
    let repo = api.model(model.to_owned());
    let listing = repo.info().map_err(|e| e.to_string())?;
    let files: Vec<String> = listing.siblings.into_iter().map(|file| file.rfilename).collect();
    let has = |name: &str| files.iter().any(|file| file == name);
    for name in SMALL.into_iter().filter(|name| has(name)) {
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
    config.parent().map(Path::to_path_buf).ok_or_else(|| "the cache has no directory".to_owned())
}

fn get(repo: &ApiRepo, file: &str) -> Result<PathBuf, String> {
    tracing::info!(file, "fetching from the hub");
    repo.get(file).map_err(|e| format!("{file}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_hub_ids_from_paths() {
        assert!(is_hub_id("Qwen/Qwen2.5-0.5B-Instruct"));
        for path in ["./qwen", "/models/qwen", "a/b/c", "qwen", "a/", "a b/c", "../x"] {
            assert!(!is_hub_id(path), "{path}");
        }
    }

    #[test]
    fn says_what_it_looked_for() {
        let cache = tempfile::tempdir().unwrap();
        let error = resolve("no such model", cache.path()).unwrap_err().to_string();
        assert!(error.contains("\"no such model\" is neither a directory nor a hub id"), "{error}");
        let here = cache.path().to_str().unwrap();
        assert_eq!(resolve(here, cache.path()).unwrap(), cache.path());
    }
}
