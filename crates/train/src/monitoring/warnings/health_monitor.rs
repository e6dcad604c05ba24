//! Tells what goes wrong with the learning, step by step: in the log and the metrics.

use hone_core::metrics::Metrics;
use hone_core::types::StepRecord;
use hone_reward::routes::{RouteConfig, RouteList};

use super::{Roles, Warning, WarningKind, Watch, WatchState};
use crate::config::WarningConfig;

/// A [`Watch`] over the parts of a configuration's routes.
pub struct HealthMonitor {
    watch: Watch,
}

impl HealthMonitor {
    /// Continues from `state`. The roles of reward parts are those of the route named `only`, or of
    /// all routes without one.
    pub fn new(
        config: &WarningConfig,
        routes: &RouteList,
        only: Option<&str>,
        state: WatchState,
    ) -> Self {
        let routes = routes.0.iter().filter(|route| only.is_none_or(|name| name == route.name));
        let parts: Vec<_> = routes.flat_map(RouteConfig::parts).collect();
        let roles = Roles::of(parts.iter().map(|part| (part.name.as_str(), part.kind.name())));
        Self { watch: Watch::new(config.clone(), roles, state) }
    }

    /// What the next process goes on from.
    pub fn state(&self) -> &WatchState {
        self.watch.state()
    }

    /// The warnings that a step raises, told.
    pub fn observe(&mut self, record: &StepRecord, metrics: &Metrics) -> Vec<Warning> {
        let raised = self.watch.observe(record);
        for Warning { kind, step, message, advice } in &raised {
            let kind = kind.as_str();
            metrics.train.warnings.with_label_values(&[kind]).inc();
            tracing::warn!(kind, step, advice, "{message}");
        }
        let active: Vec<WarningKind> = self.watch.active().collect();
        for kind in WarningKind::ALL {
            let active = i64::from(active.contains(&kind));
            metrics.train.warning_active.with_label_values(&[kind.as_str()]).set(active);
        }
        raised
    }
}
