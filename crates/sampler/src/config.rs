//! The settings of a sampler.

use std::num::NonZero;
use std::sync::Arc;
use std::thread;

/// Returns whether clients are being served at the moment. The sampler then slows down.
pub type LiveTraffic = Arc<dyn Fn() -> bool + Send + Sync>;

/// The settings of a [`BatchedEngine`](crate::BatchedEngine).
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerConfig {
    /// The model's name, for [`hone_engine::ModelInfo`].
    pub name: String,
    /// Context length in tokens, prompt and completion together.
    pub context: usize,
    /// Maximum number of sequences that run at once.
    pub slots: usize,
    /// Maximum number of queued requests. Beyond it, live requests are refused and shadow requests
    /// wait before they enter the queue.
    pub queue: usize,
    /// Positions that the KV cache holds (`rollout.max_batch_tokens`).
    pub max_batch_tokens: usize,
    /// Threads that compute while no client is served.
    pub threads: usize,
    /// Threads that compute while clients are served.
    pub busy_threads: usize,
    /// Fraction of the time in which the sampler computes while clients are served, in (0, 1].
    pub busy_share: f64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            context: 1024,
            slots: 64,
            queue: 256,
            max_batch_tokens: 32_768,
            threads: thread::available_parallelism().map_or(1, NonZero::get),
            busy_threads: 1,
            busy_share: 0.2,
        }
    }
}
