//! A part of the reward that a language model gives: alone on a scale, by comparing pairs, or by
//! ranking a prompt's completions.
//!
//! `mode = "score"`: `(score - min) / (max - min)`. `"pairwise"`: the share of comparisons won, a
//! tie half, each pair asked in both orders so that a preference for a place cancels (Zheng et al.
//! 2023, *Judging LLM-as-a-Judge*, 4.1). `"rank"`: from 1 for the best to 0 for the worst. All from
//! 0 to 1; typical weight 1. Refusals and answers that cannot be read are asked about once more,
//! then missing; pairs and ranks of a completion alone are missing.

mod cache;
mod client;
mod compare;
mod events;
mod params;
mod parse;
mod rubric;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use cache::{Cache, Key};
use client::{OpenAi, Own};
use events::JudgeCost;
use futures::future::join_all;
use parse::{Form, Judgement};
use rubric::Rubrics;
use tokio::sync::Semaphore;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, Role};

use super::remote::CallError;
use super::{RewardFn, ScoreInput};

pub use params::{JudgeMode, JudgeParams, OWN_MODEL, Rubric, TokenLimitField};

/// How a judge's answer is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JudgeSampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Longest answer.
    pub max_tokens: u32,
    /// For models that sample reproducibly.
    pub seed: u64,
}

/// What a judge said, and what it took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JudgeReply {
    /// Its answer.
    pub text: String,
    /// Tokens it read.
    pub prompt_tokens: u64,
    /// Tokens it wrote.
    pub completion_tokens: u64,
}

/// Why a judge cannot be used or did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JudgeError {
    /// The configuration was read without its environment.
    #[error("api_key_env = `{0}` was not looked up: the configuration was not read by the loader")]
    Unresolved(String),
    /// An HTTP header cannot carry the key.
    #[error("api_key_env: the key must be printable ASCII")]
    BadKey,
    /// `base_url = "self"` where no model is served.
    #[error("base_url = `self`: no model of this server can judge here")]
    NoOwnModel,
    /// The custom template.
    #[error("template {0}")]
    Template(String),
    /// The call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The endpoint answered, but not as a chat completion.
    #[error("its answer is no chat completion: {0}")]
    BadAnswer(String),
    /// This server's model failed.
    #[error("the model failed: {0}")]
    Model(String),
}

impl JudgeError {
    /// The label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Call(error) => error.reason(),
            Self::BadAnswer(_) => "bad_answer",
            Self::Template(_) => "template",
            Self::Unresolved(_) | Self::BadKey | Self::NoOwnModel | Self::Model(_) => "model",
        }
    }
}

/// A model that can be asked to judge.
#[async_trait]
pub trait JudgeModel: Send + Sync {
    /// Answers a conversation.
    ///
    /// # Errors
    /// If there is no answer; the judgement is then missing.
    async fn complete(
        &self,
        messages: &[Message],
        params: &JudgeSampling,
    ) -> Result<JudgeReply, JudgeError>;
}

/// Something to ask, and how its answer is read.
struct Question {
    messages: Vec<Message>,
    form: Form,
}

/// Asks a language model for rewards.
pub struct Judge {
    model: Box<dyn JudgeModel>,
    name: String,
    sampling: JudgeSampling,
    mode: JudgeMode,
    seed: u64,
    max_pairs: usize,
    max_candidates: usize,
    rubrics: Rubrics,
    cache: Mutex<Cache>,
    slots: Semaphore,
    tally: JudgeCost,
}

impl Judge {
    /// Prepares the part `part` of `route`; asks nothing yet. `own` is this server's base model,
    /// for `base_url = "self"`.
    ///
    /// # Errors
    /// If the template cannot be read, a key is named but not resolved, there is no model, or the
    /// HTTP client cannot be made.
    pub fn new(
        params: &JudgeParams,
        route: &str,
        part: &str,
        metrics: &Arc<Metrics>,
        own: Option<Arc<dyn JudgeModel>>,
    ) -> Result<Self, JudgeError> {
        let tally = JudgeCost::new(params, route, part, metrics);
        let model: Box<dyn JudgeModel> = if params.is_own_model() {
            let model = own.ok_or(JudgeError::NoOwnModel)?;
            Box::new(Own::new(model, params.limits().timeout, tally.calls()))
        } else {
            Box::new(OpenAi::new(params, tally.calls())?)
        };
        Ok(Self {
            model,
            name: format!("{} {}", params.base_url, params.model),
            sampling: JudgeSampling {
                temperature: params.temperature,
                max_tokens: params.max_tokens,
                seed: params.seed,
            },
            mode: params.mode,
            seed: params.seed,
            max_pairs: params.max_pairs,
            max_candidates: params.max_candidates,
            rubrics: Rubrics::new(params)?,
            cache: Mutex::new(Cache::new(params.cache_entries)),
            slots: Semaphore::new(params.max_concurrency.max(1)),
            tally,
        })
    }

