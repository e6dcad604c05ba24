//! An engine that serves clients: parts of prompts, priorities, its queue and its metrics.

use super::*;

fn serving() -> SamplerConfig {
    SamplerConfig { serves_clients: true, ..small() }
}

/// Tokens that arrived since the last call.
fn arrived(generation: &mut Generation) -> usize {
    let mut tokens = 0;
    while let Ok(Event::Token(_)) = generation.events.try_recv() {
        tokens += 1;
    }
    tokens
}

async fn first_token(generation: &mut Generation) {
    assert!(matches!(generation.events.recv().await, Some(Event::Token(_))));
}

/// Sequences and waiting requests, of live priority and of shadows.
fn gauges(engine: &BatchedEngine) -> [i64; 4] {
    let (slots, waiting) =
        (&engine.shared.metrics.engine_slots, &engine.shared.metrics.engine_waiting);
    [
        slots.with_label_values(&["live"]).get(),
        slots.with_label_values(&["shadow"]).get(),
        waiting.with_label_values(&["live"]).get(),
        waiting.with_label_values(&["shadow"]).get(),
    ]
}

fn tokens(engine: &BatchedEngine, priority: &str) -> u64 {
    engine.shared.metrics.engine_tokens.with_label_values(&[priority]).get()
}

/// Waits until the cache holds no page of a sequence.
async fn until_no_page_is_used(engine: &BatchedEngine) {
    let pages = engine.shared.metrics.engine_cache_pages.with_label_values(&["used"]);
    let began = Instant::now();
    while pages.get() != 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "{} pages", pages.get());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Tokens of a client that runs during a test.
const LONG: u32 = 250;

