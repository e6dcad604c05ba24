//! Draws prompts of the dataset and tokenizes them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hone_core::files::{at, replace_file};
use hone_core::types::{Interaction, PromptSource, SamplingParams};
use hone_dataset::{
    Dataset, DatasetConfig, DatasetError, Prompt, PromptSampler, PromptSamplerState,
};
use hone_engine::EngineError;
use hone_reward::{RewardError, Route, Routes};
use hone_store::StoreError;

use crate::context::{PromptJob, RolloutContext};

/// Why rollout cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// The dataset cannot be used.
    #[error("dataset.path: {0}")]
    Dataset(#[from] DatasetError),
    /// The dataset's route does not exist.
    #[error(transparent)]
    Route(#[from] RewardError),
    /// The dataset's route has no grader.
    #[error(
        "{key} = `{route}` has no reward that can score a completion; \
         clients give no feedback on dataset prompts"
    )]
    UnscoredRoute {
        /// The configuration key that names the route.
        key: &'static str,
        /// The route's name.
        route: String,
    },
    /// The ledger cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How often the position is saved. After a crash, the prompts drawn since are drawn again.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// The prompts to train on, in the configured order.
pub(super) struct DatasetPrompts {
    sampler: PromptSampler,
    routes: Vec<Arc<Route>>,
    /// Longest prompt in tokens; 0 limits it by the context only.
    max_prompt_tokens: usize,
    /// Keeps the sampler's state from one start to the next.
    state_file: Option<PathBuf>,
    saved: Instant,
}

impl DatasetPrompts {
    /// Reads and checks the dataset, and resumes at the saved state. `route` scores the stages that
    /// name no route.
    ///
    /// # Errors
    /// Names the line or the key that cannot be used.
    pub fn load(
        config: &DatasetConfig,
        route: &str,
        routes: &Routes,
        state_file: Option<PathBuf>,
    ) -> Result<Self, RolloutError> {
        let graded = |key, name: &str| {
            let route = routes.require(key, name)?;
            if route.has_graders() {
                return Ok(Arc::clone(route));
            }
            Err(RolloutError::UnscoredRoute { key, route: name.to_owned() })
        };
        let default = graded("rollout.dataset_route", route)?;
        let dataset = Dataset::open(config)?;
        tracing::info!(report = %dataset.report, "dataset opened");
        let sampler = match state_file.as_deref().and_then(read_state) {
            None => PromptSampler::new(&dataset.train, config)?,
            Some(state) => {
                PromptSampler::resume(&dataset.train, config, state).or_else(|error| {
                    tracing::warn!(%error, "the dataset restarts at its beginning");
                    PromptSampler::new(&dataset.train, config)
                })?
            }
        };
        let stages = sampler.curriculum().stages();
        let routes = stages.map(|stage| match &stage.route {
            Some(name) => graded("dataset.stage.route", name),
            None => Ok(Arc::clone(&default)),
        });
        let routes = routes.collect::<Result<_, _>>()?;
        let (max_prompt_tokens, saved) = (config.max_prompt_tokens, Instant::now());
        Ok(Self { sampler, routes, max_prompt_tokens, state_file, saved })
    }

    /// Saves the position. A failure is logged: the next start then resumes at an older position.
    pub fn save(&mut self) {
        self.saved = Instant::now();
        let Some(path) = &self.state_file else { return };
        let saved = serde_json::to_vec(&self.sampler.state())
            .map_err(|error| at(path)(error.into()))
            .and_then(|bytes| replace_file(path, &bytes));
        if let Err(error) = saved {
            tracing::warn!(%error, file = %path.display(), "cannot save the dataset's position");
        }
    }

    /// Whether the next group takes a live prompt; see [`PromptSampler::takes_live`].
    pub fn takes_live(&mut self, live_waits: bool) -> bool {
        self.sampler.takes_live(live_waits)
    }

    /// The next prompt as a job. A prompt that the model cannot take is never drawn again.
    pub fn next_job(&mut self, context: &RolloutContext) -> Option<PromptJob> {
        if self.saved.elapsed() > SAVE_EVERY {
            self.save();
        }
        for (prompt, rewards) in context.prompt_rewards.lock().drain(..) {
            self.sampler.report(prompt, &rewards);
        }
        let last = context.store.last_step().ok().flatten();
        let step = last.map_or(1, |last| last.step + 1);
        while let Some(draw) = self.sampler.next(step) {
            let (prompt, route) = (&draw.prompt, self.routes.get(draw.stage)?);
            match interaction(context, &route.name, prompt, self.max_prompt_tokens) {
                Ok(interaction) => {
                    return Some(PromptJob::dataset(interaction, prompt.id, Arc::clone(route)));
                }
                Err(reason) => {
                    tracing::warn!(place = %prompt.place, %reason, "a dataset prompt is left out");
                    context.count_skipped("dataset_prompt");
                    self.sampler.leave_out(prompt.id);
                }
            }
        }
        None
    }
}

/// The state that an earlier start saved; `None` if it is missing or unreadable.
fn read_state(path: &Path) -> Option<PromptSamplerState> {
    let bytes = std::fs::read(path).ok()?;
    let state = serde_json::from_slice(&bytes);
    let warn = |error| tracing::warn!(%error, file = %path.display(), "cannot read the position");
    state.map_err(warn).ok()
}

fn interaction(
    context: &RolloutContext,
    route: &str,
    prompt: &Prompt,
    max_prompt_tokens: usize,
) -> Result<Interaction, EngineError> {
    let (codec, info) = (context.engine.codec(), context.engine.info());
    let prompt_ids = codec.prompt(&prompt.messages)?;
    let length = prompt_ids.len();
    if length >= info.context {
        return Err(EngineError::PromptTooLong { prompt: length, context: info.context });
    }
    if max_prompt_tokens > 0 && length > max_prompt_tokens {
        return Err(EngineError::Invalid(format!(
            "the prompt has {length} tokens; dataset.max_prompt_tokens is {max_prompt_tokens}"
        )));
    }
    Ok(Interaction {
        model: info.name.clone(),
        metadata: prompt.metadata.clone(),
        params: SamplingParams {
            temperature: context.config.temperature,
            max_tokens: context.config.max_tokens,
            ..SamplingParams::default()
        },
        prompt_ids,
        template_hash: codec.template_hash().to_owned(),
        ..Interaction::new(PromptSource::Dataset, route, prompt.messages.clone())
    })
}
