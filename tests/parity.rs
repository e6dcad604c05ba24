//! Sampler and trainer agree: the trainer recomputes the log-probabilities that the engine records, for
//! the base model and for adapters on all or some modules. An engine that does not agree is not served.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests may fail loudly and print differences"
)]

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, PolicyVersion, Role, SamplingParams, TokenId};
use hone_engine::{
    Codec, Completion, Engine, EngineConfig, GenerateRequest, ModelDir, Priority, Publisher,
};
use hone_mistral::MistralEngine;
use hone_model::adapter::{LinearKind, LoraConfig, Modules, Patterns};
use hone_model::weights::{LoadOptions, Quantize};
use hone_sampler::{BatchedEngine, BatchedPublisher, SamplerConfig};
use hone_store::{Store, StoreConfig};
use hone_train::config::{PeakRate, TrainConfig};
use hone_train::policy::{
    Candidate, PARITY_TOLERANCE, Policies, PolicyConfig, PolicySetup, PublishOutcome, ScoredBy,
};
use hone_train::{LearnError, Learner, Snapshot, TrainSample};

/// Difference that the order of f32 sums explains.
const TOLERANCE: f32 = 1e-4;

/// Difference that the native engine's rounding of activations to 16 bits explains, where weights are
/// quantized: logits differ by about 1e-4 of the largest one, which is 10 to 20 in these models.
const ROUNDED: f32 = 3e-3;

struct Pair {
    engine: Arc<MistralEngine>,
    native: Arc<BatchedEngine>,
    learner: Learner,
    files: tempfile::TempDir,
    /// Prompts of six tokens and completions of up to twelve, for models with short windows.
    short: bool,
}

impl Pair {
    fn new(model: &str, lora: LoraConfig, short: bool) -> Self {
        let files = tempfile::tempdir().unwrap();
        let dir = ModelDir::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(model)).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let config = EngineConfig { queue: 8, ..EngineConfig::default() };
        let engine = MistralEngine::start(&dir, files.path(), &config, metrics.clone()).unwrap();
        let config = train_config(lora);
        let learner = Learner::new(&dir, config.base_dtype, &config).unwrap();
        let native = start_native(&dir, &learner, engine.codec().clone(), metrics);
        Self { engine, native, learner, files, short }
    }

    fn prompt(&self, seed: u64) -> Vec<TokenId> {
        prompt(self.engine.codec(), seed, self.short)
    }

    /// Greedy completions of the engine and of the native sampler have the same log-probabilities and,
    /// up to the first tie, the same ids. Returns the number of equal ids.
    async fn compare_greedy(&self) -> usize {
        let mut compared = 0;
        for seed in 0..4 {
            let prompt = self.prompt(seed);
            let served = sample(&*self.engine, &prompt, (seed, 0.0), self.short).await;
            let sampled = sample(&*self.native, &prompt, (seed, 0.0), self.short).await;
            assert_eq!(served.version, sampled.version);
            for (served, sampled) in served.tokens.iter().zip(&sampled.tokens) {
                let difference = (served.logprob - sampled.logprob).abs();
                assert!(difference < TOLERANCE, "{served:?} against {sampled:?}");
                if served.id != sampled.id {
                    break;
                }
                compared += 1;
            }
        }
        compared
    }

    /// [`compare`] for mistral.rs.
    async fn compare(&self) -> (f32, Vec<TrainSample>) {
        compare(&self.learner, &*self.engine, self.short).await
    }
}

fn train_config(lora: LoraConfig) -> TrainConfig {
    TrainConfig {
        lora,
        learning_rate: PeakRate::Fixed(0.02),
        warmup_steps: Some(0.0),
        ..TrainConfig::default()
    }
}

/// The native engine on the learner's weights.
fn start_native(
    dir: &ModelDir,
    learner: &Learner,
    codec: Arc<Codec>,
    metrics: Arc<Metrics>,
) -> Arc<BatchedEngine> {
    let config = SamplerConfig { context: dir.context(), ..SamplerConfig::default() };
    BatchedEngine::start(learner.model(), codec, config, Arc::new(|| false), metrics).unwrap()
}

