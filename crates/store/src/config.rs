//! Configuration section `[store]`.

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::range::between;

/// Group commit and queue of the ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreConfig {
    /// Milliseconds that a commit waits for more writes, so that they share one sync of the disk.
    pub group_commit_ms: u64,
    /// Operations that may wait for the writer. Beyond it, shadow samples are shed and counted.
    pub queue: usize,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { group_commit_ms: 2, queue: 8192 }
    }
}

impl StoreConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("store.group_commit_ms", self.group_commit_ms, 0, 1000)?;
        between("store.queue", self.queue, 16, 1 << 24)
    }
}
