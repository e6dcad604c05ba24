//! Training of an adapter on samples. No I/O except checkpoint and adapter files.
//!
//! `learner` holds the adapter with its optimizer state. Its `step` passes through the files in
//! this order, where each of `train.num_iterations` updates repeats 2 to 4:
//!
//! 1. `learner::step` selects the samples. `schedule` has the step's learning rate.
//! 2. `forward_backward` splits the samples into shards (`data::packing`), runs the model forward,
//!    and backpropagates each shard. Between the two, `objective` turns log-probabilities and
//!    entropies into the gradient of `loss` and into sums for metrics. `reference` has the adapter
//!    of the reference policy.
//! 3. `learner::step` repeats the pass without samples that the sampler cannot have drawn, and skips
//!    the step if the loss or a gradient is not finite.
//! 4. `optimizer` clips the gradients and updates the adapter.
//! 5. `average` and `reference` follow the updated adapter. `step_stats` has the result, and
//!    `step_timing` the durations of the parts.
//!
//! `checkpoint` defines the files that `learner::checkpointing` saves and restores, `float_bits` the
//! exact storage of floats in them. `snapshot` is a copy of the policy to publish.

mod average;
pub(crate) mod checkpoint;
pub(crate) mod float_bits;
mod forward_backward;
pub(crate) mod learner;
mod loss;
mod objective;
mod optimizer;
mod reference;
mod schedule;
pub(crate) mod snapshot;
pub(crate) mod step_stats;
pub(crate) mod step_timing;
