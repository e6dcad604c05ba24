//! Code that every part of Hone shares: plain types, configuration helpers, metrics, durable files,
//! digests, vector instructions, and statistics of the process.
//!
//! This crate starts no thread and depends on no other crate of Hone. Callers may rely on this:
//!
//! - [`types`] are plain data. Their serialized forms are part of the HTTP interface, of exported files and of
//!   the ledger.
//! - [`metrics::Metrics`] is the only place that names a metric.
//! - A file that [`files`] wrote is complete or absent after a crash. A file whose
//!   [`files::FileStamp`] did not change need not be read again.
//! - [`threads::to_background`] lowers the priority only of the thread that calls it, and of those
//!   that this thread starts.

pub mod config;
pub mod digest;
pub mod files;
pub mod memory;
pub mod metrics;
pub mod simd;
pub mod testing;
pub mod text;
pub mod threads;
pub mod types;
