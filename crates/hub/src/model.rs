//! Models named by id.

use std::path::{Path, PathBuf};

use crate::cache::{Repo, RepoCache, RepoKind, is_id};
use crate::client::Hub;
use crate::error::HubError;

/// Files other than weights.
const SMALL_FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const BRANCH: &str = "main";

impl Hub {
    /// Whether `text` has the form of a model's id, `organization/name`.
    pub fn is_model_id(text: &str) -> bool {
        is_id(text, false)
    }

    /// The cached snapshot of a model, if there is one that `is_complete` accepts.
    pub fn cached_model(&self, id: &str, is_complete: impl Fn(&Path) -> bool) -> Option<PathBuf> {
        let cache = RepoCache::new(&self.cache, &Repo { kind: RepoKind::Model, id });
        let dir = cache.snapshot(&cache.commit(BRANCH)?);
        is_complete(&dir).then_some(dir)
    }

    /// The directory of a model, whose files are fetched if the cache lacks them.
    ///
    /// # Errors
    /// If the hub cannot be reached, refuses access or has no safetensors of the model.
    pub async fn model(&self, id: &str) -> Result<PathBuf, HubError> {
        let repo = Repo { kind: RepoKind::Model, id };
        let cache = RepoCache::new(&self.cache, &repo);
        let listing = self.list(&repo, BRANCH, "").await?;
        let has = |name: &str| listing.files.iter().any(|file| file.name == name);
        let is_weight = |name: &str| {
            if has(WEIGHTS) {
                return name == WEIGHTS;
            }
            name == INDEX || (name.starts_with("model-") && name.ends_with(".safetensors"))
        };
        if !has(WEIGHTS) && !has(INDEX) {
            let what = "model.safetensors or model.safetensors.index.json";
            return Err(HubError::format(&repo.name(), what));
        }
        let wanted: Vec<_> = listing
            .files
            .iter()
            .filter(|file| SMALL_FILES.contains(&file.name.as_str()) || is_weight(&file.name))
            .collect();
        self.fetch(&repo, &listing.commit, &wanted).await?;
        Ok(cache.snapshot(&listing.commit))
    }
}
