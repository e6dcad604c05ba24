//! One shadow sample: plain temperature sampling in spare capacity.

use std::sync::Arc;
use std::time::Duration;

use hone_core::types::{
    FinishReason, Interaction, Sample, SampleId, SampleOrigin, SamplingParams, now_ms,
};
use hone_engine::{Completion, EngineError, GenerateRequest, Priority};

use super::Shared;

/// Pause after the first attempt that led to nothing; it doubles up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Attempts at a sample that the engine fails on (giving way to live traffic is not a failure).
const FAILURES: u32 = 4;
/// Pause after a sample is given up, so that a broken engine is not asked in a hot loop.
const GIVEN_UP: Duration = Duration::from_millis(500);

/// Samples until it is done; `None` when the engine cannot, or the daemon stops.
///
/// A sample that gave way to live traffic is drawn again with the same seed: were it drawn anew,
/// long completions, which are interrupted more often, would be under-represented.
pub(super) async fn sample(
    shared: &Shared,
    interaction: &Arc<Interaction>,
    seed: u64,
) -> Option<Sample> {
    let params = params(shared, interaction, seed);
    tokio::select! {
        biased;
        () = shared.stopped() => None,
        completion = complete(shared, interaction, &params) => {
            Some(record(interaction, params, completion?))
        }
    }
}

/// Plain temperature sampling: the trainer's distribution is `softmax(logits / temperature)`.
/// Siblings of a served completion get no more tokens than it did, so that they compare fairly.
fn params(shared: &Shared, interaction: &Interaction, seed: u64) -> SamplingParams {
    let context = shared.engine.info().context;
    let room = context.saturating_sub(interaction.prompt_ids.len());
    let max_tokens = shared
        .config
        .max_tokens
        .min(interaction.params.max_tokens)
        .min(u32::try_from(room).unwrap_or(u32::MAX));
    SamplingParams {
        temperature: shared.config.temperature,
        seed,
        max_tokens,
        ..SamplingParams::default()
    }
}

async fn complete(
    shared: &Shared,
    interaction: &Interaction,
    params: &SamplingParams,
) -> Option<Completion> {
    let mut failures = 0;
    let mut pause = PAUSE;
    loop {
        let request = GenerateRequest {
            prompt_ids: interaction.prompt_ids.clone(),
            params: params.clone(),
            stop: Vec::new(),
            top_logprobs: 0,
            priority: Priority::Shadow,
        };
        let outcome = match shared.engine.generate(request).await {
            Ok(generation) => generation.collect().await,
            Err(error) => Err(error),
        };
        match outcome {
            Ok(completion) => return Some(completion),
            Err(EngineError::Preempted | EngineError::Overloaded { .. }) => {}
            Err(error) => {
                failures += 1;
                tracing::warn!(%error, interaction = %interaction.id, failures, "a shadow sample failed");
                let hopeless = !matches!(error, EngineError::Internal(_));
                if hopeless || failures >= FAILURES {
                    tokio::time::sleep(GIVEN_UP).await;
                    return None;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

fn record(interaction: &Interaction, params: SamplingParams, completion: Completion) -> Sample {
    let untrainable = if completion.finish == FinishReason::Cancelled {
        Some("cancelled")
    } else if completion.tokens.is_empty() {
        Some("empty")
    } else {
        params.untrainable_reason()
    };
    Sample {
        id: SampleId::new(),
        interaction: interaction.id,
        choice: 0,
        origin: SampleOrigin::Shadow,
        created: now_ms(),
        ids: completion.tokens.iter().map(|t| t.id).collect(),
        logprobs: completion.tokens.iter().map(|t| t.logprob).collect(),
        kept_mass: completion.tokens.iter().map(|t| t.kept_mass).fold(1.0, f32::min),
        text: completion.text,
        finish: completion.finish,
        version: completion.version,
        params,
        untrainable: untrainable.map(str::to_owned),
    }
}
