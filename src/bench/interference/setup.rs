//! The options, and the daemon's configuration.

use std::path::Path;

use anyhow::Context;
use serde_json::json;

use hone_dataset::DatasetConfig;
use hone_engine::EngineBackend;
use hone_model::weights::Quantize;
use hone_reward::kinds::{Length, LengthUnit, RewardKind};
use hone_reward::routes::RewardConfig;
use hone_rollout::{RolloutConfig, SamplerKind};
use hone_train::config::{PeakRate, ScheduleKind, TrainConfig};

use crate::config::{Config, LogConfig};
use crate::demo::RewardsMode;
use crate::demo::config::{GROUP_SIZE, TASK_ASKED, serve_with};
use crate::demo::task::{QuestionSplit, Questions};

/// Prompts of the rollouts.
const PROMPTS: usize = 512;

/// Samples of a step of another model than the embedded one: two groups. Such a step ends within a round
/// although clients leave it a fraction of the time, and the trainer begins the next one at once.
const SAMPLES_OF_LARGER: usize = 2 * GROUP_SIZE;

/// `train.max_tokens` of such a model, so that the memory plan counts no longer samples. A question and its
/// answer take about a hundred tokens; a step of wide models computes up to so many at once.
const MAX_TOKENS_OF_LARGER: usize = 1024;

/// The options of `hone bench interference`.
#[derive(Clone, Debug)]
pub struct InterferenceOptions {
    /// Rounds of idle and busy.
    pub rounds: u32,
    /// Seconds of each condition in a round.
    pub seconds: f64,
    /// Clients, each with one request at a time.
    pub users: usize,
    /// Mean pause of a client between requests in milliseconds. Pauses are uniform from 0 to twice as
    /// much.
    pub pause_ms: f64,
    /// A Hugging Face directory or a hub id; `None` for the embedded model.
    pub model: Option<String>,
    /// The engine of the clients.
    pub backend: EngineBackend,
    /// The sampler of the rollouts.
    pub sampler: SamplerKind,
    /// Changes of the active version in all rounds together; 0 leaves out this condition.
    pub changes: u32,
    /// `model.quantize`
    pub quantize: Quantize,
    /// `train.serving_share`; `None` is the default.
    pub serving_share: Option<f64>,
}

/// The daemon's configuration: endless rollouts from a dataset, with a tiny learning rate, because a
/// model that learned the task would leave nothing to train on.
pub(super) fn config(options: &InterferenceOptions, dir: &Path) -> anyhow::Result<Config> {
    let dataset = dir.join("prompts.jsonl");
    let rows = Questions::new(1, QuestionSplit::Asked).take(PROMPTS).map(|question| {
        json!({"prompt": question.text(), "answer": question.answer().to_string()}).to_string()
            + "\n"
    });
    std::fs::write(&dataset, rows.collect::<String>()).context("cannot write the prompts")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut demo = crate::demo::config::build(RewardsMode::Graded, 1, 1, &dir.join("data"), cores);
    serve_with(&mut demo, options.backend);
    demo.model.quantize = options.quantize;
    if let Some(share) = options.serving_share {
        demo.train.serving_share = share;
    }
    if let Some(model) = &options.model {
        demo.model.path.clone_from(model);
        demo.train.samples_per_step = SAMPLES_OF_LARGER;
        demo.train.max_tokens = MAX_TOKENS_OF_LARGER;
        // Another model may answer every question of a group equally well or badly, which leaves nothing
        // to train on. The lengths of its answers differ.
        let (ideal, unit) = (120, LengthUnit::Characters);
        let length = Length { ideal, spread: 2 * ideal, unit, shape: Default::default() };
        let length = RewardConfig::new("length", 0.5, RewardKind::Length(length));
        for route in demo.routes.0.iter_mut().filter(|route| !route.rewards.is_empty()) {
            route.rewards.push(length.clone());
        }
    }
    // The time from token to token is that of the engine.
    demo.server.stream_interval_ms = 0;
    Ok(Config {
        dataset: DatasetConfig { path: dataset, ..DatasetConfig::default() },
        // Warnings that nothing is learned are expected.
        log: LogConfig { level: "error".to_owned(), ..LogConfig::default() },
        rollout: RolloutConfig {
            sampler: options.sampler,
            dataset_route: TASK_ASKED.to_owned(),
            group_size: GROUP_SIZE,
            ..demo.rollout.clone()
        },
        train: TrainConfig {
            max_steps: 0,
            total_steps: 0,
            learning_rate: PeakRate::Fixed(1e-7),
            min_learning_rate: 0.0,
            schedule: ScheduleKind::Constant,
            ..demo.train.clone()
        },
        ..demo
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_valid_as_a_file() {
        for (backend, model, parts) in [
            (EngineBackend::Mistralrs, None, 2),
            (EngineBackend::Native, Some("models/embedded".to_owned()), 3),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let options = InterferenceOptions {
                rounds: 1,
                seconds: 1.0,
                users: 1,
                pause_ms: 10.0,
                model,
                backend,
                sampler: SamplerKind::Engine,
                changes: 0,
                quantize: Quantize::None,
                serving_share: Some(0.25),
            };
            let config = config(&options, dir.path()).unwrap();
            crate::config::validate(&config).unwrap();
            assert_eq!(crate::config::parse(&toml::to_string(&config).unwrap()).unwrap(), config);
            assert_eq!(config.train.serving_share, 0.25);
            let samples = if options.model.is_some() { 16 } else { 64 };
            assert_eq!(config.train.samples_per_step, samples);
            assert_eq!(config.model.path, options.model.unwrap_or_default());
            let trained = config.routes.0.iter().find(|route| route.name == TASK_ASKED).unwrap();
            assert_eq!(trained.rewards.len(), parts);
            let rows = std::fs::read_to_string(config.dataset_in_use().unwrap().path).unwrap();
            assert_eq!(rows.lines().count(), PROMPTS);
        }
    }
}
