//! One chat request while it is sampled: its choices, what of them is for the client, and their
//! recording.
//!
//! Invariants: a choice is queued for the ledger before its end is reported, so that feedback given
//! at once finds it; a run that is dropped early cancels its generations and records what was
//! sampled as cancelled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use futures::stream::{BoxStream, SelectAll, StreamExt};
use futures::{FutureExt, stream};

use hone_core::types::{
    FinishReason, Interaction, PolicyVersion, Sample, SampleId, SampleOrigin, SamplingParams,
    TokenId, now_ms,
};
use hone_engine::{Engine, EngineError, Event, GenerateRequest, Generation, Priority, Token};
use hone_store::Op;
use hone_train::TrainState;

use super::request::ChatRequest;
use super::wire;
use super::wire::{AssistantMessage, ChatCompletion, Logprobs, TokenLogprob, Usage};
use crate::http::AppState;
use crate::http::error::ApiError;

/// What happens to a choice.
enum Step {
    Started(PolicyVersion),
    Token(Token),
    Done { finish: FinishReason, text: String },
    Failed(EngineError),
}

/// What is new of a choice, for the client.
pub(super) struct News {
    pub(super) index: u32,
    pub(super) version: PolicyVersion,
    pub(super) started: bool,
    pub(super) text: String,
    /// Of the tokens that `text` completes; empty unless asked for.
    pub(super) logprobs: Vec<TokenLogprob>,
    pub(super) finish: Option<FinishReason>,
}

/// A choice as far as it has come.
struct Choice {
    params: SamplingParams,
    version: Option<PolicyVersion>,
    ids: Vec<TokenId>,
    logprobs: Vec<f32>,
    kept_mass: f32,
    text: String,
    /// Not yet reported.
    entries: Vec<TokenLogprob>,
    finish: Option<FinishReason>,
}

/// A running request.
pub(super) struct ChatRun {
    state: Arc<AppState>,
    pub(super) interaction: Arc<Interaction>,
    top_logprobs: Option<u8>,
    arrived: Instant,
    choices: Vec<Choice>,
    steps: SelectAll<BoxStream<'static, (usize, Step)>>,
    /// Taken from `steps` already.
    ahead: VecDeque<(usize, Step)>,
    served: Vec<Sample>,
    recorded: bool,
    first_token: bool,
    /// Ended by failure: a drop is then no hang-up.
    failed: bool,
}

/// Seed of the choice with this index: choice 0 has the request's own, the others a bit mixture of
/// it (splitmix64's finaliser), so that neighbouring seeds share no choice.
fn choice_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn events(generation: Generation) -> impl futures::Stream<Item = Step> + Send {
    stream::unfold(Some(generation), |generation| async move {
        let mut generation = generation?;
        Some(match generation.events.recv().await {
            Some(Event::Token(token)) => (Step::Token(token), Some(generation)),
            Some(Event::Done { finish, text }) => (Step::Done { finish, text }, None),
            Some(Event::Failed(error)) => (Step::Failed(error), None),
            None => {
                let reason = "the generation ended without a last event".to_owned();
                (Step::Failed(EngineError::Internal(reason)), None)
            }
        })
    })
}

/// Everything that happens to one choice; dropping it cancels the choice wherever it is.
fn steps(
    engine: Arc<dyn Engine>,
    request: GenerateRequest,
    index: usize,
) -> BoxStream<'static, (usize, Step)> {
    let started = async move { engine.generate(request).await };
    stream::once(started)
        .flat_map(|result| match result {
            Ok(generation) => {
                stream::iter([Step::Started(generation.version)]).chain(events(generation)).boxed()
            }
            Err(error) => stream::iter([Step::Failed(error)]).boxed(),
        })
        .map(move |step| (index, step))
        .boxed()
}

impl ChatRun {
    /// Asks the engine for every choice at once.
    pub(super) fn new(
        state: Arc<AppState>,
        interaction: Arc<Interaction>,
        asked: &ChatRequest,
        arrived: Instant,
    ) -> Self {
        let mut all = SelectAll::new();
        let mut choices = Vec::new();
        for index in 0..asked.choices {
            let seed = choice_seed(asked.params.seed, index);
            let params = SamplingParams { seed, ..asked.params.clone() };
            let request = GenerateRequest {
                prompt_ids: interaction.prompt_ids.clone(),
                params: params.clone(),
                stop: asked.stop.clone(),
                top_logprobs: asked.logprobs.unwrap_or(0),
                priority: Priority::Live,
            };
            all.push(steps(state.engine.clone(), request, choices.len()));
            choices.push(Choice::new(params));
        }
        Self {
            state,
            interaction,
            top_logprobs: asked.logprobs,
            arrived,
            choices,
            steps: all,
            ahead: VecDeque::new(),
            served: Vec::new(),
            recorded: false,
            first_token: false,
            failed: false,
        }
    }

