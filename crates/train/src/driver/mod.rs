//! The trainer's thread, which turns ready groups in the ledger into served policy versions.
//!
//! The thread `hone-train` runs `Trainer::run`. It sleeps until one of these wakes it: groups became
//! ready, an operator activated a version, a [`TrainHandle`] sent a command, or `POLL_INTERVAL`
//! passed. It then handles all commands, follows the operator's version, and takes one step if there
//! is a batch. It follows once activations have paused for a quarter of a second, or before the next step: each
//! return to a version reads and writes a whole checkpoint. The life of a step:
//!
//! 1. *Prepare*: the oldest ready groups make a batch, and their rewards become advantages.
//! 2. *Optimize*: the learner computes the gradient and updates the adapter.
//! 3. *Wait* for the previous step's publication. If that version is not served, the step is undone
//!    and its groups stay ready.
//! 4. *Record*: a checkpoint, then the ledger's step record, which marks the groups as trained.
//! 5. *Maybe publish*: a thread `hone-publish` writes the version, loads it into the engine, probes
//!    and activates it, while this thread computes the next step.
//!
//! [`OfflineTrainer`] takes steps 1, 2 and 4 alone, on groups that another process recorded.
//!
//! A batch that cannot be stepped on changes nothing but the ledger, where its groups are dropped.
//!
//! Callers may rely on this:
//!
//! - Durable writes have a fixed order: checkpoint, step record, version. A crash between two of
//!   them is repaired at the next start: no recorded step is lost, no group is trained on twice.
//! - The learner is at most one step ahead of the publication in progress, and nothing of that step
//!   is durable before the version is served.
//! - A version that an operator activates is never replaced by weights that do not descend from it. Until the
//!   weights follow it, no step is taken and nothing is published, also after a crash.
//! - Pause and stop take effect after the current step. Errors and panics end the loop, not the
//!   thread: `worker` restarts it from the last checkpoint. Serving never blocks on the trainer.

mod command;
mod error;
mod handle;
mod markers;
mod prepared;
mod progress;
mod publication;
mod restore;
mod setup;
mod skipped;
mod status;
mod step_metrics;
mod trainer;
mod worker;

pub use error::{TrainError, TrainFailure};
pub use handle::TrainHandle;
pub use setup::TrainSetup;
pub use status::{TrainState, TrainStatus};
pub use trainer::{OfflineSetup, OfflineTrainer};
pub use worker::TrainWorker;
