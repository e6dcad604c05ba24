//! Checkpoint directories, complete or absent after a crash.
//!
//! `step-000000000012/` holds `adapter.safetensors`, `moments.safetensors`, `average.safetensors`
//! if the adapter is averaged, `reference.safetensors` if the reference was synchronized,
//! `initial_reference.safetensors` if the run started from an adapter, and `state.json`, which has the
//! SHA-256 of the others.

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
const ADAPTER_FILE: &str = "adapter.safetensors";
const MOMENTS_FILE: &str = "moments.safetensors";
const AVERAGE_FILE: &str = "average.safetensors";
const REFERENCE_FILE: &str = "reference.safetensors";
const INITIAL_REFERENCE_FILE: &str = "initial_reference.safetensors";
const PREFIX: &str = "step-";
/// Start of the names that [`replace_dir`] gives to its temporary directories.
const LEFTOVER_PREFIX: &str = ".step-";

/// Tensors by name.
type Tensors = BTreeMap<String, Tensor>;

/// The complete state of a learner.
pub(crate) struct Checkpoint {
    pub state: LearnerState,
    /// The adapter under its PEFT names.
    pub adapter: Tensors,
    /// The optimizer's moments, for every tensor of the adapter that was updated.
    pub moments: Tensors,
    /// The averaged adapter, if there is one.
    pub average: Option<Tensors>,
    /// The synchronized reference policy's adapter; `None` before the first synchronization.
    pub reference: Option<Tensors>,
    /// The reference before it; `None` if that is the base. Kept here, so that the reference of a run
    /// does not depend on whether the adapter that it started from still exists.
    pub initial_reference: Option<Tensors>,
}

/// The state in `state.json`. Fields with a default are absent from older checkpoints.
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
    /// The adapter's settings, for readers and for checkpoints without `factors`.
    pub lora: LoraConfig,
    #[serde(default)]
    pub adaptive: Option<AdaptiveCoefficients>,
    /// Prompt and completion tokens of all steps.
    #[serde(default)]
    pub tokens: u64,
    /// Steps to go of the warm-up that follows a reset of the moments.
    #[serde(default)]
    pub restart: u64,
    /// Rank and scale of each module, as they follow from `lora`.
    #[serde(default)]
    pub factors: BTreeMap<String, ModuleScale>,
    /// Number of values in the average.
    #[serde(default)]
    pub averaged: u64,
    /// State of the caller.
    pub extra: Value,
}

/// The content of `state.json`.
#[derive(Serialize, Deserialize)]
struct StateFile {
    format: String,
    version: u32,
    /// Hexadecimal SHA-256 of each of the other files.
    sha256: BTreeMap<String, String>,
    /// A [`LearnerState`].
    #[serde(flatten)]
    state: Value,
}

/// The directory of a step's checkpoint.
pub(crate) fn step_dir(root: &Path, step: u64) -> PathBuf {
    root.join(format!("{PREFIX}{step:012}"))
}

/// All checkpoints under `root`, oldest first; none if `root` does not exist.
///
/// # Errors
/// If `root` cannot be listed.
pub(crate) fn list(root: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(root))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at(root))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u64>().ok());
        found.extend(step.map(|step| (step, entry.path())));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Renames a damaged checkpoint under `root`, so that it is not read again. Returns its new path.
///
/// # Errors
/// If it cannot be renamed.
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
///
/// # Errors
/// If a directory cannot be listed or removed.
pub(crate) fn prune(root: &Path, max_count: usize) -> Result<()> {
    let all = list(root)?;
    let surplus = all.len().saturating_sub(max_count.max(1));
    for old in &all[..surplus] {
        remove_any(old)?;
    }
    if all.is_empty() {
        return Ok(());
    }
    for entry in fs::read_dir(root).map_err(at(root))? {
        let entry = entry.map_err(at(root))?;
        if entry.file_name().to_string_lossy().starts_with(LEFTOVER_PREFIX) {
            remove_any(&entry.path())?;
        }
    }
    Ok(())
}

