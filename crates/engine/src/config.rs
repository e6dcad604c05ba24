//! The keys of `[engine]`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use hone_core::config::section::Parameters;
use hone_core::config::{Checked, Compute, Problem};

use crate::admission::QueueLimits;

/// The implementation that generates for clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineBackend {
    /// mistral.rs. On a CPU each of its engines runs one sequence at a time.
    #[default]
    Mistralrs,
    /// Hone's batched engine, on the weights that the trainer uses too. It answers clients, samples for
    /// the trainer, evaluates and judges.
    Native,
}

hone_core::parameters! {
    /// Configuration of the serving engine.
    pub struct EngineConfig {
        /// The implementation that generates for clients.
        pub backend: EngineBackend = EngineBackend::default(),
        /// Replicas of the model per color; on CPU each runs one sequence at a time. Two colors are
        /// loaded, so memory holds twice as many copies of the weights. 1 with [`EngineBackend::Native`].
        pub replicas: usize = 1 => between(1, 256),
        /// Sequences that the native engine runs at once, those of clients and rollouts together.
        pub slots: usize = 64 => between(1, 65_536),
        /// Live requests that may wait for a slot. A request beyond that is answered with 429, and so is one
        /// of an API key whose requests already occupy as many places as are free.
        pub queue: usize = 64 => between(0, 1 << 20),
        /// Seconds after which a live request that waits for a slot is answered with 429; 0 is never.
        #[serde(skip)]
        pub queue_timeout_seconds: u64 = 120,
        /// Versions whose adapters the native engine keeps in memory, those that it serves included, if it
        /// answers clients. A kept version is activated without reading its files.
        #[serde(skip)]
        pub kept_versions: usize = 8,
        /// Whether a request may use what the native engine computed of the same beginning for another API key. The
        /// count of cached tokens and the time then reveal to one key what another one asked.
        pub share_prefixes: bool = false,
        /// Arithmetic of the native engine's products with weights that are stored in bf16, because rounding the
        /// activations too makes them up to twice as fast. The trainer has a key of its own.
        pub compute: Compute = Compute::default(),
    }
}

impl EngineConfig {
    /// The limits of the queue of live requests.
    pub fn queue_limits(&self) -> QueueLimits {
        let seconds = self.queue_timeout_seconds;
        let timeout = (seconds > 0).then(|| Duration::from_secs(seconds));
        QueueLimits { places: self.queue, timeout }
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        self.check_in("engine.")?;
        if self.backend == EngineBackend::Native && self.replicas != 1 {
            let allowed = "1 with engine.backend = \"native\", which runs up to engine.slots \
                           sequences in one batch";
            return Err(Problem::value("engine.replicas", self.replicas, allowed));
        }
        Ok(())
    }
}
