//! Evaluation of the served policy on prompts that it is not trained on.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use hone_config::Config;
use hone_core::types::SamplingParams;
use hone_dataset::Prompt;
use hone_engine::{Completion, Engine, EngineError, GenerateRequest, Priority};
use hone_reward::{Route, ScoreInput};

use super::table::ScoredSample;
use hone_report::stats::{self, Estimate};

/// The prompts of an evaluation and how they are sampled.
#[derive(Clone)]
pub struct EvalSet {
    pub prompts: Vec<Arc<Prompt>>,
    /// The route whose rewards score the completions.
    pub route: Arc<Route>,
    /// Completions per prompt, at least 1.
    pub samples: usize,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f32,
    pub max_tokens: u32,
    /// Seed of the sampling. Every evaluation uses the same random numbers for the same prompt.
    pub seed: u64,
}

#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Evaluation {
    /// The newest policy version that answered.
    pub version: u64,
    /// The scored completions of each prompt, in the order of the set.
    pub answers: Vec<Vec<ScoredSample>>,
    /// Mean length of the completions in tokens, including the stop token.
    pub length: f64,
}

impl EvalSet {
    /// At most `run.eval_prompts` of the prompts, as the configuration samples them.
    pub fn new(config: &Config, mut prompts: Vec<Arc<Prompt>>, route: &Arc<Route>) -> Self {
        if config.run.eval_prompts > 0 {
            prompts.truncate(config.run.eval_prompts);
        }
        Self {
            prompts,
            route: Arc::clone(route),
            samples: config.run.eval_samples,
            temperature: config.run.eval_temperature,
            max_tokens: config.rollout.max_tokens,
            seed: config.train.seed,
        }
    }

    /// Samples every prompt and scores its completions as a group, as training does.
    pub async fn run(&self, engine: &Arc<dyn Engine>) -> Result<Evaluation, EngineError> {
        let slots = Arc::new(Semaphore::new(engine.info().slots.max(1) * 2));
        let mut running = JoinSet::new();
        for (index, prompt) in self.prompts.iter().enumerate() {
            let ids = engine.codec().prompt(&prompt.messages)?;
            let (set, engine, slots) = (self.clone(), Arc::clone(engine), Arc::clone(&slots));
            let prompt = Arc::clone(prompt);
            running.spawn(async move {
                let mut completions = Vec::with_capacity(set.samples);
                for draw in 0..set.samples {
                    // The semaphore is never closed.
                    let _slot = slots.acquire().await;
                    let request = set.request(&ids, index, draw);
                    completions.push(engine.generate(request).await?.collect().await?);
                }
                Ok::<_, EngineError>((index, set.score(&prompt, completions).await))
            });
        }
        let mut answers = vec![Vec::new(); self.prompts.len()];
        let (mut tokens, mut count, mut version) = (0, 0, 0);
        while let Some(done) = running.join_next().await {
            let done = done.map_err(|error| EngineError::Internal(error.to_string()))?;
            let (index, (scored, length, newest)) = done?;
            tokens += length;
            count += scored.len();
            version = version.max(newest);
            answers[index] = scored;
        }
        let length = tokens as f64 / count.max(1) as f64;
        Ok(Evaluation { version, answers, length })
    }

    fn request(&self, ids: &[u32], prompt: usize, draw: usize) -> GenerateRequest {
        let place = (prompt as u64) << 20 | draw as u64;
        GenerateRequest::new(
            ids.to_vec(),
            SamplingParams {
                temperature: self.temperature,
                max_tokens: self.max_tokens,
                // Any odd factor spreads adjacent places over the seeds.
                seed: self.seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                ..SamplingParams::default()
            },
            Priority::Live,
        )
    }

