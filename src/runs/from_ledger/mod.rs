//! `hone train --from-ledger`: training on the records of a daemon, without a daemon.
//!
//! 1. [`read`] takes the completions that can be trained on from the ledger, which is never changed, and
//!    counts the others. [`filter`] has the options that select records.
//! 2. `held_out` holds some prompts out.
//! 3. `plan` orders the groups of the other prompts into steps.
//! 4. [`train`] takes the steps with [`hone_train::OfflineTrainer`], and writes a data directory as
//!    `hone train` does.
//! 5. [`estimate`] compares the policies before and after on the held-out records, and [`report`] shows
//!    the result.

pub mod estimate;
pub mod filter;
mod held_out;
mod plan;
pub mod read;
pub mod report;
pub mod train;

#[cfg(test)]
mod tests;