/// A question, or six tokens for models with short windows.
fn prompt(codec: &Codec, seed: u64, short: bool) -> Vec<TokenId> {
    if short {
        return (0..6).map(|i| 3 + ((seed as TokenId) * 7 + i * 5) % 80).collect();
    }
    let text = format!("What is {seed} + 17?");
    let message = Message::new(Role::User, text);
    codec.prompt(&[message]).unwrap()
}

async fn sample(
    engine: &dyn Engine,
    prompt: &[TokenId],
    (seed, temperature): (u64, f32),
    short: bool,
) -> Completion {
    let max_tokens = if short { 12 } else { 40 };
    let params = SamplingParams { seed, temperature, max_tokens, ..Default::default() };
    let request = GenerateRequest::new(prompt.to_vec(), params, Priority::Live);
    engine.generate(request).await.unwrap().collect().await.unwrap()
}

/// Samples from an engine at several temperatures. Returns the largest difference between its
/// log-probabilities and the trainer's, and the samples.
async fn compare(learner: &Learner, engine: &dyn Engine, short: bool) -> (f32, Vec<TrainSample>) {
    let (mut largest, mut samples) = (0.0_f32, Vec::new());
    let policy = learner.snapshot().unwrap();
    for seed in 0..12 {
        let prompt = prompt(engine.codec(), seed, short);
        let temperature = [1.0, 0.7, 1.5][seed as usize % 3];
        let completion = sample(engine, &prompt, (seed, temperature), short).await;
        let ids: Vec<TokenId> = completion.tokens.iter().map(|t| t.id).collect();
        let logprobs: Vec<f32> = completion.tokens.iter().map(|t| t.logprob).collect();
        let scored = policy.score(&prompt, &ids, temperature).unwrap();
        assert_eq!(scored.len(), logprobs.len());
        for (served, trained) in logprobs.iter().zip(&scored) {
            largest = largest.max((served - trained).abs());
        }
        let advantage = if seed % 2 == 0 { 1.0 } else { -1.0 };
        let version = completion.version.0;
        samples.push(TrainSample {
            prompt_ids: prompt,
            ids,
            logprobs,
            masked: Vec::new(),
            temperature,
            advantage,
            version,
            truncated: false,
            late: false,
            correction: false,
        });
    }
    (largest, samples)
}

async fn agrees(model: &str, modules: &str, lora: LoraConfig, short: bool) {
    let mut pair = Pair::new(model, lora, short);
    let (base, mut samples) = pair.compare().await;
    println!("{model}, {modules}, base: {base:.1e}");
    assert!(base < TOLERANCE, "{model}: {base}");
    assert!(pair.compare_greedy().await > 20, "{model}: the completions differ too soon");
    for version in 1..=2 {
        let stats = pair.learner.step(&samples, version - 1, 40).unwrap();
        assert_eq!((stats.skipped, stats.refused), (None, Vec::new()));
        let dir = pair.files.path().join(format!("adapter-{version}"));
        std::fs::create_dir(&dir).unwrap();
        pair.learner.snapshot().unwrap().write(&dir, "model").unwrap();
        pair.engine.stage(PolicyVersion(version), Some(&dir)).await.unwrap();
        pair.engine.activate().await.unwrap();
        pair.native.publish(PolicyVersion(version), Some(pair.learner.served())).unwrap();
        let before = samples;
        let (difference, after) = pair.compare().await;
        println!("{model}, {modules}, version {version}: {difference:.1e}");
        assert!(difference < TOLERANCE, "{model}: {difference}");
        assert!(pair.compare_greedy().await > 20, "{model}: the completions differ too soon");
        // The published version must differ, or agreement would prove nothing.
        assert!(before.iter().zip(&after).any(|(b, a)| b.logprobs != a.logprobs));
        samples = after;
    }
}

