//! Live traffic over two engines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;

use hone_core::types::PolicyVersion;
use hone_engine::admission::Owner;
use hone_engine::{Codec, Engine, EngineError, EngineLoad, GenerateRequest, Generation, ModelInfo};

use super::BatchedEngine;

/// The engine of clients: the serving engine, except for requests that only the sampler can answer.
///
/// The serving engine loads a version for seconds and holds two at a time. The sampler changes its
/// version at once and computes several in one batch. So it answers the requests of a canary, and all
/// requests after a rollback until the serving engine has loaded the version.
pub struct BridgedEngine {
    serving: Arc<dyn Engine>,
    sampler: Arc<BatchedEngine>,
    /// Whether the sampler answers every request; shared with the publisher.
    bridging: Arc<AtomicBool>,
}

impl BridgedEngine {
    pub(super) fn new(
        serving: Arc<dyn Engine>,
        sampler: Arc<BatchedEngine>,
        bridging: Arc<AtomicBool>,
    ) -> Self {
        Self { serving, sampler, bridging }
    }

    fn is_bridging(&self) -> bool {
        self.bridging.load(Ordering::Acquire)
    }
}

#[async_trait]
impl Engine for BridgedEngine {
    fn info(&self) -> &ModelInfo {
        self.serving.info()
    }

    fn codec(&self) -> &Arc<Codec> {
        self.serving.codec()
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        if self.is_bridging() {
            return self.sampler.generate(request).await;
        }
        if request.version.is_some_and(|version| self.sampler.has_canary(version)) {
            match self.sampler.generate(request.clone()).await {
                // The sampler's cache is too small or full; the client must not notice.
                Err(EngineError::Invalid(_)) => {}
                Err(error) if error.is_retryable() => {}
                result => return result,
            }
        }
        self.serving.generate(request).await
    }

    fn admits(&self, owner: &Owner, choices: usize) -> Result<(), EngineError> {
        // A canary's requests that the sampler has no place for go to the serving engine.
        if !self.is_bridging() {
            return self.serving.admits(owner, choices);
        }
        match self.sampler.admits(owner, choices) {
            // The serving engine, which may admit more, answers again soon.
            Err(EngineError::TooManyChoices { .. }) => self.serving.admits(owner, choices),
            admitted => admitted,
        }
    }

    fn trouble(&self) -> Option<String> {
        self.serving.trouble().or_else(|| self.sampler.trouble())
    }

    fn active_version(&self) -> PolicyVersion {
        if self.is_bridging() {
            self.sampler.active_version()
        } else {
            self.serving.active_version()
        }
    }

    fn load(&self) -> EngineLoad {
        let (serving, sampler) = (self.serving.load(), self.sampler.load());
        EngineLoad {
            live_running: serving.live_running + sampler.live_running,
            live_waiting: serving.live_waiting + sampler.live_waiting,
            ..serving
        }
    }
}
