//! The engines of clients: tokens, versions, and changes of the version under traffic.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests may fail loudly and print what they measure"
)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Deserialize;

use hone_core::types::{FinishReason, Message, PolicyVersion, SamplingParams, TokenId};
use hone_engine::{
    Completion, EngineBackend, EngineError, EngineLoad, Event, GenerateRequest, Priority,
};

#[path = "../serve/backend.rs"]
mod backend;
mod fixture;
use backend::with_each_backend;
use fixture::*;

with_each_backend!(
    greedy_ids_equal_those_of_transformers,
    a_directory_of_transformers_5_is_served_unchanged,
    long_contexts_decode_as_they_prefill,
    concurrent_requests_equal_sequential_ones,
    a_generation_stops_at_stop_strings_and_limits,
    a_dropped_generation_frees_its_slot,
    live_requests_preempt_shadow_requests,
    a_version_leaves_no_trace_in_later_ones,
    an_adapter_that_does_not_fit_changes_nothing,
    a_running_generation_keeps_its_version,
    two_hundred_swaps_under_traffic_lose_nothing,
);

fn ids(completion: &Completion) -> Vec<TokenId> {
    completion.tokens.iter().map(|token| token.id).collect()
}

#[derive(Deserialize)]
struct References {
    cases: Vec<Reference>,
}

#[derive(Deserialize)]
struct Reference {
    messages: Vec<Message>,
    prompt_ids: Vec<TokenId>,
    greedy_ids: Vec<TokenId>,
}

async fn greedy_ids_equal_those_of_transformers(backend: EngineBackend) {
    let fixture = start(backend, 1, 8).await;
    let text =
        std::fs::read_to_string(here("tests/reference/models/embedded_greedy.json")).unwrap();
    let references: References = serde_json::from_str(&text).unwrap();
    assert!(references.cases.len() > 3);
    for reference in references.cases {
        let prompt_ids = fixture.engine.codec().prompt(&reference.messages).unwrap();
        assert_eq!(prompt_ids, reference.prompt_ids);
        let mut request = fixture.request("", 0, Priority::Live);
        request.prompt_ids = prompt_ids;
        request.params.temperature = 0.0;
        request.params.max_tokens = u32::try_from(reference.greedy_ids.len()).unwrap();
        let completion = fixture.run(request).await.unwrap();
        assert_eq!(ids(&completion), reference.greedy_ids, "{:?}", reference.messages);
        assert!(completion.tokens.iter().all(|t| t.logprob <= 0.0 && t.logprob.is_finite()));
    }
}

