//! `judge`: a reward that a language model assigns.
//!
//! `mode = "score"`: `(score - min) / (max - min)`. `"pairwise"`: the share of comparisons won, a tie
//! counting half; each pair is asked in both orders, so that a position bias cancels (Zheng et al.
//! 2023, *Judging LLM-as-a-Judge*, 4.1). All values are from 0 to 1; typical weight 1.
//!
//! Questions run as futures on the caller's task, at most `max_concurrency` at a time. Equal questions
//! are asked once, and answers are cached. After a refusal or an answer that cannot be parsed the
//! judge is asked a second time; then the value is missing. It is also missing for pairs of a prompt
//! with a single completion. Every missing value is counted with its reason.

mod params;
mod parse;
mod rubric;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use futures::future::join_all;
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use hone_core::config::Problem;
use hone_core::digest::Digest;
use hone_core::metrics::Metrics;
use hone_core::types::{Message, Role};

use crate::grader::{GraderSampling, ModelClient, ModelRequest, TokenUsage};
use crate::remote::{CallError, CallEvents, ChatEndpoint, unresolved};
use crate::{RewardFn, ScoreInput};
use rubric::{JudgePrompt, JudgePrompts};

pub use params::{JudgeMode, JudgeParams, Rubric, SELF_JUDGE, TokenLimitField};

