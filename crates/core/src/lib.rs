//! What every part of Hone shares: plain types, configuration helpers, metrics, durable files,
//! digests and thread priorities.
//!
//! This crate starts no thread and knows no other crate of Hone. Callers may rely on three things:
//!
//! - [`types`] are plain data. Their serialized forms are part of the ledger's format.
//! - [`metrics::Metrics`] is the only place that names a metric.
//! - A file that [`files`] wrote is complete or absent after a crash.

pub mod config;
pub mod digest;
pub mod files;
pub mod metrics;
pub mod process;
pub mod simd;
pub mod types;