async fn a_directory_of_transformers_5_is_served_unchanged(backend: EngineBackend) {
    let fixture = start_model(backend, "tests/fixtures/qwen2-tiny", 1, 8).await;
    let text =
        std::fs::read_to_string(here("tests/reference/models/qwen2_tiny_greedy.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let list = |key: &str| -> Vec<TokenId> {
        serde_json::from_value(reference.get(key).unwrap().clone()).unwrap()
    };
    let user = reference.get("user").unwrap().as_str().unwrap();
    let mut request = fixture.request(user, 0, Priority::Live);
    assert_eq!(request.prompt_ids, list("prompt_ids"));
    request.params.temperature = 0.0;
    request.params.max_tokens = u32::try_from(list("greedy_ids").len()).unwrap();
    assert_eq!(ids(&fixture.run(request).await.unwrap()), list("greedy_ids"));
    // The context is the model's, not the multiple of 512 that mistral.rs receives.
    let mut request = fixture.endless(Priority::Live);
    request.params.temperature = 0.0;
    let prompt = request.prompt_ids.len();
    let completion = fixture.run(request).await.unwrap();
    assert_eq!(completion.finish, FinishReason::Length);
    assert_eq!(prompt + completion.tokens.len(), 256);
    let mut request = fixture.request("", 0, Priority::Live);
    request.prompt_ids = vec![5; 256];
    let error = fixture.run(request).await.unwrap_err();
    assert!(matches!(error, EngineError::PromptTooLong { prompt: 256, context: 256 }), "{error}");
}

/// The cache grows at 512 positions: decoding and prefill across that position return the same
/// tokens.
async fn long_contexts_decode_as_they_prefill(backend: EngineBackend) {
    let fixture = start(backend, 1, 8).await;
    let mut request = fixture.endless(Priority::Live);
    let turn = request.prompt_ids.clone();
    request.prompt_ids = turn.iter().cycle().take(490).copied().collect();
    request.params.temperature = 0.0;
    request.params.max_tokens = 60;
    let decoded = ids(&fixture.run(request.clone()).await.unwrap());
    assert_eq!(decoded.len(), 60);
    for known in [10, 30, 50] {
        let mut longer = request.clone();
        longer.prompt_ids.extend(&decoded[..known]);
        longer.params.max_tokens = 10;
        assert_eq!(ids(&fixture.run(longer).await.unwrap()), decoded[known..known + 10]);
    }
}

async fn concurrent_requests_equal_sequential_ones(backend: EngineBackend) {
    let fixture = start(backend, 2, 64).await;
    let request = |seed: u64| {
        let mut request = fixture.request(&format!("What is {seed} plus 7?"), seed, Priority::Live);
        request.top_logprobs = 3;
        request
    };
    let mut alone = Vec::new();
    for seed in 0..24 {
        alone.push(fixture.run(request(seed)).await.unwrap());
    }
    let together = (0..24).map(|seed| fixture.run(request(seed)));
    let together = futures::future::join_all(together).await;
    for (alone, together) in alone.iter().zip(together) {
        // Every id, log-probability and text.
        assert_eq!(*alone, together.unwrap());
    }
    let texts: std::collections::HashSet<&str> = alone.iter().map(|c| c.text.as_str()).collect();
    assert!(texts.len() > 12, "seeds make a difference");
}

async fn a_generation_stops_at_stop_strings_and_limits(backend: EngineBackend) {
    let fixture = start(backend, 1, 8).await;
    let mut request = fixture.request("What is 3 plus 4?", 1, Priority::Live);
    request.params.temperature = 0.0;
    request.top_logprobs = 5;
    let whole = fixture.run(request.clone()).await.unwrap();
    assert_eq!(whole.finish, FinishReason::Stop);
    assert!(fixture.engine.codec().stop_ids().contains(&whole.tokens.last().unwrap().id));
    assert_eq!(whole.text, fixture.engine.codec().decode(&ids(&whole)).unwrap());
    for token in &whole.tokens {
        assert_eq!((token.top.len(), token.top[0]), (5, (token.id, token.logprob)));
        assert_eq!(token.kept_mass, 1.0);
    }
    // A stop string in the middle of the text.
    let middle: String = whole.text.chars().skip(whole.text.chars().count() / 2).take(3).collect();
    request.stop = vec!["never".to_owned(), middle.clone()];
    let cut = fixture.run(request.clone()).await.unwrap();
    assert_eq!(cut.finish, FinishReason::Stop);
    assert_eq!(cut.text, whole.text[..whole.text.find(&middle).unwrap()]);
    assert_eq!(ids(&cut), ids(&whole)[..cut.tokens.len()]);
    assert!(cut.tokens.len() < whole.tokens.len());
    request.stop.clear();
    request.params.max_tokens = 4;
    let short = fixture.run(request.clone()).await.unwrap();
    assert_eq!((short.finish, short.tokens.len()), (FinishReason::Length, 4));
    request.params.top_p = 0.0;
    let error = fixture.run(request).await.unwrap_err().to_string();
    assert_eq!(error, "top_p is 0; more than 0 and at most 1 was expected");
}

async fn a_dropped_generation_frees_its_slot(backend: EngineBackend) {
    let fixture = start(backend, 1, 0).await;
    let first = fixture.engine.generate(fixture.endless(Priority::Live)).await.unwrap();
    let refused = fixture.engine.generate(fixture.endless(Priority::Live)).await.unwrap_err();
    assert!(matches!(refused, EngineError::Overloaded { slots: 1, queued: 0, .. }), "{refused}");
    assert_eq!(fixture.metrics.engine_rejected.get(), 1);
    drop(first);
    fixture.until("freed", |load| load == EngineLoad::default()).await;
    let request = fixture.request("What is 2 plus 2?", 3, Priority::Live);
    assert!(!fixture.run(request).await.unwrap().tokens.is_empty());
}

async fn live_requests_preempt_shadow_requests(backend: EngineBackend) {
    let fixture = start(backend, 1, 8).await;
    let shadow = fixture.request("What is 6 plus 2?", 11, Priority::Shadow);
    let undisturbed = fixture.run(shadow.clone()).await.unwrap();
    let running = fixture.engine.generate(fixture.endless(Priority::Shadow)).await.unwrap();
    let engine = Arc::clone(&fixture.engine);
    let waiting = tokio::spawn(async move { engine.generate(shadow).await?.collect().await });
    fixture.until("shadow waits", |load| load.shadow_waiting == 1).await;
    let live = fixture.request("What is 2 plus 2?", 3, Priority::Live);
    let completion = fixture.run(live).await.unwrap();
    assert_eq!(completion.version, PolicyVersion::BASE);
    let preempted = running.collect().await.unwrap_err();
    assert!(matches!(preempted, EngineError::Preempted), "{preempted}");
    assert_eq!(fixture.metrics.engine_preempted.get(), 1);
    // The waiting request runs afterwards, and its seed returns the same tokens as before.
    assert_eq!(waiting.await.unwrap().unwrap(), undisturbed);
}

async fn a_version_leaves_no_trace_in_later_ones(backend: EngineBackend) {
    let fixture = start(backend, 1, 8).await;
    let request = || fixture.request("What is 5 plus 5?", 9, Priority::Live);
    let base = fixture.run(request()).await.unwrap();
    assert!(fixture.publisher.activate().await.is_err(), "nothing is staged");

    let adapter = fixture.adapter(1, |name| name);
    let staging = Instant::now();
    fixture.publisher.stage(PolicyVersion(1), Some(&adapter)).await.unwrap();
    println!("staged in {:?}", staging.elapsed());
    assert_eq!(fixture.engine.active_version(), PolicyVersion::BASE);
    assert_eq!(fixture.run(request()).await.unwrap(), base);
    let greedy = SamplingParams { temperature: 0.0, max_tokens: 8, ..Default::default() };
    let probe = fixture
        .publisher
        .probe(GenerateRequest::probe(&request().prompt_ids, &greedy))
        .await
        .unwrap();
    println!("activated in {:?}", fixture.publisher.activate().await.unwrap());
    let tuned = fixture.run(request()).await.unwrap();
    assert_eq!(tuned.version, PolicyVersion(1));
    assert_ne!(tuned.tokens, base.tokens);
    // The same probe of the version that is active now.
    fixture.publisher.stage(PolicyVersion(1), Some(&adapter)).await.unwrap();
    assert_eq!(
        fixture
            .publisher
            .probe(GenerateRequest::probe(&request().prompt_ids, &greedy))
            .await
            .unwrap(),
        probe
    );

    // Back to the base, which mistral.rs still holds in the inactive slots, then to a reloaded base.
    fixture.publish(0, None).await;
    assert_eq!(fixture.run(request()).await.unwrap(), base);
    fixture.publish(2, Some(&adapter)).await;
    assert_eq!(fixture.run(request()).await.unwrap().tokens, tuned.tokens);
    fixture.publish(3, None).await;
    let again = fixture.run(request()).await.unwrap();
    assert_eq!(again.version, PolicyVersion(3));
    assert_eq!(again.tokens, base.tokens);
}

async fn an_adapter_that_does_not_fit_changes_nothing(backend: EngineBackend) {
    let fixture = start(backend, 1, 8).await;
    let request = || fixture.request("What is 5 plus 5?", 9, Priority::Live);
    let base = fixture.run(request()).await.unwrap();
    for (seed, from, to, message) in [
        (1, "q_proj", "query", "belongs to no module"),
        (2, "layers.0.", "layers.99.", "belongs to no module"),
        (3, "self_attn.k_proj.lora_B", "self_attn.k_proj.lora_C", "is not the name"),
        (4, "down_proj", "up_proj", "shape"),
    ] {
        let adapter = fixture.adapter(seed, |name| name.replacen(from, to, 1));
        let staged = fixture.publisher.stage(PolicyVersion(seed), Some(&adapter)).await;
        let error = staged.unwrap_err().to_string();
        let directory = adapter.file_name().unwrap().to_str().unwrap();
        let named = match backend {
            EngineBackend::Mistralrs => message,
            EngineBackend::Native => directory,
        };
        assert!(error.contains(named), "{error}");
        assert!(fixture.publisher.activate().await.is_err());
        assert_eq!(fixture.run(request()).await.unwrap(), base);
    }
    // No thread keeps any of their weights.
    fixture.publish(9, None).await;
    assert_eq!(fixture.run(request()).await.unwrap().tokens, base.tokens);
}

async fn a_running_generation_keeps_its_version(backend: EngineBackend) {
    let fixture = start(backend, 2, 8).await;
    let mut running = fixture.engine.generate(fixture.endless(Priority::Live)).await.unwrap();
    let adapter = fixture.adapter(1, |name| name);
    fixture.publish(1, Some(&adapter)).await;
    let new = fixture.run(fixture.request("What is 5 plus 5?", 9, Priority::Live)).await.unwrap();
    assert_eq!((running.version, new.version), (PolicyVersion::BASE, PolicyVersion(1)));
    assert!(matches!(running.events.recv().await, Some(Event::Token(_))));
    // The next staging waits for it in mistral.rs, which holds two versions.
    let publisher = Arc::clone(&fixture.publisher);
    let staging = tokio::spawn(async move { publisher.stage(PolicyVersion(2), None).await });
    for seed in 0..3 {
        // Requests for the new version do not wait for it.
        let request = fixture.request("What is 5 plus 5?", seed, Priority::Live);
        assert_eq!(fixture.run(request).await.unwrap().version, PolicyVersion(1));
    }
    if backend == EngineBackend::Mistralrs {
        assert!(!staging.is_finished());
    }
    assert!(matches!(running.events.recv().await, Some(Event::Token(_))));
    drop(running);
    staging.await.unwrap().unwrap();
    fixture.close(false);
    let refused = fixture.engine.generate(fixture.endless(Priority::Live)).await.unwrap_err();
    assert!(matches!(refused, EngineError::ShuttingDown), "{refused}");
}

/// Resident memory in MiB and threads of this process.
fn process() -> (f64, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let number = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).unwrap_or("");
        line.split_whitespace().nth(1).and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0)
    };
    (number("VmRSS:") / 1024.0, number("Threads:") as usize)
}

