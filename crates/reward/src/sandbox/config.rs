//! The keys of `[sandbox]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::range::between;

/// The sandbox for code from completions and graders.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxConfig {
    /// The Python interpreter: a path, or a name to look up on `PATH`.
    pub python: PathBuf,
    /// Programs that may run at the same time.
    pub concurrency: usize,
    /// The user id of programs if the daemon is root; no other process should use it.
    pub uid: u32,
}

impl Default for SandboxConfig {
    fn default() -> Self {
        Self { python: PathBuf::from("python3"), concurrency: 2, uid: 65_534 }
    }
}

impl SandboxConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("sandbox.concurrency", self.concurrency, 1, 256)?;
        between("sandbox.uid", self.uid, 1, u32::MAX - 1)
    }
}
