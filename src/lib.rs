//! Hone serves a language model and trains it with the rewards of its users.
//!
//! This package combines the crates in `crates/` into one binary: the command line ([`cli`]), the
//! composition of the daemon ([`app`]), its HTTP surface ([`http`]), runs on a dataset ([`runs`]),
//! the conversion of TRL's configurations ([`import_trl`]), the demonstration ([`demo`]) and benchmarks
//! ([`mod@bench`]).

pub mod app;
pub mod bench;
pub mod cli;
pub mod config;
pub mod demo;
pub mod http;
pub mod import_trl;
pub mod logging;
mod progress;
pub mod runs;
mod usage;

pub use usage::{UsageError, usage};
