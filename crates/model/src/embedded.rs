//! The model that comes with the binary, as an ordinary Hugging Face directory.
//!
//! `cargo run --release --example pretrain_embedded` makes it; see there for what it was taught.

use std::path::{Path, PathBuf};
use std::{fs, io};

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The model's own name in `/v1/models`.
pub const NAME: &str = "hone-adder";

/// Its files, by name.
pub const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../../models/embedded/config.json")),
    ("generation_config.json", include_bytes!("../../../models/embedded/generation_config.json")),
    ("model.safetensors", include_bytes!("../../../models/embedded/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../../models/embedded/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../models/embedded/tokenizer_config.json")),
];

/// First 12 hex digits of the SHA-256 over the files' names, lengths and bytes.
pub fn digest() -> String {
    let mut hash = Sha256::new();
    for (name, bytes) in FILES {
        hash.update(name);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// Makes `<data>/models/embedded-<digest>/` hold the model and returns its path. A directory that
/// is whole is kept as it is; anything else in its place is replaced. It appears under its name
/// only when it is complete, so a crash leaves no torn model behind.
///
/// # Errors
/// If the data directory cannot be written.
pub fn unpack(data: &Path) -> io::Result<PathBuf> {
    let models = data.join("models");
    let target = models.join(format!("embedded-{}", digest()));
    if is_whole(&target) {
        return Ok(target);
    }
    let temporary = models.join(format!(".embedded-{}", Uuid::now_v7()));
    fs::create_dir_all(&temporary)?;
    let placed = place(&temporary, &target);
    if placed.is_err() {
        // Best effort: the first error is the one to report.
        let _ = fs::remove_dir_all(&temporary);
    }
    // Another process may have placed it first; then the rename failed, and all is well.
    if is_whole(&target) { Ok(target) } else { placed.map(|()| target) }
}

/// Fills `temporary` and gives it the name `target`.
fn place(temporary: &Path, target: &Path) -> io::Result<()> {
    for (name, bytes) in FILES {
        fs::write(temporary.join(name), bytes)?;
    }
    if target.exists() && !is_whole(target) {
        fs::remove_dir_all(target)?;
    }
    fs::rename(temporary, target)
}

/// Whether every file is there, byte for byte.
fn is_whole(dir: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| fs::read(dir.join(name)).is_ok_and(|found| found == *bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacks_once_and_repairs_what_is_torn() {
        let data = tempfile::tempdir().unwrap();
        let dir = unpack(data.path()).unwrap();
        assert!(is_whole(&dir));
        let made = fs::metadata(dir.join("config.json")).unwrap().modified().unwrap();

        assert_eq!(unpack(data.path()).unwrap(), dir);
        let again = fs::metadata(dir.join("config.json")).unwrap().modified().unwrap();
        assert_eq!(made, again, "a whole directory is kept");

        fs::write(dir.join("model.safetensors"), b"torn").unwrap();
        fs::remove_file(dir.join("tokenizer.json")).unwrap();
        assert_eq!(unpack(data.path()).unwrap(), dir);
        assert!(is_whole(&dir));
        let left = fs::read_dir(data.path().join("models")).unwrap().count();
        assert_eq!(left, 1, "no temporary directory stays behind");
    }

    #[test]
    fn many_at_once_agree() {
        let data = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| unpack(data.path()).unwrap())).collect();
            for worker in workers {
                assert!(is_whole(&worker.join().unwrap()));
            }
        });
    }

    #[test]
    fn it_is_as_small_as_promised() {
        let bytes: usize = FILES.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes < 4_000_000, "{bytes} bytes");
    }
}
