//! `hone bench`: speed of Hone's components on this machine, and safety of what they learn. Other
//! processes change the times, so numbers that are compared are measured in turns within one run.

pub mod http;
pub mod interference;
pub mod machine;
pub mod rewards;
pub mod safety;
pub mod sample;
pub mod train;

use std::path::PathBuf;

/// A temporary directory, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn temporary() -> std::io::Result<Self> {
        let dir = std::env::temp_dir().join(format!("hone-bench-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The system cleans its temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
