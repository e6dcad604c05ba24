//! Forms the groups that the trainer sees: samples shadow completions of a prompt, scores them and
//! commits them to the ledger.
//!
//! ```text
//! submit -> queue -> scheduler -> shadows -> group_commit -> ledger: samples, rewards, group
//! dataset ---------------^                       ^
//! feedback in the ledger ------------------------+-> feedback -> siblings -> groups of rated samples
//! ```
//!
//! # Tasks
//!
//! All tasks run on the runtime in which [`Rollout::start`] is called.
//!
//! - The scheduler starts a group when a sampling slot is free, the trainer's backlog is below its
//!   limit and there is a prompt. It wakes for a submitted prompt, the end of a group, a change in
//!   the number of ready groups, and every second.
//! - Each group is a task, and so is each of its shadow samples.
//! - The feedback sweep makes groups of rated completions from feedback that no other group uses. It
//!   wakes for committed feedback, for the end of a group, and twice a second.
//!
//! # Guarantees
//!
//! - [`Rollout::submit`] never waits, and shadows run at `Priority::Shadow`: live traffic goes
//!   first.
//! - A group is committed whole or not at all.
//! - Feedback in the ledger reaches exactly one group eventually, even after a crash. Until the
//!   trainer uses that group, a rating of another completion of the prompt may merge it into a larger
//!   one.
//! - A preempted shadow is sampled again with the same seed. A new seed would bias samples towards
//!   short completions, which are preempted less often.

mod config;
mod context;
mod dataset;
mod group_commit;
mod scheduler;
mod service;
mod siblings;

pub use config::{RolloutConfig, SamplerKind};
pub use context::RolloutProgress;
pub use dataset::RolloutError;
pub use service::Rollout;

#[cfg(test)]
mod tests;
