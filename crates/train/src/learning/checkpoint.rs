//! Checkpoint directories, complete or absent after a crash.
//!
//! `step-000000000012/` holds `adapter.safetensors` under its PEFT names, the optimizer's
//! `moments.safetensors`, `average.safetensors` if the adapter is averaged, `reference.safetensors` if the
//! reference was synchronized, `initial_reference.safetensors` if the run started from an adapter, which
//! may be gone, and `state.json`, which has the SHA-256 of the others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use hone_core::digest::sha256;
use hone_core::files::{at, remove_any, replace_dir};
use hone_model::adapter::{LoraConfig, ModuleScale};
use hone_model::weights::safetensors_bytes;

use super::objective::AdaptiveCoefficients;
use crate::error::{LearnError, Result};

const FORMAT: &str = "hone-checkpoint";
const VERSION: u32 = 1;
const STATE_FILE: &str = "state.json";
const TENSORS_ENDING: &str = ".safetensors";
const PREFIX: &str = "step-";
/// Start of the names that [`replace_dir`] gives to its temporary directories.
const LEFTOVER_PREFIX: &str = ".step-";

pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// The tensors of a checkpoint, by the name of their file without its ending.
pub(crate) type CheckpointFiles = BTreeMap<String, Tensors>;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LearnerState {
    /// Steps taken, which is also the position in the learning-rate schedule.
    pub step: u64,
    /// Updates of the optimizer.
    pub updates: u64,
    /// The random stream that seeds dropout.
    pub rng: ChaCha8Rng,
    /// `Model::digest` of the base model.
    pub model: String,
    /// The adapter's settings, for readers.
    pub lora: LoraConfig,
    pub adaptive: AdaptiveCoefficients,
    /// Prompt and completion tokens of all steps.
    pub tokens: u64,
    /// Steps to go of the warm-up that follows a reset of the moments.
    pub restart: u64,
    /// Rank and scale of each module, as they follow from `lora`.
    pub factors: BTreeMap<String, ModuleScale>,
    /// Number of values in the average.
    pub averaged: u64,
    /// State of the caller.
    pub extra: Value,
}

#[derive(Serialize, Deserialize)]
struct StateFile {
    format: String,
    version: u32,
    /// Hexadecimal SHA-256 of each of the other files.
    sha256: BTreeMap<String, String>,
    #[serde(flatten)]
    state: Value,
}

pub(crate) fn step_dir(root: &Path, step: u64) -> PathBuf {
    root.join(format!("{PREFIX}{step:012}"))
}

/// The paths in a directory, in order; none if it does not exist.
pub(crate) fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(dir))?,
    };
    let mut paths = entries
        .map(|entry| entry.map(|entry| entry.path()).map_err(at(dir)))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    paths.sort();
    Ok(paths)
}

/// All checkpoints under `root`, oldest first; none if `root` does not exist.
pub(crate) fn list(root: &Path) -> Result<Vec<PathBuf>> {
    let step = |path: PathBuf| {
        let step = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.parse::<u64>().ok()?;
        Some((step, path))
    };
    let mut found: Vec<_> = entries(root)?.into_iter().filter_map(step).collect();
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Renames a damaged checkpoint under `root`, so that it is not read again. Returns its new path.
pub(crate) fn set_aside(root: &Path, dir: &Path) -> Result<PathBuf> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let aside = root.join(format!("damaged-{name}"));
    if aside.exists() {
        remove_any(&aside)?;
    }
    fs::rename(dir, &aside).map_err(at(dir))?;
    Ok(aside)
}

/// Removes all but the `max_count` newest checkpoints (at least one is kept), and the remains of
/// interrupted saves.
pub(crate) fn prune(root: &Path, max_count: usize) -> Result<()> {
    let all = list(root)?;
    let surplus = all.len().saturating_sub(max_count.max(1));
    for old in &all[..surplus] {
        remove_any(old)?;
    }
    if all.is_empty() {
        return Ok(());
    }
    for path in entries(root)? {
        if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(LEFTOVER_PREFIX)) {
            remove_any(&path)?;
        }
    }
    Ok(())
}

/// Makes `to` a second name of the files of checkpoint `from`, which are never changed in place.
/// Copies them where the file system has no hard links.
pub(crate) fn keep(from: &Path, to: &Path) -> Result<()> {
    replace_dir(to, |new| {
        for path in entries(from)? {
            let target = new.join(path.file_name().unwrap_or_default());
            if fs::hard_link(&path, &target).is_err() {
                fs::copy(&path, &target).map_err(at(&path))?;
            }
        }
        Ok(())
    })
}

/// Writes or replaces a checkpoint, on the threads of the current pool: no rollout starts before that ends.
pub(crate) fn save(dir: &Path, state: &LearnerState, files: &CheckpointFiles) -> Result<()> {
    replace_dir(dir, |new| {
        let write = |name: &str, bytes: &[u8]| {
            let path = new.join(name);
            fs::write(&path, bytes).map_err(at(&path))
        };
        let save = |(name, tensors): (&String, &Tensors)| {
            let (name, bytes) = (format!("{name}{TENSORS_ENDING}"), safetensors_bytes(tensors)?);
            let (written, hash) = rayon::join(|| write(&name, &bytes), || sha256(&bytes));
            written?;
            Ok((name, hash))
        };
        let sha256 = files.par_iter().map(save).collect::<Result<_>>()?;
        let unwritable = |e: serde_json::Error| wrong(dir, format!("{STATE_FILE}: {e}"));
        let state = serde_json::to_value(state).map_err(unwritable)?;
        let file = StateFile { format: FORMAT.to_owned(), version: VERSION, sha256, state };
        let text = serde_json::to_vec_pretty(&file).map_err(unwritable)?;
        Ok(write(STATE_FILE, &text)?)
    })
}

/// Reads a checkpoint and checks its digests.
pub(crate) fn load(dir: &Path, device: &Device) -> Result<(LearnerState, CheckpointFiles)> {
    let read = |name: &str| {
        fs::read(dir.join(name)).map_err(|error| wrong(dir, format!("{name}: {error}")))
    };
    let damaged = |e: serde_json::Error| wrong(dir, format!("{STATE_FILE}: {e}"));
    let file: StateFile = serde_json::from_slice(&read(STATE_FILE)?).map_err(damaged)?;
    if file.format != FORMAT {
        return Err(wrong(dir, format!("`format` is `{}`, not `{FORMAT}`", file.format)));
    }
    if file.version != VERSION {
        let reason = format!("`version` is {}; this program reads version {VERSION}", file.version);
        return Err(wrong(dir, reason));
    }
    let mut files = CheckpointFiles::new();
    for (name, hash) in &file.sha256 {
        let bytes = read(name)?;
        if *hash != sha256(&bytes) {
            return Err(wrong(dir, format!("{name} is not the file that was saved (SHA-256)")));
        }
        let loaded = candle_core::safetensors::load_buffer(&bytes, device)
            .map_err(|e| wrong(dir, format!("{name}: {e}")))?;
        files.insert(name.replace(TENSORS_ENDING, ""), loaded.into_iter().collect());
    }
    Ok((serde_json::from_value(file.state).map_err(damaged)?, files))
}

pub(crate) fn wrong(dir: &Path, reason: String) -> LearnError {
    LearnError::Checkpoint { path: dir.to_owned(), reason }
}