/// Why there is no judgement: the label in metrics, and the detail for the log.
type Lacking = (&'static str, String);

enum JudgeSource {
    Own(Arc<dyn ModelClient>),
    Endpoint(Box<ChatEndpoint>),
}

/// Asks a language model for rewards.
pub struct Judge {
    source: JudgeSource,
    params: JudgeParams,
    prompts: JudgePrompts,
    cache: Mutex<JudgementCache>,
    slots: Semaphore,
    calls: Arc<CallEvents>,
    metrics: Arc<Metrics>,
}

impl Judge {
    /// Prepares the part `part` of `route`. `own` is this server's base model, for
    /// `base_url = "self"`.
    /// Errors: if the template is invalid, a key is named but not resolved, there is no model, or the HTTP
    /// client cannot be built.
    pub fn new(
        params: &JudgeParams,
        route: &str,
        part: &str,
        metrics: &Arc<Metrics>,
        own: Option<Arc<dyn ModelClient>>,
    ) -> Result<Self, Problem> {
        let calls = metrics.reward_judge.calls.clone();
        let calls = Arc::new(CallEvents::new("judge", route, part, calls));
        let source = if params.is_self_judge() {
            let why = " = `self`: no model of this server can judge here";
            JudgeSource::Own(own.ok_or_else(|| Problem::new("base_url", why))?)
        } else {
            let key = params.api_key.as_ref();
            if key.is_none() && !params.api_key_env.is_empty() {
                return Err(unresolved("api_key_env", &params.api_key_env));
            }
            let (limits, events) = (params.limits(), Arc::clone(&calls));
            let endpoint = ChatEndpoint::new(&params.base_url, key, limits, events);
            // The error is a sentence of its own.
            let endpoint = endpoint.map_err(|error| Problem::new("", error.to_string()))?;
            JudgeSource::Endpoint(Box::new(endpoint))
        };
        Ok(Self {
            source,
            prompts: JudgePrompts::new(params)?,
            cache: Mutex::new(JudgementCache::new(params.cache_entries)),
            slots: Semaphore::new(params.max_concurrency.max(1)),
            calls,
            metrics: Arc::clone(metrics),
            params: params.clone(),
        })
    }

    /// The judgement of every prompt that has one, with the prompt's place. Equal prompts are asked
    /// once. Prompts that could not be built count as missing.
    async fn ask_all<P>(
        &self,
        prompts: impl IntoIterator<Item = (P, Result<JudgePrompt, Lacking>)>,
    ) -> Vec<(P, f64)> {
        let mut places: Vec<(P, PromptKey)> = Vec::new();
        let mut distinct: BTreeMap<PromptKey, JudgePrompt> = BTreeMap::new();
        for (place, prompt) in prompts {
            match prompt {
                Ok(prompt) => {
                    let key = prompt_key(&self.params, &prompt.messages);
                    places.push((place, key));
                    if distinct.insert(key, prompt).is_some() {
                        self.cache_lookup(true);
                    }
                }
                Err((reason, detail)) => self.missing(reason, 1, &detail),
            }
        }
        let asked = distinct.iter().map(async |(key, prompt)| (*key, self.ask(*key, prompt).await));
        let judgements: BTreeMap<PromptKey, Option<f64>> =
            join_all(asked).await.into_iter().collect();
        places.into_iter().filter_map(|(place, key)| Some((place, judgements[&key]?))).collect()
    }

    async fn ask(&self, key: PromptKey, prompt: &JudgePrompt) -> Option<f64> {
        let cached = self.cache.lock().get(&key).cloned();
        self.cache_lookup(cached.is_some());
        if let Some(text) = cached {
            return prompt.format.parse(&text).ok();
        }
        // Acquiring cannot fail: the semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let (reason, detail) = match self.ask_with_reminder(prompt).await {
            Ok((text, Ok(judgement))) => {
                self.cache.lock().insert(key, text);
                return Some(judgement);
            }
            Ok((text, Err(reason))) => (reason, text),
            Err(lacking) => lacking,
        };
        self.missing(reason, 1, &detail);
        None
    }

    /// Asks, and asks for the bare answer if the first cannot be parsed. Returns the last answer.
    async fn ask_with_reminder(
        &self,
        prompt: &JudgePrompt,
    ) -> Result<(String, Result<f64, &'static str>), Lacking> {
        let mut text = self.complete(&prompt.messages).await?;
        let mut parsed = prompt.format.parse(&text);
        if parsed.is_err() {
            let mut messages = prompt.messages.clone();
            messages.push(Message::new(Role::Assistant, text));
            messages.push(Message::new(Role::User, prompt.format.reminder()));
            text = self.complete(&messages).await?;
            parsed = prompt.format.parse(&text);
        }
        Ok((text, parsed))
    }

    async fn complete(&self, messages: &[Message]) -> Result<String, Lacking> {
        let JudgeParams { temperature, max_tokens, seed, ref model, .. } = self.params;
        let failed = |error: CallError| (error.reason(), error.to_string());
        let (text, usage) = match &self.source {
            JudgeSource::Own(own) => {
                // With a time limit, and counted like the calls of an endpoint.
                let (start, limit) = (Instant::now(), self.params.limits().timeout);
                let request = ModelRequest {
                    model: SELF_JUDGE.to_owned(),
                    messages: messages.to_vec(),
                    sampling: GraderSampling {
                        temperature: Some(temperature.into()),
                        seed: Some(seed.cast_signed()),
                        max_tokens: Some(max_tokens),
                        ..GraderSampling::default()
                    },
                    response_format: Value::Null,
                };
                let reply = match tokio::time::timeout(limit, own.complete(&request)).await {
                    Ok(reply) => reply.map_err(|error| ("model", error.to_string())),
                    Err(_) => Err(failed(CallError::Timeout(limit))),
                };
                let outcome = reply.as_ref().map_or_else(|(reason, _)| *reason, |_| "ok");
                self.calls.attempt(outcome, start.elapsed());
                let reply = reply?;
                (reply.text, reply.usage)
            }
            JudgeSource::Endpoint(endpoint) => {
                let mut body = json!({
                    "model": model, "messages": messages, "temperature": temperature, "seed": seed,
                });
                let field = match self.params.token_limit_field {
                    TokenLimitField::MaxTokens => "max_tokens",
                    TokenLimitField::MaxCompletionTokens => "max_completion_tokens",
                };
                body[field] = max_tokens.into();
                let reply = endpoint.complete(&body).await.map_err(failed)?;
                (reply.text.or(reply.refusal).unwrap_or_default(), reply.usage)
            }
        };
        self.answered(usage);
        Ok(text)
    }

    async fn score_each(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let prompts = samples.iter().map(|s| self.prompts.score(s)).enumerate();
        let mut values = vec![None; samples.len()];
        for (place, judgement) in self.ask_all(prompts).await {
            values[place] = Some(judgement);
        }
        values
    }

    async fn compare(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let texts: Vec<&str> = samples.iter().map(|s| s.text.as_str()).collect();
        let seed = seed(self.params.seed, &texts);
        let pairs = pairs(texts.len(), self.params.max_pairs, seed);
        // Equal completions tie without a question.
        let (equal, differing): (Vec<_>, Vec<_>) =
            pairs.into_iter().partition(|(i, j)| texts[*i] == texts[*j]);
        let orders = differing.iter().flat_map(|&(i, j)| [(i, j), (j, i)]);
        let prompts = orders.map(|(a, b)| ((a, b), self.prompts.pair(&samples[a], &samples[b])));
        let points = self.ask_all(prompts).await.into_iter().collect();
        win_rates(texts.len(), &equal, &differing, &points)
    }
}

#[async_trait]
impl RewardFn for Judge {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        match self.params.mode {
            JudgeMode::Score => self.score_each(samples).await,
            JudgeMode::Pairwise if samples.len() < 2 => {
                self.missing("alone", samples.len(), "nothing to compare it with");
                vec![None; samples.len()]
            }
            JudgeMode::Pairwise => self.compare(samples).await,
        }
    }
}

impl Judge {
    fn cache_lookup(&self, hit: bool) {
        let labels =
            [self.calls.route.as_str(), &self.calls.part, if hit { "hit" } else { "miss" }];
        self.metrics.reward_judge.cache.with_label_values(&labels).inc();
    }

