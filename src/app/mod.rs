//! Composition root: builds the daemon from its parts and shuts it down in a fixed order.
//!
//! `Core` opens the ledger, loads the model, and starts the engine, rollout and the trainer.
//! [`start`] serves it over HTTP. Shutdown runs in the reverse order.

pub(crate) mod adapters;
mod core;
mod engines;
pub(crate) mod generate;
mod memory;
mod service;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use hone_core::files::replace_file;
use hone_core::metrics::Metrics;
use hone_engine::{Codec, ModelDir};
use hone_hub::{DatasetQuery, Hub, HubDataset, dataset_id};
use hone_reward::routes::RouteConfig;
use hone_reward::sandbox::Setup;
use hone_reward::{GraderEndpoint, LazySandbox, RewardError, Routes, Tools};
use hone_train::Learner;

use crate::config::Config;
use crate::usage;
use engines::SelfJudge;
pub(crate) use engines::device;

pub(crate) use self::core::{Core, RUN_GRACE};
pub use hone_store::LEDGER;
pub(crate) use memory::{explain_memory, longest_recorded_sample};
pub use service::{ReloadSignal, Service, shutdown_signal, start};

// Fetches datasets of the hub before they are opened.

/// Fetches what the configuration names as `hf://OWNER/NAME`, sets the files of the dataset, and sets
/// `dataset.revision` to their commit, so that a copy of the configuration names the same rows.
///
/// # Errors
/// If the hub cannot be reached or does not have the split as Parquet. Also if a path that does not
/// exist is the id of a dataset without `hf://`.
pub async fn fetch_dataset(config: &mut Config) -> anyhow::Result<()> {
    let Some(used) = config.dataset_in_use().cloned() else { return Ok(()) };
    let hub = Hub::new(&config.hub, &config.data.dir);
    let path = id_in("dataset.path", &used.path)?;
    let eval = id_in("dataset.eval_path", &used.eval_path)?;
    let dataset = &mut config.dataset;
    if let Some(id) = path {
        let (split, split_key) = (used.split.as_str(), "dataset.split");
        let (config, revision) = (used.config.as_str(), used.revision.as_str());
        let query = DatasetQuery { id, config, split, split_key, revision };
        let found = fetch(&hub, &query).await?;
        dataset.revision.clone_from(&found.commit);
        dataset.files = found.files;
    }
    if let Some(id) = eval {
        // The keys name the training dataset, unless that is a file.
        let same = path.is_none_or(|path| path == id);
        let (config, revision) =
            if same { (used.config.as_str(), dataset.revision.as_str()) } else { ("", "") };
        let (split, split_key) = (used.eval_split.as_str(), "dataset.eval_split");
        let query = DatasetQuery { id, config, split, split_key, revision };
        dataset.eval_files = fetch(&hub, &query).await?.files;
    }
    Ok(())
}

/// The id in a path, if the path names a dataset of the hub.
fn id_in<'a>(key: &str, path: &'a Path) -> anyhow::Result<Option<&'a str>> {
    if let Some(id) = dataset_id(path) {
        return Ok(Some(id?));
    }
    let text = path.to_string_lossy();
    let has_extension = path.extension().is_some_and(|extension| extension.len() <= 7);
    ensure!(
        path.exists() || has_extension || !Hub::is_model_id(&text),
        "{key}: there is no file {text:?}; a dataset of the hub is written \"hf://{text}\""
    );
    Ok(None)
}

async fn fetch(hub: &Hub, query: &DatasetQuery<'_>) -> anyhow::Result<HubDataset> {
    let found = hub.dataset(query).await?;
    let (id, split, commit) = (query.id, query.split, &found.commit);
    let files: Vec<_> = found.files.iter().filter_map(|path| path.file_name()).collect();
    tracing::info!(id, split, commit, ?files, "dataset of the hub");
    if found.partial {
        tracing::warn!("hf://{id}: the hub has only the beginning of split {split} as Parquet");
    }
    Ok(found)
}

/// The services that the configured rewards use.
pub struct RewardTools {
    /// Argument of [`Routes::with`].
    pub tools: Tools,
    /// Judge in `tools` that uses the served base model; not loaded yet.
    self_judge: Arc<SelfJudge>,
}

