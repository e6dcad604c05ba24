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

/// Tokens of a client that runs during a test.
const LONG: u32 = 250;

#[tokio::test]
async fn other_sequences_decode_while_a_long_prompt_is_computed() {
    for config in [small(), serving()] {
        let config = SamplerConfig { busy_prefill_tokens: 16, prefix_cache: false, ..config };
        let mut stepped = SteppedEngine::new(config);
        let decoding = live(endless(&stepped.engine, &[5, 9], 1, LONG));
        let mut decoding = stepped.admit(decoding).await;
        assert_eq!(arrived(&mut decoding), 1);
        let long: Vec<TokenId> = (0..200).map(|i| 3 + i * 7 % 80).collect();
        let mut prompt = stepped.admit(live(request(&long, 2, 4))).await;
        let mut iterations = 1;
        while prompt.events.try_recv().is_err() {
            stepped.scheduler.iterate();
            iterations += 1;
        }
        // 199 tokens are 13 parts, with a step after each.
        assert!(iterations >= 13, "{iterations}");
        assert_eq!(arrived(&mut decoding), iterations);
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

#[tokio::test]
async fn few_shadows_join_the_steps_of_live_sequences_and_they_continue() {
    for busy_rows in [1, 3] {
        let config = SamplerConfig { busy_rows, slots: 16, ..serving() };
        let mut stepped = SteppedEngine::new(config);
        let client = live(endless(&stepped.engine, &[5, 9], 1, LONG));
        let _client = stepped.admit(client).await;
        let mut shadows = Vec::new();
        for seed in 0..12 {
            let shadow = endless(&stepped.engine, &[4, 5, 6], seed, 60);
            shadows.push(stepped.admit(shadow).await);
        }
        let of_shadows = |stepped: &SteppedEngine| tokens(&stepped.engine, "shadow");
        let (before, busy_rows) = (of_shadows(&stepped), busy_rows as u64);
        assert!(before <= 12 * busy_rows, "{before}");
        for step in 1..=120 {
            stepped.scheduler.iterate();
            assert_eq!(tokens(&stepped.engine, "live"), 13 + step);
            let shadow = of_shadows(&stepped) - before;
            assert!(shadow <= busy_rows * step, "{shadow} in {step} steps");
        }
        let shadow = of_shadows(&stepped) - before;
        assert!(shadow >= 60, "{shadow}");
    }
}

/// A publication waits for its probe.
#[tokio::test]
async fn an_urgent_request_does_not_wait_for_clients() {
    for is_urgent in [false, true] {
        let mut stepped = SteppedEngine::new(SamplerConfig { slots: 16, ..serving() });
        let client = live(endless(&stepped.engine, &[5, 9], 1, LONG));
        let _client = stepped.admit(client).await;
        let mut shadows = Vec::new();
        for seed in 0..12 {
            let shadow = endless(&stepped.engine, &[4, 5, 6], seed, 200);
            shadows.push(stepped.admit(shadow).await);
        }
        let probe = endless(&stepped.engine, &[7; 40], 1, 8);
        let iterate = async { stepped.scheduler.iterate() };
        let submitted =
            stepped.engine.submit(probe, RequestWeights::Active(PolicySlot::default()), is_urgent);
        let (admitted, _) = tokio::join!(biased; submitted, iterate);
        let mut admitted = admitted.unwrap();
        let mut found = arrived(&mut admitted);
        for _ in 0..12 {
            stepped.scheduler.iterate();
            found += arrived(&mut admitted);
        }
        assert_eq!(found == 8, is_urgent, "{found} tokens");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shadow_prompts_and_old_versions_continue_under_constant_live_load() {
    let engine = start(SamplerConfig { slots: 12, ..serving() });
    let spec = model(&tiny()).spec().clone();
    let shadows: Vec<_> = (0..4).map(|seed| request(&[8; 40], seed, 30)).collect();
    let expected = all(&start(small()), &shadows).await;
    let stop = Arc::new(AtomicBool::new(false));
    let started = Arc::new(tokio::sync::Barrier::new(5));
    let mut clients = Vec::new();
    for client in 0..4_u64 {
        let (engine, stop) = (Arc::clone(&engine), Arc::clone(&stop));
        let started = Arc::clone(&started);
        clients.push(tokio::spawn(async move {
            let mut answers = 0;
            while !stop.load(Ordering::Relaxed) {
                let text: Vec<TokenId> = (0..150).map(|i| 3 + (i * 7 + answers) % 80).collect();
                let request = live(request(&text, client, 40));
                let generation = engine.generate(request).await.unwrap();
                if answers == 0 {
                    started.wait().await;
                }
                generation.collect().await.unwrap();
                answers += 1;
            }
        }));
    }
    started.wait().await;
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
        client.await.unwrap();
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

#[tokio::test]
async fn owners_that_wait_are_admitted_in_turn() {
    let mut stepped = SteppedEngine::new(SamplerConfig { slots: 1, queue: 32, ..serving() });
    let held = live(endless(&stepped.engine, &[7], 0, LONG));
    let held = stepped.admit(held).await;
    let SteppedEngine { engine, mut scheduler } = stepped;
    let order = Mutex::new(Vec::new());
    let ask = async |name: &'static str| {
        let request = live(endless(&engine, &[7], 1, LONG));
        let request = GenerateRequest { owner: Some(Arc::from(name)), ..request };
        // The slot is occupied until the generation is dropped.
        let generation = engine.generate(request).await.unwrap();
        order.lock().unwrap().push(name);
        drop(generation);
    };
    // An iteration admits one request, which is polled before the next iteration.
    let serve = async {
        scheduler.iterate();
        assert_eq!(engine.load().live_waiting, 5);
        drop(held);
        for waiting in (0..5).rev() {
            scheduler.iterate();
            assert_eq!(engine.load().live_waiting, waiting);
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(
        biased;
        ask("flood"),
        ask("flood"),
        ask("flood"),
        ask("flood"),
        ask("other"),
        serve,
    );
    let order = order.into_inner().unwrap();
    assert_eq!(order, ["flood", "other", "flood", "flood", "flood"]);
    assert_eq!(engine.shared.metrics.engine_queue_wait.get_sample_count(), 6);
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
