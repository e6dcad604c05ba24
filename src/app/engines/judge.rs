//! The served base model as a judge. It has a separate engine, so that judging neither waits for the
//! policy's slots nor uses the policy that is judged.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, SamplingParams};
use hone_engine::{
    Codec, Engine, EngineBackend, EngineConfig, EngineError, GenerateRequest, ModelDir, Priority,
};
use hone_model::Model;
use hone_reward::judge::{JudgeError, JudgeModel, JudgeReply, JudgeSampling};

use super::mistral::start_mistral;
use super::native::{JUDGE_QUEUE, NativePurpose, load_base, start_native};
use crate::config::Config;

/// A judge without a model until [`SelfJudge::load`], because routes are checked before a model is
/// loaded.
#[derive(Default)]
pub(in crate::app) struct SelfJudge(OnceLock<Arc<dyn Engine>>);

impl SelfJudge {
    /// Starts an engine of its own, of `engine.backend`, for the base model. The native one uses the
    /// weights `base` if they are loaded already.
    pub async fn load(
        &self,
        config: &Config,
        dir: &ModelDir,
        data: &Path,
        base: Option<&Model>,
    ) -> anyhow::Result<()> {
        // Separate metrics: the exported ones describe only the policy's engines.
        let metrics = Arc::new(Metrics::new()?);
        let engine: Arc<dyn Engine> = match config.engine.backend {
            EngineBackend::Mistralrs => {
                let config = EngineConfig {
                    replicas: 1,
                    queue: JUDGE_QUEUE,
                    queue_timeout_seconds: 0,
                    ..config.engine.clone()
                };
                start_mistral(&config, dir, data, metrics).await?
            }
            EngineBackend::Native => {
                let base = match base {
                    Some(base) => base.clone(),
                    None => load_base(config, dir).await?,
                };
                let (codec, purpose) = (Arc::new(Codec::load(dir)?), NativePurpose::Judging);
                start_native(config, dir, &base, codec, purpose, Arc::new(|| false), metrics)?
            }
        };
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
        let request = GenerateRequest::new(
            prompt_ids,
            SamplingParams {
                temperature: params.temperature,
                max_tokens: params.max_tokens,
                seed: params.seed,
                ..SamplingParams::default()
            },
            Priority::Live,
        );
        let generation = engine.generate(request).await.map_err(model_error)?;
        let completion = generation.collect().await.map_err(model_error)?;
        let completion_tokens = completion.tokens.len() as u64;
        Ok(JudgeReply { text: completion.text, prompt_tokens, completion_tokens })
    }
}
