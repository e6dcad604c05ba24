//! Checkpoints: a directory that is either whole or not there.
//!
//! `step-000000000012/` holds `adapter.safetensors`, `moments.safetensors`, `average.safetensors`
//! where the adapter is averaged, `reference.safetensors` where the reference was synchronised, and
//! `state.json`, which carries the SHA-256 of the others. It is written beside its place under a
//! name that starts with a dot, synced, and renamed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use hone_core::files::{at, remove_any, sibling, sync_dir, write_synced};
use hone_model::ModelSpec;
use hone_model::adapter::weights::named_plan;
use hone_model::adapter::{LoraConfig, ModuleScale};
use hone_model::files::safetensors_bytes;

use super::objective::AdaptiveCoefficients;
use crate::error::{LearnError, Result};

const FORMAT: &str = "hone-checkpoint";
const VERSION: u32 = 1;
const STATE_FILE: &str = "state.json";
const ADAPTER_FILE: &str = "adapter.safetensors";
const MOMENTS_FILE: &str = "moments.safetensors";
const AVERAGE_FILE: &str = "average.safetensors";
const REFERENCE_FILE: &str = "reference.safetensors";
const PREFIX: &str = "step-";

/// Everything a learner needs to go on exactly.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    /// What is not a tensor.
    pub state: LearnerState,
    /// The adapter under its PEFT names.
    pub adapter: BTreeMap<String, Tensor>,
    /// The optimiser's, for every tensor of the adapter that was updated.
    pub moments: BTreeMap<String, Tensor>,
    /// The averaged adapter; empty where there is none.
    pub average: BTreeMap<String, Tensor>,
    /// The reference's adapter; empty where the reference is the base.
    pub reference: BTreeMap<String, Tensor>,
}

/// The part of a checkpoint that is not a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LearnerState {
    /// Steps taken; also the schedule's place.
    pub step: u64,
    /// Updates of the optimiser.
    pub updates: u64,
    /// The random stream of dropout.
    pub rng: ChaCha8Rng,
    /// Tells the base model it belongs to: see `Model::digest`.
    pub model: String,
    /// The adapter's settings, for people and for checkpoints without `factors`.
    pub lora: LoraConfig,
    /// Coefficients that follow a target; absent from older checkpoints.
    #[serde(default)]
    pub adaptive: Option<AdaptiveCoefficients>,
    /// Prompt and completion tokens of all steps.
    #[serde(default)]
    pub tokens: u64,
    /// Rank and scale of each module, which the settings lead to.
    #[serde(default)]
    pub factors: BTreeMap<String, ModuleScale>,
    /// Values in the average.
    #[serde(default)]
    pub averaged: u64,
    /// What the caller keeps with it: baselines, ledger cursor.
    pub extra: Value,
}

impl LearnerState {
    /// Rank and scale of each module.
    pub(crate) fn factors(&self, spec: &ModelSpec) -> Result<BTreeMap<String, ModuleScale>> {
        if self.factors.is_empty() {
            Ok(named_plan(spec, &self.lora)?)
        } else {
            Ok(self.factors.clone())
        }
    }
}

#[derive(Serialize, Deserialize)]
struct File {
    format: String,
    version: u32,
    sha256: BTreeMap<String, String>,
    #[serde(flatten)]
    rest: Value,
}

/// Where the checkpoint of a step belongs.
pub fn step_dir(root: &Path, step: u64) -> PathBuf {
    root.join(format!("{PREFIX}{step:012}"))
}

