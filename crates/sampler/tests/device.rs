//! The native engine on a device against the one on the processor, with the libraries of hone-cuda's tests.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

#[path = "../../cuda/tests/kernels/fake.rs"]
mod fake;

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use hone_core::metrics::Metrics;
use hone_core::types::{FinishReason, PolicyVersion, SamplingParams, TokenId};
use hone_cuda::{
    CubinCache, DeviceFloat, DeviceMemory, DeviceModel, DeviceSampler, Gpu, StreamPriority,
};
use hone_engine::{
    Codec, Completion, Engine, EngineError, EngineLoad, Event, GenerateRequest, ModelDir, Priority,
    Publisher,
};
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{BaseDtype, LoraConfig, peft};
use hone_model::testing::{load_model, randomize};
use hone_model::{Model, device};
use hone_sampler::{BatchedEngine, BatchedPublisher, SamplerConfig};

use fake::{ALL, run};

/// Adapters on the device at once.
const SLOTS: usize = 2;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen2-tiny")
}

fn config() -> SamplerConfig {
    SamplerConfig {
        slots: 6,
        threads: 2,
        context: 128,
        max_batch_tokens: 1024,
        prefill_tokens: 24,
        busy_prefill_tokens: 16,
        ..SamplerConfig::default()
    }
}

fn lora_config(r: usize) -> LoraConfig {
    LoraConfig { r, alpha: 3.0, ..LoraConfig::default() }
}

fn adapter(model: &Model, r: usize, seed: u64) -> LoraWeights {
    let (config, mut rng) = (lora_config(r), ChaCha8Rng::seed_from_u64(seed));
    let lora = LoraWeights::fresh(model.spec(), &config, &mut rng, DType::F32, &Device::Cpu);
    let lora = lora.unwrap();
    randomize(&lora, seed);
    lora
}

/// A model, and the same engine on both.
struct Engines {
    model: Model,
    processor: Arc<BatchedEngine>,
    device: Arc<BatchedEngine>,
    /// Of the engine on the device.
    metrics: Arc<Metrics>,
}

impl Engines {
    fn new(float: DeviceFloat, config: &SamplerConfig) -> Self {
        let model = load_model(&tiny(), BaseDtype::Auto);
        let codec = Arc::new(Codec::load(&ModelDir::open(&tiny()).unwrap()).unwrap());
        let metrics = || Arc::new(Metrics::new().unwrap());
        let never = || Arc::new(|| false);
        let on_processor =
            BatchedEngine::start(&model, Arc::clone(&codec), config.clone(), never(), metrics());
        let of_device = metrics();
        let sampler = Self::sampler(&model, float, config);
        let spec = model.spec().clone();
        let on_device = BatchedEngine::start_on_device(
            spec,
            sampler,
            codec,
            config.clone(),
            never(),
            Arc::clone(&of_device),
        );
        let (processor, device) = (on_processor.unwrap(), on_device.unwrap());
        Self { model, processor, device, metrics: of_device }
    }

    fn sampler(model: &Model, float: DeviceFloat, config: &SamplerConfig) -> DeviceSampler {
        let gpu = Arc::new(Gpu::open(0).unwrap());
        let shape = device::decoder_shape(model.spec(), config.context);
        let mut upload = DeviceModel::open(&gpu, &shape, float, 0).unwrap();
        device::upload(model, config.context, |name, values| upload.upload(name, values)).unwrap();
        let on_device = upload.finish().unwrap();
        let modules = device::adapter_modules(&adapter(model, 4, 1));
        let limits = config.device_limits(SLOTS, 512).unwrap();
        let cache = CubinCache::new(Path::new(&env::var_os("HONE_CUBINS").unwrap()));
        let priority = StreamPriority::Serving;
        DeviceSampler::open(&on_device, &cache, &modules, &limits, 0, priority).unwrap()
    }

    fn publish(&self, version: u32, lora: &LoraWeights) {
        for engine in [&self.processor, &self.device] {
            engine.publish(PolicyVersion(version.into()), Some(lora)).unwrap();
        }
    }
}

fn request(prompt: &[TokenId], seed: u64, max_tokens: u32) -> GenerateRequest {
    let params = SamplingParams { seed, max_tokens, ..SamplingParams::default() };
    GenerateRequest::new(prompt.to_vec(), params, Priority::Shadow)
}

