//! `judge`: a reward that a language model assigns.
//!
//! `mode = "score"`: `(score - min) / (max - min)`. `"pairwise"`: the share of comparisons won, a tie
//! counting half; each pair is asked in both orders, so that a position bias cancels (Zheng et al.
//! 2023, *Judging LLM-as-a-Judge*, 4.1). `"rank"`: from 1 for the best to 0 for the worst. All values
//! are from 0 to 1; typical weight 1.
//!
//! Questions run as futures on the caller's task, at most `max_concurrency` at a time. Equal questions
//! are asked once, and answers are cached. After a refusal or an answer that cannot be parsed the
//! judge is asked a second time; then the value is missing. It is also missing for pairs and ranks of
//! a prompt with a single completion. Every missing value is counted with its reason.

mod cache;
mod client;
mod compare;
mod events;
mod model;
mod params;
mod parse;
mod rubric;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use cache::{JudgementCache, PromptKey};
use client::{EndpointJudge, SelfJudgeClient};
use events::JudgeEvents;
use futures::future::join_all;
use parse::{Judgement, ParseFailure};
use rubric::{JudgePrompt, JudgePrompts, PromptError};
use tokio::sync::Semaphore;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, Role};

use crate::{RewardFn, ScoreInput};

pub use model::{JudgeError, JudgeModel, JudgeReply, JudgeSampling};
pub use params::{JudgeMode, JudgeParams, Rubric, SELF_JUDGE, TokenLimitField};

/// Asks a language model for rewards.
pub struct Judge {
    model: Box<dyn JudgeModel>,
    params: JudgeParams,
    sampling: JudgeSampling,
    prompts: JudgePrompts,
    cache: Mutex<JudgementCache>,
    slots: Semaphore,
    events: JudgeEvents,
}

impl Judge {
    /// Prepares the part `part` of `route`. `own` is this server's base model, for
    /// `base_url = "self"`.
    ///
    /// # Errors
    /// If the template is invalid, a key is named but not resolved, there is no model, or the HTTP
    /// client cannot be built.
    pub fn new(
        params: &JudgeParams,
        route: &str,
        part: &str,
        metrics: &Arc<Metrics>,
        own: Option<Arc<dyn JudgeModel>>,
    ) -> Result<Self, JudgeError> {
        let events = JudgeEvents::new(params, route, part, metrics);
        let model: Box<dyn JudgeModel> = if params.is_self_judge() {
            let model = own.ok_or(JudgeError::NoSelfJudge)?;
            let timeout = params.limits().timeout;
            Box::new(SelfJudgeClient { model, timeout, events: Arc::clone(&events.calls) })
        } else {
            Box::new(EndpointJudge::new(params, Arc::clone(&events.calls))?)
        };
        Ok(Self {
            model,
            sampling: JudgeSampling {
                temperature: params.temperature,
                max_tokens: params.max_tokens,
                seed: params.seed,
            },
            prompts: JudgePrompts::new(params)?,
            cache: Mutex::new(JudgementCache::new(params.cache_entries)),
            slots: Semaphore::new(params.max_concurrency.max(1)),
            events,
            params: params.clone(),
        })
    }

    /// The judgement of every prompt that has one, with the prompt's place. Equal prompts are asked
    /// once. Prompts that could not be built count as missing.
    async fn ask_all<P>(
        &self,
        prompts: impl IntoIterator<Item = (P, Result<JudgePrompt, PromptError>)>,
    ) -> Vec<(P, Judgement)> {
        let model = format!("{} {}", self.params.base_url, self.params.model);
        let mut places: Vec<(P, PromptKey)> = Vec::new();
        let mut distinct: BTreeMap<PromptKey, JudgePrompt> = BTreeMap::new();
        for (place, prompt) in prompts {
            match prompt {
                Ok(prompt) => {
                    let key = cache::key(&model, &prompt.messages, &self.sampling);
                    places.push((place, key));
                    if distinct.insert(key, prompt).is_some() {
                        self.events.cache_lookup(true);
                    }
                }
                Err(error) => self.events.missing(error.reason, 1, &error.detail),
            }
        }
        let asked = distinct.iter().map(async |(key, prompt)| (*key, self.ask(*key, prompt).await));
        let judgements: BTreeMap<PromptKey, Option<Judgement>> =
            join_all(asked).await.into_iter().collect();
        let judgement = |key| judgements.get(&key).cloned().flatten();
        places.into_iter().filter_map(|(place, key)| Some((place, judgement(key)?))).collect()
    }

