//! The directory of a version: PEFT files and a manifest.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

use hone_core::digest::sha256_file;
use hone_core::file_stamp::FileStamp;
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

/// Digests that are remembered, at most.
const REMEMBERED: usize = 64;

/// A weights file, and its digest while it has this stamp.
struct DigestOf {
    file: PathBuf,
    stamp: FileStamp,
    digest: String,
}

/// The digests of weights files that were read last. A version that is activated again is not read again
/// unless its file has changed.
#[derive(Default)]
pub(super) struct KnownDigests(Mutex<VecDeque<DigestOf>>);

impl KnownDigests {
    /// [`adapter_digest`], from memory if the file did not change since it was read.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn of(&self, dir: &Path) -> io::Result<String> {
        let file = dir.join(WEIGHTS_FILE);
        let stamp = FileStamp::of(&file)?;
        let known = |all: &VecDeque<DigestOf>| {
            let found = all.iter().find(|known| known.file == file && known.stamp == stamp);
            found.map(|known| known.digest.clone())
        };
        if let Some(digest) = self.with(|all| known(all)) {
            return Ok(digest);
        }
        let digest = sha256_file(&file)?;
        // What was read while the file changed is not remembered.
        if FileStamp::of(&file)? == stamp {
            self.with(|all| {
                all.retain(|known| known.file != file);
                while all.len() >= REMEMBERED {
                    all.pop_front();
                }
                all.push_back(DigestOf { file, stamp, digest: digest.clone() });
            });
        }
        Ok(digest)
    }

    fn with<R>(&self, f: impl FnOnce(&mut VecDeque<DigestOf>) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_again_and_few_digests_are_remembered() {
        let parent = tempfile::tempdir().unwrap();
        let (known, dir) = (KnownDigests::default(), parent.path().join("v1"));
        assert!(known.of(&dir).is_err());
        let write = |content: &str| {
            replace_dir::<PolicyError>(&dir, |new| {
                let path = new.join(WEIGHTS_FILE);
                fs::write(&path, content).map_err(at(&path))?;
                Ok(())
            })
            .unwrap();
        };
        for content in ["one", "two"] {
            write(content);
            for _ in 0..2 {
                assert_eq!(known.of(&dir).unwrap(), adapter_digest(&dir).unwrap(), "{content}");
            }
        }
        // A digest that is not the file's own is returned while the file does not change: it is not read.
        let set = |digest: &str| known.with(|all| all[0].digest = digest.to_owned());
        set("remembered");
        assert_eq!(known.of(&dir).unwrap(), "remembered");
        write("two");
        assert_eq!(known.of(&dir).unwrap(), adapter_digest(&dir).unwrap());
        for i in 0..2 * REMEMBERED {
            let other = parent.path().join(i.to_string());
            fs::create_dir(&other).unwrap();
            fs::write(other.join(WEIGHTS_FILE), i.to_string()).unwrap();
            assert_eq!(known.of(&other).unwrap(), adapter_digest(&other).unwrap());
        }
        assert_eq!(known.with(|all| all.len()), REMEMBERED);
        fs::remove_dir_all(&dir).unwrap();
        assert!(known.of(&dir).is_err());
    }
}