    async fn score(
        &self,
        prompt: &Prompt,
        completions: Vec<Completion>,
    ) -> (Vec<ScoredSample>, usize, u64) {
        let messages = Arc::new(prompt.messages.clone());
        let metadata = Arc::new(prompt.metadata.clone());
        let inputs: Vec<ScoreInput> = completions
            .iter()
            .map(|completion| ScoreInput {
                messages: Arc::clone(&messages),
                metadata: Arc::clone(&metadata),
                text: completion.text.clone(),
                ids: completion.tokens.iter().map(|token| token.id).collect(),
            })
            .collect();
        let shown = prompt.messages.last().map(|m| m.content.clone()).unwrap_or_default();
        let scored = score(&self.route, &inputs).await;
        let answers = inputs
            .into_iter()
            .zip(scored)
            .map(|(input, (parts, total))| ScoredSample {
                prompt: shown.clone(),
                completion: input.text,
                parts,
                total,
                extracted: BTreeMap::new(),
            })
            .collect();
        let tokens = completions.iter().map(|completion| completion.tokens.len()).sum();
        let version = completions.iter().map(|completion| completion.version.0).max();
        (answers, tokens, version.unwrap_or(0))
    }
}

/// The parts of each sample and their weighted sum. The sum leaves out missing parts; it is `None` if
/// all parts are missing.
pub async fn score(
    route: &Route,
    inputs: &[ScoreInput],
) -> Vec<(BTreeMap<String, Option<f64>>, Option<f64>)> {
    let graded = route.grade(inputs).await;
    let of = |sample: usize| {
        let value = |values: &Vec<Option<f64>>| values.get(sample).copied().flatten();
        let parts: BTreeMap<String, Option<f64>> =
            graded.iter().map(|(part, values)| (part.clone(), value(values))).collect();
        let weighted: Vec<f64> = parts
            .iter()
            .filter_map(|(part, value)| Some(route.weight(part)? * (*value)?))
            .collect();
        let total = (!weighted.is_empty()).then(|| weighted.iter().sum());
        (parts, total)
    };
    (0..inputs.len()).map(of).collect()
}

impl Evaluation {
    /// Mean total reward, averaged first over each prompt's completions, with its 95 % interval over
    /// prompts.
    pub fn reward(&self, seed: u64) -> Option<Estimate> {
        let means: Vec<f64> = self.means(|sample| sample.total).into_iter().flatten().collect();
        stats::estimate(&means, seed)
    }

    pub fn parts(&self) -> Vec<String> {
        let first = self.answers.iter().flatten().next();
        first.map(|sample| sample.parts.keys().cloned().collect()).unwrap_or_default()
    }

    /// The mean of each part over the prompts that have it, each prompt's completions averaged first.
    pub fn part_means(&self) -> BTreeMap<String, f64> {
        let mean = |part: String| {
            let of_part = |sample: &ScoredSample| sample.parts.get(&part).copied().flatten();
            let means: Vec<f64> = self.means(of_part).into_iter().flatten().collect();
            let mean = means.iter().sum::<f64>() / means.len() as f64;
            (!means.is_empty()).then_some((part, mean))
        };
        self.parts().into_iter().filter_map(mean).collect()
    }

    /// `(completions, right completions)` of each prompt. A completion is right if `part` is at least
    /// `at`. Prompts with a missing value are left out.
    pub fn successes(&self, part: &str, at: f64) -> Vec<(u64, u64)> {
        let of = |answers: &Vec<ScoredSample>| {
            let values: Option<Vec<f64>> =
                answers.iter().map(|s| s.parts.get(part).copied().flatten()).collect();
            let values = values.filter(|values| !values.is_empty())?;
            let right = values.iter().filter(|value| **value >= at).count();
            Some((values.len() as u64, right as u64))
        };
        self.answers.iter().filter_map(of).collect()
    }

    /// The mean of each prompt's known values.
    pub fn means(&self, value: impl Fn(&ScoredSample) -> Option<f64>) -> Vec<Option<f64>> {
        let mean = |answers: &Vec<ScoredSample>| {
            let values: Vec<f64> = answers.iter().filter_map(&value).collect();
            let sum: f64 = values.iter().sum();
            (!values.is_empty()).then(|| sum / values.len() as f64)
        };
        self.answers.iter().map(mean).collect()
    }
}
