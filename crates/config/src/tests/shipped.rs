//! The configurations in `configs/examples/guides` are valid and have the values that the guides recommend.

use hone_model::adapter::LinearKind;
use hone_train::config::{OptimizerKind, PeakRate, Recompute, ScheduleKind};

use crate::{Config, load_from, validate};

fn shipped(name: &str) -> Config {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../configs/examples/guides")
        .join(name);
    let config = load_from(Some(&path), []).unwrap();
    validate(&config).unwrap();
    config
}

/// Checks the values that both guides share.
fn common(config: &Config) {
    let train = &config.train;
    assert_eq!((train.lora.r, train.lora.alpha), (16, 32.0));
    assert_eq!(train.lora.target_modules, LinearKind::ALL.map(LinearKind::as_str).into());
    assert_eq!((train.clip_low, train.clip_high), (0.2, 0.2));
    // A tenth of the run is warm-up, and the run is one epoch.
    assert_eq!((train.warmup_steps, train.epochs, train.lora.dropout), (Some(0.1), 1.0, 0.05));
    // A step consists of whole groups.
    assert_eq!(train.samples_per_step % config.rollout.group_size, 0);
}

#[test]
fn memory_optimized_configuration() {
    let config = shipped("memory-optimized.toml");
    common(&config);
    let (train, rollout) = (&config.train, &config.rollout);
    assert_eq!(train.learning_rate, PeakRate::Fixed(5e-6));
    assert_eq!(
        (train.optimizer.beta1, train.optimizer.beta2, train.weight_decay),
        (0.9, 0.99, 0.1)
    );
    assert_eq!((train.schedule.kind, train.max_grad_norm), (ScheduleKind::Cosine, 0.1));
    assert_eq!(
        (train.optimizer.kind, train.recompute),
        (OptimizerKind::AdamW8bit, Recompute::Always)
    );
    assert_eq!((rollout.group_size, rollout.max_tokens), (8, 512));
    assert_eq!(config.dataset.max_prompt_tokens, 256);
    assert_eq!(train.samples_per_step / rollout.group_size, 4);
}

#[test]
fn high_performance_configuration() {
    let config = shipped("high-performance.toml");
    common(&config);
    let (train, rollout) = (&config.train, &config.rollout);
    assert_eq!(train.learning_rate, PeakRate::Fixed(1e-5));
    assert_eq!((rollout.group_size, rollout.max_tokens), (16, 1024));
    assert_eq!(config.dataset.max_prompt_tokens, 512);
    assert_eq!(train.samples_per_step / rollout.group_size, 8);
}
