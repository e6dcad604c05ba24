//! Fetches datasets of the hub before they are opened.

use std::path::Path;

use anyhow::ensure;

use hone_hub::{DatasetQuery, Hub, HubDataset, dataset_id};

use crate::config::Config;

/// Fetches what the configuration names as `hf://OWNER/NAME`, sets the files of the dataset, and sets
/// `dataset.revision` to their commit, so that a copy of the configuration names the same rows.
///
/// # Errors
/// If the hub cannot be reached or does not have the split as Parquet. Also if a path that does not
/// exist is the id of a dataset without `hf://`.
pub async fn fetch_dataset(config: &mut Config) -> anyhow::Result<()> {
    let Some(used) = config.dataset_in_use() else { return Ok(()) };
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
    let files: Vec<String> = found.files.iter().map(|path| file_name(path)).collect();
    tracing::info!(id, split, commit, ?files, "dataset of the hub");
    if found.partial {
        tracing::warn!("hf://{id}: the hub has only the beginning of split {split} as Parquet");
    }
    Ok(found)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
