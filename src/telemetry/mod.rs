//! Logs and metrics: the tracing set-up, every metric's name, and events that emit both.

mod logging;
mod maker;
mod metrics;
pub mod process;

pub use logging::init;
pub use maker::{Description, Kind};
pub use metrics::{CallMetrics, JudgeMetrics, Metrics, TrainMetrics};
