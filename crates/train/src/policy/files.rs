//! A version's directory: PEFT files and a manifest, written whole or not at all.

use std::fs::File;
use std::path::Path;
use std::{fs, io};

use sha2::{Digest, Sha256};

use hone_core::types::{PolicyRecord, PolicyVersion};

use super::{Candidate, PolicyError};

/// The weights' file, as PEFT names it.
const WEIGHTS: &str = "adapter_model.safetensors";

/// Where a version lives, relative to the data directory.
pub(super) fn relative_dir(version: PolicyVersion) -> String {
    format!("adapters/v{:06}", version.0)
}

/// SHA-256 of the version's weights, in hex.
pub fn sha256(dir: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(dir.join(WEIGHTS))?, &mut hasher)?;
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Writes the candidate beside `dir`, makes it durable, then renames it to `dir`; returns the
/// SHA-256 of its weights. A leftover of an interrupted try is replaced.
pub(super) fn write(
    dir: &Path,
    candidate: &dyn Candidate,
    record: &PolicyRecord,
) -> Result<String, PolicyError> {
    let files = |error: io::Error| {
        PolicyError::Files(format!("policy version {}: {}: {error}", record.version, dir.display()))
    };
    let parent = dir
        .parent()
        .ok_or_else(|| PolicyError::Files(format!("{} has no parent", dir.display())))?;
    let temporary = dir.with_extension("tmp");
    remove(&temporary).map_err(files)?;
    fs::create_dir_all(&temporary).map_err(files)?;
    candidate.write(&temporary).map_err(PolicyError::Files)?;
    let digest = sha256(&temporary).map_err(files)?;
    let manifest = serde_json::json!({
        "version": record.version,
        "parent": record.parent,
        "step": record.step,
        "sha256": digest,
        "metrics": record.metrics,
        "created": record.created,
    });
    fs::write(temporary.join("manifest.json"), format!("{manifest:#}\n")).map_err(files)?;
    for entry in fs::read_dir(&temporary).map_err(files)? {
        File::open(entry.map_err(files)?.path()).and_then(|f| f.sync_all()).map_err(files)?;
    }
    remove(dir).map_err(files)?;
    fs::rename(&temporary, dir).map_err(files)?;
    File::open(parent).and_then(|f| f.sync_all()).map_err(files)?;
    Ok(digest)
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
