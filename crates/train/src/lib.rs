//! GRPO on LoRA adapters: takes groups of scored completions from the ledger and publishes adapters.
//!
//! [`driver`] is the loop, [`data`] turns groups into batches and advantages, [`learning`] is the
//! optimizer step, [`memory`] predicts its memory, [`policy`] keeps and publishes versions, and
//! [`monitoring`] warns of runs that go wrong. [`config`] has the keys of `[train]`.
//!
//! Its threads, which run at `train.priority`:
//!
//! - `hone-train` runs the loop. Ready groups, an operator's activation, a command of
//!   [`TrainHandle`] or one second of idleness wake it.
//! - `hone-train-N` (one for each core) compute the forward and backward passes.
//! - `hone-publish` lives for one publication; `hone-probe-N` compute its parity probe.
//!
//! Callers may rely on this: [`Learner::step`] is deterministic for a given seed and independent of
//! the number of threads; checkpoints and version directories are complete or absent after a crash;
//! a version is served only after the engine reproduced the trainer's log-probabilities; and a
//! failure of the trainer never stops serving. [`driver`] documents the order of durable writes.

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
pub use data::{RecordedGroup, RecordedSample};
pub use driver::{
    OfflineSetup, OfflineTrainer, TrainError, TrainFailure, TrainHandle, TrainHold, TrainSetup,
    TrainState, TrainStatus, TrainWorker,
};
pub use error::LearnError;
pub use learning::Snapshot;
pub use learning::StepTiming;
pub use learning::device_plan;
pub use learning::learner::{Learner, StepStats};
pub use memory::MemoryPlan;
pub use memory::available_memory;
