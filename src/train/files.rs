//! Writing files so that they survive a crash.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::error::{LearnError, Result};

/// Names the file in an I/O error.
pub(super) fn at(path: &Path) -> impl FnOnce(std::io::Error) -> LearnError + '_ {
    move |source| LearnError::Io { path: path.to_owned(), source }
}

/// A hidden name beside `path`: `.NAME` and a suffix.
pub(super) fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(suffix);
    path.with_file_name(name)
}

/// Writes a whole file and waits until it is on disk.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(at(path))?;
    file.write_all(bytes).map_err(at(path))?;
    file.sync_all().map_err(at(path))
}

/// Waits until a directory's entries are on disk.
pub(super) fn sync_dir(path: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(path).and_then(|dir| dir.sync_all()).map_err(at(path))?;
    }
    Ok(())
}

/// Removes a file or directory if there is one.
pub(super) fn remove_any(path: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    removed.map_err(at(path))
}

/// Tensors as the bytes of a safetensors file; equal tensors give equal bytes.
pub(super) fn safetensors_bytes(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>> {
    // Python tools look for this entry.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(metadata))
        .map_err(|e| LearnError::Tensor(candle_core::Error::wrap(e)))
}
