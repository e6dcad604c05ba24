//! The directory of a version: PEFT files and a manifest.

use std::path::Path;
use std::{fs, io};

use hone_core::digest::sha256_file;
use hone_core::files::{at, replace_dir};
use hone_core::types::{PolicyRecord, PolicyVersion};
use hone_model::adapter::peft::WEIGHTS_FILE;

use super::error::PolicyError;
use crate::error::LearnError;

/// The directory of all versions, relative to the data directory.
pub(super) const ADAPTERS: &str = "adapters";

/// The name of a version's directory.
pub(crate) fn version_name(version: PolicyVersion) -> String {
    format!("v{:06}", version.0)
}

/// A version's directory relative to the data directory.
pub(crate) fn relative_dir(version: PolicyVersion) -> String {
    format!("{ADAPTERS}/{}", version_name(version))
}

/// SHA-256 of the weights in a version's directory, in hexadecimal.
///
/// # Errors
/// If the file cannot be read.
pub fn adapter_digest(dir: &Path) -> io::Result<String> {
    sha256_file(&dir.join(WEIGHTS_FILE))
}

/// Writes the PEFT files of `write_adapter` and a manifest to `dir`, which is complete or absent after a
/// crash. Replaces what an interrupted publication left there. Returns the weights' SHA-256.
pub(crate) fn write_version(
    dir: &Path,
    write_adapter: impl FnOnce(&Path) -> Result<(), LearnError>,
    record: &PolicyRecord,
) -> Result<String, PolicyError> {
    let mut digest = String::new();
    replace_dir(dir, |new| {
        write_adapter(new)?;
        digest = adapter_digest(new).map_err(at(&new.join(WEIGHTS_FILE)))?;
        let manifest = serde_json::json!({
            "version": record.version,
            "parent": record.parent,
            "step": record.step,
            "sha256": digest,
            "metrics": record.metrics,
            "created": record.created,
        });
        let path = new.join("manifest.json");
        fs::write(&path, format!("{manifest:#}\n")).map_err(at(&path))?;
        Ok::<_, PolicyError>(())
    })?;
    Ok(digest)
}