/// Requests with varied parameters and priorities, some with the same prompt.
fn requests(count: u64) -> Vec<GenerateRequest> {
    let kind = |i: u64| {
        let length = 1 + 11 * (i % 5) as TokenId;
        let prompt: Vec<TokenId> = (0..length).map(|k| 3 + k * 7 % 80).collect();
        let mut request = request(&prompt, i, 1 + (i as u32 * 13) % 40);
        request.params.temperature = [1.0, 0.7, 0.0, 1.4][i as usize % 4];
        request.params.top_k = [0, 0, 7][i as usize % 3];
        request.params.top_p = [1.0, 0.8][i as usize % 2];
        request.params.presence_penalty = [0.0, 0.0, 0.0, 0.5][i as usize % 4];
        request.top_logprobs = (i % 3) as u8;
        if i.is_multiple_of(6) {
            request.priority = Priority::Live;
            request.stop = vec!["e".to_owned()];
        }
        request
    };
    (0..count).map(kind).collect()
}

async fn all(engine: &Arc<BatchedEngine>, requests: &[GenerateRequest]) -> Vec<Completion> {
    let run = |request: &GenerateRequest| {
        let (engine, request) = (Arc::clone(engine), request.clone());
        tokio::spawn(async move {
            loop {
                // Live requests preempt shadows, whose callers try again.
                match engine.generate(request.clone()).await?.collect().await {
                    Err(EngineError::Preempted) => {}
                    result => return result,
                }
            }
        })
    };
    let tasks: Vec<_> = requests.iter().map(run).collect();
    let mut completions = Vec::new();
    for task in tasks {
        completions.push(task.await.unwrap().unwrap());
    }
    completions
}

async fn until_idle(engine: &BatchedEngine) {
    let began = Instant::now();
    while engine.load() != EngineLoad::default() {
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", engine.load());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Asserts that completions are the same but for the rounding of log-probabilities.
fn assert_same(found: &[Completion], expected: &[Completion]) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((found.version, found.finish), (expected.version, expected.finish), "{i}");
        assert_eq!(found.text, expected.text, "{i}");
        assert_eq!(found.tokens.len(), expected.tokens.len(), "{i}");
        for (found, expected) in found.tokens.iter().zip(&expected.tokens) {
            assert_eq!(found.id, expected.id, "{i}");
            let error = (found.logprob - expected.logprob).abs();
            assert!(error < 1e-4, "{i}: {} {}", found.logprob, expected.logprob);
            assert!((found.kept_mass - expected.kept_mass).abs() < 1e-4, "{i}");
            let ids = |top: &[(TokenId, f32)]| top.iter().map(|top| top.0).collect::<Vec<_>>();
            assert_eq!(ids(&found.top), ids(&expected.top), "{i}");
        }
    }
}

macro_rules! on_fake_device {
    ($($name:ident, $inner:ident;)*) => {$(
        #[test]
        fn $name() {
            run(stringify!($inner), &ALL, &[]);
        }
    )*};
}

