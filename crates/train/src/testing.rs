//! Fixtures of the unit tests.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_core::metrics::Metrics;
use hone_core::testing as records;
use hone_core::types::{
    Group, Interaction, InteractionId, PolicyVersion, PromptSource, Reward, RewardSource, Sample,
    SampleId, SampleOrigin, TokenId, now_ms,
};
use hone_model::adapter::LoraConfig;
use hone_model::testing::family;
use hone_model::{Model, ModelDir, ModelSpec};
use hone_reward::Routes;
use hone_reward::feedback::Aggregate;
use hone_reward::routes::RouteList;
use hone_store::{CorrectionEntry, FeedbackEntry, Op, Store, StoreConfig};

use crate::config::{PeakRate, TrainConfig};
use crate::data::packing::TrainSample;
use crate::learning::learner::Learner;
use crate::policy::VersionRating;

pub(crate) use hone_model::testing::{tiny_model, tiny_spec};

/// A family's model in double precision.
pub(crate) fn family_model(name: &str) -> Model {
    let dir = ModelDir::open(&family(name)).unwrap();
    let all = dir
        .weights
        .iter()
        .flat_map(|file| candle_core::safetensors::load(file, &Device::Cpu).unwrap());
    let weights = all.map(|(name, weight)| (name, weight.to_dtype(DType::F64).unwrap()));
    Model::new(ModelSpec::from_config(&dir.config).unwrap(), weights.collect()).unwrap()
}

/// Settings that train all seven linear layers with rank 2 and have a KL term.
pub(crate) fn tiny_config() -> TrainConfig {
    TrainConfig {
        learning_rate: PeakRate::Fixed(1e-2),
        warmup_steps: Some(0.0),
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
                ..TrainSample::default()
            }
        })
        .collect()
}

/// The initial value of a tensor of the wide model, as in `tests/reference/learning/make_wide_cases.py`:
/// a hash of its name (FNV-1a) and of the value's index (lowbias32), scaled by its kind.
pub(crate) fn wide_tensor(name: &str, shape: &[usize]) -> Tensor {
    let columns = shape.last().copied().unwrap_or(1) as f64;
    let (center, scale) = match name {
        name if name.contains("norm") => (1.0, 0.2),
        name if name.contains("lora_B") || name.ends_with("bias") => (0.0, 0.1),
        _ => (0.0, (3.0 / columns).sqrt()),
    };
    let values = hashed(name, shape.iter().product());
    let values: Vec<f64> = values.iter().map(|value| center + scale * value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Values in `[-1, 1)`.
pub(crate) fn hashed(name: &str, count: usize) -> Vec<f64> {
    let fnv = |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    let seed = name.bytes().fold(0x811c_9dc5, fnv);
    let value = |index: u32| {
        let mut x = seed.wrapping_add(index);
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        f64::from(x ^ (x >> 16)) / f64::from(1_u32 << 31) - 1.0
    };
    (0..count as u32).map(value).collect()
}

/// The weights of the wide model, in double precision.
pub(crate) fn wide_weights(spec: &ModelSpec) -> HashMap<String, Tensor> {
    let weight = |(name, shape): (String, Vec<usize>)| {
        let tensor = wide_tensor(&name, &shape);
        (name, tensor)
    };
    spec.weight_shapes().into_iter().map(weight).collect()
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

/// A rating of a version's completion, without a key.
pub(crate) fn version_rating(version: u64, value: f64) -> VersionRating {
    VersionRating {
        version: PolicyVersion(version),
        unit: SampleId::new().0.into_bytes(),
        rated: now_ms(),
        sampled: now_ms(),
        route: "chat".to_owned(),
        part: "thumbs".to_owned(),
        value,
        key: None,
        max_key_share: 1.0,
        keys: 0,
    }
}

// Records of a ledger.

/// A ledger in a directory.
pub(crate) fn open_store(dir: &Path) -> Store {
    let metrics = Arc::new(Metrics::new().unwrap());
    Store::open(&dir.join("ledger.redb"), &StoreConfig::default(), metrics).unwrap()
}

/// A client's prompt.
pub(crate) fn interaction(id: InteractionId, route: &str, prompt_ids: Vec<TokenId>) -> Interaction {
    let asked = Interaction::new(PromptSource::Live, route, Vec::new());
    Interaction { id, created: 1, prompt_ids, ..asked }
}

/// A served completion of one token.
pub(crate) fn sample(interaction: InteractionId, version: u64) -> Sample {
    let sample = Sample::new(interaction, SampleOrigin::Served, PolicyVersion(version));
    Sample { created: 2, ids: vec![1], logprobs: vec![-1.0], ..sample }
}

/// A ready group of samples with one reward part.
pub(crate) fn group(route: &str, part: &str, members: &[Sample], created: u64) -> Group {
    Group { created, ..records::group(route, part, members) }
}

/// The value of a part.
pub(crate) fn reward(
    sample: SampleId,
    part: &str,
    value: Option<f64>,
    source: RewardSource,
) -> Reward {
    Reward { source, created: 7, ..Reward::graded(sample, part, value) }
}

/// A rating of the part `stars`.
pub(crate) fn rating(
    interaction: InteractionId,
    value: f64,
    key_id: Option<&str>,
    created: u64,
) -> Op {
    Op::Feedback(vec![FeedbackEntry {
        interaction,
        choice: 0,
        name: "stars".to_owned(),
        value: Some(value),
        comment: None,
        idempotency_key: None,
        key_id: key_id.map(str::to_owned),
        created,
        aggregate: Aggregate::Mean,
        elsewhere: None,
    }])
}

/// A correction of a completion.
pub(crate) fn correction(
    interaction: InteractionId,
    ids: Vec<TokenId>,
    key_id: Option<&str>,
    created: u64,
) -> Op {
    Op::Correction(Box::new(CorrectionEntry {
        interaction,
        choice: 0,
        text: "better".to_owned(),
        ids,
        unused: None,
        rating: None,
        comment: None,
        idempotency_key: None,
        key_id: key_id.map(str::to_owned),
        created,
    }))
}

/// The routes of a configuration's `[[route]]` tables.
pub(crate) fn routes(text: &str) -> Routes {
    let tables: HashMap<String, RouteList> = toml::from_str(text).unwrap();
    Routes::new(&tables["route"]).unwrap()
}
