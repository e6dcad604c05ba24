//! Warnings about runs that go wrong, each with advice.
//!
//! Each kind of warning has episodes. An episode begins, and its warning is raised, when its
//! condition has held for some steps in a row. It ends when a stricter condition (hysteresis) has
//! held for some steps in a row, so that a metric near its limit raises one warning, not many. A
//! missing metric neither begins nor ends an episode.

mod conditions;
mod health_monitor;
mod roles;
mod state;
mod warning;

pub use crate::config::WarningConfig;
pub use health_monitor::HealthMonitor;
pub use roles::RewardRoles;
pub use state::MonitorState;
pub(crate) use warning::EQUAL_REWARDS;
pub use warning::{Warning, WarningKind};

#[cfg(test)]
mod tests;
