//! Random arrivals, cancellations, publications and settings.

use std::sync::OnceLock;

use proptest::prelude::*;

use super::*;

/// One client or rollout.
#[derive(Clone, Debug)]
struct Arrival {
    /// Microseconds after the start.
    at: u64,
    /// Which of several texts it begins with, and the length of its prompt.
    text: TokenId,
    prompt: TokenId,
    limit: u32,
    seed: u64,
    is_live: bool,
    /// Microseconds after which it is cancelled.
    cancel: Option<u64>,
    publish: Option<u64>,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let request = (0..4 as TokenId, 1..90 as TokenId, 1..50_u32, 0..4_u64, any::<bool>());
    let cancel = prop::option::weighted(0.2, 0..3000_u64);
    let publish = prop::option::weighted(0.15, 0..3_u64);
    (0..8000_u64, request, cancel, publish).prop_map(|(at, request, cancel, publish)| {
        let (text, prompt, limit, seed, is_live) = request;
        Arrival { at, text, prompt, limit, seed, is_live, cancel, publish }
    })
}

fn config() -> impl Strategy<Value = SamplerConfig> {
    let sizes = (1..7_usize, 9..40_usize, 16..60_usize, 16..40_usize);
    let switches = (any::<bool>(), any::<bool>(), 1..3_usize, 1..4_usize);
    (sizes, switches).prop_map(|((slots, pages, prefill, busy), switches)| {
        let (prefix_cache, serves_clients, threads, busy_rows) = switches;
        SamplerConfig {
            slots,
            max_batch_tokens: 16 * pages,
            prefill_tokens: prefill,
            busy_prefill_tokens: busy,
            prefix_cache,
            serves_clients,
            threads,
            busy_rows,
            ..SamplerConfig::default()
        }
    })
}

impl Arrival {
    fn request(&self) -> GenerateRequest {
        // The texts agree in their first 24 tokens.
        let differs = |i| if i >= 24 { self.text * 13 } else { 0 };
        let text: Vec<TokenId> = (0..self.prompt).map(|i| 3 + (i * 7 + differs(i)) % 80).collect();
        let mut request = request(&text, self.seed, self.limit);
        if self.is_live {
            request = live(request);
            request.top_logprobs = 2;
        }
        request
    }

    /// Runs it. `None` if it was cancelled.
    async fn run(self, engine: Arc<BatchedEngine>) -> Option<Completion> {
        tokio::time::sleep(Duration::from_micros(self.at)).await;
        if let Some(version) = self.publish {
            publish(&engine, version);
        }
        let whole = async {
            loop {
                match engine.generate(self.request()).await.unwrap().collect().await {
                    Err(EngineError::Preempted) => {}
                    result => return result.unwrap(),
                }
            }
        };
        match self.cancel {
            None => Some(whole.await),
            Some(after) => tokio::time::timeout(Duration::from_micros(after), whole).await.ok(),
        }
    }
}

fn publish(engine: &BatchedEngine, version: u64) {
    static SPEC: OnceLock<ModelSpec> = OnceLock::new();
    let spec = SPEC.get_or_init(|| model(&tiny()).spec().clone());
    let lora = (version > 0).then(|| random_lora(spec, 2, version));
    engine.publish(PolicyVersion(version), lora.as_ref()).unwrap();
}

/// An engine on the processor for each version, which computes one request at a time, without a prefix cache.
fn alone() -> [Arc<BatchedEngine>; 3] {
    let config =
        SamplerConfig { slots: 1, threads: 1, prefix_cache: false, ..SamplerConfig::default() };
    [0, 1, 2].map(|version| {
        let (codec, config) = codec_and(config.clone());
        let (model, never) = (model(&tiny()), Arc::new(|| false));
        let engine = BatchedEngine::start(&model, codec, config, never, metrics()).unwrap();
        publish(&engine, version);
        engine
    })
}

/// Compares what a device computed with the log-probabilities of the same tokens on the processor. Rounding may
/// choose another token.
async fn check_scores(found: &Completion, request: &GenerateRequest, alone: &BatchedEngine) {
    let scored = GenerateRequest::score(&request.prompt_ids, &ids(found), 0);
    let scored = alone.generate(scored).await.unwrap().collect().await.unwrap();
    assert!(ids(found) == ids(&scored) && !found.tokens.is_empty());
    for (token, exact) in found.tokens.iter().zip(&scored.tokens) {
        let error = (token.logprob - exact.logprob).abs();
        assert!(error < 1e-4, "{request:?}: {} {}", token.logprob, exact.logprob);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if is_on_device() { 4 } else { 24 },
        ..ProptestConfig::default()
    })]

    /// Every completion equals the one that its request has alone, on the version that it ran on.
    #[test]
    fn every_completion_equals_the_one_computed_alone(
        arrivals in prop::collection::vec(arrival(), 1..40),
        config in config(),
        is_small in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let engine = start_sized(config, is_small);
            let tasks: Vec<_> = arrivals
                .iter()
                .map(|arrival| tokio::spawn(arrival.clone().run(Arc::clone(&engine))))
                .collect();
            let alone = alone();
            for (index, task) in tasks.into_iter().enumerate() {
                let Some(found) = task.await.unwrap() else { continue };
                let (engine, request) =
                    (&alone[found.version.0 as usize], arrivals[index].request());
                if is_on_device() {
                    check_scores(&found, &request, engine).await;
                    continue;
                }
                let expected = engine.generate(request).await.unwrap();
                assert_eq!(found, expected.collect().await.unwrap(), "{:?}", arrivals[index]);
            }
            until_idle(&engine).await;
            until_no_page_is_used(&engine).await;
        });
    }
}
