//! The keys of `[engine]`.

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::range::between;

/// Configuration of the serving engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Replicas of the model per color; on CPU each runs one sequence at a time. Two colors are
    /// loaded, so memory holds twice as many copies of the weights.
    pub replicas: usize,
    /// Live requests that may wait for a slot. A request beyond that is answered with 429.
    pub queue: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { replicas: 1, queue: 64 }
    }
}

impl EngineConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("engine.replicas", self.replicas, 1, 256)?;
        between("engine.queue", self.queue, 0, 1 << 20)
    }
}
