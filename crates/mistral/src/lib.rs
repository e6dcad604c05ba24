//! Serves a model with mistral.rs 0.8.1 on the CPU, and changes its weights while it serves.
//!
//! [`MistralEngine`] implements [`hone_engine::Engine`] and [`hone_engine::Publisher`]. This is the
//! only crate that links mistral.rs.
//!
//! # Blue/green slots
//!
//! An engine loads two colors of `replicas` copies of the model. A replica is a mistral.rs engine with
//! one slot. New requests get slots of the active color only ([`hone_engine::admission`]). A request
//! stays on its slot until it ends, so all its tokens come from one policy version.
//!
//! A replica runs one sequence at a time. mistral.rs 0.8.1 computes wrong attention for batches on the
//! CPU: every row of a decoding step gets the last row's output. The lease of a slot enforces this,
//! because mistral.rs's own limit does not hold when its queue refills.
//!
//! # Sampling
//!
//! Tokens are sampled in a logits processor, the only public hook that sees raw logits. mistral.rs
//! returns no token ids, reports base-10 logarithms, and has one random generator for all requests.
//! The processor samples with [`hone_engine::sampling`], and leaves mistral.rs one finite logit.
//!
//! # Hot swap
//!
//! [`stage`](hone_engine::Publisher::stage) waits until the idle color has no lease, loads pipelines
//! with the adapter merged into the weights, and swaps them with those in the idle replicas.
//! mistral.rs has no function for this, but an engine shares its pipeline in a lock, and all
//! pipelines have the same concrete type. A new engine for each version would leak a thread.
//! [`activate`](hone_engine::Publisher::activate) makes the idle color the active one. The other
//! color keeps the previous version, so that a rollback only activates it again.
//!
//! # Threads
//!
//! - `hone-engine`, one for each replica: runs one request after another; a request wakes it. It
//!   outlives the caller's runtime, because mistral.rs panics if the receiver of a response is gone.
//! - mistral.rs's own thread for each replica. It computes in a private rayon pool.
//! - `hone-stage`: loads the pipelines of one `stage` call, and then ends.
//!
//! # Guarantees
//!
//! - Publishing neither delays nor alters a running generation. A failed `stage` leaves the active
//!   color unchanged.
//! - Seeds, sampled ids and log-probabilities are those of [`hone_engine::sampling`].
//! - A panic in mistral.rs fails the request that caused it; the engine thread restarts with the next
//!   request.

mod engine;
mod hot_swap;
mod model_files;

pub use engine::MistralEngine;
