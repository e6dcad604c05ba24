//! Hone serves a language model and improves it from what its users reward.
//!
//! This package joins the crates under `crates/` to one binary: the command line ([`cli`]), the
//! composition of the daemon ([`app`]), its HTTP surface ([`http`]), runs on a dataset ([`runs`]),
//! the demonstration ([`demo`]) and benchmarks ([`mod@bench`]).

pub mod app;
pub mod bench;
pub mod cli;
pub mod config;
pub mod demo;
pub mod http;
pub mod logging;
mod progress;
pub mod runs;
