//! `hone validate`: the configuration, its rewards and its dataset, without a run.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;

use hone_core::metrics::Metrics;
use hone_dataset::Dataset;
use hone_engine::{Codec, ModelDir};
use hone_reward::Routes;

use super::rewards::reward_tools;
use crate::config::Config;
use crate::runs::data_check;

/// Checks a configuration, and, if `reads_data`, the dataset that it names. Returns a report. Nothing
/// is downloaded and nothing is left on the disk.
///
/// # Errors
/// The first thing that would stop a run, or keep it from learning.
pub async fn validate(config: &Config, reads_data: bool) -> anyhow::Result<String> {
    let rewards = reward_tools(config, Arc::new(Metrics::new()?)).await?;
    let routes = Routes::with(&config.routes, &rewards.tools)?;
    let mut text = "the configuration is valid\n".to_owned();
    let Some(dataset) = config.dataset_in_use() else { return Ok(text) };
    hone_dataset::check(&dataset)?;
    if reads_data {
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
    let path = ModelDir::local(model, &config.data.dir.join("hub"));
    path.map(|path| load(&path)).transpose()
}

fn load(path: &Path) -> anyhow::Result<(Codec, usize)> {
    let dir = ModelDir::open(path)?;
    Ok((Codec::load(&dir)?, dir.context()))
}
