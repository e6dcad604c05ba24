//! This server's own base model as a judge: an engine of its own, so that judging neither waits for
//! the policy's slots nor is done by the policy that it judges.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, SamplingParams};
use hone_engine::{Engine, EngineConfig, GenerateRequest, ModelDir, Priority};
use hone_mistral::MistralEngine;
use hone_reward::judge::{JudgeError, JudgeModel, JudgeReply, JudgeSampling};

/// Empty until [`OwnModel::load`]: routes are checked before a model is loaded.
#[derive(Default)]
pub(super) struct OwnModel(OnceLock<Arc<dyn Engine>>);

impl OwnModel {
    /// Loads the base model once more.
    pub(super) async fn load(&self, dir: &ModelDir, data: &Path) -> anyhow::Result<()> {
        let (dir, models) = (dir.clone(), data.join("models"));
        let engine = tokio::task::spawn_blocking(move || {
            let normalized = dir.write_normalized(&models)?;
            // Its figures are not the policy's: they go nowhere.
            let metrics = Arc::new(Metrics::new()?);
            let config = EngineConfig { replicas: 1, queue: 4096 };
            anyhow::Ok(MistralEngine::start(&dir, &normalized, &config, metrics)?)
        });
        let engine: Arc<dyn Engine> = engine.await??;
        // Loaded once, by the one caller.
        let _ = self.0.set(engine);
        Ok(())
    }
}

#[async_trait]
impl JudgeModel for OwnModel {
    async fn complete(
        &self,
        messages: &[Message],
        params: &JudgeSampling,
    ) -> Result<JudgeReply, JudgeError> {
        let engine = self.0.get().ok_or(JudgeError::NoOwnModel)?;
        let prompt_ids =
            engine.codec().prompt(messages).map_err(|error| JudgeError::Model(error.into()))?;
        let prompt_tokens = prompt_ids.len() as u64;
        let request = GenerateRequest {
            prompt_ids,
            params: SamplingParams {
                temperature: params.temperature,
                max_tokens: params.max_tokens,
                seed: params.seed,
                ..SamplingParams::default()
            },
            stop: Vec::new(),
            top_logprobs: 0,
            priority: Priority::Live,
        };
        let generation =
            engine.generate(request).await.map_err(|error| JudgeError::Model(error.into()))?;
        let completion =
            generation.collect().await.map_err(|error| JudgeError::Model(error.into()))?;
        let completion_tokens = completion.tokens.len() as u64;
        Ok(JudgeReply { text: completion.text, prompt_tokens, completion_tokens })
    }
}
