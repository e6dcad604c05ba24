//! The learning loop: batches of groups in, adapters out.
//!
//! [`Learner`] is the pure part (model, loss, optimiser, checkpoint); [`Worker`] drives it: it
//! gathers groups from the ledger, takes steps, checkpoints and offers versions to `policy`.

mod gather;
mod handle;
mod observe;
mod progress;
mod worker;

pub use handle::{TrainError, TrainHandle, TrainState, TrainStatus};
pub use worker::{Parts, Worker};