    async fn ask(&self, key: PromptKey, prompt: &JudgePrompt) -> Option<Judgement> {
        let cached = self.cache().get(&key).cloned();
        self.events.cache_lookup(cached.is_some());
        if let Some(text) = cached {
            return prompt.format.parse(&text).ok();
        }
        // Acquiring cannot fail: the semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let (reason, detail) = match self.ask_with_reminder(prompt).await {
            Ok((text, Ok(judgement))) => {
                self.cache().insert(key, text);
                return Some(judgement);
            }
            Ok((text, Err(failure))) => (failure.reason(), text),
            Err(error) => (error.reason(), error.to_string()),
        };
        self.events.missing(reason, 1, &detail);
        None
    }

    /// Asks, and asks for the bare answer if the first cannot be parsed. Returns the last answer.
    async fn ask_with_reminder(
        &self,
        prompt: &JudgePrompt,
    ) -> Result<(String, Result<Judgement, ParseFailure>), JudgeError> {
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

    async fn complete(&self, messages: &[Message]) -> Result<String, JudgeError> {
        let reply = self.model.complete(messages, &self.sampling).await?;
        self.events.answered(&reply);
        Ok(reply.text)
    }

    fn cache(&self) -> MutexGuard<'_, JudgementCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn score_each(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        let prompts = samples.iter().map(|s| self.prompts.score(s)).enumerate();
        let mut values = vec![None; samples.len()];
        for (place, judgement) in self.ask_all(prompts).await {
            values[place] = judgement.score();
        }
        values
    }

    async fn compare(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        let texts: Vec<&str> = samples.iter().map(|s| s.text.as_str()).collect();
        let seed = compare::seed(self.params.seed, &texts);
        let pairs = compare::pairs(texts.len(), self.params.max_pairs, seed);
        // Equal completions tie without a question.
        let (equal, differing): (Vec<_>, Vec<_>) =
            pairs.into_iter().partition(|(i, j)| texts[*i] == texts[*j]);
        let orders = differing.iter().flat_map(|&(i, j)| [(i, j), (j, i)]);
        let prompts = orders.map(|(a, b)| ((a, b), self.prompts.pair(samples[a], samples[b])));
        let judgements = self.ask_all(prompts).await.into_iter();
        let points: BTreeMap<(usize, usize), f64> =
            judgements.filter_map(|(pair, judgement)| Some((pair, judgement.score()?))).collect();
        compare::win_rates(texts.len(), &equal, &differing, &points)
    }

    async fn rank(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        let texts: Vec<&str> = samples.iter().map(|s| s.text.as_str()).collect();
        let order = compare::distinct(&texts, self.params.seed);
        if order.len() == 1 {
            // All completions are equal and tie.
            return vec![Some(0.5); samples.len()];
        }
        if order.len() > self.params.max_candidates {
            let detail = format!("{} candidates", order.len());
            self.events.missing("too_many_candidates", samples.len(), &detail);
            return vec![None; samples.len()];
        }
        let shown: Vec<&str> = order.iter().map(|i| texts[*i]).collect();
        match self.ask_all([((), self.prompts.rank(samples[0], &shown))]).await.pop() {
            Some(((), Judgement::Ranking(ranking))) => compare::by_rank(&texts, &order, &ranking),
            _ => vec![None; samples.len()],
        }
    }

    async fn score_group(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        match self.params.mode {
            JudgeMode::Score => self.score_each(samples).await,
            _ if samples.len() < 2 => {
                self.events.missing("alone", samples.len(), "nothing to compare it with");
                vec![None; samples.len()]
            }
            JudgeMode::Pairwise => self.compare(samples).await,
            JudgeMode::Rank => self.rank(samples).await,
        }
    }
}

#[async_trait]
impl RewardFn for Judge {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let groups = groups(samples);
        let judged = join_all(groups.iter().map(async |members| {
            let inputs: Vec<&ScoreInput> = members.iter().map(|i| &samples[*i]).collect();
            self.score_group(&inputs).await
        }))
        .await;
        let mut values = vec![None; samples.len()];
        for (members, judged) in groups.iter().zip(judged) {
            for (member, value) in members.iter().zip(judged) {
                values[*member] = value;
            }
        }
        values
    }
}

/// The indices of the samples of each prompt, which share messages and metadata.
fn groups(samples: &[ScoreInput]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (i, sample) in samples.iter().enumerate() {
        let same = |members: &&mut Vec<usize>| {
            let other = &samples[members[0]];
            other.messages == sample.messages && other.metadata == sample.metadata
        };
        match groups.iter_mut().find(same) {
            Some(members) => members.push(i),
            None => groups.push(vec![i]),
        }
    }
    groups
}

#[cfg(test)]
mod tests;