impl RewardTools {
    /// Builds the configured routes and probes their parts.
    ///
    /// # Errors
    /// The first route, part and key with a wrong value, or with Python that cannot be loaded.
    pub async fn routes(&self, config: &Config) -> Result<Routes, RewardError> {
        let routes = Routes::with(&config.routes, &self.tools)?;
        routes.probe().await?;
        Ok(routes)
    }
}

/// Sets up the services that the configured rewards use. A sandbox is probed before it is used.
///
/// # Errors
/// If a reward runs Python that cannot be confined on this machine, or if an HTTP client cannot be
/// created.
pub async fn reward_tools(config: &Config, metrics: Arc<Metrics>) -> anyhow::Result<RewardTools> {
    let self_judge = Arc::new(SelfJudge::default());
    let python = Arc::new(LazySandbox::new(Setup {
        python: config.sandbox.python.clone(),
        ..Setup::default()
    }));
    let mut kinds = config.routes.0.iter().flat_map(RouteConfig::parts).map(|part| part.kind);
    let sandbox = match kinds.any(|kind| kind.needs_sandbox()) {
        true => Some(python.get().await.context("the sandbox")?),
        false => None,
    };
    let endpoint = GraderEndpoint::new(&config.graders, &metrics).context("[graders]")?;
    let tools = Tools {
        metrics: Some(metrics),
        self_judge: Some(self_judge.clone()),
        endpoint,
        sandbox,
        python: Some(python),
    };
    Ok(RewardTools { tools, self_judge })
}

/// The configured rewards and the model's tokenizer, without an engine for the policy. If a judge
/// uses the base model, that model is loaded.
pub async fn load_rewards(config: &Config) -> anyhow::Result<(Codec, Routes)> {
    let data = &config.data.dir;
    let dir = open_model(config, data).await?;
    let rewards = reward_tools(config, Arc::new(Metrics::new()?)).await?;
    let routes = rewards.routes(config).await?;
    if config.uses_self_judge() {
        rewards.self_judge.load(config, &dir, data, None, None).await?;
    }
    Ok((Codec::load(&dir)?, routes))
}

// Finds the configured model, and claims the data directory for it.

/// The configured model, if it is on this machine. The embedded one is unpacked in `data`.
pub(crate) fn local_model(config: &Config, data: &Path) -> anyhow::Result<Option<PathBuf>> {
    let model = &config.model.path;
    if model.is_empty() {
        let unpacked = hone_model::embedded::unpack(data);
        return Ok(Some(unpacked.context("unpacking the embedded model")?));
    }
    if Path::new(model).exists() {
        return Ok(Some(PathBuf::from(model)));
    }
    let is_complete = |dir: &Path| ModelDir::open(dir).is_ok();
    let hub = Hub::new(&config.hub, &config.data.dir);
    Ok(Hub::is_model_id(model).then(|| hub.cached_model(model, is_complete)).flatten())
}

/// Finds the configured model, fetches it from the hub, or unpacks the embedded one.
async fn open_model(config: &Config, data: &Path) -> anyhow::Result<ModelDir> {
    let model = &config.model.path;
    let path = match local_model(config, data)? {
        Some(path) => path,
        None if Hub::is_model_id(model) => {
            Hub::new(&config.hub, &config.data.dir).model(model).await?
        }
        None => bail!(
            "model.path is {model:?}: it must be a directory, a GGUF file or a hub id of the \
             form organization/name"
        ),
    };
    let mut dir = ModelDir::open(&path)?;
    if let Some(name) = config.model.names.first() {
        dir.name.clone_from(name);
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
fn owner(data: &Path, model: &ModelDir) -> anyhow::Result<Option<String>> {
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
async fn claim(data: &Path, model: &ModelDir) -> anyhow::Result<()> {
    let (data, model) = (data.to_owned(), model.clone());
    let claim = move || {
        if owner(&data, &model)?.is_none() {
            let claim = Claim { name: model.name.clone(), sha256: fingerprint(&model)? };
            let claim = serde_json::to_string_pretty(&claim)?;
            replace_file(&data.join(CLAIM_FILE), format!("{claim}\n").as_bytes())?;
        }
        anyhow::Ok(())
    };
    tokio::task::spawn_blocking(claim).await?
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
