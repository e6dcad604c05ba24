//! The monitor: detects the warnings of a run and reports them to the log and to Prometheus.

use hone_core::metrics::Metrics;
use hone_core::types::StepRecord;
use hone_reward::routes::{RouteConfig, RouteList};

use super::conditions::StepContext;
use super::roles::RewardRoles;
use super::state::MonitorState;
use super::warning::{Warning, WarningKind};
use crate::config::WarningConfig;

/// Watches the recorded steps of one run.
#[derive(Clone, Debug)]
pub struct HealthMonitor {
    config: WarningConfig,
    roles: RewardRoles,
    state: MonitorState,
}

impl HealthMonitor {
    /// Continues from `state`. Reward parts have the roles that they have in the route named `only`,
    /// or in any route if `only` is `None`.
    pub fn new(
        config: &WarningConfig,
        routes: &RouteList,
        only: Option<&str>,
        state: MonitorState,
    ) -> Self {
        let routes = routes.0.iter().filter(|route| only.is_none_or(|name| name == route.name));
        let parts: Vec<_> = routes.flat_map(RouteConfig::parts).collect();
        let parts = parts.iter().map(|part| (part.name.as_str(), part.kind.name()));
        Self::with_roles(config.clone(), RewardRoles::of(parts), state)
    }

    pub(super) fn with_roles(
        config: WarningConfig,
        roles: RewardRoles,
        state: MonitorState,
    ) -> Self {
        Self { config, roles, state }
    }

    /// The state from which a resumed run continues.
    pub fn state(&self) -> &MonitorState {
        &self.state
    }

    /// The kinds whose episode has not ended.
    pub(super) fn active(&self) -> impl Iterator<Item = WarningKind> {
        self.state.episodes.iter().filter(|(_, episode)| episode.active).map(|(kind, _)| *kind)
    }

    /// Adds a step; logs, counts and returns the warnings that it raises.
    pub fn observe(&mut self, record: &StepRecord, metrics: &Metrics) -> Vec<Warning> {
        let raised = self.check(record, metrics);
        for Warning { kind, step, message, advice } in &raised {
            tracing::warn!(kind = kind.as_str(), step, advice, "{message}");
        }
        raised
    }

    /// As [`Self::observe`] without the log, for callers that display the warnings.
    pub fn check(&mut self, record: &StepRecord, metrics: &Metrics) -> Vec<Warning> {
        let raised = self.detect(record);
        for Warning { kind, .. } in &raised {
            metrics.train.warnings.with_label_values(&[kind.as_str()]).inc();
        }
        let active: Vec<WarningKind> = self.active().collect();
        for kind in WarningKind::ALL {
            let active = i64::from(active.contains(&kind));
            metrics.train.warning_active.with_label_values(&[kind.as_str()]).set(active);
        }
        raised
    }

    /// Adds a step and returns the warnings that it raises. A step that was added before, which a
    /// resumed run repeats, changes nothing.
    pub(super) fn detect(&mut self, record: &StepRecord) -> Vec<Warning> {
        if record.step <= self.state.last_step {
            return Vec::new();
        }
        self.state.last_step = record.step;
        self.state.add(&self.config, &self.roles, record);
        let context =
            StepContext { config: &self.config, roles: &self.roles, state: &self.state, record };
        let signals = WarningKind::ALL.map(|kind| (kind, context.signal(kind)));
        let patience = self.config.patience.max(1);
        let mut raised = Vec::new();
        for (kind, signal) in signals {
            let raise_after = match kind {
                WarningKind::FormatIgnored => self.config.format_patience.max(1),
                _ => patience,
            };
            let episode = self.state.episodes.entry(kind).or_default();
            if let Some(message) = episode.update(signal, raise_after, patience) {
                let advice = kind.advice().to_owned();
                raised.push(Warning { kind, step: record.step, message, advice });
            }
        }
        raised
    }
}