    /// Every question's verdict, equal questions asked once.
    async fn ask_all(&self, questions: Vec<Question>) -> Vec<Option<Judgement>> {
        let keys: Vec<Key> =
            questions.iter().map(|q| cache::key(&self.name, &q.messages, &self.sampling)).collect();
        let mut firsts: BTreeMap<Key, Question> = BTreeMap::new();
        for (key, question) in keys.iter().zip(questions) {
            if firsts.insert(*key, question).is_some() {
                self.tally.cached(true);
            }
        }
        let asked = firsts.iter().map(|(key, question)| async {
            let verdict = self.ask(*key, question).await;
            (*key, verdict)
        });
        let verdicts: BTreeMap<Key, Option<Judgement>> =
            join_all(asked).await.into_iter().collect();
        keys.iter().map(|key| verdicts.get(key).cloned().flatten()).collect()
    }

    async fn ask(&self, key: Key, question: &Question) -> Option<Judgement> {
        let remembered = self.cache().get(&key).cloned();
        self.tally.cached(remembered.is_some());
        if let Some(text) = remembered {
            return question.form.read(&text).ok();
        }
        // Closed never: the semaphore lives as long as this.
        let _slot = self.slots.acquire().await;
        let (reason, detail) = match self.insist(question).await {
            Ok((text, Ok(verdict))) => {
                self.cache().insert(key, text);
                return Some(verdict);
            }
            Ok((text, Err(unread))) => (unread.reason(), text),
            Err(error) => (error.reason(), error.to_string()),
        };
        self.tally.missing(reason, 1, &detail);
        None
    }

    /// Asks, and once more for the bare answer if the first cannot be read.
    async fn insist(
        &self,
        question: &Question,
    ) -> Result<(String, Result<Judgement, parse::Unread>), JudgeError> {
        let text = self.complete(&question.messages).await?;
        let read = question.form.read(&text);
        if read.is_ok() {
            return Ok((text, read));
        }
        let mut messages = question.messages.clone();
        messages.push(Message { role: Role::Assistant, content: text });
        messages.push(Message { role: Role::User, content: question.form.reminder() });
        let text = self.complete(&messages).await?;
        let read = question.form.read(&text);
        Ok((text, read))
    }

    async fn complete(&self, messages: &[Message]) -> Result<String, JudgeError> {
        let reply = self.model.complete(messages, &self.sampling).await?;
        self.tally.used(&reply);
        Ok(reply.text)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the questions that could be put, each with its place; the others are missing.
    fn put<P>(
        &self,
        all: Vec<(P, Result<Question, rubric::Unaskable>)>,
    ) -> (Vec<P>, Vec<Question>) {
        let mut put = (Vec::new(), Vec::new());
        for (place, question) in all {
            match question {
                Ok(question) => {
                    put.0.push(place);
                    put.1.push(question);
                }
                Err(why) => self.tally.missing(why.reason, 1, &why.detail),
            }
        }
        put
    }

    async fn score_each(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        let questions = samples.iter().map(|s| self.rubrics.score(s)).enumerate().collect();
        let (places, questions) = self.put(questions);
        let mut values = vec![None; samples.len()];
        for (place, verdict) in places.into_iter().zip(self.ask_all(questions).await) {
            values[place] = verdict.and_then(|v| v.score());
        }
        values
    }

    async fn compare(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        let texts: Vec<&str> = samples.iter().map(|s| s.text.as_str()).collect();
        let pairs = compare::pairs(texts.len(), self.max_pairs, compare::seed(self.seed, &texts));
        // Equal completions tie; nobody needs to be asked.
        let (equal, differing): (Vec<_>, Vec<_>) =
            pairs.into_iter().partition(|(i, j)| texts[*i] == texts[*j]);
        let asked = differing.iter().flat_map(|&(i, j)| [(i, j), (j, i)]);
        let asked = asked.map(|(a, b)| ((a, b), self.rubrics.pair(samples[a], samples[b])));
        let (places, questions) = self.put(asked.collect());
        let verdicts = self.ask_all(questions).await;
        let points: BTreeMap<(usize, usize), f64> = places
            .into_iter()
            .zip(verdicts)
            .filter_map(|(place, verdict)| Some((place, verdict?.score()?)))
            .collect();
        compare::win_rates(texts.len(), &equal, &differing, &points)
    }

    async fn rank(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        let texts: Vec<&str> = samples.iter().map(|s| s.text.as_str()).collect();
        let order = compare::distinct(&texts, self.seed);
        if order.len() == 1 {
            // All the same: tied.
            return vec![Some(0.5); samples.len()];
        }
        if order.len() > self.max_candidates {
            let detail = format!("{} candidates", order.len());
            self.tally.missing("too_many_candidates", samples.len(), &detail);
            return vec![None; samples.len()];
        }
        let shown: Vec<&ScoreInput> = order.iter().map(|i| samples[*i]).collect();
        let (_, questions) = self.put(vec![((), self.rubrics.rank(&shown))]);
        match self.ask_all(questions).await.pop().flatten() {
            Some(Judgement::Ranking(ranking)) => compare::by_rank(&texts, &order, &ranking),
            _ => vec![None; samples.len()],
        }
    }

    async fn group(&self, samples: &[&ScoreInput]) -> Vec<Option<f64>> {
        match self.mode {
            JudgeMode::Score => self.score_each(samples).await,
            _ if samples.len() < 2 => {
                self.tally.missing("alone", samples.len(), "nothing to compare it with");
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
            self.group(&inputs).await
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

/// The samples of each prompt: equal messages and metadata.
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
