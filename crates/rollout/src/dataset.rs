//! The dataset's prompts as jobs: what [`hone_dataset`] draws, tokenised for the engine.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hone_core::types::{Interaction, InteractionId, PromptSource, SamplingParams, now_ms};
use hone_dataset::{DatasetConfig, Prompt, PromptSampler, PromptSamplerState};
use hone_reward::{Route, Routes};

use super::queue::PromptJob;
use super::{RolloutError, Shared};

/// How long a daemon that is killed may have drawn prompts that the next start draws again.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// The prompts to train on, drawn in the configured order.
pub(super) struct DatasetPrompts {
    sampler: PromptSampler,
    /// By stage.
    routes: Vec<Arc<Route>>,
    /// Longest prompt in tokens; 0 as the context allows.
    max_tokens: usize,
    /// Where the sampler's state is kept, if anywhere.
    kept: Option<PathBuf>,
    saved: Instant,
}

impl DatasetPrompts {
    /// Reads and checks the file; the error names the line or the key. `route` scores the stages
    /// that name none. It goes on where the state `kept` was left by an earlier daemon.
    pub fn load(
        config: &DatasetConfig,
        route: &str,
        routes: &Routes,
        kept: Option<PathBuf>,
    ) -> Result<Self, RolloutError> {
        let fail = |error: hone_dataset::DatasetError| RolloutError::Dataset(error.to_string());
        let graded = |key, name: &str| {
            let route = routes.require(key, name)?;
            if route.has_graders() {
                return Ok(Arc::clone(route));
            }
            Err(RolloutError::UnscoredRoute { key, route: name.to_owned() })
        };
        let default = graded("rollout.dataset_route", route)?;
        let dataset = hone_dataset::Dataset::open(config).map_err(fail)?;
        tracing::info!(report = %dataset.report, "dataset opened");
        let sampler = match kept.as_deref().and_then(read_state) {
            None => PromptSampler::new(&dataset.train, config).map_err(fail)?,
            Some(state) => PromptSampler::resume(&dataset.train, config, state).or_else(|error| {
                tracing::warn!(%error, "the dataset begins anew: what was kept does not go with it");
                PromptSampler::new(&dataset.train, config).map_err(fail)
            })?,
        };
        let stages = sampler.curriculum().stages();
        let routes = stages.map(|stage| match &stage.route {
            Some(name) => graded("dataset.stage.route", name),
            None => Ok(Arc::clone(&default)),
        });
        let routes = routes.collect::<Result<_, _>>()?;
        let (max_tokens, saved) = (config.max_prompt_tokens, Instant::now());
        Ok(Self { sampler, routes, max_tokens, kept, saved })
    }

    /// Keeps where it is, whole or not at all. What goes wrong costs the next start its place.
    pub fn save(&mut self) {
        self.saved = Instant::now();
        let Some(path) = &self.kept else { return };
        let whole = path.with_extension("tmp");
        let written = serde_json::to_vec(&self.sampler.state())
            .map_err(std::io::Error::from)
            .and_then(|bytes| std::fs::write(&whole, bytes))
            .and_then(|()| std::fs::rename(&whole, path));
        if let Err(error) = written {
            tracing::warn!(%error, file = %path.display(), "the dataset's place is not kept");
        }
    }

    /// Whether the next group takes a live prompt; see [`PromptSampler::takes_live`].
    pub fn takes_live(&mut self, waits: bool) -> bool {
        self.sampler.takes_live(waits)
    }

    /// The next prompt as a job. Prompts that the model cannot take are left out for good.
    pub fn next_job(&mut self, shared: &Shared) -> Option<PromptJob> {
        if self.saved.elapsed() > SAVE_EVERY {
            self.save();
        }
        for (prompt, rewards) in shared.outcomes().drain(..) {
            self.sampler.report(prompt, &rewards);
        }
        let last = shared.store.last_step().ok().flatten();
        let step = last.map_or(1, |last| last.step + 1);
        while let Some(draw) = self.sampler.next(step) {
            let (prompt, route) = (&draw.prompt, self.routes.get(draw.stage)?);
            match interaction(shared, &route.name, prompt, self.max_tokens) {
                Ok(interaction) => {
                    let job = PromptJob::fresh(Arc::new(interaction), Arc::clone(route));
                    return Some(PromptJob { prompt: Some(prompt.id), ..job });
                }
                Err(reason) => {
                    tracing::warn!(place = %prompt.place, %reason, "a dataset prompt is left out");
                    shared.skip("dataset_prompt");
                    self.sampler.leave_out(prompt.id);
                }
            }
        }
        None
    }
}

/// What an earlier daemon kept; a file that is torn or of another form is as none.
fn read_state(path: &Path) -> Option<PromptSamplerState> {
    let bytes = std::fs::read(path).ok()?;
    let state = serde_json::from_slice(&bytes);
    state.map_err(|error| tracing::warn!(%error, file = %path.display(), "not understood")).ok()
}

fn interaction(
    shared: &Shared,
    route: &str,
    prompt: &Prompt,
    max_tokens: usize,
) -> Result<Interaction, String> {
    let codec = shared.engine.codec();
    let info = shared.engine.info();
    let prompt_ids = codec.prompt(&prompt.messages).map_err(|error| error.to_string())?;
    if prompt_ids.len() >= info.context {
        let (length, context) = (prompt_ids.len(), info.context);
        return Err(format!("it has {length} tokens; the model's context holds {context}"));
    }
    if max_tokens > 0 && prompt_ids.len() > max_tokens {
        let length = prompt_ids.len();
        return Err(format!("it has {length} tokens; dataset.max_prompt_tokens is {max_tokens}"));
    }
    Ok(Interaction {
        id: InteractionId::new(),
        created: now_ms(),
        source: PromptSource::Dataset,
        route: route.to_owned(),
        model: info.name.clone(),
        key_id: None,
        messages: prompt.messages.clone(),
        metadata: prompt.metadata.clone(),
        params: SamplingParams {
            temperature: shared.config.temperature,
            max_tokens: shared.config.max_tokens,
            ..SamplingParams::default()
        },
        prompt_ids,
        template_hash: codec.template_hash().to_owned(),
    })
}

impl fmt::Debug for DatasetPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatasetPrompts")
            .field("prompts", &self.sampler.len())
            .finish_non_exhaustive()
    }
}
