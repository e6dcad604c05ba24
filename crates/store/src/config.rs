//! The keys of `[store]`.

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::range::between;

/// The ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreConfig {
    /// Milliseconds for which a commit gathers writes.
    pub group_commit_ms: u64,
    /// Writes that may wait; beyond it shadow samples are shed first, and counted.
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