    fn answered(&self, usage: TokenUsage) {
        let (route, part) = (self.calls.route.as_str(), self.calls.part.as_str());
        let TokenUsage { prompt_tokens, completion_tokens, .. } = usage;
        let tokens = &self.metrics.reward_judge.tokens;
        tokens.with_label_values(&[route, part, "prompt"]).inc_by(prompt_tokens);
        tokens.with_label_values(&[route, part, "completion"]).inc_by(completion_tokens);
        // Prices are of a million tokens.
        let cost = prompt_tokens as f64 * (self.params.prompt_price / 1e6)
            + completion_tokens as f64 * (self.params.completion_price / 1e6);
        self.metrics.reward_judge.cost.with_label_values(&[route, part]).inc_by(cost);
        tracing::debug!(route, part, prompt_tokens, completion_tokens, cost, "a judge answered");
    }

    /// `count` judgements are missing for one reason.
    fn missing(&self, reason: &'static str, count: usize, detail: &str) {
        // The detail may be a judge's whole answer.
        let detail: String = detail.chars().take(200).collect();
        self.calls.missing(reason, count, &detail);
    }
}

// A cache of judges' answers that evicts the least recently used.

type PromptKey = [u8; 32];

/// The key of a question: a digest of the model, every message and the sampling parameters.
fn prompt_key(params: &JudgeParams, messages: &[Message]) -> PromptKey {
    let messages = messages.iter().flat_map(|m| [m.role.as_str(), &m.content]);
    messages
        .fold(Digest::new().field(&params.base_url).field(&params.model), Digest::field)
        .bytes(params.temperature.to_bits().to_le_bytes())
        .bytes(params.max_tokens.to_le_bytes())
        .bytes(params.seed.to_le_bytes())
        .finish()
}

struct JudgementCache {
    capacity: usize,
    clock: u64,
    /// Time of the last use, and the answer.
    entries: HashMap<PromptKey, (u64, String)>,
}

impl JudgementCache {
    fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, entries: HashMap::new() }
    }

    fn get(&mut self, key: &PromptKey) -> Option<&String> {
        let (used, answer) = self.entries.get_mut(key)?;
        self.clock += 1;
        *used = self.clock;
        Some(answer)
    }

    /// Keeps an answer in place of the one that was used the longest ago. A judge takes far longer than the search.
    fn insert(&mut self, key: PromptKey, answer: String) {
        self.clock += 1;
        self.entries.insert(key, (self.clock, answer));
        if self.entries.len() > self.capacity {
            let used = |(key, (used, _)): (&PromptKey, &(u64, String))| (*used, *key);
            let oldest = self.entries.iter().map(used).min();
            oldest.and_then(|(_, key)| self.entries.remove(&key));
        }
    }
}

// Selects the pairs to compare, and converts comparisons to values.

/// The seed of one group's random choices: reproducible, and different for every group.
fn seed(configured: u64, texts: &[&str]) -> u64 {
    let digest = Digest::new().bytes(configured.to_le_bytes());
    u64::from_le_bytes(texts.iter().fold(digest, Digest::field).prefix())
}

/// At most `most` pairs of `n` candidates. If not all pairs fit: a ring in random order, in which
/// every candidate is compared with two others, then random other pairs.
fn pairs(n: usize, most: usize, seed: u64) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize)> =
        (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j))).collect();
    if all.len() <= most {
        return all;
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..n).collect();
    order.shuffle(&mut random);
    all.shuffle(&mut random);
    let neighbours = order.iter().zip(order.iter().cycle().skip(1));
    let ring = neighbours.map(|(&i, &j)| (i.min(j), i.max(j)));
    let mut taken = BTreeSet::new();
    ring.chain(all).filter(|pair| taken.insert(*pair)).take(most).collect()
}

/// The share of comparisons that each of `n` candidates won, from 0 to 1, a tie counting half.
/// `None` for a candidate without a comparison.
///
/// `points[(a, b)]` is the result of `a`, shown first, against `b`: 1 for a win. An `asked` pair
/// counts only if both orders have a result, because a single one includes the judge's position bias.
fn win_rates(
    n: usize,
    equal: &[(usize, usize)],
    asked: &[(usize, usize)],
    points: &BTreeMap<(usize, usize), f64>,
) -> Vec<Option<f64>> {
    let mut won = vec![(0.0, 0_u32); n];
    let mut add = |(i, j): (usize, usize), first: f64| {
        for (k, value) in [(i, first), (j, 1.0 - first)] {
            won[k].0 += value;
            won[k].1 += 1;
        }
    };
    equal.iter().for_each(|pair| add(*pair, 0.5));
    for &(i, j) in asked {
        if let (Some(forth), Some(back)) = (points.get(&(i, j)), points.get(&(j, i))) {
            add((i, j), (forth + 1.0 - back) / 2.0);
        }
    }
    won.iter().map(|(points, count)| (*count > 0).then(|| points / f64::from(*count))).collect()
}

#[cfg(test)]
mod tests;
