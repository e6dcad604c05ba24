//! Prometheus metrics: every metric is declared once, in one registry of the process.
//!
//! [`Metrics`] holds them. The trainer's are in [`TrainMetrics`], those of external services in
//! [`CallMetrics`] and [`JudgeMetrics`].

mod catalog;
mod registry;

pub use catalog::{CallMetrics, JudgeMetrics, Metrics, TrainMetrics};
pub use registry::{MetricDescription, MetricKind};

/// The target of spans that are sent to an OpenTelemetry collector. Logs do not show them.
pub const SPANS: &str = "otel";
