//! The served base model as a judge. It has a separate engine, so that judging neither waits for the
//! policy's slots nor uses the policy that is judged.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, SamplingParams};
use hone_engine::{Engine, EngineConfig, EngineError, GenerateRequest, ModelDir, Priority};
use hone_mistral::MistralEngine;
use hone_reward::judge::{JudgeError, JudgeModel, JudgeReply, JudgeSampling};

/// A judge without a model until [`SelfJudge::load`], because routes are checked before a model is
/// loaded.
#[derive(Default)]
pub(super) struct SelfJudge(OnceLock<Arc<dyn Engine>>);

impl SelfJudge {
    /// Loads the base model into an engine of its own.
    pub(super) async fn load(&self, dir: &ModelDir, data: &Path) -> anyhow::Result<()> {
        let (dir, models) = (dir.clone(), data.join("models"));
        let engine = tokio::task::spawn_blocking(move || {
            let normalized = dir.write_normalized(&models)?;
            // Separate metrics: the exported ones describe only the policy's engine.
            let metrics = Arc::new(Metrics::new()?);
            let config = EngineConfig { replicas: 1, queue: 4096 };
            anyhow::Ok(MistralEngine::start(&dir, &normalized, &config, metrics)?)
        });
        let engine: Arc<dyn Engine> = engine.await??;
        self.0.set(engine).map_err(|_| anyhow::anyhow!("the judge's model is loaded already"))
    }
}

#[async_trait]
impl JudgeModel for SelfJudge {
    async fn complete(
        &self,
        messages: &[Message],
        params: &JudgeSampling,
    ) -> Result<JudgeReply, JudgeError> {
        let engine = self.0.get().ok_or(JudgeError::NoSelfJudge)?;
        let model_error = |error: EngineError| JudgeError::Model(error.into());
        let prompt_ids = engine.codec().prompt(messages).map_err(model_error)?;
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
            version: None,
        };
        let generation = engine.generate(request).await.map_err(model_error)?;
        let completion = generation.collect().await.map_err(model_error)?;
        let completion_tokens = completion.tokens.len() as u64;
        Ok(JudgeReply { text: completion.text, prompt_tokens, completion_tokens })
    }
}
