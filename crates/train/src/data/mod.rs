//! From ready groups in the ledger to the samples of one optimizer step.
//!
//! A step passes through the files in this order:
//!
//! 1. `batch_builder` loads ready groups with their samples and rewards, and corrections: a
//!    `TrainBatch`.
//! 2. `feedback_cap` limits the part of the batch's feedback that comes from one API key.
//! 3. `adaptive_weights` sets the current weights of adaptive reward parts.
//! 4. `advantage` computes advantages from the rewards; each member that has one, and
//!    each correction, becomes a `TrainSample`.
//! 5. `packing` splits the step into shards and lays each shard out for one forward pass. It is
//!    called by the learner.
//!
//! `recorded` has the groups of a ledger that another process wrote, which replace step 1. `replay` draws
//! groups of earlier steps, which pass through the same files.

pub(crate) mod adaptive_weights;
pub(crate) mod advantage;
pub(crate) mod batch_builder;
pub(crate) mod feedback_cap;
pub(crate) mod packing;
pub(crate) mod recorded;
pub(crate) mod replay;
