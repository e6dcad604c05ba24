//! Tells what goes wrong with the learning, step by step: in the log and the metrics.

use crate::config::{Config, RouteConfig};
use crate::telemetry::Metrics;
use crate::types::StepRecord;

use super::{Roles, Warning, WarningKind, Watch, WatchState};

/// A [`Watch`] over the parts of a configuration's routes.
pub struct Watchman {
    watch: Watch,
}

impl Watchman {
    /// Goes on from `state`. The parts' meanings are those of the route that a dataset's prompts
    /// have, or of all routes.
    pub fn new(config: &Config, state: WatchState) -> Self {
        let used = config.dataset_in_use().map(|_| config.rollout.dataset_route.as_str());
        let routes = config.routes.0.iter().filter(|r| used.is_none_or(|used| used == r.name));
        let parts: Vec<_> = routes.flat_map(RouteConfig::parts).collect();
        let roles = Roles::of(parts.iter().map(|part| (part.name.as_str(), part.kind.name())));
        Self { watch: Watch::new(config.run.warnings.clone(), roles, state) }
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
