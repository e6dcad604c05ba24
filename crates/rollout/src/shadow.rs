//! Samples one shadow completion in spare capacity.

use std::time::Duration;

use hone_core::types::{
    FinishReason, Interaction, Sample, SampleId, SampleOrigin, SamplingParams, now_ms,
};
use hone_engine::{Completion, EngineError, GenerateRequest, Priority, TokenRecords};

use crate::context::RolloutContext;

/// Pause after the first unsuccessful attempt. It doubles up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_millis(100);
/// Failed attempts after which a sample is abandoned. Preemption is not a failure.
const MAX_FAILURES: u32 = 4;
/// Pause after a sample is abandoned, which keeps a broken engine from causing a busy loop.
const ABANDONED_PAUSE: Duration = Duration::from_millis(500);

/// Samples a completion; `None` if the engine fails or rollout stops.
pub(super) async fn sample(
    context: &RolloutContext,
    interaction: &Interaction,
    seed: u64,
) -> Option<Sample> {
    let params = params(context, interaction, seed);
    tokio::select! {
        biased;
        () = context.stopped() => None,
        completion = complete(context, interaction, &params) => {
            Some(record(interaction, params, completion?))
        }
    }
}

/// Temperature sampling without truncation or penalties, because the trainer's distribution is
/// `softmax(logits / temperature)`. The client's temperature applies to [`comparable`] prompts, and its token limit
/// if that is lower. Where a completion may end is always the client's.
fn params(context: &RolloutContext, interaction: &Interaction, seed: u64) -> SamplingParams {
    let config = &context.config;
    let asked = &interaction.params;
    let is_comparable = comparable(context, interaction);
    SamplingParams {
        temperature: if is_comparable { asked.temperature } else { config.temperature },
        seed,
        max_tokens: config.max_tokens.min(token_limit(context, interaction)),
        ..SamplingParams::default()
    }
    .ending_as(asked)
}

/// The token limit of the client's completions.
fn token_limit(context: &RolloutContext, interaction: &Interaction) -> u32 {
    let free = context.engine.info().context.saturating_sub(interaction.prompt_ids.len());
    interaction.params.max_tokens.min(u32::try_from(free).unwrap_or(u32::MAX))
}

/// Whether shadows can be sampled as the client's completions, so that rewards of both can be compared: the
/// settings are trainable and do not truncate, and `rollout.max_tokens` permits the client's token limit.
pub(super) fn comparable(context: &RolloutContext, interaction: &Interaction) -> bool {
    let asked = &interaction.params;
    asked.untrainable_reason().is_none()
        && !asked.truncates()
        && token_limit(context, interaction) <= context.config.max_tokens
}

/// Repeats the request with the same seed until it succeeds or fails permanently.
async fn complete(
    context: &RolloutContext,
    interaction: &Interaction,
    params: &SamplingParams,
) -> Option<Completion> {
    let mut failures = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        match generate(context, interaction, params).await {
            Ok(completion) => return Some(completion),
            Err(EngineError::Preempted | EngineError::Overloaded { .. }) => {}
            Err(error) => {
                failures += 1;
                let id = interaction.id;
                tracing::warn!(%error, interaction = %id, failures, "a shadow sample failed");
                let transient = matches!(error, EngineError::Internal(_) | EngineError::Sample(_))
                    && !error.is_of_grammar();
                if !transient || failures >= MAX_FAILURES {
                    tokio::time::sleep(ABANDONED_PAUSE).await;
                    return None;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Samples once.
async fn generate(
    context: &RolloutContext,
    interaction: &Interaction,
    params: &SamplingParams,
) -> Result<Completion, EngineError> {
    let grammar = match &interaction.grammar {
        Some(spec) => Some(context.engine.codec().compile_grammar(spec).await?),
        None => None,
    };
    let request =
        GenerateRequest::new(interaction.prompt_ids.clone(), params.clone(), Priority::Shadow);
    let request = GenerateRequest { stop: interaction.stop.clone(), grammar, ..request };
    context.engine.generate(request).await?.collect().await
}

fn record(interaction: &Interaction, params: SamplingParams, completion: Completion) -> Sample {
    let untrainable = if completion.finish == FinishReason::Cancelled {
        Some("cancelled")
    } else if completion.tokens.is_empty() {
        Some("empty")
    } else {
        params.untrainable_reason()
    };
    let tokens: TokenRecords = completion.tokens.iter().collect();
    Sample {
        id: SampleId::new(),
        interaction: interaction.id,
        choice: 0,
        origin: SampleOrigin::Shadow,
        created: now_ms(),
        kept: tokens.kept(),
        ids: tokens.ids,
        logprobs: tokens.logprobs,
        forced: tokens.forced,
        text: completion.text,
        finish: completion.finish,
        version: completion.version,
        params,
        untrainable: untrainable.map(str::to_owned),
    }
}
