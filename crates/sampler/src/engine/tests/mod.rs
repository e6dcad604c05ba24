#[expect(dead_code, reason = "only the start of this program is used")]
#[path = "../../../../cuda/tests/kernels/fake.rs"]
mod fake;

mod arrivals;
mod kept;
mod live;
mod policies;
mod prefix;
mod priority;

use std::env;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hone_core::types::{FinishReason, SamplingParams, TokenId};
use hone_cuda::{CubinCache, DeviceFloat, DeviceModel, Gpu, StreamPriority};
use hone_engine::{Completion, Event, ModelDir, Probe, Publisher};
use hone_model::adapter::LoraConfig;
use hone_model::device;
use hone_train::Learner;
use hone_train::config::TrainConfig;

use super::*;
use crate::testing::{model, random_lora};

/// Attempts of a test that is void if a request of it ends too early, because the test's thread had to
/// wait.
const ATTEMPTS: usize = 100;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen2-tiny")
}

fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new().unwrap())
}

fn start_with(config: SamplerConfig, live_traffic: LiveTraffic) -> Arc<BatchedEngine> {
    let (codec, config) = codec_and(config);
    let decoder = decoder(&config);
    let engine = BatchedEngine::without_thread(&decoder, codec, config, live_traffic, metrics());
    engine.unwrap().with_thread(decoder).unwrap()
}

fn codec_and(config: SamplerConfig) -> (Arc<Codec>, SamplerConfig) {
    let dir = ModelDir::open(&tiny()).unwrap();
    let codec = Arc::new(Codec::load(&dir).unwrap());
    (codec, SamplerConfig { context: dir.context(), ..config })
}

/// Whether `engines_on_a_device_pass_these_tests` has started this process.
fn is_on_device() -> bool {
    env::var_os("HONE_CUBINS").is_some()
}

/// Computes on the processor, or on the emulated device of `engines_on_a_device_pass_these_tests`.
fn decoder(config: &SamplerConfig) -> PassDecoder {
    let model = model(&tiny());
    let Some(cubins) = env::var_os("HONE_CUBINS") else {
        return Decoder::new(&model).unwrap().into();
    };
    let (gpu, float) = (Arc::new(Gpu::open(0).unwrap()), DeviceFloat::F32);
    let shape = device::decoder_shape(model.spec(), config.context);
    let mut upload = DeviceModel::open(&gpu, &shape, float, 0).unwrap();
    device::upload(&model, config.context, |name, values| upload.upload(name, values)).unwrap();
    let on_device = upload.finish().unwrap();
    // As many ranks as adapters of these tests have at most.
    let modules = device::adapter_modules(&random_lora(model.spec(), 16, 1));
    let (limits, cache) = (config.device_limits(2, 512), CubinCache::new(Path::new(&cubins)));
    let (limits, priority) = (limits.unwrap(), StreamPriority::Serving);
    let sampler = DeviceSampler::open(&on_device, &cache, &modules, &limits, 0, priority).unwrap();
    let decoder = DeviceDecoder::new(model.spec().clone(), sampler, config).unwrap();
    PassDecoder::Device(Box::new(decoder))
}

fn start(config: SamplerConfig) -> Arc<BatchedEngine> {
    start_with(config, Arc::new(|| false))
}

/// An engine that computes as for a model whose weights stay in a core's own cache, or for a larger one.
fn start_sized(config: SamplerConfig, is_small: bool) -> Arc<BatchedEngine> {
    let (engine, mut decoder) = without_thread(config);
    if let PassDecoder::Processor(decoder) = &mut decoder {
        decoder.is_small = is_small;
    }
    engine.with_thread(decoder).unwrap()
}

fn without_thread(config: SamplerConfig) -> (BatchedEngine, PassDecoder) {
    let (codec, config) = codec_and(config);
    let (decoder, never) = (decoder(&config), Arc::new(|| false));
    let engine = BatchedEngine::without_thread(&decoder, codec, config, never, metrics());
    (engine.unwrap(), decoder)
}

