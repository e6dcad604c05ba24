//! `hone train --explain-memory`.

use hone_engine::ModelDir;
use hone_model::ModelSpec;

use super::model::open_model;
use crate::config::Config;

/// Bytes of an `f32`.
const F32: usize = 4;

/// Bytes that the process will allocate beyond the trainer's plan and what is loaded already: the copy
/// of the model that the serving engine loads for a version, and the native sampler's cache.
pub(super) fn reserved_memory(
    config: &Config,
    model: &ModelDir,
    serves: bool,
    samples: bool,
) -> anyhow::Result<usize> {
    let spec = ModelSpec::from_config(&model.config)?;
    let weights: usize =
        spec.weight_shapes().iter().map(|(_, s)| s.iter().product::<usize>()).sum();
    let staging = if serves { weights * F32 } else { 0 };
    let position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * F32;
    let cache = if samples { config.rollout.max_batch_tokens * position } else { 0 };
    Ok(staging + cache)
}

/// A table of the memory that the trainer needs for the configured model, by part, and of the memory
/// that the machine has available.
///
/// # Errors
/// If the model cannot be found, read or trained.
pub async fn explain_memory(config: &Config) -> anyhow::Result<String> {
    let dir = open_model(config, &config.data.dir).await?;
    hone_train::Learner::check(&dir, &config.train)?;
    let spec = hone_model::ModelSpec::from_config(&dir.config)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if config.train.threads == 0 { cores } else { config.train.threads };
    let base = hone_train::memory::BaseMemory::read(&spec, &dir.weights, config.train.base_dtype)?;
    let plan = hone_train::MemoryPlan::new(&spec, base, &config.train, threads, 0);
    let available = hone_train::available_memory().map(|bytes| {
        format!("\n{:<18} {:>9.1} MiB", "available", bytes as f64 / f64::from(1 << 20))
    });
    Ok(format!("{plan}{}", available.unwrap_or_default()))
}
