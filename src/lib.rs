//! Hone serves a language model and trains it with the rewards of its users.
//!
//! This package combines the crates in `crates/` into one binary: the command line ([`cli`]), the
//! composition of the daemon ([`app`]), runs on a dataset, the starter configuration and the
//! conversion of TRL's configurations.

pub mod app;
pub mod cli;
pub mod commands;
mod fleet;
mod import_trl;
mod ledger;
pub mod logging;
mod runs;
mod starter;
mod telemetry;
mod tracker;

pub use hone_config as config;

/// A mistake in the arguments, or in the configuration or data that they name. The binary ends with
/// exit code 2, and with 1 for every other error.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct UsageError(anyhow::Error);

/// Marks an error as a [`UsageError`].
pub fn usage(error: impl Into<anyhow::Error>) -> anyhow::Error {
    UsageError(error.into()).into()
}
