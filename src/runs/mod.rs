//! What a training run tells its owner: warnings, logs, statistics, tables and the final report.
//!
//! Plain data in, files and text out. Nothing here knows the engine or the trainer, and nothing
//! reads a clock: times are passed in, so the same input gives the same bytes.

pub mod early_stop;
pub mod jsonl;
pub mod names;
pub mod progress;
pub mod report;
pub mod stats;
pub mod table;
pub mod tensorboard;
pub mod warnings;
