//! TODO

mod average;
pub mod checkpoint;
pub(crate) mod float_bits;
mod forward_backward;
pub mod learner;
pub mod loss;
pub(crate) mod objective;
pub mod optimizer;
mod reference;
pub mod schedule;
pub(crate) mod snapshot;
mod step_stats;
pub(crate) mod step_timing;
