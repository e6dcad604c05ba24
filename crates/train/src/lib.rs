//! The learning loop: batches of groups in, adapters out.

pub mod config;
pub mod data;
pub mod driver;
pub mod error;
pub mod learning;
pub mod memory;
pub mod monitoring;
pub mod policy;
#[cfg(test)]
mod testing;

pub use data::packing::TrainSample;
pub use driver::handle::{TrainError, TrainHandle, TrainState, TrainStatus};
pub use driver::worker::{TrainSetup, TrainWorker};
pub use error::LearnError;
pub use learning::learner::{Learner, StepStats};
pub use learning::snapshot::Snapshot;
pub use learning::step_timing::StepTiming;
pub use memory::MemoryPlan;
pub use memory::memory_check::available_memory;
