//! Starts mistral.rs.

use std::path::Path;
use std::sync::Arc;

use hone_core::metrics::Metrics;
use hone_engine::{EngineConfig, ModelDir};
use hone_mistral::MistralEngine;

/// Loads the model into mistral.rs. All that blocks runs off the async threads.
pub(super) async fn start_mistral(
    config: &EngineConfig,
    dir: &ModelDir,
    data: &Path,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Arc<MistralEngine>> {
    let (config, dir, models) = (config.clone(), dir.clone(), data.join("models"));
    tokio::task::spawn_blocking(move || {
        let normalized = dir.write_normalized(&models)?;
        anyhow::Ok(MistralEngine::start(&dir, &normalized, &config, metrics)?)
    })
    .await?
}