const CLIENTS: u64 = 4;
const ADAPTERS: u64 = 5;

impl Fixture {
    fn client_request(&self, client: u64) -> GenerateRequest {
        self.request(&format!("What is {client} plus {}?", 3 * client), client, Priority::Live)
    }

    /// The tokens of every client's request for the base and for every adapter, without other load.
    async fn references(&self, adapters: &[PathBuf]) -> Vec<Vec<Vec<TokenId>>> {
        let mut all = Vec::new();
        let versions = std::iter::once(None).chain(adapters.iter().map(Some));
        for (version, adapter) in versions.enumerate() {
            self.publish(version as u64, adapter.map(PathBuf::as_path)).await;
            let mut each = Vec::new();
            for client in 0..CLIENTS {
                each.push(ids(&self.run(self.client_request(client)).await.unwrap()));
            }
            all.push(each);
        }
        all
    }
}

/// `HONE_SWAPS` changes the number of swaps, at least 100.
fn swaps() -> usize {
    let count = std::env::var("HONE_SWAPS").ok().and_then(|text| text.parse().ok());
    count.unwrap_or(200).max(100)
}

async fn two_hundred_swaps_under_traffic_lose_nothing(backend: EngineBackend) {
    let fixture = Arc::new(start(backend, 2, 64).await);
    let adapters: Vec<PathBuf> =
        (1..=ADAPTERS).map(|seed| fixture.adapter(seed, |name| name)).collect();
    let references = Arc::new(fixture.references(&adapters).await);
    for (one, other) in references.iter().zip(references.iter().skip(1)) {
        assert_ne!(one, other, "the versions differ");
    }
    // The runtime starts another blocking thread for a task that comes before the last thread is idle
    // again. With enough of them from the start, the threads that are counted below are the engine's.
    let blocked = (0..8)
        .map(|_| tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(20))));
    for task in blocked.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    // Version v uses adapter v % 6; 0 is the base.
    let which = |version: PolicyVersion| (version.0 % (ADAPTERS + 1)) as usize;
    let stop = Arc::new(AtomicBool::new(false));
    let completions = Arc::new(AtomicUsize::new(0));
    let tokens = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (fixture, references) = (Arc::clone(&fixture), Arc::clone(&references));
            let (stop, completions) = (Arc::clone(&stop), Arc::clone(&completions));
            let tokens = Arc::clone(&tokens);
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let completion = fixture.run(fixture.client_request(client)).await.unwrap();
                    let expected = &references[which(completion.version)][client as usize];
                    assert_eq!(ids(&completion), *expected, "version {}", completion.version);
                    completions.fetch_add(1, Ordering::Relaxed);
                    tokens.fetch_add(completion.tokens.len(), Ordering::Relaxed);
                }
            })
        })
        .collect();

    let (first, count) = (ADAPTERS + 1, swaps());
    let mut measured = Vec::new();
    let (mut staging, mut held) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for version in (first..).take(count) {
        let adapter = adapters.get(which(PolicyVersion(version)).wrapping_sub(1));
        let begun = Instant::now();
        fixture
            .publisher
            .stage(PolicyVersion(version), adapter.map(PathBuf::as_path))
            .await
            .unwrap();
        staging.push(begun.elapsed());
        held.push(fixture.publisher.activate().await.unwrap());
        assert_eq!(fixture.engine.active_version(), PolicyVersion(version));
        measured.push(process());
        // An engine may exchange versions faster than it completes a request.
        while 3 * completions.load(Ordering::Relaxed) < 2 * measured.len() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    staging.sort_unstable();
    held.sort_unstable();
    let (early, late) = (measured[20], measured[count - 1]);
    let middle = count / 2;
    println!(
        "{count} swaps in {seconds:.1} s: {} completions, {} tokens, 0 failed; staging p50 {:?} max \
         {:?}; exchange held p50 {:?} max {:?}; resident {:.1} -> {:.1} MiB, threads {} -> {}",
        completions.load(Ordering::Relaxed),
        tokens.load(Ordering::Relaxed),
        staging[middle],
        staging[count - 1],
        held[middle],
        held[count - 1],
        early.0,
        late.0,
        early.1,
        late.1,
    );
    assert!(completions.load(Ordering::Relaxed) > 100);
    assert_eq!(fixture.metrics.engine_failures.get(), 0);
    // Tests beside this one start and end threads; those of a version that is never freed would remain.
    let threads = |part: &[(f64, usize)]| part.iter().map(|(_, threads)| *threads).min().unwrap();
    let [few, many] = [&measured[..20], &measured[count - 20..]].map(threads);
    assert!(many <= few + 1, "threads grew from {few} to {many}");
    // Tests beside this one also have memory for a while. A copy of the weights that stays for each swap would be
    // more than that at every moment.
    let memory = |part: &[(f64, usize)]| part.iter().map(|(mib, _)| *mib).collect::<Vec<f64>>();
    let most = memory(&measured[20..60]).into_iter().fold(0.0, f64::max);
    let least = memory(&measured[count - 40..]).into_iter().fold(f64::MAX, f64::min);
    assert!(least < most + 16.0, "memory grew from {most} to {least} MiB");
    // Loading a version happens before the exchange, which only switches to it.
    assert!(20 * held[middle] < staging[middle], "{:?} of {:?}", held[middle], staging[middle]);
}