/// Makes `to` a second name of the files of checkpoint `from`, which are never changed in place.
/// Copies them where the file system has no hard links.
///
/// # Errors
/// If `from` cannot be read or `to` cannot be written.
pub(crate) fn keep(from: &Path, to: &Path) -> Result<()> {
    replace_dir(to, |new| {
        for entry in fs::read_dir(from).map_err(at(from))? {
            let (path, name) = entry.map(|e| (e.path(), e.file_name())).map_err(at(from))?;
            let target = new.join(name);
            if fs::hard_link(&path, &target).is_err() {
                fs::copy(&path, &target).map_err(at(&path))?;
            }
        }
        Ok(())
    })
}

/// Writes a checkpoint to `dir`, and replaces one that exists there. Its files are written and hashed on the threads
/// of the current pool, because no rollout starts before that ends.
pub(crate) fn save(dir: &Path, checkpoint: &Checkpoint) -> Result<()> {
    let files = [
        (ADAPTER_FILE, Some(&checkpoint.adapter)),
        (MOMENTS_FILE, Some(&checkpoint.moments)),
        (AVERAGE_FILE, checkpoint.average.as_ref()),
        (REFERENCE_FILE, checkpoint.reference.as_ref()),
        (INITIAL_REFERENCE_FILE, checkpoint.initial_reference.as_ref()),
    ];
    replace_dir(dir, |new| {
        let write = |name: &str, bytes: &[u8]| {
            let path = new.join(name);
            fs::write(&path, bytes).map_err(at(&path))
        };
        let save = |(name, tensors): (&str, Option<&Tensors>)| {
            let Some(tensors) = tensors else { return Ok(None) };
            let bytes = safetensors_bytes(tensors)?;
            let (written, hash) = rayon::join(|| write(name, &bytes), || sha256(&bytes));
            written?;
            Ok(Some((name.to_owned(), hash)))
        };
        let saved: Vec<_> = files.into_par_iter().map(save).collect::<Result<_>>()?;
        let hashes = saved.into_iter().flatten().collect();
        let unwritable = |e: serde_json::Error| wrong(dir, format!("{STATE_FILE}: {e}"));
        let state = serde_json::to_value(&checkpoint.state).map_err(unwritable)?;
        let file = StateFile { format: FORMAT.to_owned(), version: VERSION, sha256: hashes, state };
        let text = serde_json::to_vec_pretty(&file).map_err(unwritable)?;
        Ok(write(STATE_FILE, &text)?)
    })
}

/// Reads a checkpoint and checks its digests.
pub(crate) fn load(dir: &Path, device: &Device) -> Result<Checkpoint> {
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
    let state: LearnerState = serde_json::from_value(file.state).map_err(damaged)?;
    let tensors = |name: &str| -> Result<Tensors> {
        let bytes = read(name)?;
        if file.sha256.get(name) != Some(&sha256(&bytes)) {
            return Err(wrong(dir, format!("{name} is not the file that was saved (SHA-256)")));
        }
        let loaded = candle_core::safetensors::load_buffer(&bytes, device)
            .map_err(|e| wrong(dir, format!("{name}: {e}")))?;
        Ok(loaded.into_iter().collect())
    };
    let if_saved = |name: &str| file.sha256.contains_key(name).then(|| tensors(name)).transpose();
    Ok(Checkpoint {
        adapter: tensors(ADAPTER_FILE)?,
        moments: tensors(MOMENTS_FILE)?,
        average: if_saved(AVERAGE_FILE)?,
        reference: if_saved(REFERENCE_FILE)?,
        initial_reference: if_saved(INITIAL_REFERENCE_FILE)?,
        state,
    })
}

/// An error that names the checkpoint.
pub(crate) fn wrong(dir: &Path, reason: String) -> LearnError {
    LearnError::Checkpoint { path: dir.to_owned(), reason }
}
