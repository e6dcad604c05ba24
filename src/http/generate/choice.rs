//! One choice of a request: its generation and its state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::stream::{self, BoxStream, StreamExt};

use hone_core::types::{
    FinishReason, InteractionId, PolicyVersion, Sample, SampleId, SampleOrigin, SamplingParams,
    TokenId, now_ms,
};
use hone_engine::{Engine, EngineError, Event, GenerateRequest, Token, TokenRecords};

use super::reading::{ReadingPace, generation_events};

/// An event of a choice's generation.
pub(super) enum ChoiceEvent {
    Started(PolicyVersion),
    Token(Token),
    Done { finish: FinishReason, text: String, cached_tokens: usize },
    Failed(EngineError),
}

impl From<Event> for ChoiceEvent {
    fn from(event: Event) -> Self {
        match event {
            Event::Token(token) => Self::Token(token),
            Event::Done { finish, text, cached_tokens } => {
                Self::Done { finish, text, cached_tokens }
            }
            Event::Failed(error) => Self::Failed(error),
        }
    }
}

/// A choice while it is sampled.
#[derive(Default)]
pub(super) struct ChoiceState {
    pub(super) params: SamplingParams,
    pub(super) version: Option<PolicyVersion>,
    pub(super) tokens: TokenRecords,
    pub(super) text: String,
    /// Tokens whose log-probabilities are not reported yet.
    pub(super) pending: Vec<Token>,
    /// Number of tokens whose ids are reported.
    reported: usize,
    pub(super) finish: Option<FinishReason>,
    /// Tokens of the prompt that the engine had in its cache; known at the end.
    pub(super) cached_tokens: Option<usize>,
}

impl ChoiceState {
    pub(super) fn new(params: SamplingParams) -> Self {
        Self { params, ..Self::default() }
    }

    pub(super) fn push(&mut self, token: &Token) {
        self.tokens.push(token);
        self.text.push_str(&token.text);
    }

    /// The ids that were not reported before.
    pub(super) fn take_ids(&mut self) -> Vec<TokenId> {
        let ids = self.tokens.ids.get(self.reported..).unwrap_or_default().to_vec();
        self.reported = self.tokens.ids.len();
        ids
    }

    /// The ledger's record of the choice, which is cancelled if it has not finished; `None` if it
    /// never started.
    ///
    /// Whatever ended it, a stop string or the client, the tokens are a sample of the policy up to a
    /// stopping time: whether a token is the last does not depend on later ones. So they can be
    /// trained on.
    pub(super) fn sample(&self, interaction: InteractionId, choice: u32) -> Option<Sample> {
        let finish = self.finish.unwrap_or(FinishReason::Cancelled);
        let TokenRecords { ids, logprobs, forced, .. } = self.tokens.clone();
        let untrainable =
            if ids.is_empty() { Some("empty") } else { self.params.untrainable_reason() };
        Some(Sample {
            id: SampleId::new(),
            interaction,
            choice,
            origin: SampleOrigin::Served,
            created: now_ms(),
            ids,
            logprobs,
            kept: self.tokens.kept(),
            forced,
            text: self.text.clone(),
            finish,
            version: self.version?,
            params: self.params.clone(),
            untrainable: untrainable.map(str::to_owned),
        })
    }
}

/// Seed of the choice `index`: the request's own for choice 0, else a splitmix64 mixture of both, so
/// that requests with neighboring seeds share no choice.
pub(super) fn choice_seed(seed: u64, index: usize) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The events of one choice, each with `index`. Dropping the stream cancels the choice, whether it
/// waits or runs.
///
/// `begun` is shared by all choices of a request and set by the first that starts. From then on a choice
/// that has waited as long as the queue permits waits again, because its request has been admitted.
pub(super) fn choice_events(
    engine: Arc<dyn Engine>,
    request: GenerateRequest,
    index: usize,
    begun: Arc<AtomicBool>,
    pace: Arc<ReadingPace>,
) -> BoxStream<'static, (usize, ChoiceEvent)> {
    let started = async move {
        loop {
            match engine.generate(request.clone()).await {
                Err(EngineError::QueueTimeout { .. }) if begun.load(Ordering::Relaxed) => {}
                result => {
                    begun.fetch_or(result.is_ok(), Ordering::Relaxed);
                    return result;
                }
            }
        }
    };
    stream::once(started)
        .flat_map(move |result| match result {
            Ok(generation) => {
                let started = ChoiceEvent::Started(generation.version);
                let events = generation_events(generation, Arc::clone(&pace));
                stream::iter([started]).chain(events.map(ChoiceEvent::from)).boxed()
            }
            Err(error) => stream::iter([ChoiceEvent::Failed(error)]).boxed(),
        })
        .map(move |event| (index, event))
        .boxed()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::choice_seed;

    #[test]
    fn every_choice_has_its_own_seed() {
        assert_eq!(choice_seed(7, 0), 7);
        let pairs = (0..64).flat_map(|seed| (0..8).map(move |i| choice_seed(seed, i)));
        assert_eq!(pairs.collect::<BTreeSet<_>>().len(), 64 * 8);
    }
}
