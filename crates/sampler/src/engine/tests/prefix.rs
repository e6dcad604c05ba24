//! The prefix cache: what is computed once, and that it changes no result.

use super::*;

/// Prompt tokens that were computed and that were taken from the cache.
pub(super) fn prompt_tokens(engine: &BatchedEngine) -> (u64, u64) {
    let counter = &engine.shared.metrics.engine_prompt_tokens;
    let value = |source: &str| counter.with_label_values(&[source]).get();
    (value("computed"), value("cached"))
}

fn pages(engine: &BatchedEngine, state: &str) -> i64 {
    engine.shared.metrics.engine_cache_pages.with_label_values(&[state]).get()
}

pub(super) async fn answer(engine: &BatchedEngine, request: &GenerateRequest) -> Completion {
    engine.generate(request.clone()).await.unwrap().collect().await.unwrap()
}

pub(super) fn prompt(len: TokenId, first: TokenId) -> Vec<TokenId> {
    (0..len).map(|i| 3 + (first + i * 7) % 80).collect()
}

fn without_cache() -> SamplerConfig {
    SamplerConfig { prefix_cache: false, ..small() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn siblings_compute_their_prompt_once() {
    let plain = start(without_cache());
    for (slots, is_small) in [(1, true), (3, true), (40, true), (3, false), (40, false)] {
        let engine = start_sized(SamplerConfig { slots, ..small() }, is_small);
        let requests: Vec<_> = (0..8).map(|seed| request(&prompt(40, 1), seed, 20)).collect();
        assert_eq!(all(&engine, &requests).await, all(&plain, &requests).await);
        // 39 tokens once, and the last token of each.
        assert_eq!(prompt_tokens(&engine), (39 + 8, 7 * 39), "{slots} slots");
    }
    assert_eq!(prompt_tokens(&plain), (5 * 8 * 40, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn siblings_that_began_with_a_copied_page_compute_the_rest_once() {
    let plain = start(without_cache());
    let text = prompt(60, 1);
    for same in [5, 16, 21] {
        let earlier = request(&[&text[..same], &prompt(30, 40)].concat(), 9, 4);
        let requests: Vec<_> = (0..8).map(|seed| request(&text, seed, 20)).collect();
        for (slots, is_small) in [(1, true), (40, true), (3, false), (40, false)] {
            let engine = start_sized(SamplerConfig { slots, ..small() }, is_small);
            answer(&engine, &earlier).await;
            let before = prompt_tokens(&engine);
            assert_eq!(all(&engine, &requests).await, all(&plain, &requests).await);
            let after = prompt_tokens(&engine);
            let expected = (59 - same as u64 + 8, same as u64 + 7 * 59);
            let counted = (after.0 - before.0, after.1 - before.1);
            assert_eq!(counted, expected, "{same} tokens, {slots} slots, small: {is_small}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_turn_of_a_conversation_continues_the_cached_answer() {
    let (engine, plain) = (start(small()), start(without_cache()));
    let lora = random_lora(model(&tiny()).spec(), 4, 3);
    for engine in [&engine, &plain] {
        engine.publish(PolicyVersion(1), Some(&lora)).unwrap();
    }
    let mut text = prompt(40, 2);
    let mut cached = 0;
    for turn in 0..4 {
        let request = endless(&engine, &text, turn, 30);
        let before = prompt_tokens(&engine);
        let answered = answer(&engine, &request).await;
        assert_eq!(answered, answer(&plain, &request).await, "turn {turn}");
        let after = prompt_tokens(&engine);
        // All full pages of the last turn, whose last token was never computed.
        assert_eq!(after.1 - before.1, cached);
        assert_eq!(after.0 - before.0, text.len() as u64 - cached);
        text.extend(ids(&answered));
        cached = (text.len() as u64 - 1) / 16 * 16;
        text.extend(prompt(9, turn as TokenId));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_with_the_same_beginning_share_it() {
    let (engine, plain) = (start(small()), start(without_cache()));
    let system = prompt(70, 3);
    for (i, differs) in [70, 70, 64, 17, 3].into_iter().enumerate() {
        let text = [&system[..differs], &prompt(25, 11 * (1 + i as TokenId))].concat();
        // The continuations differ in their first token.
        let before = prompt_tokens(&engine).1;
        let request = request(&text, 5, 12);
        assert_eq!(answer(&engine, &request).await, answer(&plain, &request).await);
        let expected = if i == 0 { 0 } else { differs as u64 };
        assert_eq!(prompt_tokens(&engine).1 - before, expected, "{differs}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_do_not_share_pages() {
    let spec = model(&tiny()).spec().clone();
    let loras: Vec<_> = (0..3).map(|seed| random_lora(&spec, 2, seed)).collect();
    let engine = start(small());
    let request = endless(&engine, &prompt(50, 4), 1, 20);
    let mut expected = Vec::new();
    for lora in &loras {
        let plain = start(without_cache());
        plain.publish(PolicyVersion(1), Some(lora)).unwrap();
        expected.push(ids(&answer(&plain, &request).await));
    }
    assert_ne!(expected[0], expected[1]);
    // Also not if an adapter replaces another one of the same number.
    for (version, which) in [(1, 0), (2, 1), (2, 2), (1, 0)] {
        engine.publish(PolicyVersion(version), Some(&loras[which])).unwrap();
        let before = prompt_tokens(&engine).1;
        assert_eq!(ids(&answer(&engine, &request).await), expected[which]);
        assert_eq!(prompt_tokens(&engine).1, before, "version {version}");
        assert_eq!(ids(&answer(&engine, &request).await), expected[which]);
        assert_eq!(prompt_tokens(&engine).1, before + 49);
    }
    // A canary and the active version keep their pages side by side.
    let canary = AdapterWeights::new(&spec, &loras[1]).unwrap();
    engine.set_canary(
        PolicySlot::default(),
        Some(PolicyWeights::new(PolicyVersion(9), Some(canary))),
    );
    let named = GenerateRequest { version: Some(PolicyVersion(9)), ..request.clone() };
    for _ in 0..2 {
        assert_eq!(ids(&answer(&engine, &named).await), expected[1]);
        assert_eq!(ids(&answer(&engine, &request).await), expected[0]);
    }
    let before = prompt_tokens(&engine).1;
    assert_eq!(ids(&answer(&engine, &named).await), expected[1]);
    assert_eq!(prompt_tokens(&engine).1, before + 49);
    engine.set_canary(PolicySlot::default(), None);
    assert_eq!(ids(&answer(&engine, &request).await), expected[0]);
    until_idle(&engine).await;
    // 69 tokens of one version.
    until(&engine, |_| (pages(&engine, "used"), pages(&engine, "cached")) == (0, 5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_learn_nothing_of_each_others_prompts() {
    for (share_prefixes, cached) in [(false, 39), (true, 2 * 39)] {
        let engine = start(SamplerConfig { share_prefixes, ..small() });
        for name in ["a", "b", "a"] {
            let request = request(&prompt(40, 1), 1, 4);
            answer(&engine, &GenerateRequest { owner: Some(Arc::from(name)), ..request }).await;
        }
        assert_eq!(prompt_tokens(&engine), (3 * 40 - cached, cached));
    }
}