fn rank_four() -> LoraConfig {
    LoraConfig { r: 4, ..LoraConfig::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_model_with_every_module() {
    agrees("models/embedded", "all modules", rank_four(), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_model_with_two_modules() {
    let names = [LinearKind::QProj, LinearKind::DownProj].map(|kind| kind.as_str().to_owned());
    let lora = LoraConfig { target_modules: Modules::Names(names.to_vec()), ..rank_four() };
    agrees("models/embedded", "two modules", lora, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_model_with_one_layer_of_two() {
    for layer in 0..2 {
        let lora = LoraConfig { layers_to_transform: vec![layer], ..rank_four() };
        agrees("models/embedded", "one layer", lora, false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transformers_directory() {
    agrees("tests/fixtures/qwen2-tiny", "all modules", rank_four(), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_and_scales_by_module() {
    let lora = LoraConfig {
        use_rslora: true,
        rank_pattern: Patterns::from([("q_proj".to_owned(), 2), (r"layers\.1\.mlp".to_owned(), 7)]),
        alpha_pattern: Patterns::from([("v_proj".to_owned(), 3.0)]),
        ..rank_four()
    };
    agrees("tests/fixtures/qwen2-tiny", "patterns", lora, false).await;
}

/// Directories of `tests/reference/models/make_families.py` that the engine serves. It does not support the
/// biases of `llama-biases`.
const FAMILIES: [&str; 9] =
    ["qwen2", "qwen3", "llama2", "llama3", "mistral", "smollm3", "gemma2", "phi3", "phi3-longrope"];

#[tokio::test(flavor = "multi_thread")]
async fn every_model_family() {
    for name in FAMILIES {
        agrees(&format!("tests/fixtures/families/{name}"), "all modules", rank_four(), true).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn greedy_completions_of_every_family_match_transformers() {
    for name in FAMILIES {
        let model = format!("tests/fixtures/families/{name}");
        let pair = Pair::new(&model, rank_four(), true);
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(&model).join("greedy.json");
        let case: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let ids = |key: &str| -> Vec<TokenId> {
            case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as TokenId).collect()
        };
        let (prompt, wanted) = (ids("prompt_ids"), ids("greedy_ids"));
        let never = pair.engine.codec().stop_ids().iter().map(|id| (*id, -1e9)).collect();
        let params = SamplingParams {
            temperature: 0.0,
            max_tokens: wanted.len() as u32,
            logit_bias: never,
            ..Default::default()
        };
        let request = GenerateRequest::new(prompt, params, Priority::Live);
        let engines: [Arc<dyn Engine>; 2] = [pair.engine.clone(), pair.native.clone()];
        for engine in engines {
            let completion = engine.generate(request.clone()).await.unwrap();
            let completion = completion.collect().await.unwrap();
            let served: Vec<TokenId> = completion.tokens.iter().map(|t| t.id).collect();
            assert_eq!(served, wanted, "{name}");
        }
    }
}

/// The native engine and the trainer, on one copy of the weights, agree before and after a step.
async fn native_agrees(model: &str, quantize: Quantize) {
    let dir = ModelDir::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(model)).unwrap();
    let config = train_config(rank_four());
    let options = LoadOptions { quantize, ..LoadOptions::default() };
    let mut learner = Learner::new(&dir, options, &config).unwrap();
    let codec = Arc::new(Codec::load(&dir).unwrap());
    let native = start_native(&dir, &learner, codec, Arc::new(Metrics::new().unwrap()));
    let (base, samples) = compare(&learner, &*native, true).await;
    let stats = learner.step(&samples, 0, 40).unwrap();
    assert_eq!((stats.skipped, stats.refused), (None, Vec::new()));
    native.publish(PolicyVersion(1), Some(learner.served())).unwrap();
    let (trained, after) = compare(&learner, &*native, true).await;
    println!("{model}, {}: base {base:.1e}, version 1 {trained:.1e}", quantize.as_str());
    assert!(base < ROUNDED && trained < ROUNDED, "{model}: {base}, {trained}");
    // The published version must differ, or agreement would prove nothing.
    assert!(samples.iter().zip(&after).any(|(b, a)| b.logprobs != a.logprobs));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_gguf_file() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".gguf") {
            native_agrees(&format!("tests/fixtures/gguf/{name}"), Quantize::None).await;
            files += 1;
        }
    }
    assert!(files >= 14, "{files} files");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_model_family_quantized_while_it_is_loaded() {
    // To 8 bits; blocks of fewer bits are longer than the rows of these models.
    for name in FAMILIES {
        native_agrees(&format!("tests/fixtures/families/{name}"), Quantize::Q8_0).await;
    }
}

/// A policy whose files are changed after they are written.
struct ChangedFiles {
    policy: Snapshot,
    change: fn(&Path),
}

impl Candidate for ChangedFiles {
    fn write(&self, dir: &Path) -> Result<(), LearnError> {
        self.policy.write(dir, "model")?;
        (self.change)(dir);
        Ok(())
    }

    fn score(
        &self,
        _: ScoredBy<'_>,
        prompt_ids: &[TokenId],
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>, LearnError> {
        self.policy.score(prompt_ids, ids, temperature)
    }
}

/// Multiplies `lora_alpha`, by which the engine scales the adapter.
fn scale_alpha(dir: &Path, factor: f64) {
    let file = dir.join("adapter_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["lora_alpha"] = (config["lora_alpha"].as_f64().unwrap() * factor).into();
    std::fs::write(file, config.to_string()).unwrap();
}

/// Multiplies every matrix B.
fn scale_weights(dir: &Path, factor: f64) {
    let file = dir.join("adapter_model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &candle_core::Device::Cpu).unwrap();
    for (name, tensor) in &mut tensors {
        if name.contains("lora_B") {
            *tensor = tensor.affine(factor, 0.0).unwrap();
        }
    }
    candle_core::safetensors::save(&tensors, file).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_rejects_an_adapter_whose_scale_is_wrong() {
    let pair = Pair::new("models/embedded", rank_four(), false);
    let publisher = pair.engine.clone();
    rejects_wrong_scales(pair, publisher.clone(), publisher, "serving").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_native_engine_alone_rejects_an_adapter_whose_scale_is_wrong() {
    let pair = Pair::new("models/embedded", rank_four(), false);
    let engine = pair.native.clone();
    let publisher = Arc::new(BatchedPublisher::new(None, engine.clone()));
    rejects_wrong_scales(pair, engine, publisher, "rollout").await;
}

/// `sampler` is the engine's name in the checks of the gate.
async fn rejects_wrong_scales(
    mut pair: Pair,
    engine: Arc<dyn Engine>,
    publisher: Arc<dyn Publisher>,
    sampler: &str,
) {
    let (_, samples) = pair.compare().await;
    pair.learner.step(&samples, 0, 40).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let ledger = pair.files.path().join("ledger.redb");
    let store = Store::open(&ledger, &StoreConfig::default(), metrics.clone()).unwrap();
    let config = PolicyConfig::default();
    let (tolerance, prompt) = (PARITY_TOLERANCE, pair.prompt(1));
    let policies = Policies::restore(PolicySetup {
        publisher,
        store,
        config,
        metrics,
        data_dir: pair.files.path().to_owned(),
        probe_prompt: prompt,
        examiner: None,
        authority: None,
        raters: 0,
    })
    .await
    .unwrap();
    let publish = async |parent: PolicyVersion, change: fn(&Path)| {
        let candidate = ChangedFiles { policy: pair.learner.snapshot().unwrap(), change };
        policies.publish(&candidate, parent, 1, [].into()).await.unwrap()
    };
    let rejected = async |active: PolicyVersion, what: &str, change: fn(&Path)| {
        let outcome = publish(active, change).await;
        let PublishOutcome::Rejected(record) = outcome else { panic!("{what}: {outcome:?}") };
        let difference = record.metrics["parity_logprob_difference"];
        println!("{what}: {difference:.1e}");
        assert!(difference > tolerance, "{what}: {difference}");
        let check = format!("parity/{sampler}: ");
        assert!(record.reason.unwrap().starts_with(&check), "{what}");
        assert_eq!((policies.active(), engine.active_version()), (active, active), "{what}");
    };
    let base = PolicyVersion::BASE;
    rejected(base, "alpha times 1.5", |dir| scale_alpha(dir, 1.5)).await;
    rejected(base, "alpha times 1.1", |dir| scale_alpha(dir, 1.1)).await;
    rejected(base, "weights times 1.5", |dir| scale_weights(dir, 1.5)).await;
    rejected(base, "no adapter", |dir| scale_weights(dir, 0.0)).await;
    let outcome = publish(base, |_| ()).await;
    let PublishOutcome::Published(record) = outcome else { panic!("{outcome:?}") };
    assert!(record.metrics["parity_logprob_difference"] < f64::from(TOLERANCE));
    assert_eq!(engine.active_version(), record.version);
    // The active version stays if its successor is wrong.
    rejected(record.version, "alpha times 0.5", |dir| scale_alpha(dir, 0.5)).await;
}
