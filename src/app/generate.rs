//! `hone generate`: completions from a model and an adapter, without a daemon.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{bail, ensure};
use serde::Serialize;

use hone_core::metrics::Metrics;
use hone_core::types::{FinishReason, Message, PolicyVersion, SamplingParams};
use hone_dataset::with_configured_context;
use hone_engine::{Codec, Engine, Event, GenerateRequest, ModelDir, Priority, Publisher};
use hone_sampler::BatchedPublisher;
use hone_store::LEDGER;

use super::adapters::{FoundVersion, VersionChoice, find};
use super::engines::{NativePurpose, load_base, start_native};
use super::{open_model, owner};
use crate::config::Config;

/// The weights that generate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// The active version of the data directory; the model alone if the directory has no ledger.
    #[default]
    Default,
    Version(VersionChoice),
    Base,
    Adapter(PathBuf),
}

/// The options of `hone generate` that are not in the configuration.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The conversation, to which `dataset.system_prompt` and `dataset.few_shot` are added.
    pub messages: Vec<Message>,
    pub weights: Weights,
    /// Sampling parameters. Completion `i` has the seed `seed + i`.
    pub params: SamplingParams,
    pub samples: u64,
}

/// The result of `hone generate`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Generated {
    pub model: String,
    /// The version or the directory of the adapter, or "the base model".
    pub weights: String,
    /// The completions, in the order of their seeds.
    pub completions: Vec<GeneratedText>,
}

/// One completion of `hone generate`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GeneratedText {
    /// The text, without stop token.
    pub text: String,
    pub finish: FinishReason,
    /// Sampled tokens, the stop token included.
    pub tokens: usize,
}

/// Generates one completion at a time on the native engine, whatever `engine.backend` is. Changes nothing in the data directory,
/// except that the embedded model is unpacked and a model of the hub is downloaded there. `chosen` receives
/// [`Generated::weights`], and `write` the next text of the completion with an index.
///
/// # Errors
/// If the model or the adapter cannot be loaded, the data directory belongs to another model, or the
/// prompt is longer than the context.
pub async fn run(
    config: &Config,
    options: &GenerateOptions,
    chosen: impl FnOnce(&str),
    mut write: impl FnMut(u64, &str) -> io::Result<()>,
) -> anyhow::Result<Generated> {
    let dir = open_model(config, &config.data.dir).await?;
    let (label, version, adapter) = match choose(config, &dir, &options.weights)? {
        Some(FoundVersion { label, version, adapter: Some(adapter) }) => {
            (label, version, Some(adapter))
        }
        _ => ("the base model".to_owned(), PolicyVersion::BASE, None),
    };
    chosen(&label);
    let metrics = Arc::new(Metrics::new()?);
    let base = load_base(config, &dir).await?;
    let (codec, purpose) = (Arc::new(Codec::load(&dir)?), NativePurpose::Sampling);
    let engine = start_native(config, &dir, &base, codec, purpose, Arc::new(|| false), metrics)?;
    let publisher = BatchedPublisher::new(None, Arc::clone(&engine));
    publisher.stage(version, adapter.as_deref()).await?;
    publisher.activate().await?;
    let messages = with_configured_context(&config.dataset, options.messages.clone());
    let prompt_ids = engine.codec().prompt(&messages)?;
    let mut completions = Vec::new();
    for index in 0..options.samples {
        let seed = options.params.seed.wrapping_add(index);
        // A shadow request reports its tokens only at the end.
        let request = GenerateRequest::new(
            prompt_ids.clone(),
            SamplingParams { seed, ..options.params.clone() },
            Priority::Live,
        );
        let mut generation = engine.generate(request).await?;
        let (mut text, mut tokens, mut ended) = (String::new(), 0, None);
        while let Some(event) = generation.events.recv().await {
            let piece = match event {
                Event::Token(token) => {
                    tokens += 1;
                    token.text
                }
                Event::Done { finish, text, .. } => {
                    ended = Some(finish);
                    text
                }
                Event::Failed(error) => return Err(error.into()),
            };
            write(index, &piece)?;
            text.push_str(&piece);
        }
        let Some(finish) = ended else { bail!("the completion has no end") };
        completions.push(GeneratedText { text, finish, tokens });
    }
    Ok(Generated { model: dir.name, weights: label, completions })
}

/// The adapter to use; `None` is the model alone.
fn choose(
    config: &Config,
    model: &ModelDir,
    weights: &Weights,
) -> anyhow::Result<Option<FoundVersion>> {
    let data = &config.data.dir;
    let choice = match weights {
        Weights::Base => return Ok(None),
        Weights::Adapter(path) => {
            let (label, version) = (path.display().to_string(), PolicyVersion(1));
            return Ok(Some(FoundVersion { label, version, adapter: Some(path.clone()) }));
        }
        Weights::Default if !data.join(LEDGER).exists() => return Ok(None),
        Weights::Default => VersionChoice::Active,
        Weights::Version(choice) => *choice,
    };
    let owner = owner(data, model)?;
    if let Some(owner) = owner.filter(|owner| *owner != model.name) {
        // A merged model already contains an adapter of this directory, which must not be added again.
        ensure!(
            *weights != Weights::Default,
            "data.dir {} belongs to the model {owner}, and this model is {}: choose --base for the \
             model alone, or --version N or --best for an adapter of the directory",
            data.display(),
            model.name,
        );
    }
    find(data, choice).map(Some)
}
