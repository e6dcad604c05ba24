//! The settings of a sampler.

use std::num::NonZero;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

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
    /// Longest wait of a live request for admission; `None` is without end.
    pub queue_timeout: Option<Duration>,
    /// Positions that the KV cache holds (`rollout.max_batch_tokens`).
    pub max_batch_tokens: usize,
    /// Whether computed prompts and completions are kept for later requests that begin with the same
    /// tokens. Results are the same.
    pub prefix_cache: bool,
    /// Whether requests of different API keys share the prefix cache (`engine.share_prefixes`).
    pub share_prefixes: bool,
    /// Adapters that stay in memory, with their cached pages, after other versions were activated. A kept
    /// version is activated without reading it.
    pub kept_adapters: usize,
    /// Prompt tokens that the engine computes between two steps, at least 16.
    pub prefill_tokens: usize,
    /// Prompt tokens that the engine computes between two steps while a live sequence decodes, at least
    /// 16, and up to 15 more, so that all rows of a pass are whole blocks of columns. A long prompt delays
    /// the next token of other requests by the time for so many tokens.
    pub busy_prefill_tokens: usize,
    /// Whether clients use this engine, rather than another one that it must yield to. It then reports
    /// its queue and slots in the metrics, and runs at normal priority.
    pub serves_clients: bool,
    /// Shadow sequences that take part in a step while live requests run, at least 1, if this engine
    /// serves clients. Few steps with a part of a prompt have any.
    pub busy_rows: usize,
    /// Threads that compute; only one while another engine serves clients.
    pub threads: usize,
    /// Fraction of the time in which the sampler computes while clients are served, in (0, 1]. If this
    /// engine serves clients itself, a page of a shadow prompt is computed in a quarter of this fraction of its
    /// steps although live prompts wait, and shadow sequences join as many passes with a part of a prompt.
    pub busy_share: f64,
    /// If this engine serves clients and background threads have something to compute: the pauses between
    /// iterations for clients, as a fraction of their duration. There are none if the model's weights stay in
    /// the processors' caches.
    pub background_share: f64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            context: 1024,
            slots: 64,
            queue: 256,
            queue_timeout: None,
            max_batch_tokens: 32_768,
            prefix_cache: true,
            share_prefixes: false,
            kept_adapters: 0,
            prefill_tokens: 128,
            busy_prefill_tokens: 64,
            serves_clients: false,
            busy_rows: 4,
            threads: thread::available_parallelism().map_or(1, NonZero::get),
            busy_share: 0.2,
            background_share: 0.0,
        }
    }
}
