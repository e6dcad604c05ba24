//! The daemon's configuration for each run.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{LoraConfig, peft};
use hone_rollout::RolloutConfig;
use hone_train::policy::{CanaryConfig, CanaryLimit, GateConfig, PolicyConfig, Promotion};

use super::scenario::SafetyScenario;
use super::verdict::is_judged_by_windows;
use crate::train::Subject;
use hone_config::{Config, LogConfig};
use hone_demo::RewardsMode;
use hone_demo::config::{build, thumbs};

/// Bound of the damaged weights, which are several times those of a trained adapter.
const DAMAGE: f32 = 1.0;

/// The configuration of a daemon that only answers, to measure the base.
pub(crate) fn without_training(seed: u64, dir: &Path) -> Config {
    let mut config = usual(RewardsMode::Graded, seed, dir);
    config.train.enabled = false;
    config.rollout = RolloutConfig { enabled: false, ..config.rollout };
    config.policy.promotion = Promotion::Direct;
    config
}

/// The configuration of one run with its data in `dir`.
pub(crate) fn config(
    scenario: SafetyScenario,
    promotion: Promotion,
    seed: u64,
    dir: &Path,
) -> anyhow::Result<Config> {
    let graders = scenario.graders();
    let mode = if graders.is_empty() { RewardsMode::Feedback } else { RewardsMode::Both };
    let mut config = usual(mode, seed, dir);
    for route in config.routes.0.iter_mut().filter(|route| !route.rewards.is_empty()) {
        route.rewards = graders.clone();
        route.rewards.push(thumbs(scenario.thumbs_weight()));
    }
    scenario.set_train(&mut config.train);
    if scenario == SafetyScenario::CorruptAdapter {
        let adapter = dir.join("damaged");
        write_damaged(&adapter, &config.train.lora, seed)?;
        config.train.lora.init_adapter = adapter;
    }
    config.policy = policy(scenario, promotion);
    Ok(config)
}

/// The demo's configuration without an end of training.
fn usual(mode: RewardsMode, seed: u64, dir: &Path) -> Config {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let demo = build(mode, 0, seed, &dir.join("data"), cores);
    // Warnings about what a scenario breaks are expected.
    Config { log: LogConfig { level: "off".to_owned(), ..LogConfig::default() }, ..demo }
}

/// Prompts and groups that may wait for the trainer: those of the current step and the next one. With more,
/// users of a run that samples shadow completions would wait for the engines, and those of a run with
/// thumbs alone would end their requests before the trainer has used their ratings.
pub(crate) fn most_waiting(scenario: SafetyScenario, config: &Config) -> u64 {
    let is_sampled = !scenario.graders().is_empty();
    let group = if is_sampled { config.rollout.group_size } else { 1 };
    2 * (config.train.samples_per_step / group) as u64
}

/// Settings for the size of these runs: thousands of requests, and a model that learns its task in a
/// hundred steps.
fn policy(scenario: SafetyScenario, promotion: Promotion) -> PolicyConfig {
    let usual = PolicyConfig::default();
    PolicyConfig {
        promotion,
        publish_every: if promotion == Promotion::Direct { 1 } else { scenario.publish_every() },
        gate: GateConfig { prompts: 16, holdout_share: 0.05, ..usual.gate },
        canary: canary(scenario),
        keep_versions: match is_judged_by_windows(scenario, promotion) {
            // Every version that was promoted takes an exam after the run.
            true => 1 << 10,
            false => usual.keep_versions,
        },
        ..usual
    }
}

/// Larger first shares and fewer ratings than a service with more traffic would choose.
fn canary(scenario: SafetyScenario) -> CanaryConfig {
    let usual = CanaryConfig {
        stage_ratings: 10,
        margin: 0.1,
        max_ratings: 300,
        ..CanaryConfig::default()
    };
    match scenario {
        SafetyScenario::SparseThumbs => CanaryConfig {
            shares: vec![0.25, 0.5],
            stage_ratings: 3,
            // A few ratings find only large losses.
            margin: 0.2,
            max_ratings: 60,
            ..usual
        },
        // Where 30 % of the raters post the contrary, ratings show 0.4 of a true difference, and an estimate
        // from a thousand of them can be wrong by as much as the margin.
        SafetyScenario::InvertedRaters => CanaryConfig {
            shares: vec![0.25, 0.5],
            margin: 0.04,
            max_ratings: 1500,
            on_limit: CanaryLimit::RollBack,
            ..usual
        },
        // A candidate of more steps is worth a longer comparison.
        SafetyScenario::Honest => {
            CanaryConfig { shares: vec![0.1, 0.25, 0.5], max_ratings: 600, ..usual }
        }
        SafetyScenario::LateFeedback => CanaryConfig { shares: vec![0.25, 0.5], ..usual },
        _ => CanaryConfig { shares: vec![0.1, 0.25, 0.5], ..usual },
    }
}

/// Writes an adapter whose second factors are random.
fn write_damaged(dir: &Path, config: &LoraConfig, seed: u64) -> anyhow::Result<()> {
    let model = Subject::Embedded.load()?;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let lora = LoraWeights::fresh(model.spec(), config, &mut random, DType::F32, &Device::Cpu)?;
    for (name, var) in lora.parameters() {
        if name.contains("lora_B") {
            let values = (0..var.elem_count()).map(|_| random.random_range(-DAMAGE..DAMAGE));
            let values: Vec<f32> = values.collect();
            var.set(&Tensor::from_vec(values, var.dims().to_vec(), &Device::Cpu)?)?;
        }
    }
    Ok(peft::write(dir, &lora, config, "embedded")?)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn every_run_has_a_valid_configuration() {
        let dir = tempfile::tempdir().unwrap();
        for scenario in SafetyScenario::value_variants() {
            for promotion in [Promotion::Direct, Promotion::Gate, Promotion::Canary] {
                let config = config(*scenario, promotion, 1, dir.path()).unwrap();
                hone_config::validate(&config).unwrap();
                let text = toml::to_string(&config).unwrap();
                assert_eq!(hone_config::parse(&text).unwrap(), config, "{scenario}");
            }
        }
        hone_config::validate(&without_training(1, dir.path())).unwrap();
    }

    #[test]
    fn the_damaged_adapter_fits_the_model_and_changes_it() {
        let dir = tempfile::tempdir().unwrap();
        let config = LoraConfig::default();
        write_damaged(dir.path(), &config, 1).unwrap();
        let model = Subject::Embedded.load().unwrap();
        let (_, lora) = peft::read(dir.path(), model.spec(), DType::F32, &Device::Cpu).unwrap();
        let is_zero = |tensor: &Tensor| {
            let sum = tensor.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
            sum == 0.0
        };
        assert!(lora.parameters().iter().all(|(_, var)| !is_zero(var)));
    }
}
