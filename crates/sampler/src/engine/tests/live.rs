//! Live traffic on the sampler: canaries, rollbacks, and priority over shadows.

use super::*;

/// A serving engine that takes `release` before it has loaded a version, and its publisher.
struct SlowServing {
    inner: Arc<BatchedEngine>,
    own: BatchedPublisher,
    release: tokio::sync::Semaphore,
}

#[async_trait]
impl Publisher for SlowServing {
    async fn stage(&self, version: PolicyVersion, dir: Option<&Path>) -> Result<(), EngineError> {
        self.release.acquire().await.unwrap().forget();
        self.own.stage(version, dir).await
    }

    async fn probe(&self, request: GenerateRequest) -> Result<Vec<Probe>, EngineError> {
        self.own.probe(request).await
    }

    async fn complete_staged(&self, request: GenerateRequest) -> Result<Completion, EngineError> {
        self.own.complete_staged(request).await
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        self.own.activate().await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sampler_answers_until_the_serving_engine_has_loaded_a_version() {
    let (serving, sampler) = (start(small()), start(small()));
    let slow = Arc::new(SlowServing {
        inner: Arc::clone(&serving),
        own: BatchedPublisher::new(None, Arc::clone(&serving)),
        release: tokio::sync::Semaphore::new(0),
    });
    let publisher = BatchedPublisher::new(Some(slow.clone()), Arc::clone(&sampler));
    let live = publisher.live_engine(slow.inner.clone());
    let dir = adapter_dir(3);
    let version = async || {
        let request = super::live(request(&[5, 9], 1, 4));
        live.generate(request).await.unwrap().collect().await.unwrap().version
    };
    assert_eq!(version().await, PolicyVersion::BASE);
    assert!(publisher.serve_now(PolicyVersion(3), Some(dir.path())).await.unwrap());
    assert_eq!((version().await, live.active_version()), (PolicyVersion(3), PolicyVersion(3)));
    assert_eq!(serving.active_version(), PolicyVersion::BASE, "it has not loaded the version");
    slow.release.add_permits(1);
    publisher.stage(PolicyVersion(3), Some(dir.path())).await.unwrap();
    publisher.activate().await.unwrap();
    assert_eq!(serving.active_version(), PolicyVersion(3));
    let before = serving.shared.metrics.engine_tokens.with_label_values(&["live"]).get();
    assert_eq!(version().await, PolicyVersion(3));
    let after = serving.shared.metrics.engine_tokens.with_label_values(&["live"]).get();
    assert!(after > before, "the serving engine answers again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_canary_answers_the_requests_that_name_it() {
    let engine = start(small());
    let publisher = BatchedPublisher::new(None, Arc::clone(&engine));
    let dir = adapter_dir(3);
    let named = async |version: Option<u64>| {
        let version = version.map(PolicyVersion);
        let request = GenerateRequest { version, ..request(&[5, 9], 1, 8) };
        engine.generate(request).await.unwrap().collect().await.unwrap()
    };
    publisher.stage(PolicyVersion(2), Some(dir.path())).await.unwrap();
    assert_eq!(named(Some(2)).await.version, PolicyVersion::BASE, "staged is not served");
    assert!(publisher.begin_canary().await.unwrap());
    let (canary, active) = (named(Some(2)).await, named(None).await);
    assert_eq!((canary.version, active.version), (PolicyVersion(2), PolicyVersion::BASE));
    assert_ne!(canary.tokens, active.tokens);
    assert_eq!(named(Some(7)).await.version, PolicyVersion::BASE, "an unknown version");
    publisher.end_canary();
    assert_eq!(named(Some(2)).await, active);
    publisher.activate().await.unwrap();
    assert_eq!(named(None).await, canary);
}

/// How two shadows end, the older one first, if a live request arrives while both slots are theirs.
/// `None` if a shadow may have ended before it.
async fn ends_of_shadows(engine: &BatchedEngine) -> Option<[Result<FinishReason, EngineError>; 2]> {
    let older = engine.generate(endless(engine, &[5, 9, 2], 0, 400)).await.unwrap();
    let newer = engine.generate(endless(engine, &[5, 9, 2], 1, 400)).await.unwrap();
    let answered =
        engine.generate(live(request(&[7], 3, 4))).await.unwrap().collect().await.unwrap();
    assert!(!answered.tokens.is_empty());
    let older = older.collect().await.map(|completion| completion.finish);
    let newer = newer.collect().await.map(|completion| completion.finish);
    newer.is_err().then_some([older, newer])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_request_preempts_the_newest_shadow() {
    let engine = start(SamplerConfig { slots: 2, threads: 1, ..SamplerConfig::default() });
    let mut ends = None;
    for _ in 0..ATTEMPTS {
        if ends.is_none() {
            ends = ends_of_shadows(&engine).await;
        }
    }
    let ends = ends.expect("no live request arrived in time");
    assert!(matches!(ends[1], Err(EngineError::Preempted)), "{ends:?}");
    assert!(matches!(ends[0], Ok(FinishReason::Length)), "{ends:?}");
}
