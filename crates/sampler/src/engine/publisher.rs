//! Publishes policy versions to the sampler.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use hone_core::types::PolicyVersion;
use hone_engine::admission::Owner;
use hone_engine::{
    Codec, Completion, Engine, EngineError, EngineLoad, GenerateRequest, Generation, ModelInfo,
    Probe, Publisher,
};

use super::BatchedEngine;
use super::policy::PolicyEngine;

/// Publishes each version to the sampler and to the serving engine, if there is one. Both then use
/// the same version.
pub struct BatchedPublisher {
    serving: Option<Arc<dyn Publisher>>,
    policy: PolicyEngine,
    /// Whether the sampler answers clients until the serving engine has loaded the version.
    bridging: Arc<AtomicBool>,
}

impl BatchedPublisher {
    /// Creates a publisher for a sampler and an optional serving engine.
    pub fn new(serving: Option<Arc<dyn Publisher>>, sampler: Arc<BatchedEngine>) -> Self {
        Self { serving, policy: PolicyEngine::of(sampler), bridging: Arc::default() }
    }

    /// The engine of clients, over the serving engine that this publisher publishes to.
    pub fn live_engine(&self, serving: Arc<dyn Engine>) -> BridgedEngine {
        let (sampler, bridging) = (Arc::clone(&self.policy.engine), Arc::clone(&self.bridging));
        BridgedEngine { serving, sampler, bridging }
    }
}

#[async_trait]
impl Publisher for BatchedPublisher {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        *self.policy.staged() = None;
        let load = self.policy.read(version, adapter);
        let weights = match &self.serving {
            Some(serving) => tokio::try_join!(load, serving.stage(version, adapter))?.0,
            None => load.await?,
        };
        *self.policy.staged() = Some(weights);
        Ok(())
    }

    async fn probe(&self, request: GenerateRequest) -> Result<Vec<Probe>, EngineError> {
        let mut probes = match &self.serving {
            Some(serving) => serving.probe(request.clone()).await?,
            None => Vec::new(),
        };
        probes.extend(self.policy.probe(request).await?);
        Ok(probes)
    }

    async fn complete_staged(&self, request: GenerateRequest) -> Result<Completion, EngineError> {
        self.policy.complete_staged(request).await
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        let duration = match &self.serving {
            Some(serving) => serving.activate().await?,
            None => Duration::ZERO,
        };
        let activated = self.policy.activate().await;
        // The serving engine checks whether a version is staged.
        if self.serving.is_none() {
            activated?;
        }
        self.bridging.store(false, Ordering::Release);
        Ok(duration)
    }

    async fn serve_now(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<bool, EngineError> {
        let weights = self.policy.read(version, adapter).await?;
        let loaded = match &self.serving {
            Some(serving) => serving.serve_now(version, adapter).await?,
            None => true,
        };
        self.policy.serve(weights);
        self.bridging.store(!loaded, Ordering::Release);
        Ok(true)
    }

    async fn begin_canary(&self) -> Result<bool, EngineError> {
        self.policy.begin_canary().await
    }

    fn end_canary(&self) {
        self.policy.end_canary();
    }
}

// Live traffic over two engines.

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
