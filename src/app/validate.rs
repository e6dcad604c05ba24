//! `hone validate`: the configuration, its rewards and its dataset, without a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;

use hone_core::metrics::Metrics;
use hone_dataset::Dataset;
use hone_engine::{Codec, ModelDir};
use hone_hub::Hub;

use super::dataset::fetch_dataset;
use super::rewards::reward_tools;
use crate::config::Config;
use crate::http::{KeyRing, Tls};
use crate::runs::data_check;

/// Checks a configuration, and, if `reads_data`, the dataset that it names, which is fetched if it is one
/// of the hub. Returns a report. No model is downloaded.
///
/// # Errors
/// The first thing that would stop a run, or keep it from learning.
pub async fn validate(config: &mut Config, reads_data: bool) -> anyhow::Result<String> {
    KeyRing::load(&config.server)?;
    Tls::load(&config.server.tls)?;
    let rewards = reward_tools(config, Arc::new(Metrics::new()?)).await?;
    let routes = rewards.routes(config).await?;
    let mut text = "the configuration is valid\n".to_owned();
    let Some(dataset) = config.dataset_in_use() else { return Ok(text) };
    hone_dataset::check(&dataset)?;
    if reads_data {
        fetch_dataset(config).await?;
        let dataset = config.dataset_in_use().unwrap_or(dataset);
        let dataset = Dataset::open(&dataset)?;
        let codec = tokenizer(config)?;
        let codec = codec.as_ref().map(|(codec, context)| (codec, *context));
        text += &data_check::describe(config, &dataset, &routes, codec).await?;
    }
    Ok(text)
}

/// The model's tokenizer and context length; `None` if the model is not on this machine.
fn tokenizer(config: &Config) -> anyhow::Result<Option<(Codec, usize)>> {
    let model = &config.model.path;
    if model.is_empty() {
        let name = format!("hone-validate-{}", uuid::Uuid::now_v7().simple());
        let temporary = std::env::temp_dir().join(name);
        let unpacked = hone_model::embedded::unpack(&temporary);
        let loaded = unpacked.context("unpacking the embedded model").and_then(|path| load(&path));
        // The error of the model is the one to report.
        let _removed = std::fs::remove_dir_all(&temporary);
        return loaded.map(Some);
    }
    let path = if Path::new(model).exists() {
        Some(PathBuf::from(model))
    } else {
        let hub = Hub::new(&config.hub, &config.data.dir);
        let is_complete = |dir: &Path| ModelDir::open(dir).is_ok();
        Hub::is_model_id(model).then(|| hub.cached_model(model, is_complete)).flatten()
    };
    path.map(|path| load(&path)).transpose()
}

fn load(path: &Path) -> anyhow::Result<(Codec, usize)> {
    let dir = ModelDir::open(path)?;
    Ok((Codec::load(&dir)?, dir.context()))
}