    /// Waits until a choice has started; fails if one is refused before that or at once. Returns
    /// the version of the first to start.
    pub(super) async fn start(&mut self) -> Result<PolicyVersion, ApiError> {
        let mut first = None;
        while first.is_none() || self.ahead.len() < self.choices.len() {
            let step = match first {
                None => self.steps.next().await,
                Some(_) => self.steps.next().now_or_never().flatten(),
            };
            match step {
                Some((_, Step::Failed(error))) => return Err(self.fail(error)),
                Some(step) => {
                    if let (None, Step::Started(version)) = (first, &step.1) {
                        first = Some(*version);
                    }
                    self.ahead.push_back(step);
                }
                None => break,
            }
        }
        first.ok_or_else(ApiError::internal)
    }

    /// What is new; `None` when every choice has ended and is queued for the ledger.
    pub(super) async fn next(&mut self) -> Option<Result<News, ApiError>> {
        if self.ended() {
            return None;
        }
        let step = match self.ahead.pop_front() {
            Some(step) => Some(step),
            None => self.steps.next().await,
        };
        Some(match step {
            Some((index, step)) => self.apply(index, step),
            None => {
                self.failed = true;
                Err(ApiError::internal())
            }
        })
    }

    /// Runs to the end and returns the whole answer with choice 0's version.
    pub(super) async fn finish(mut self) -> Result<(PolicyVersion, ChatCompletion), ApiError> {
        let mut entries: Vec<Vec<TokenLogprob>> = self.choices.iter().map(|_| Vec::new()).collect();
        while let Some(news) = self.next().await {
            let news = news?;
            if let Some(entries) = entries.get_mut(news.index as usize) {
                entries.extend(news.logprobs);
            }
        }
        let version = self.choices.first().and_then(|c| c.version).unwrap_or_default();
        let asked = self.top_logprobs.is_some();
        let choices =
            self.choices.iter_mut().zip(entries).zip(0..).map(|((choice, entries), i)| {
                wire::Choice {
                    index: i,
                    message: AssistantMessage {
                        role: "assistant",
                        content: std::mem::take(&mut choice.text),
                        refusal: None,
                    },
                    logprobs: asked.then(|| Logprobs::new(entries)),
                    finish_reason: choice.finish.unwrap_or(FinishReason::Stop).as_str(),
                }
            });
        let choices = choices.collect();
        let answer = ChatCompletion {
            id: self.interaction.id.completion_id(),
            object: "chat.completion",
            created: self.interaction.created / 1000,
            model: self.interaction.model.clone(),
            system_fingerprint: version.fingerprint(),
            choices,
            usage: self.usage(),
        };
        Ok((version, answer))
    }

