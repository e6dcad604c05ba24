//! The keys of `[engine]`.

use serde::{Deserialize, Serialize};

use hone_core::config::Checked;
use hone_core::config::range::between;

/// Token generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Engines a colour, each running one sequence at a time on CPU. Two colours are loaded, so
    /// memory holds twice this many copies of the weights.
    pub replicas: usize,
    /// Live requests that may wait for a slot before 429.
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