/// All checkpoints under `root`, oldest first; none if `root` does not exist.
///
/// # Errors
/// If `root` cannot be listed.
pub fn list(root: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(root))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at(root))?;
        let name = entry.file_name();
        let step = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|digits| digits.parse::<u64>().ok());
        if let Some(step) = step {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// The checkpoint of the highest step under `root`.
///
/// # Errors
/// If `root` cannot be listed.
pub fn latest(root: &Path) -> Result<Option<PathBuf>> {
    Ok(list(root)?.pop())
}

/// Removes all but the `keep` newest checkpoints (at least one is kept), and what an interrupted
/// save left behind.
///
/// # Errors
/// If something cannot be listed or removed.
pub fn prune(root: &Path, keep: usize) -> Result<()> {
    let all = list(root)?;
    let surplus = all.len().saturating_sub(keep.max(1));
    for old in &all[..surplus] {
        remove_any(old)?;
    }
    if all.is_empty() {
        return Ok(());
    }
    for entry in fs::read_dir(root).map_err(at(root))? {
        let entry = entry.map_err(at(root))?;
        if entry.file_name().to_string_lossy().starts_with(&format!(".{PREFIX}")) {
            remove_any(&entry.path())?;
        }
    }
    Ok(())
}

/// Writes a checkpoint to `dir`, replacing one that is there: whole or not at all.
pub(crate) fn save(dir: &Path, checkpoint: &Checkpoint) -> Result<()> {
    let parent = dir.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(at(parent))?;
    let (temporary, replaced) = (sibling(dir, ".tmp"), sibling(dir, ".old"));
    remove_any(&temporary)?;
    fs::create_dir(&temporary).map_err(at(&temporary))?;
    let mut sha256 = BTreeMap::new();
    for (name, tensors, always) in [
        (ADAPTER_FILE, &checkpoint.adapter, true),
        (MOMENTS_FILE, &checkpoint.moments, true),
        (AVERAGE_FILE, &checkpoint.average, false),
        (REFERENCE_FILE, &checkpoint.reference, false),
    ] {
        if tensors.is_empty() && !always {
            continue;
        }
        let bytes = safetensors_bytes(tensors)?;
        write_synced(&temporary.join(name), &bytes)?;
        sha256.insert(name.to_owned(), digest(&bytes));
    }
    let damaged = |e: serde_json::Error| wrong(dir, format!("{STATE_FILE}: {e}"));
    let rest = serde_json::to_value(&checkpoint.state).map_err(damaged)?;
    let file = File { format: FORMAT.to_owned(), version: VERSION, sha256, rest };
    let text = serde_json::to_vec_pretty(&file).map_err(damaged)?;
    write_synced(&temporary.join(STATE_FILE), &text)?;
    sync_dir(&temporary)?;
    remove_any(&replaced)?;
    if dir.exists() {
        fs::rename(dir, &replaced).map_err(at(dir))?;
    }
    fs::rename(&temporary, dir).map_err(at(dir))?;
    sync_dir(parent)?;
    Ok(remove_any(&replaced)?)
}

/// Reads a checkpoint whole.
pub(crate) fn load(dir: &Path, device: &Device) -> Result<Checkpoint> {
    let text =
        fs::read(dir.join(STATE_FILE)).map_err(|e| wrong(dir, format!("{STATE_FILE}: {e}")))?;
    let damaged = |e: serde_json::Error| wrong(dir, format!("{STATE_FILE}: {e}"));
    let file: File = serde_json::from_slice(&text).map_err(damaged)?;
    if file.format != FORMAT {
        return Err(wrong(dir, format!("`format` is `{}`, not `{FORMAT}`", file.format)));
    }
    if file.version != VERSION {
        return Err(wrong(
            dir,
            format!("`version` is {}; this program reads version {VERSION}", file.version),
        ));
    }
    let state: LearnerState = serde_json::from_value(file.rest).map_err(damaged)?;
    let tensors = |name: &str| -> Result<BTreeMap<String, Tensor>> {
        let bytes = fs::read(dir.join(name)).map_err(|e| wrong(dir, format!("{name}: {e}")))?;
        if file.sha256.get(name) != Some(&digest(&bytes)) {
            return Err(wrong(dir, format!("{name} is not the file that was saved (SHA-256)")));
        }
        let loaded = candle_core::safetensors::load_buffer(&bytes, device)
            .map_err(|e| wrong(dir, format!("{name}: {e}")))?;
        Ok(loaded.into_iter().collect())
    };
    let where_saved = |name: &str| {
        if file.sha256.contains_key(name) { tensors(name) } else { Ok(BTreeMap::new()) }
    };
    Ok(Checkpoint {
        adapter: tensors(ADAPTER_FILE)?,
        moments: tensors(MOMENTS_FILE)?,
        average: where_saved(AVERAGE_FILE)?,
        reference: where_saved(REFERENCE_FILE)?,
        state,
    })
}

/// An error that names the checkpoint.
pub(crate) fn wrong(dir: &Path, reason: String) -> LearnError {
    LearnError::Checkpoint { path: dir.to_owned(), reason }
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