/// An engine without a thread. The test runs its iterations, so that their order is known.
struct SteppedEngine {
    engine: BatchedEngine,
    scheduler: BatchScheduler,
}

impl SteppedEngine {
    fn new(config: SamplerConfig) -> Self {
        let (engine, decoder) = without_thread(config);
        let scheduler = BatchScheduler::new(Arc::clone(&engine.shared), decoder);
        Self { engine, scheduler }
    }

    async fn admit(&mut self, request: GenerateRequest) -> Generation {
        let iterate = async { self.scheduler.iterate() };
        let (admitted, _) = tokio::join!(biased; self.engine.generate(request), iterate);
        admitted.unwrap()
    }
}

fn small() -> SamplerConfig {
    SamplerConfig { slots: 40, threads: 2, ..SamplerConfig::default() }
}

fn request(prompt: &[TokenId], seed: u64, max_tokens: u32) -> GenerateRequest {
    let params = SamplingParams { seed, max_tokens, ..SamplingParams::default() };
    GenerateRequest::new(prompt.to_vec(), params, Priority::Shadow)
}

/// A request that continues to its limit.
fn endless(engine: &BatchedEngine, prompt: &[TokenId], seed: u64, tokens: u32) -> GenerateRequest {
    let mut request = request(prompt, seed, tokens);
    request.params.logit_bias = engine.codec().stop_ids().iter().map(|id| (*id, -100.0)).collect();
    request
}

fn live(request: GenerateRequest) -> GenerateRequest {
    GenerateRequest { priority: Priority::Live, ..request }
}

fn ids(completion: &Completion) -> Vec<TokenId> {
    completion.tokens.iter().map(|token| token.id).collect()
}

