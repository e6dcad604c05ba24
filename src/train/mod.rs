//! The learning loop: batches of groups in, adapters out.
//!
//! [`Learner`] is the pure part (model, loss, optimiser, checkpoint); [`Worker`] drives it: it
//! gathers groups from the ledger, takes steps, checkpoints and offers versions to `policy`.

pub mod advantage;
mod average;
#[cfg(test)]
mod average_tests;
mod batch;
mod bits;
pub mod checkpoint;
mod eight_bit;
pub mod error;
mod files;
mod gather;
mod handle;
pub mod learner;
#[cfg(test)]
mod learner_tests;
pub mod lora;
pub mod loss;
mod memory;
pub mod merge;
#[cfg(test)]
mod merge_tests;
pub mod model;
pub mod names;
mod objective;
mod observe;
mod offer;
pub mod optim;
#[cfg(test)]
mod optim_tests;
mod pass;
#[cfg(test)]
mod pass_tests;
pub mod peft;
#[cfg(test)]
mod peft_tests;
mod progress;
mod reference;
#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod resume_tests;
mod room;
pub mod schedule;
mod shares;
mod snapshot;
mod split;
mod step_stats;
#[cfg(test)]
mod testing;
mod trainer;
pub mod warnings;
mod weights;
mod worker;
#[cfg(test)]
mod worker_tests;

pub use batch::TrainSample;
pub use error::LearnError;
pub use handle::{TrainError, TrainHandle, TrainState, TrainStatus};
pub use learner::{Learner, StepStats};
pub use lora::Lora;
pub use memory::{Base, Plan};
pub use model::{Model, ModelSpec};
pub use room::available_memory;
pub use snapshot::Snapshot;
pub use split::Split;
pub use worker::{Parts, Worker};
