//! Which prompts get a group, when, and by which sampler; forms every group the trainer sees.
// STUB: signatures only.

use std::sync::Arc;

use crate::config::RolloutConfig;
use crate::engine::Engine;
use crate::reward::Routes;
use crate::store::Store;
use crate::telemetry::Metrics;
use crate::types::{Interaction, Sample};

/// What can go wrong at start.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// The dataset cannot be read.
    #[error("rollout.dataset: {0}")]
    Dataset(String),
}

/// The running scheduler.
#[derive(Clone)]
pub struct Rollout {}

#[expect(unused_variables, clippy::unused_async, reason = "stub")]
impl Rollout {
    /// Starts its tasks on the current runtime.
    pub fn start(
        config: &RolloutConfig,
        engine: Arc<dyn Engine>,
        store: Store,
        routes: Arc<Routes>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, RolloutError> {
        Ok(Self {})
    }
    /// Offers a served interaction for a group. Never waits.
    pub fn offer(&self, interaction: Arc<Interaction>, served: Vec<Sample>) {}
    /// Stops sampling, hands on what is complete.
    pub async fn stop(&self) {}
}
