//! `hone bench`: what this machine makes of hone's parts. Times vary with what else it does, so the
//! figures are told, and compared with each other, in one run.

pub mod interference;
pub mod machine;
pub mod rewards;
pub mod sample;
pub mod train;

use std::path::PathBuf;

/// A directory among the temporary ones, removed in the end.
struct Folder(PathBuf);

impl Folder {
    /// A new one.
    fn temporary() -> std::io::Result<Self> {
        let dir = std::env::temp_dir().join(format!("hone-bench-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Best effort: it lies among temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
