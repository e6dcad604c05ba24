//! Runs on a dataset: `hone train`, `hone eval`, `hone rewards test`, and what they tell their owner:
//! warnings, logs, statistics, tables and the final report.
//!
//! [`train`], [`eval`] and [`score`] drive the loop's [`Core`](crate::app::Core). The rest is plain
//! data in, files and text out: nothing there knows the engine or the trainer, and nothing reads a
//! clock, so the same input gives the same bytes.

pub mod compare;
pub mod early_stop;
pub mod eval;
pub mod evaluate;
pub mod jsonl;
pub mod progress;
pub mod report;
pub mod score;
pub mod stats;
pub mod table;
pub mod tensorboard;
pub mod train;