/// Tokens that a decoding client gets while another one's prompt of 200 tokens is computed. `None` if
/// the first client has ended before.
async fn tokens_during_a_prompt(engine: &BatchedEngine) -> Option<usize> {
    let mut decoding = engine.generate(live(endless(engine, &[5, 9], 1, LONG))).await.unwrap();
    first_token(&mut decoding).await;
    let before = 1 + arrived(&mut decoding);
    let long: Vec<TokenId> = (0..200).map(|i| 3 + i * 7 % 80).collect();
    let mut prompt = engine.generate(live(request(&long, 2, 4))).await.unwrap();
    first_token(&mut prompt).await;
    let during = arrived(&mut decoding);
    (before + during < LONG as usize).then_some(during)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_sequences_decode_while_a_long_prompt_is_computed() {
    for config in [small(), serving()] {
        let config = SamplerConfig { busy_prefill_tokens: 16, prefix_cache: false, ..config };
        let engine = start(config);
        let mut during = None;
        for _ in 0..ATTEMPTS {
            during = during.or(tokens_during_a_prompt(&engine).await);
        }
        // 199 tokens are 13 parts, with a step after each.
        assert!(during.is_some_and(|tokens| tokens >= 12), "{during:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_cancelled_in_the_queue_during_its_prompt_and_later() {
    let config = SamplerConfig { prefill_tokens: 16, slots: 3, ..serving() };
    let engine = start(config);
    let long: Vec<TokenId> = (0..200).map(|i| 3 + i * 7 % 80).collect();
    for round in 0..12 {
        let mut kept = Vec::new();
        for i in 0..3 {
            let request = endless(&engine, &[long[i + 3 * round]], i as u64, 240);
            kept.push(engine.generate(live(request)).await.unwrap());
        }
        let mut text = long.clone();
        text[0] = 3 + round as TokenId;
        // In the queue: no slot is free.
        let queued = engine.generate(live(request(&text, 1, 9)));
        let _ = tokio::time::timeout(Duration::from_micros(200), queued).await;
        kept.truncate(1);
        // During its prompt, which takes 13 iterations, and after its first token.
        for during in [true, false] {
            let mut generation = engine.generate(live(request(&text, 1, 9))).await.unwrap();
            if !during {
                first_token(&mut generation).await;
            }
        }
        drop(kept);
        until_idle(&engine).await;
    }
    until_no_page_is_used(&engine).await;
    assert_eq!(gauges(&engine), [0; 4]);
}

/// Counts the tokens of 12 shadows beside one client. Returns the client's steps and the shadows' tokens
/// while the client ran, or `None` if it has ended too early.
async fn shadows_beside_a_client(engine: &Arc<BatchedEngine>) -> Option<(u64, u64)> {
    let before = (tokens(engine, "live"), tokens(engine, "shadow"));
    let mut client = engine.generate(live(endless(engine, &[5, 9], 1, LONG))).await.unwrap();
    first_token(&mut client).await;
    let mut shadows = tokio::task::JoinSet::new();
    for seed in 0..12 {
        let shadow = endless(engine, &[4, 5, 6], seed, 60);
        let engine = Arc::clone(engine);
        shadows.spawn(async move { engine.generate(shadow).await?.collect().await });
    }
    loop {
        // In this order, the client still ran when the shadows' tokens were counted.
        let shadow = tokens(engine, "shadow") - before.1;
        let client = tokens(engine, "live") - before.0;
        if client >= u64::from(LONG) {
            while let Some(shadow) = shadows.join_next().await {
                shadow.unwrap().unwrap();
            }
            return None;
        }
        if shadow >= 60 {
            return Some((client + 1, shadow));
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn few_shadows_join_the_steps_of_live_sequences_and_they_continue() {
    for busy_rows in [1, 3] {
        let engine = start(SamplerConfig { busy_rows, slots: 16, ..serving() });
        let mut counted = 0;
        for _ in 0..ATTEMPTS {
            if let Some((steps, shadow)) = shadows_beside_a_client(&engine).await {
                assert!(shadow <= busy_rows as u64 * steps, "{shadow} in {steps} steps");
                counted += 1;
            }
            until_idle(&engine).await;
        }
        assert!(counted > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shadow_prompts_and_old_versions_continue_under_constant_live_load() {
    let engine = start(SamplerConfig { slots: 12, ..serving() });
    let spec = model(&tiny()).spec().clone();
    let shadows: Vec<_> = (0..4).map(|seed| request(&[8; 40], seed, 30)).collect();
    let expected = all(&start(small()), &shadows).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for client in 0..4_u64 {
        let (engine, stop) = (Arc::clone(&engine), Arc::clone(&stop));
        clients.push(tokio::spawn(async move {
            let mut answers = 0;
            while !stop.load(Ordering::Relaxed) {
                let text: Vec<TokenId> = (0..150).map(|i| 3 + (i * 7 + answers) % 80).collect();
                let request = live(request(&text, client, 40));
                engine.generate(request).await.unwrap().collect().await.unwrap();
                answers += 1;
            }
            answers
        }));
    }
    let mut waiting = Vec::new();
    for shadow in &shadows {
        let generation = engine.generate(shadow.clone()).await.unwrap();
        waiting.push(tokio::spawn(generation.collect()));
    }
    // The clients use another version from now on.
    engine.publish(PolicyVersion(1), Some(&random_lora(&spec, 2, 1))).unwrap();
    for (shadow, expected) in waiting.into_iter().zip(expected) {
        assert_eq!(shadow.await.unwrap().unwrap(), expected);
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        assert!(client.await.unwrap() > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_requests_beyond_the_queue_are_refused_and_shadows_wait_to_enter_it() {
    let engine = start(SamplerConfig { slots: 1, queue: 2, ..serving() });
    let mut shadows = Vec::new();
    for seed in 0..8 {
        let engine = Arc::clone(&engine);
        shadows.push(tokio::spawn(async move {
            loop {
                match engine.generate(request(&[1, 2], seed, 30)).await?.collect().await {
                    Err(EngineError::Preempted) => {}
                    result => return result,
                }
            }
        }));
    }
    let began = Instant::now();
    let mut refused = 0;
    while refused == 0 {
        assert!(began.elapsed() < Duration::from_secs(10));
        let mut clients = Vec::new();
        for seed in 0..6 {
            let (client, request) = (Arc::clone(&engine), endless(&engine, &[7], seed, 200));
            clients.push(tokio::spawn(async move {
                client.generate(live(request)).await?.collect().await
            }));
            assert!(engine.load().shadow_waiting <= 2, "{:?}", engine.load());
        }
        for client in clients {
            match client.await.unwrap() {
                Ok(completion) => assert_eq!(completion.tokens.len(), 200),
                Err(EngineError::Overloaded { slots: 1, queued: 2 | 3, .. }) => refused += 1,
                Err(other) => panic!("{other}"),
            }
        }
    }
    assert_eq!(engine.shared.metrics.engine_rejected.get(), refused);
    for shadow in shadows {
        shadow.await.unwrap().unwrap();
    }
    until_idle(&engine).await;
    assert_eq!(gauges(&engine), [0; 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_request_preempts_shadows_until_its_pages_are_free() {
    // 20 pages, of which each shadow is promised 6.
    let config = SamplerConfig { max_batch_tokens: 320, slots: 8, ..serving() };
    let engine = start(config);
    let mut shadows = Vec::new();
    for seed in 0..3 {
        let shadow = endless(&engine, &[5 + seed], u64::from(seed), 95);
        shadows.push(engine.generate(shadow).await.unwrap());
    }
    let text: Vec<TokenId> = (0..100).map(|i| 3 + i * 7 % 80).collect();
    let client = engine.generate(live(endless(&engine, &text, 1, 60))).await.unwrap();
    assert_eq!(client.collect().await.unwrap().tokens.len(), 60);
    let mut preempted = 0;
    for shadow in shadows {
        match shadow.collect().await {
            Ok(completion) => assert_eq!(completion.tokens.len(), 95),
            Err(error) => {
                assert!(matches!(error, EngineError::Preempted), "{error}");
                preempted += 1;
            }
        }
    }
    assert_eq!(engine.shared.metrics.engine_preempted.get(), preempted);
    assert!(preempted <= 2, "{preempted}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owners_that_wait_are_admitted_in_turn() {
    let engine = start(SamplerConfig { slots: 1, queue: 32, ..serving() });
    for _ in 0..ATTEMPTS {
        let held = engine.generate(live(endless(&engine, &[7], 0, 250))).await.unwrap();
        let order = Mutex::new(Vec::new());
        let ask = async |name: &'static str| {
            let request = live(endless(&engine, &[7], 1, 250));
            let request = GenerateRequest { owner: Some(Arc::from(name)), ..request };
            // The slot is occupied until the generation is dropped.
            let generation = engine.generate(request).await.unwrap();
            order.lock().unwrap().push(name);
            drop(generation);
        };
        let release = async {
            let waiting = engine.load().live_waiting;
            drop(held);
            waiting
        };
        let (_, _, _, _, _, waiting) = tokio::join!(
            biased;
            ask("flood"),
            ask("flood"),
            ask("flood"),
            ask("flood"),
            ask("other"),
            release,
        );
        if waiting == 5 {
            let order = order.into_inner().unwrap();
            assert_eq!(order, ["flood", "other", "flood", "flood", "flood"]);
            assert!(engine.shared.metrics.engine_queue_wait.get_sample_count() >= 6);
            return;
        }
    }
    panic!("the first request always ended too early");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_request_that_waits_too_long_is_refused() {
    let limit = Duration::from_millis(20);
    let engine = start(SamplerConfig { slots: 1, queue_timeout: Some(limit), ..serving() });
    let held = engine.generate(live(endless(&engine, &[7], 0, 250))).await.unwrap();
    let refused = engine.generate(live(request(&[7], 1, 4))).await;
    match refused {
        Err(EngineError::QueueTimeout { waited, .. }) => assert!(waited >= limit),
        // The first request ended meanwhile.
        Ok(_) => assert_eq!(held.collect().await.unwrap().tokens.len(), 250),
        Err(other) => panic!("{other}"),
    }
    until_idle(&engine).await;
}
