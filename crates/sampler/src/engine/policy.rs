//! One of the policies that share an engine.

use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use hone_core::types::PolicyVersion;
use hone_engine::admission::Owner;
use hone_engine::{
    Codec, Completion, Engine, EngineError, EngineLoad, GenerateRequest, Generation, ModelInfo,
    Probe, Publisher,
};
use hone_model::adapter::weights::LoraWeights;

use super::BatchedEngine;
use super::adapters::PolicyWeights;
use super::shared::{PolicySlot, RequestWeights};
use crate::error::SamplerError;

/// Pause before a preempted completion starts again.
const PREEMPTED_PAUSE: Duration = Duration::from_millis(20);

/// Serves one policy, and publishes its versions, on an engine whose batches have sequences of all its policies.
///
/// A publication changes nothing for the other policies, and a running request keeps its version. Slots, the queue and
/// the load are those of the engine. Dropping it unloads the policy: its adapters leave memory, each once no request
/// uses it.
pub struct PolicyEngine {
    pub(super) engine: Arc<BatchedEngine>,
    pub(super) slot: PolicySlot,
    number: u32,
    staged: Mutex<Option<PolicyWeights>>,
}

impl PolicyEngine {
    /// Adds a policy to an engine. It serves the base model, as version `number << 32`.
    ///
    /// Versions of the policy have the number in their upper 32 bits. Kept adapters of other versions are not dropped
    /// with it.
    pub fn new(engine: Arc<BatchedEngine>, number: u32) -> Self {
        let base = PolicyWeights::new(PolicyVersion(u64::from(number) << 32), None);
        let slot = engine.shared.lock().add(base);
        Self { engine, slot, number, staged: Mutex::default() }
    }

    /// The policy that the engine itself serves.
    pub(super) fn of(engine: Arc<BatchedEngine>) -> Self {
        Self { engine, slot: PolicySlot::default(), number: 0, staged: Mutex::default() }
    }

    /// Copies an adapter and serves it to new sequences. `None` is the base model.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn publish(
        &self,
        version: PolicyVersion,
        lora: Option<&LoraWeights>,
    ) -> Result<(), SamplerError> {
        self.serve(self.engine.copied(version, lora)?);
        Ok(())
    }

    pub(super) fn serve(&self, weights: PolicyWeights) {
        self.engine.activate(self.slot, weights);
    }

    pub(super) fn staged(&self) -> MutexGuard<'_, Option<PolicyWeights>> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn staged_weights(&self) -> Result<PolicyWeights, EngineError> {
        self.staged().clone().ok_or_else(EngineError::nothing_staged)
    }

    /// The weights of a version, which are read unless they are kept.
    pub(super) async fn read(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<PolicyWeights, EngineError> {
        let Some(dir) = adapter.map(Path::to_path_buf) else {
            return Ok(PolicyWeights::new(version, None));
        };
        let engine = Arc::clone(&self.engine);
        let load = tokio::task::spawn_blocking(move || engine.load_adapter(version, &dir));
        let failed = |e: &dyn Display| EngineError::Model(format!("sampler: {e}"));
        load.await.map_err(|e| failed(&e))?.map_err(|e| failed(&e))
    }

    /// Completes a prompt with the staged version. What `is_urgent` does not wait for clients.
    async fn complete(
        &self,
        request: GenerateRequest,
        is_urgent: bool,
    ) -> Result<Completion, EngineError> {
        let weights = self.staged_weights()?;
        loop {
            let weights = RequestWeights::Fixed(weights.clone());
            let generation = self.engine.submit(request.clone(), weights, is_urgent).await?;
            match generation.collect().await {
                // A client needed its slot.
                Err(EngineError::Preempted) => tokio::time::sleep(PREEMPTED_PAUSE).await,
                result => return result,
            }
        }
    }
}

impl Drop for PolicyEngine {
    fn drop(&mut self) {
        if self.slot != PolicySlot::default() {
            let dropped = self.engine.shared.lock().remove(self.slot, self.number);
            drop(dropped);
        }
    }
}

#[async_trait]
impl Engine for PolicyEngine {
    fn info(&self) -> &ModelInfo {
        self.engine.info()
    }

    fn codec(&self) -> &Arc<Codec> {
        self.engine.codec()
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        self.engine.generate_of(self.slot, request).await
    }

    fn admits(&self, owner: &Owner, choices: usize) -> Result<(), EngineError> {
        self.engine.admits(owner, choices)
    }

    fn trouble(&self) -> Option<String> {
        self.engine.trouble()
    }

    fn active_version(&self) -> PolicyVersion {
        self.engine.active(self.slot)
    }

    fn load(&self) -> EngineLoad {
        self.engine.load()
    }
}

#[async_trait]
impl Publisher for PolicyEngine {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        *self.staged() = None;
        let weights = self.read(version, adapter).await?;
        *self.staged() = Some(weights);
        Ok(())
    }

    async fn probe(&self, request: GenerateRequest) -> Result<Vec<Probe>, EngineError> {
        let tokens = self.complete(request, true).await?.token_logprobs();
        Ok(vec![Probe { sampler: "rollout", dtype: self.engine.dtype, tokens }])
    }

    async fn complete_staged(&self, request: GenerateRequest) -> Result<Completion, EngineError> {
        self.complete(request, false).await
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        let staged = self.staged().take().ok_or_else(EngineError::nothing_staged)?;
        self.serve(staged);
        Ok(Duration::ZERO)
    }

    async fn serve_now(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<bool, EngineError> {
        let weights = self.read(version, adapter).await?;
        self.serve(weights);
        Ok(true)
    }

    async fn begin_canary(&self) -> Result<bool, EngineError> {
        self.engine.set_canary(self.slot, Some(self.staged_weights()?));
        Ok(true)
    }

    fn end_canary(&self) {
        self.engine.set_canary(self.slot, None);
    }
}
