//! Finds the configured model, and claims the data directory for it.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use hone_core::files::replace_file;
use hone_engine::ModelDir;
use hone_hub::Hub;
use hone_train::Learner;

use crate::config::Config;
use crate::usage;

/// Finds the configured model, fetches it from the hub, or unpacks the embedded one.
pub(super) async fn open_model(config: &Config, data: &Path) -> anyhow::Result<ModelDir> {
    let model = &config.model.path;
    let path = if model.is_empty() {
        hone_model::embedded::unpack(data).context("unpacking the embedded model")?
    } else if Path::new(model).exists() {
        PathBuf::from(model)
    } else if Hub::is_model_id(model) {
        let is_complete = |dir: &Path| ModelDir::open(dir).is_ok();
        Hub::new(&config.hub, data).model(model, is_complete).await?
    } else {
        bail!(
            "model.path is {model:?}: it must be a directory, a GGUF file or a hub id of the \
             form organization/name"
        )
    };
    let mut dir = ModelDir::open(&path)?;
    if !config.model.name.is_empty() {
        dir.name.clone_from(&config.model.name);
    } else if model.is_empty() {
        hone_model::embedded::NAME.clone_into(&mut dir.name);
    } else if !Path::new(model).exists() {
        dir.name.clone_from(model);
    }
    Ok(dir)
}

/// Finds the configured model for a run on the records of the data directory `source`, and claims the
/// run's own data directory for it.
///
/// # Errors
/// If the model cannot be found or trained, or a directory belongs to another model: recorded token ids
/// apply to one model only.
pub async fn model_of_records(config: &Config, source: &Path) -> anyhow::Result<ModelDir> {
    let data = &config.data.dir;
    std::fs::create_dir_all(data).with_context(|| format!("data.dir {}", data.display()))?;
    let model = open_model(config, data).await?;
    Learner::check(&model, &config.train)?;
    let fits = owner(source, &model).context("--from-ledger: the records are of another model");
    fits.map_err(usage)?;
    claim(data, &model).await?;
    Ok(model)
}

/// File that names the model that a data directory belongs to.
const CLAIM_FILE: &str = "model.json";

/// Content of [`CLAIM_FILE`].
#[derive(Serialize, Deserialize)]
struct Claim {
    name: String,
    /// The model's [`fingerprint`].
    sha256: String,
}

/// The name of the model that a data directory belongs to; `None` if it belongs to none yet.
///
/// # Errors
/// If the directory belongs to a model with other files than `model`.
pub(super) fn owner(data: &Path, model: &ModelDir) -> anyhow::Result<Option<String>> {
    let path = data.join(CLAIM_FILE);
    if !path.exists() {
        return Ok(None);
    }
    let existing: Claim = serde_json::from_slice(&std::fs::read(&path)?)
        .with_context(|| format!("{} is damaged", path.display()))?;
    anyhow::ensure!(
        existing.sha256 == fingerprint(model)?,
        "data.dir {} belongs to the model {}, not to {}: use a separate data directory for each \
         model",
        data.display(),
        existing.name,
        model.path.display(),
    );
    Ok(Some(existing.name))
}

/// Claims the data directory for `model` and refuses a directory of another model, because its
/// adapters, checkpoints and recorded token ids do not apply to this one. Reads files off the async
/// threads.
///
/// # Errors
/// If the directory belongs to another model, or a file cannot be read or written.
pub(super) async fn claim(data: &Path, model: &ModelDir) -> anyhow::Result<()> {
    let (data, model) = (data.to_owned(), model.clone());
    tokio::task::spawn_blocking(move || claim_files(&data, &model)).await?
}

fn claim_files(data: &Path, model: &ModelDir) -> anyhow::Result<()> {
    if owner(data, model)?.is_none() {
        let claim = Claim { name: model.name.clone(), sha256: fingerprint(model)? };
        let claim = serde_json::to_string_pretty(&claim)?;
        replace_file(&data.join(CLAIM_FILE), format!("{claim}\n").as_bytes())?;
    }
    Ok(())
}

/// SHA-256 of the model's configuration and tokenizer, and of the lengths of its weight files.
fn fingerprint(model: &ModelDir) -> anyhow::Result<String> {
    let mut hasher = Sha256::new();
    hasher.update(model.config_json()?);
    hasher.update(model.tokenizer_json()?);
    for file in &model.weights {
        hasher.update(std::fs::metadata(file)?.len().to_le_bytes());
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
