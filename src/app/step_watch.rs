//! Watches the trainer's steps for warnings, and acts on them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hone_core::files::replace_file;
use hone_core::metrics::Metrics;
use hone_store::Store;
use hone_train::TrainHandle;
use hone_train::config::{WarningAction, WarningActions};
use hone_train::monitoring::warnings::{HealthMonitor, MonitorState, Warning};
use hone_train::policy::Policies;

use crate::config::Config;

/// Interval at which the ledger is polled for new steps.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The parts that warnings concern.
pub(super) struct StepWatch {
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub policies: Arc<Policies>,
    pub trainer: TrainHandle,
    /// What to do when a warning begins.
    pub actions: WarningActions,
    /// File with the monitor's state, so that a restart neither forgets the first steps, which later
    /// ones are compared with, nor repeats a warning.
    pub state: PathBuf,
}

impl StepWatch {
    /// Watches every step from the last one that was watched.
    pub async fn run(self, config: Config) {
        let saved = self.saved();
        let last_step = || self.store.last_step().ok().flatten().map_or(0, |last| last.step);
        let mut seen = saved.as_ref().map_or_else(last_step, MonitorState::last_step);
        let mut monitor = config.health_monitor(saved.unwrap_or_default());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            // Read errors are ignored here; callers that need the ledger report them.
            let records = self.store.steps(seen + 1, 64).unwrap_or_default();
            if records.is_empty() {
                continue;
            }
            for record in records {
                seen = record.step;
                for warning in monitor.observe(&record, &self.metrics) {
                    self.act(&warning).await;
                }
            }
            self.save(&monitor);
        }
    }

    async fn act(&self, warning: &Warning) {
        let kind = warning.kind.as_str();
        let done = match warning.kind.action(&self.actions) {
            WarningAction::Log => return,
            WarningAction::LowerRate => self.trainer.lower_rate().map_err(|e| e.to_string()),
            WarningAction::Pause => self.trainer.pause().map_err(|e| e.to_string()),
            WarningAction::RollBack => {
                let reason = format!("{kind}: {}", warning.message);
                let active = self.policies.active();
                let withdrawn = self.policies.withdraw(active, &reason).await;
                withdrawn.map(drop).map_err(|e| e.to_string())
            }
        };
        match done {
            Ok(()) => tracing::warn!(kind, "the action of the warning was taken"),
            Err(error) => tracing::error!(kind, error, "the action of the warning failed"),
        }
    }

    /// The state that an earlier process saved; `None` if it is missing or unreadable.
    fn saved(&self) -> Option<MonitorState> {
        let bytes = std::fs::read(&self.state).ok()?;
        let warn = |error| {
            tracing::warn!(%error, file = %self.state.display(), "warnings begin from this start");
        };
        serde_json::from_slice(&bytes).map_err(warn).ok()
    }

    fn save(&self, monitor: &HealthMonitor) {
        let written = serde_json::to_vec(monitor.state())
            .map_err(|error| error.to_string())
            .and_then(|text| replace_file(&self.state, &text).map_err(|error| error.to_string()));
        if let Err(error) = written {
            tracing::warn!(error, "the state of the warnings is not saved");
        }
    }
}