    /// Tokens so far, the prompt counted once.
    pub(super) fn usage(&self) -> Usage {
        let prompt_tokens = self.interaction.prompt_ids.len();
        let completion_tokens = self.choices.iter().map(|c| c.ids.len()).sum();
        Usage { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }

    /// Whether log-probabilities were asked for.
    pub(super) fn wants_logprobs(&self) -> bool {
        self.top_logprobs.is_some()
    }

    fn ended(&self) -> bool {
        self.choices.iter().all(|c| c.finish.is_some())
    }

    fn fail(&mut self, error: EngineError) -> ApiError {
        self.failed = true;
        error.into()
    }

    fn apply(&mut self, index: usize, step: Step) -> Result<News, ApiError> {
        let started = matches!(step, Step::Started(_));
        let Some(choice) = self.choices.get_mut(index) else { return Err(ApiError::internal()) };
        let mut text = String::new();
        let mut ended = None;
        match step {
            Step::Started(version) => choice.version = Some(version),
            Step::Token(token) => {
                text.clone_from(&token.text);
                let codec = self.state.engine.codec();
                let is_stop = codec.stop_ids().contains(&token.id);
                if self.top_logprobs.is_some() && !is_stop {
                    choice.entries.push(TokenLogprob::new(codec, &token));
                }
                choice.take(&token);
                self.first_token();
            }
            Step::Done { finish: FinishReason::Cancelled, .. } => {
                return Err(self.fail(EngineError::ShuttingDown));
            }
            Step::Done { finish, text: rest } => {
                choice.text.push_str(&rest);
                choice.finish = Some(finish);
                text = rest;
                ended = Some(finish);
            }
            Step::Failed(error) => return Err(self.fail(error)),
        }
        if ended.is_some() {
            self.record(index);
        }
        let Some(choice) = self.choices.get_mut(index) else { return Err(ApiError::internal()) };
        // Entries wait for the text that their tokens complete.
        let due = ended.is_some() || !text.is_empty();
        let logprobs = if due { std::mem::take(&mut choice.entries) } else { Vec::new() };
        let version = choice.version.unwrap_or_default();
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        Ok(News { index, version, started, text, logprobs, finish: ended })
    }

    fn first_token(&mut self) {
        if self.first_token {
            return;
        }
        self.first_token = true;
        let trainer = match self.state.train.status().state {
            TrainState::Training | TrainState::Publishing => "training",
            _ => "idle",
        };
        let seconds = self.arrived.elapsed().as_secs_f64();
        let metrics = &self.state.metrics;
        metrics.http_time_to_first_token.with_label_values(&[trainer]).observe(seconds);
        metrics.http_prompt_tokens.inc_by(self.interaction.prompt_ids.len() as u64);
    }

    /// Queues a choice that has ended, with its prompt if it is the first; offers the prompt for a
    /// group when all have.
    fn record(&mut self, index: usize) {
        let sample = self.choices.get(index).and_then(|choice| self.sample(index, choice));
        let Some(sample) = sample else { return };
        self.state.metrics.http_completion_tokens.inc_by(sample.ids.len() as u64);
        self.served.push(sample.clone());
        self.enqueue(vec![sample]);
        if self.ended()
            && let Some(rollout) = &self.state.rollout
        {
            rollout.offer(self.interaction.clone(), std::mem::take(&mut self.served));
        }
    }

    fn enqueue(&mut self, samples: Vec<Sample>) {
        let mut ops = Vec::with_capacity(samples.len() + 1);
        if !self.recorded {
            ops.push(Op::Interaction(Box::new((*self.interaction).clone())));
            self.recorded = true;
        }
        ops.extend(samples.into_iter().map(|sample| Op::Sample(Box::new(sample))));
        if let Err(error) = self.state.store.enqueue(ops) {
            // The client still gets its answer; nothing will be learned from it.
            tracing::error!(%error, interaction = %self.interaction.id, "a completion is not recorded");
        }
    }

    /// `None` if the choice never started.
    fn sample(&self, index: usize, choice: &Choice) -> Option<Sample> {
        let finish = choice.finish.unwrap_or(FinishReason::Cancelled);
        let stop_ids = self.state.engine.codec().stop_ids();
        let ended_by_id = choice.ids.last().is_some_and(|id| stop_ids.contains(id));
        let untrainable = match finish {
            FinishReason::Cancelled => Some("cancelled"),
            // The text was cut somewhere within the sampled tokens.
            FinishReason::Stop if !ended_by_id => Some("stop_string"),
            _ => choice.params.untrainable_reason(),
        };
        Some(Sample {
            id: SampleId::new(),
            interaction: self.interaction.id,
            choice: u32::try_from(index).unwrap_or(u32::MAX),
            origin: SampleOrigin::Served,
            created: now_ms(),
            ids: choice.ids.clone(),
            logprobs: choice.logprobs.clone(),
            kept_mass: choice.kept_mass,
            text: choice.text.clone(),
            finish,
            version: choice.version?,
            params: choice.params.clone(),
            untrainable: untrainable.map(str::to_owned),
        })
    }
}

impl Choice {
    fn new(params: SamplingParams) -> Self {
        Self {
            params,
            version: None,
            ids: Vec::new(),
            logprobs: Vec::new(),
            kept_mass: 1.0,
            text: String::new(),
            entries: Vec::new(),
            finish: None,
        }
    }

    fn take(&mut self, token: &Token) {
        self.ids.push(token.id);
        self.logprobs.push(token.logprob);
        self.kept_mass = self.kept_mass.min(token.kept_mass);
        self.text.push_str(&token.text);
    }
}

impl Drop for ChatRun {
    fn drop(&mut self) {
        if self.ended() {
            return;
        }
        if !self.failed {
            self.state.metrics.http_disconnects.inc();
            tracing::info!(interaction = %self.interaction.id, "client hung up");
        }
        let open = self.choices.iter().enumerate().filter(|(_, c)| c.finish.is_none());
        let samples: Vec<Sample> = open.filter_map(|(i, c)| self.sample(i, c)).collect();
        if !samples.is_empty() {
            self.enqueue(samples);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::choice_seed;

    #[test]
    fn choices_have_seeds_of_their_own() {
        assert_eq!(choice_seed(7, 0), 7);
        let pairs = (0..64).flat_map(|seed| (0..8).map(move |i| choice_seed(seed, i)));
        assert_eq!(pairs.collect::<BTreeSet<_>>().len(), 64 * 8);
    }
}