on_fake_device! {
    completions_equal_those_of_the_processor, compare_completions;
    versions_share_passes_and_more_than_fit_take_turns, take_turns;
    probes_and_canaries_use_their_version, probe_and_try;
    log_probabilities_in_bf16_are_near_those_in_f32, compare_in_bf16;
    a_restart_serves_the_same_bits, restart;
    no_request_fails_while_versions_are_published, publish_often;
    what_does_not_fit_is_refused, refuse;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by `completions_equal_those_of_the_processor`"]
async fn compare_completions() {
    let requests = requests(40);
    // With a cache that holds all, and with one that evicts prompts.
    for max_batch_tokens in [1024, 112] {
        let engines =
            Engines::new(DeviceFloat::F32, &SamplerConfig { max_batch_tokens, ..config() });
        let expected = all(&engines.processor, &requests).await;
        assert!(expected.iter().any(|c| c.finish == FinishReason::Length));
        assert_same(&all(&engines.device, &requests).await, &expected);
        // Others are cancelled by dropping them.
        for request in &requests[..20] {
            let mut generation = engines.device.generate(request.clone()).await.unwrap();
            if request.priority == Priority::Live {
                assert!(matches!(generation.events.recv().await, Some(Event::Token(_))));
            }
        }
        let backwards: Vec<_> = requests.iter().rev().cloned().collect();
        let mut found = all(&engines.device, &backwards).await;
        found.reverse();
        assert_same(&found, &expected);
        until_idle(&engines.device).await;
        let counter = &engines.metrics.engine_prompt_tokens;
        assert!(counter.with_label_values(&["cached"]).get() > 100);
        let pages = engines.metrics.engine_cache_pages.with_label_values(&["used"]);
        let began = Instant::now();
        while pages.get() > 0 {
            assert!(began.elapsed() < Duration::from_secs(20));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        engines.device.close(true);
        let refused = engines.device.generate(requests[0].clone()).await;
        assert!(matches!(refused, Err(EngineError::ShuttingDown)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by `versions_share_passes_and_more_than_fit_take_turns`"]
async fn take_turns() {
    let engines = Engines::new(DeviceFloat::F32, &config());
    // Five versions run at once, and there are two slots; the base has none.
    let mut running = Vec::new();
    for version in 0..6_u32 {
        if version > 0 {
            // Of different ranks.
            let rank = 1 + version as usize % 4;
            engines.publish(version, &adapter(&engines.model, rank, version.into()));
        }
        let prompt: Vec<TokenId> = (0..20 + 3 * version).map(|k| 3 + k * 7 % 80).collect();
        let mut request = request(&prompt, 7, 30);
        request.params.temperature = [1.0, 0.8][version as usize % 2];
        let both =
            [&engines.processor, &engines.device].map(|engine| engine.generate(request.clone()));
        let [expected, found] = both;
        running.push((expected.await.unwrap(), found.await.unwrap()));
    }
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    for (processor, device) in running {
        expected.push(processor.collect().await.unwrap());
        found.push(device.collect().await.unwrap());
    }
    assert_same(&found, &expected);
    let versions: Vec<_> = found.iter().map(|completion| completion.version).collect();
    assert_eq!(versions, (0..6).map(PolicyVersion).collect::<Vec<_>>());
    until_idle(&engines.device).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by `probes_and_canaries_use_their_version`"]
async fn probe_and_try() {
    let engines = Engines::new(DeviceFloat::F32, &config());
    let dir = tempfile::tempdir().unwrap();
    let lora = adapter(&engines.model, 4, 3);
    peft::write(dir.path(), &lora, &lora_config(4), "tiny").unwrap();
    let params = SamplingParams { temperature: 0.0, max_tokens: 8, ..Default::default() };
    let mut results = Vec::new();
    for engine in [&engines.processor, &engines.device] {
        let publisher = BatchedPublisher::new(None, Arc::clone(engine));
        publisher.stage(PolicyVersion(3), Some(dir.path())).await.unwrap();
        let probes = publisher.probe(GenerateRequest::probe(&[5, 9, 2], &params)).await.unwrap();
        let scored = GenerateRequest::score(&[5, 9], &[2, 7, 11], 0);
        let scored = publisher.complete_staged(scored).await.unwrap();
        publisher.begin_canary().await.unwrap();
        let canary = GenerateRequest { version: Some(PolicyVersion(3)), ..request(&[5, 9], 4, 9) };
        let mut completions = all(engine, &[canary, request(&[5, 9], 4, 9)]).await;
        publisher.activate().await.unwrap();
        completions.extend(all(engine, &[request(&[5, 9], 4, 9)]).await);
        completions.push(scored);
        assert_eq!(probes[0].dtype, "f32");
        results.push((probes, completions));
    }
    assert_same(&results[1].1, &results[0].1);
    let versions: Vec<_> = results[1].1.iter().map(|completion| completion.version.0).collect();
    assert_eq!(versions, [3, 0, 3, 3]);
    let (found, expected) = (&results[1].0[0].tokens, &results[0].0[0].tokens);
    assert_eq!(found.len(), expected.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by `log_probabilities_in_bf16_are_near_those_in_f32`"]
async fn compare_in_bf16() {
    let engines = Engines::new(DeviceFloat::Bf16, &config());
    assert_eq!([engines.processor.dtype(), engines.device.dtype()], ["f32", "bf16"]);
    let lora = adapter(&engines.model, 4, 5);
    engines.publish(1, &lora);
    let requests: Vec<_> = (0..12).map(|i| request(&[5, 9, 2 + i % 3], i.into(), 30)).collect();
    let mut greatest = 0.0_f32;
    for (request, completion) in requests.iter().zip(all(&engines.device, &requests).await) {
        let ids: Vec<TokenId> = completion.tokens.iter().map(|token| token.id).collect();
        let scored = GenerateRequest::score(&request.prompt_ids, &ids, 0);
        let scored = all(&engines.processor, &[scored]).await.remove(0);
        assert_eq!(scored.tokens.len(), ids.len());
        for (token, exact) in completion.tokens.iter().zip(&scored.tokens) {
            greatest = greatest.max((token.logprob - exact.logprob).abs());
        }
    }
    assert!(greatest > 0.0 && greatest < 0.1, "{greatest}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by `no_request_fails_while_versions_are_published`"]
async fn publish_often() {
    let engines = Engines::new(DeviceFloat::F32, &config());
    let adapters: Vec<_> = (0..5).map(|seed| adapter(&engines.model, 4, seed)).collect();
    let (gpu, is_over) = (Gpu::open(0).unwrap(), Arc::new(AtomicBool::new(false)));
    let free = gpu.free_bytes().unwrap();
    let user = |seed: u64| {
        let (engine, is_over) = (Arc::clone(&engines.device), Arc::clone(&is_over));
        tokio::spawn(async move {
            let mut answers = 0;
            while !is_over.load(Ordering::Acquire) {
                let completions = all(&engine, &[request(&[5, 9, 2], seed, 6)]).await;
                answers += completions.len();
            }
            answers
        })
    };
    let users: Vec<_> = (0..3).map(user).collect();
    for version in 1..=500 {
        let lora = &adapters[version % adapters.len()];
        let version = PolicyVersion(version as u64);
        engines.device.publish(version, Some(lora)).unwrap();
        let served = all(&engines.device, &[request(&[7, 9], version.0, 2)]).await;
        assert_eq!(served[0].version, version);
        assert_eq!(gpu.free_bytes().unwrap(), free);
    }
    is_over.store(true, Ordering::Release);
    for user in users {
        assert!(user.await.unwrap() > 0);
    }
}

/// A version that was published from memory, and the same one after a restart that reads its files, beside greedy rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by `a_restart_serves_the_same_bits`"]
async fn restart() {
    let dir = tempfile::tempdir().unwrap();
    let (mut results, mut values) = (Vec::new(), None);
    for is_restart in [false, true] {
        let engines = Engines::new(DeviceFloat::Bf16, &config());
        let lora = values.get_or_insert_with(|| adapter(&engines.model, 4, 5));
        if is_restart {
            let publisher = BatchedPublisher::new(None, Arc::clone(&engines.device));
            publisher.stage(PolicyVersion(1), Some(dir.path())).await.unwrap();
            publisher.activate().await.unwrap();
        } else {
            peft::write(dir.path(), lora, &lora_config(4), "tiny").unwrap();
            engines.publish(1, lora);
        }
        let mut completions = Vec::new();
        for temperature in [0.0, 1.0] {
            let mut request = request(&[5, 9, 2, 40], 3, 24);
            request.params.temperature = temperature;
            completions.extend(all(&engines.device, &[request]).await);
        }
        results.push(completions);
    }
    assert_eq!(results[0], results[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by `what_does_not_fit_is_refused`"]
async fn refuse() {
    let engines = Engines::new(DeviceFloat::F32, &config());
    // An adapter of a greater rank ends its own requests only.
    engines.device.publish(PolicyVersion(1), Some(&adapter(&engines.model, 5, 1))).unwrap();
    let generation = engines.device.generate(request(&[1, 2, 3], 1, 5)).await.unwrap();
    let error = generation.collect().await.unwrap_err().to_string();
    assert!(error.contains("does not fit the engine's"), "{error}");
    engines.device.publish(PolicyVersion(2), None).unwrap();
    let generation = engines.device.generate(request(&[1, 2, 3], 1, 5)).await.unwrap();
    assert!(generation.collect().await.is_ok());

    let larger = SamplerConfig { slots: 9, ..config() };
    let sampler = Engines::sampler(&engines.model, DeviceFloat::F32, &config());
    let codec = Arc::clone(engines.device.codec());
    let (spec, metrics) = (engines.model.spec().clone(), Arc::clone(&engines.metrics));
    let started =
        BatchedEngine::start_on_device(spec, sampler, codec, larger, Arc::new(|| false), metrics);
    let error = started.err().unwrap().to_string();
    assert!(error.contains("are less than"), "{error}");
}
