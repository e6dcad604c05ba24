//! Completions of the same prompts by the candidate and by the active version.

use std::sync::Arc;
use std::time::Duration;

use futures::future::ok;
use futures::stream::{StreamExt, TryStreamExt, iter};

use hone_core::types::{GroupId, Interaction, PolicyVersion, SamplingParams};
use hone_engine::{
    Completion, Engine, EngineError, GenerateRequest, Priority, Publisher, SampleError,
};
use hone_reward::{Route, Routes, ScoreInput};
use hone_store::{Store, StoreError};

/// Pause before a completion that clients displaced starts again.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// A prompt that candidate and active version complete.
#[derive(Clone)]
pub struct ExamPrompt {
    /// The prompt with its metadata, which graders read.
    pub interaction: Arc<Interaction>,
    /// The route whose graders score the completions; `None` if no route of that name exists.
    pub route: Option<Arc<Route>>,
    /// Whether the prompt is never trained on, so that the exam may use it.
    pub held_out: bool,
}

/// What the gate needs to complete and score prompts.
pub struct Examiner {
    /// The engine that makes training data, on the active version.
    pub engine: Arc<dyn Engine>,
    /// The routes, whose graders score the completions.
    pub routes: Arc<Routes>,
    /// The ledger, which has the reservoir of held-out prompts.
    pub store: Store,
    /// Sampling temperature of the completions.
    pub temperature: f32,
    /// Token limit of the completions.
    pub max_tokens: u32,
    /// The prompts of `policy.gate.exam_file`; empty takes the reservoir.
    pub exam: Vec<ExamPrompt>,
    /// Names of the parts that reward a format.
    pub format_parts: Vec<String>,
}

pub(in crate::policy) struct ComparedPrompt {
    pub prompt: ExamPrompt,
    pub candidate: Completion,
    pub active: Completion,
    pub temperature: f32,
}

impl ComparedPrompt {
    /// Both completions as the graders' input, the candidate's first.
    pub fn score_inputs(&self) -> [ScoreInput; 2] {
        let messages = Arc::new(self.prompt.interaction.messages.clone());
        let metadata = Arc::new(self.prompt.interaction.metadata.clone());
        [&self.candidate, &self.active].map(|completion| ScoreInput {
            messages: Arc::clone(&messages),
            metadata: Arc::clone(&metadata),
            text: completion.text.clone(),
            ids: completion.tokens.iter().map(|token| token.id).collect(),
        })
    }
}

impl Examiner {
    /// At most `limit` prompts of the exam, else of each graded route in the reservoir, else of the last step, which only
    /// measure drift.
    pub(in crate::policy) fn prompts(
        &self,
        limit: usize,
        version: PolicyVersion,
    ) -> Result<Vec<ExamPrompt>, StoreError> {
        if limit == 0 {
            return Ok(Vec::new());
        }
        if !self.exam.is_empty() {
            // A larger file is used part by part.
            let count = self.exam.len();
            let first = usize::try_from(version.0).unwrap_or_default().wrapping_mul(limit) % count;
            let picked = (0..limit.min(count)).map(|i| self.exam[(first + i) % count].clone());
            return Ok(picked.collect());
        }
        let mut prompts = Vec::new();
        for route in self.routes.iter().filter(|route| route.has_graders()) {
            for interaction in self.store.held_out(&route.name, limit)? {
                prompts.push(self.prompt(interaction, true));
            }
        }
        if prompts.is_empty() {
            let groups = self.store.last_step()?.map(|step| step.groups).unwrap_or_default();
            for id in groups.into_iter().take(limit) {
                prompts.extend(self.trained_prompt(id)?);
            }
        }
        Ok(prompts)
    }

    fn prompt(&self, interaction: Interaction, held_out: bool) -> ExamPrompt {
        let route = self.routes.get(&interaction.route).cloned();
        ExamPrompt { interaction: Arc::new(interaction), route, held_out }
    }

    fn trained_prompt(&self, group: GroupId) -> Result<Option<ExamPrompt>, StoreError> {
        let Some(group) = self.store.group(group)? else { return Ok(None) };
        let interaction = self.store.interaction(group.interaction)?;
        Ok(interaction.map(|interaction| self.prompt(interaction, false)))
    }

    /// Completes every prompt with both versions and the same seed, but those whose grammar cannot be
    /// followed, so that no client's grammar can stop all publications.
    pub(super) async fn complete(
        &self,
        publisher: &dyn Publisher,
        version: PolicyVersion,
        prompts: &[ExamPrompt],
    ) -> Result<Vec<ComparedPrompt>, EngineError> {
        let slots = self.engine.info().slots.max(1);
        let compare = |(index, prompt): (u64, &ExamPrompt)| {
            let (prompt, temperature) = (prompt.clone(), self.temperature);
            async move {
                let request = self.request(&prompt, version.0 << 20 | index).await?;
                let candidate = publisher.complete_staged(request.clone()).await?;
                let active = self.complete_active(request).await?;
                Ok(ComparedPrompt { prompt, candidate, active, temperature })
            }
        };
        let numbered: Vec<_> = (0..).zip(prompts).collect();
        let compared = iter(numbered.into_iter().map(compare)).buffered(slots);
        let usable = compared.map(|result: Result<ComparedPrompt, EngineError>| match result {
            Err(error) if error.is_of_grammar() => {
                tracing::warn!(%error, "an exam leaves a prompt out");
                Ok(None)
            }
            result => result.map(Some),
        });
        usable.try_filter_map(ok).try_collect().await
    }

    async fn complete_active(&self, request: GenerateRequest) -> Result<Completion, EngineError> {
        loop {
            let completion = match self.engine.generate(request.clone()).await {
                Ok(generation) => generation.collect().await,
                Err(error) => Err(error),
            };
            match completion {
                Err(EngineError::Preempted | EngineError::Overloaded { .. }) => {
                    tokio::time::sleep(BUSY_PAUSE).await;
                }
                result => return result,
            }
        }
    }

    async fn request(
        &self,
        prompt: &ExamPrompt,
        seed: u64,
    ) -> Result<GenerateRequest, EngineError> {
        let interaction = &prompt.interaction;
        let codec = self.engine.codec();
        let grammar = match &interaction.grammar {
            Some(spec) => {
                let grammar = codec.compile_grammar(spec).await;
                Some(grammar.map_err(|error| EngineError::Sample(SampleError::Grammar(error)))?)
            }
            None => None,
        };
        let params = SamplingParams {
            temperature: self.temperature,
            max_tokens: self.max_tokens,
            seed,
            ..SamplingParams::default()
        };
        Ok(GenerateRequest {
            prompt_ids: interaction.prompt_ids.clone(),
            params: params.ending_as(&interaction.params),
            stop: interaction.stop.clone(),
            top_logprobs: 0,
            priority: Priority::Shadow,
            owner: None,
            version: None,
            grammar,
            scored: Vec::new(),
        })
    }
}
