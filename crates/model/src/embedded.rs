//! The model inside the binary, an ordinary Hugging Face directory.
//!
//! The example `pretrain_embedded` creates it, and documents its task.

use std::fs;
use std::path::{Path, PathBuf};

use hone_core::digest::{Digest, hex};
use hone_core::files::{FileError, at, remove_any, sync_dir, write_synced};
use hone_core::types::new_uuid;

/// The model's name in `/v1/models`.
pub const NAME: &str = "hone-adder";

/// The model's files, by name.
pub const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../../models/embedded/config.json")),
    ("generation_config.json", include_bytes!("../../../models/embedded/generation_config.json")),
    ("model.safetensors", include_bytes!("../../../models/embedded/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../../models/embedded/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../models/embedded/tokenizer_config.json")),
];

/// First 12 hex digits of the SHA-256 over the files' names, lengths and bytes.
fn digest() -> String {
    let add = |digest: Digest, (name, bytes): &(&str, &[u8])| digest.bytes(name).field(bytes);
    hex(&FILES.iter().fold(Digest::new(), add).prefix::<6>())
}

/// Creates `<data>/models/embedded-<digest>/` with the model's files and returns its path. A complete
/// directory is kept, an incomplete one is replaced. The files are synced before the directory gets its
/// name, so a crash leaves it complete or absent. Several processes may call this at once.
///
/// # Errors
/// If the data directory cannot be written.
pub fn unpack(data: &Path) -> Result<PathBuf, FileError> {
    let models = data.join("models");
    let target = models.join(format!("embedded-{}", digest()));
    if is_complete(&target) {
        return Ok(target);
    }
    // Its name is unique: another process may be at the same point.
    let temporary = models.join(format!(".embedded-{}", new_uuid()));
    let written = write(&temporary, &target).and_then(|()| sync_dir(&models));
    if written.is_err() {
        // The first error is the one to report.
        let _second = remove_any(&temporary);
    }
    // If another process renamed its directory first, the rename failed, and the target is complete.
    if is_complete(&target) { Ok(target) } else { written.map(|()| target) }
}

/// Writes the files to `temporary` and renames it to `target`.
fn write(temporary: &Path, target: &Path) -> Result<(), FileError> {
    fs::create_dir_all(temporary).map_err(at(temporary))?;
    for (name, bytes) in FILES {
        write_synced(&temporary.join(name), bytes)?;
    }
    sync_dir(temporary)?;
    // In this order: a directory that another process renames meanwhile is kept.
    if target.exists() && !is_complete(target) {
        remove_any(target)?;
    }
    fs::rename(temporary, target).map_err(at(target))
}

/// Whether every file exists with the right content.
fn is_complete(dir: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| fs::read(dir.join(name)).is_ok_and(|found| found == *bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complete_directory_is_kept_and_a_damaged_one_is_replaced() {
        let data = tempfile::tempdir().unwrap();
        let dir = unpack(data.path()).unwrap();
        assert!(is_complete(&dir));
        let written = fs::metadata(dir.join("config.json")).unwrap().modified().unwrap();

        assert_eq!(unpack(data.path()).unwrap(), dir);
        let again = fs::metadata(dir.join("config.json")).unwrap().modified().unwrap();
        assert_eq!(written, again, "a complete directory is kept");

        fs::write(dir.join("model.safetensors"), b"torn").unwrap();
        fs::remove_file(dir.join("tokenizer.json")).unwrap();
        assert_eq!(unpack(data.path()).unwrap(), dir);
        assert!(is_complete(&dir));
        let left = fs::read_dir(data.path().join("models")).unwrap().count();
        assert_eq!(left, 1, "no temporary directory remains");
    }

    #[test]
    fn concurrent_calls_return_the_same_complete_directory() {
        let data = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| unpack(data.path()).unwrap())).collect();
            for worker in workers {
                assert!(is_complete(&worker.join().unwrap()));
            }
        });
    }
}
