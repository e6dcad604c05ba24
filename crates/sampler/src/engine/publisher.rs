//! Publishes policy versions to the sampler.

use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use hone_core::types::{PolicyVersion, SamplingParams, TokenId};
use hone_engine::{EngineError, GenerateRequest, Publisher};

use super::BatchedEngine;
use super::shared::PolicyWeights;

/// Publishes each version to the sampler and to the serving engine, if there is one. Both then use
/// the same version.
pub struct BatchedPublisher {
    serving: Option<Arc<dyn Publisher>>,
    sampler: Arc<BatchedEngine>,
    staged: Mutex<Option<PolicyWeights>>,
}

impl BatchedPublisher {
    /// Creates a publisher for a sampler and an optional serving engine.
    pub fn new(serving: Option<Arc<dyn Publisher>>, sampler: Arc<BatchedEngine>) -> Self {
        Self { serving, sampler, staged: Mutex::new(None) }
    }

    fn staged(&self) -> MutexGuard<'_, Option<PolicyWeights>> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Publisher for BatchedPublisher {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        *self.staged() = None;
        let (sampler, dir) = (Arc::clone(&self.sampler), adapter.map(Path::to_path_buf));
        let read = tokio::task::spawn_blocking(move || sampler.read_adapter(dir.as_deref()));
        if let Some(serving) = &self.serving {
            serving.stage(version, adapter).await?;
        }
        let failed = |e: &dyn Display| EngineError::Model(format!("sampler: {e}"));
        let adapter = read.await.map_err(|e| failed(&e))?.map_err(|e| failed(&e))?;
        *self.staged() = Some(PolicyWeights { version, adapter: adapter.map(Arc::new) });
        Ok(())
    }

    /// Samples from the serving engine's staged version, or from the sampler's if there is no serving
    /// engine.
    async fn probe(
        &self,
        prompt_ids: &[TokenId],
        params: &SamplingParams,
    ) -> Result<Vec<(TokenId, f32)>, EngineError> {
        if let Some(serving) = &self.serving {
            return serving.probe(prompt_ids, params).await;
        }
        let staged = self.staged().clone().ok_or_else(EngineError::nothing_staged)?;
        let request = GenerateRequest::probe(prompt_ids, params);
        let completion = self.sampler.submit(request, Some(staged)).await?.collect().await?;
        Ok(completion.token_logprobs())
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        let duration = match &self.serving {
            Some(serving) => serving.activate().await?,
            None => Duration::ZERO,
        };
        match self.staged().take() {
            Some(staged) => self.sampler.activate(staged),
            // The serving engine checks whether a version is staged.
            None if self.serving.is_some() => {}
            None => return Err(EngineError::nothing_staged()),
        }
        Ok(duration)
    }
}
