//! The gate's prompts and rewards.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;

use hone_core::types::{Interaction, InteractionId, PromptSource, SamplingParams, now_ms};
use hone_dataset::{Dataset, DatasetConfig, Prompt};
use hone_engine::Engine;
use hone_reward::Routes;
use hone_reward::routes::RouteConfig;
use hone_store::Store;
use hone_train::monitoring::warnings::RewardRoles;
use hone_train::policy::{ExamPrompt, Examiner};

use crate::config::Config;

/// What the gate needs. Reads the exam's file, if there is one.
pub(super) fn examiner(
    config: &Config,
    engine: &Arc<dyn Engine>,
    store: &Store,
    routes: &Arc<Routes>,
) -> anyhow::Result<Examiner> {
    let gate = &config.policy.gate;
    let parts: Vec<_> = config.routes.0.iter().flat_map(RouteConfig::parts).collect();
    let roles = RewardRoles::of(parts.iter().map(|part| (part.name.as_str(), part.kind.name())));
    let exam = if gate.exam_file.is_empty() {
        Vec::new()
    } else {
        exam_prompts(config, engine, routes).context("policy.gate.exam_file")?
    };
    let max_tokens = if gate.max_tokens > 0 { gate.max_tokens } else { config.rollout.max_tokens };
    Ok(Examiner {
        engine: Arc::clone(engine),
        routes: Arc::clone(routes),
        store: store.clone(),
        temperature: config.rollout.temperature,
        max_tokens,
        exam,
        format_parts: roles.format,
    })
}

/// The rows of the exam's file, which the dataset's route scores.
fn exam_prompts(
    config: &Config,
    engine: &Arc<dyn Engine>,
    routes: &Arc<Routes>,
) -> anyhow::Result<Vec<ExamPrompt>> {
    let route = routes.require("rollout.dataset_route", &config.rollout.dataset_route)?;
    let file = DatasetConfig {
        path: Path::new(&config.policy.gate.exam_file).to_owned(),
        eval_path: Default::default(),
        ..config.dataset.clone()
    };
    let Dataset { train, held_out, .. } = Dataset::open(&file)?;
    train.iter().chain(&held_out).map(|prompt| exam_prompt(prompt, engine, route)).collect()
}

fn exam_prompt(
    prompt: &Arc<Prompt>,
    engine: &Arc<dyn Engine>,
    route: &Arc<hone_reward::Route>,
) -> anyhow::Result<ExamPrompt> {
    let interaction = Interaction {
        id: InteractionId::new(),
        created: now_ms(),
        source: PromptSource::Dataset,
        route: route.name.clone(),
        model: engine.info().name.clone(),
        endpoint: Default::default(),
        key_id: None,
        messages: prompt.messages.clone(),
        metadata: prompt.metadata.clone(),
        params: SamplingParams::default(),
        prompt_ids: engine.codec().prompt(&prompt.messages)?,
        template_hash: engine.codec().template_hash().to_owned(),
        stop: Vec::new(),
        held_out: true,
        chat: Default::default(),
        grammar: None,
        continues: None,
    };
    Ok(ExamPrompt {
        interaction: Arc::new(interaction),
        route: Some(Arc::clone(route)),
        held_out: true,
    })
}
