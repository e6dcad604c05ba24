//! Fixtures of the unit tests.

use candle_core::DType;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_model::adapter::LoraConfig;
use hone_reward::Routes;
use hone_reward::routes::RouteList;

use crate::config::TrainConfig;
use crate::data::packing::TrainSample;
use crate::learning::learner::Learner;

pub(crate) use hone_model::testing::{tiny_model, tiny_spec};

/// Settings that train all seven linear layers with rank 2 and have a KL term.
pub(crate) fn tiny_config() -> TrainConfig {
    TrainConfig {
        learning_rate: 1e-2,
        beta: 0.1,
        micro_batch: 64,
        max_sampler_difference: 0.0,
        lora: LoraConfig { r: 2, alpha: 4.0, ..LoraConfig::default() },
        ..TrainConfig::default()
    }
}

/// A learner over the tiny model.
pub(crate) fn tiny_learner(config: &TrainConfig) -> Learner {
    Learner::with_model(tiny_model(DType::F32), config).unwrap()
}

/// Samples of different lengths and temperatures with random log-probabilities.
pub(crate) fn random_samples(count: usize, seed: u64) -> Vec<TrainSample> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let vocab = tiny_spec().vocab_size as u32;
    (0..count)
        .map(|i| {
            let mut ids = |n: usize| (0..n).map(|_| rng.random_range(0..vocab)).collect();
            let (prompt_ids, ids): (Vec<u32>, Vec<u32>) = (ids(3 + i % 5), ids(1 + (i * 7) % 11));
            TrainSample {
                logprobs: ids.iter().map(|_| rng.random_range(-8.0..-4.0)).collect(),
                prompt_ids,
                ids,
                temperature: [1.0, 0.7, 1.3][i % 3],
                advantage: rng.random_range(-2.0..2.0),
                version: 1,
                truncated: false,
            }
        })
        .collect()
}

/// Log-probabilities of a sample's ids under the served policy.
pub(crate) fn score(learner: &Learner, sample: &TrainSample) -> Vec<f32> {
    let policy = learner.snapshot().unwrap();
    policy.score(&sample.prompt_ids, &sample.ids, sample.temperature).unwrap()
}

/// Replaces recorded log-probabilities with those of the served policy plus noise within `±spread`.
pub(crate) fn record(learner: &Learner, samples: &mut [TrainSample], spread: f32, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for sample in samples {
        let own = score(learner, sample);
        sample.logprobs = own.iter().map(|l| l + rng.random_range(-1.0..1.0) * spread).collect();
    }
}

/// The routes of a configuration's `[[route]]` tables.
pub(crate) fn routes(text: &str) -> Routes {
    #[derive(serde::Deserialize)]
    struct Tables {
        route: RouteList,
    }
    Routes::new(&toml::from_str::<Tables>(text).unwrap().route).unwrap()
}