/// Requests with varied parameters and priorities, some with the same prompt.
fn requests(count: u64) -> Vec<GenerateRequest> {
    let kind = |i: u64| {
        let prompt: Vec<TokenId> =
            (0..1 + 11 * (i % 5) as TokenId).map(|k| 3 + k * 7 % 80).collect();
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

async fn one_by_one(engine: &Arc<BatchedEngine>, requests: &[GenerateRequest]) -> Vec<Completion> {
    let mut completions = Vec::new();
    for request in requests {
        let generation = engine.generate(request.clone()).await.unwrap();
        completions.push(generation.collect().await.unwrap());
    }
    completions
}

/// Waits for a condition, or fails after ten seconds.
async fn until(engine: &BatchedEngine, condition: impl Fn(&EngineLoad) -> bool) {
    let began = Instant::now();
    while !condition(&engine.load()) {
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", engine.load());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn until_idle(engine: &BatchedEngine) {
    until(engine, |load| *load == EngineLoad::default()).await;
}

/// Waits until the cache holds no page of a sequence.
async fn until_no_page_is_used(engine: &BatchedEngine) {
    let pages = engine.shared.metrics.engine_cache_pages.with_label_values(&["used"]);
    until(engine, |_| pages.get() == 0).await;
}

/// A PEFT directory with an adapter.
fn adapter_dir(seed: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = LoraConfig { r: 4, alpha: 3.0, ..LoraConfig::default() };
    peft::write(dir.path(), &random_lora(model(&tiny()).spec(), 4, seed), &config, "tiny").unwrap();
    dir
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_is_the_same_alone_and_in_every_batch() {
    let requests = requests(90);
    let alone = start(SamplerConfig { slots: 1, threads: 1, ..SamplerConfig::default() });
    let expected = one_by_one(&alone, &requests).await;
    assert!(expected.iter().any(|c| c.finish == FinishReason::Length));
    assert!(expected.iter().any(|c| c.finish == FinishReason::Stop));
    let batched = start(small());
    assert_eq!(all(&batched, &requests).await, expected);
    // In another order, with a cache so small that few run at once and prompts are evicted.
    let narrow = start(SamplerConfig { max_batch_tokens: 112, ..small() });
    let mut backwards: Vec<_> = requests.iter().rev().cloned().collect();
    let mut found = all(&narrow, &backwards).await;
    found.reverse();
    assert_eq!(found, expected);
    // While others are cancelled by dropping them.
    backwards.rotate_left(17);
    for request in &backwards[..30] {
        let mut generation = batched.generate(request.clone()).await.unwrap();
        if request.priority == Priority::Live {
            assert!(matches!(generation.events.recv().await, Some(Event::Token(_))));
        }
    }
    assert_eq!(all(&batched, &requests).await, expected);
    until_idle(&batched).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recorded_logprobs_equal_those_that_the_trainer_computes() {
    let engine = start(small());
    let model = model(&tiny());
    let lora = random_lora(model.spec(), 4, 3);
    engine.publish(PolicyVersion(7), Some(&lora)).unwrap();
    assert_eq!(engine.active_version(), PolicyVersion(7));
    let mut requests: Vec<_> =
        (0..24).map(|i| request(&[5, 9, 2 + i % 3], u64::from(i), 30)).collect();
    for (i, request) in requests.iter_mut().enumerate() {
        request.params.temperature = [1.0, 0.8, 1.3][i % 3];
    }
    let mut greatest = 0.0_f32;
    for (request, completion) in requests.iter().zip(all(&engine, &requests).await) {
        assert_eq!(completion.version, PolicyVersion(7));
        let ids = ids(&completion);
        let temperature = request.params.temperature;
        let logits = {
            let all = [request.prompt_ids.clone(), ids.clone()].concat();
            crate::testing::trainer_logits(&model, &all, Some(&lora))
        };
        for (at, token) in completion.tokens.iter().enumerate() {
            let row = &logits[request.prompt_ids.len() - 1 + at];
            let max = row.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
            let scaled = |x: f32| f64::from((x - max) / temperature);
            let sum: f64 = row.iter().map(|x| scaled(*x).exp()).sum();
            let expected = scaled(row[token.id as usize]) - sum.ln();
            greatest = greatest.max((token.logprob - expected as f32).abs());
            assert_eq!(token.kept_mass, 1.0);
        }
    }
    assert!(greatest < 2e-5, "{greatest:e}");

    // The same with the learner's score function and its initial adapter.
    let config = TrainConfig::default();
    let learner = Learner::with_model(model, &config).unwrap();
    engine.publish(PolicyVersion(8), Some(learner.served())).unwrap();
    for completion in all(&engine, &requests[..6]).await {
        let ids = ids(&completion);
        let difference = score_difference(&requests, &ids, &learner, &completion);
        assert!(difference < 1e-4, "{difference}");
    }
}

/// The greatest difference to the learner's scores, for the request that fits best.
fn score_difference(
    requests: &[GenerateRequest],
    ids: &[TokenId],
    learner: &Learner,
    completion: &Completion,
) -> f32 {
    let policy = learner.snapshot().unwrap();
    let differences = requests[..6].iter().map(|request| {
        let temperature = request.params.temperature;
        let scored = policy.score(&request.prompt_ids, ids, temperature).unwrap();
        let pairs = completion.tokens.iter().zip(scored);
        pairs.fold(0.0_f32, |worst, (token, score)| worst.max((token.logprob - score).abs()))
    });
    differences.fold(f32::INFINITY, f32::min)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_can_never_run_are_refused() {
    let engine = start(SamplerConfig { max_batch_tokens: 64, queue: 2, slots: 1, ..small() });
    let refused = async |request: GenerateRequest| engine.generate(request).await.unwrap_err();
    let error = refused(request(&[1; 30], 0, 50)).await;
    insta::assert_snapshot!(error, @"rollout.max_batch_tokens is 64, which is too small: one sequence of 80 tokens needs 80 places in the cache");
    assert!(matches!(refused(request(&[], 0, 5)).await, EngineError::Invalid(_)));
    assert!(matches!(refused(request(&[9999], 0, 5)).await, EngineError::Invalid(_)));
    let long = vec![1; engine.info().context];
    assert!(matches!(refused(request(&long, 0, 5)).await, EngineError::PromptTooLong { .. }));
    let mut bad = request(&[1], 0, 5);
    bad.params.top_p = 0.0;
    assert!(matches!(refused(bad).await, EngineError::Invalid(_)));
    assert!(engine.generate(request(&[1; 16], 0, 48)).await.is_ok());
    let error = SamplerCapacity::new(&SamplerConfig { max_batch_tokens: 31, ..small() });
    insta::assert_snapshot!(error.unwrap_err(), @"rollout.max_batch_tokens is 31; at least 32 was expected");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_ends_running_and_queued_shadow_requests() {
    let engine =
        start_with(SamplerConfig { slots: 2, busy_share: 0.001, ..small() }, Arc::new(|| true));
    let mut tasks = Vec::new();
    for seed in 0..6 {
        let engine = Arc::clone(&engine);
        let run =
            async move { engine.generate(request(&[1, 2], seed, 400)).await?.collect().await };
        tasks.push(tokio::spawn(run));
    }
    until(&engine, |load| load.shadow_running == 2 && load.shadow_waiting >= 3).await;
    engine.close(false);
    for task in tasks {
        assert!(matches!(task.await.unwrap(), Err(EngineError::ShuttingDown)));
    }
    assert!(matches!(engine.generate(request(&[1], 1, 1)).await, Err(EngineError::ShuttingDown)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_slows_down_while_clients_are_served() {
    let (busy, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (flag, count) = (Arc::clone(&busy), Arc::clone(&asked));
    let config = SamplerConfig { busy_share: 0.02, threads: 1, ..small() };
    let engine = start_with(
        config,
        Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
            flag.load(Ordering::Relaxed)
        }),
    );
    let requests: Vec<_> = (0..8).map(|seed| request(&[1, 2, 3], seed, 40)).collect();
    let timed = async || {
        let began = Instant::now();
        let completions = all(&engine, &requests).await;
        (began.elapsed(), completions)
    };
    // The shortest of several, because other processes may delay one.
    let (mut free, expected) = timed().await;
    for _ in 0..3 {
        free = free.min(timed().await.0);
    }
    assert!(asked.load(Ordering::Relaxed) >= 40, "the sampler checks for clients between steps");
    busy.store(true, Ordering::Relaxed);
    let (held, found) = timed().await;
    assert_eq!(found, expected);
    assert!(held > 3 * free, "{free:?} without clients, {held:?} with clients");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_without_a_serving_engine_probes_and_activates_the_staged_version() {
    let engine = start(small());
    let publisher = BatchedPublisher::new(None, Arc::clone(&engine));
    let refused = publisher.activate().await.unwrap_err().to_string();
    assert!(refused.contains("no version is staged"), "{refused}");

    let dir = adapter_dir(3);
    publisher.stage(PolicyVersion(3), Some(dir.path())).await.unwrap();
    let greedy = |version| {
        let (engine, mut request) = (Arc::clone(&engine), request(&[5, 9, 2], 0, 8));
        request.params.temperature = 0.0;
        async move {
            let completion = engine.generate(request).await.unwrap().collect().await.unwrap();
            assert_eq!(completion.version, version);
            completion.tokens.iter().map(|t| (t.id, t.logprob)).collect::<Vec<_>>()
        }
    };
    let params = SamplingParams { temperature: 0.0, max_tokens: 8, ..Default::default() };
    let probes = publisher.probe(GenerateRequest::probe(&[5, 9, 2], &params)).await.unwrap();
    let [Probe { sampler: "rollout", dtype: "f32", tokens: probed }] = &probes[..] else {
        panic!("{probes:?}")
    };
    let base = greedy(PolicyVersion::BASE).await;
    publisher.activate().await.unwrap();
    assert_ne!(*probed, base);
    assert_eq!(*probed, greedy(PolicyVersion(3)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_adapter_changes_no_sequence_of_another_version() {
    let engine = start(small());
    let requests: Vec<_> = (0..6).map(|seed| endless(&engine, &[5, 9, 2], seed, 60)).collect();
    let expected = all(&engine, &requests).await;
    let broken = random_lora(model(&tiny()).spec(), 2, 1);
    for (_, var) in broken.parameters() {
        var.set(&(var.as_tensor() * f64::INFINITY).unwrap()).unwrap();
    }
    for _ in 0..5 {
        engine.publish(PolicyVersion::BASE, None).unwrap();
        let mut running = Vec::new();
        for request in &requests {
            running.push(engine.generate(request.clone()).await.unwrap());
        }
        engine.publish(PolicyVersion(1), Some(&broken)).unwrap();
        let mut failing = Vec::new();
        for request in &requests {
            failing.push(engine.generate(request.clone()).await.unwrap());
        }
        for (generation, expected) in running.into_iter().zip(&expected) {
            assert_eq!(generation.collect().await.unwrap(), *expected);
        }
        for generation in failing {
            let _ = generation.collect().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_scheduler_fails_its_sequences_and_not_later_ones() {
    let armed = Arc::new(AtomicBool::new(false));
    let fuse = Arc::clone(&armed);
    let panics = move || {
        assert!(!fuse.swap(false, Ordering::SeqCst), "planned");
        false
    };
    let engine = start_with(small(), Arc::new(panics));
    let wanted = one_by_one(&engine, &requests(3)[1..]).await;
    armed.store(true, Ordering::SeqCst);
    let failed = engine.generate(request(&[3, 4, 5], 1, 8)).await.unwrap().collect().await;
    assert!(matches!(failed, Err(EngineError::Internal(_))), "{failed:?}");
    let again = one_by_one(&engine, &requests(3)[1..]).await;
    assert!(wanted.iter().map(ids).eq(again.iter().map(ids)));
    assert_eq!((engine.trouble(), engine.load()), (None, EngineLoad::default()));
    assert_eq!(engine.shared.metrics.engine_restarts.get(), 1);
}

/// Left out are tests that take too long in the emulator, that measure time, or that expect of a device what it does not
/// promise: the bits of a model that decodes a cached answer again, and passes as for a small model.
#[test]
fn engines_on_a_device_pass_these_tests() {
    let Some((mut command, _folder)) = fake::command(&fake::ALL) else { return };
    let tests = TESTS_ON_DEVICE.iter().map(|test| format!("engine::tests::{test}"));
    command.args(["--exact", "--test-threads=1"]).args(tests).env("HONE_FAKE_MEMORY", "1000000000");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let passed = format!("{} passed", TESTS_ON_DEVICE.len());
    assert!(output.status.success() && text.contains(&passed), "{text}{errors}");
}

const TESTS_ON_DEVICE: &[&str] = &[
    "a_broken_adapter_changes_no_sequence_of_another_version",
    "a_panic_of_the_scheduler_fails_its_sequences_and_not_later_ones",
    "a_publisher_without_a_serving_engine_probes_and_activates_the_staged_version",
    "closing_ends_running_and_queued_shadow_requests",
    "kept::a_kept_version_is_activated_with_the_same_weights_and_cached_pages",
    "kept::files_that_changed_are_read_again",
    "kept::the_adapters_in_memory_are_bounded",
    "live::a_canary_answers_the_requests_that_name_it",
    "live::a_live_request_preempts_the_newest_shadow",
    "live::the_sampler_answers_until_the_serving_engine_has_loaded_a_version",
    "prefix::keys_learn_nothing_of_each_others_prompts",
    "prefix::prompts_with_the_same_beginning_share_it",
    "prefix::versions_do_not_share_pages",
    "priority::a_live_request_preempts_shadows_until_its_pages_are_free",
    "priority::a_live_request_that_waits_too_long_is_refused",
    "priority::a_request_is_cancelled_in_the_queue_during_its_prompt_and_later",
    "priority::an_urgent_request_does_not_wait_for_clients",
    "priority::live_requests_beyond_the_queue_are_refused_and_shadows_wait_to_enter_it",
    "priority::owners_that_wait_are_admitted_in_turn",
    "priority::shadow_prompts_and_old_versions_continue_under_constant_live_load",
    "recorded_logprobs_equal_those_that_the_trainer_computes",
    "requests_that_can_never_run_are_refused",
];
