//! Composition root: builds the daemon from its parts and shuts it down in a fixed order.
//!
//! [`Core`] opens the ledger, loads the model, and starts the engine, rollout and the trainer.
//! [`start`] serves a [`Core`] over HTTP. Shutdown runs in the reverse order.

pub mod adapters;
mod background;
mod core;
mod dataset;
mod detached_runtime;
mod engines;
mod examiner;
pub mod generate;
mod memory;
mod model;
mod rewards;
mod service;
mod step_watch;
mod validate;

pub use self::core::{Core, LEDGER, RUN_GRACE};
pub use dataset::fetch_dataset;
pub(crate) use detached_runtime::DetachedRuntime;
pub use memory::{MemoryReport, explain_memory, longest_recorded_sample};
pub use model::model_of_records;
pub use rewards::{RewardTools, load_rewards, reward_tools};
pub use service::{ReloadSignal, Service, shutdown_signal, start};
pub use validate::validate;
