//! Prometheus metrics: every metric is declared once, in one registry of the process.
//!
//! [`Metrics`] holds them. The trainer's are in [`TrainMetrics`], those of external services in
//! [`CallMetrics`] and [`JudgeMetrics`].

mod catalog;
mod registry;
mod remote;
mod train;

pub use catalog::Metrics;
pub use registry::{MetricDescription, MetricKind};
pub use remote::{CallMetrics, JudgeMetrics};
pub use train::TrainMetrics;
