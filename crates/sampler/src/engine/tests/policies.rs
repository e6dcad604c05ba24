//! Several policies on one engine.

use std::sync::Weak;

use super::prefix::{answer, prompt, prompt_tokens};
use super::*;

fn version(policy: u32, n: u64) -> PolicyVersion {
    PolicyVersion(u64::from(policy) << 32 | n)
}

/// An adapter of a policy, of another rank than its neighbors'.
fn adapter(policy: u32) -> LoraWeights {
    random_lora(model(&tiny()).spec(), 1 + policy as usize % 5, u64::from(policy))
}

async fn of_policy(policy: &PolicyEngine, request: GenerateRequest) -> Completion {
    loop {
        match policy.generate(request.clone()).await.unwrap().collect().await {
            Err(EngineError::Preempted) => {}
            completion => return completion.unwrap(),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_policies_answer_from_one_batch_as_each_does_alone() {
    const POLICIES: u32 = 50;
    let requests = requests(2 * u64::from(POLICIES));
    let of = |i: usize| i as u32 % POLICIES;
    let alone = start(SamplerConfig { slots: 1, threads: 1, prefix_cache: false, ..small() });
    let mut expected = Vec::new();
    for (i, request) in requests.iter().enumerate() {
        alone.publish(version(1 + of(i), 1), Some(&adapter(of(i)))).unwrap();
        expected.push(answer(&alone, request).await);
    }
    for (slots, is_small) in [(128, true), (128, false), (20, false)] {
        let engine = start_sized(SamplerConfig { slots, ..small() }, is_small);
        let policies = (0..POLICIES).map(|i| {
            let policy = PolicyEngine::new(Arc::clone(&engine), 1 + i);
            policy.publish(version(1 + i, 1), Some(&adapter(i))).unwrap();
            Arc::new(policy)
        });
        let policies: Vec<_> = policies.collect();
        // The second time, prompts are in the cache.
        for _ in 0..2 {
            let run = |(i, request): (usize, &GenerateRequest)| {
                let (policy, request) = (Arc::clone(&policies[of(i) as usize]), request.clone());
                tokio::spawn(async move { of_policy(&policy, request).await })
            };
            let tasks: Vec<_> = requests.iter().enumerate().map(run).collect();
            for (i, (task, expected)) in tasks.into_iter().zip(&expected).enumerate() {
                assert_eq!(task.await.unwrap(), *expected, "policy {}, {slots} slots", of(i));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publication_changes_one_policy_only() {
    let engine = start(small());
    let [a, b] = [1, 2].map(|number| PolicyEngine::new(Arc::clone(&engine), number));
    let request = || endless(&engine, &prompt(40, 4), 1, 20);
    let found = async |policy: &PolicyEngine| of_policy(policy, request()).await;
    let base = answer(&engine, &request()).await;
    assert_eq!((a.active_version(), b.active_version()), (version(1, 0), version(2, 0)));
    assert_eq!(ids(&found(&a).await), ids(&base));

    let [one, two] = [3, 4].map(adapter_dir);
    a.stage(version(1, 1), Some(one.path())).await.unwrap();
    assert!(b.activate().await.is_err(), "nothing of this policy is staged");
    assert!(a.begin_canary().await.unwrap());
    let canary = GenerateRequest { version: Some(version(1, 1)), ..request() };
    assert_eq!(of_policy(&b, canary.clone()).await.version, version(2, 0));
    assert_eq!(answer(&engine, &canary).await.version, PolicyVersion::BASE);
    let of_canary = of_policy(&a, canary).await;
    assert_eq!((of_canary.version, found(&a).await.version), (version(1, 1), version(1, 0)));
    a.activate().await.unwrap();
    assert!(b.serve_now(version(2, 1), Some(two.path())).await.unwrap());
    let (of_a, of_b) = (found(&a).await, found(&b).await);
    assert_eq!((of_a.clone(), of_b.version), (of_canary, version(2, 1)));
    assert_ne!(ids(&of_a), ids(&of_b));
    assert_eq!(answer(&engine, &request()).await, base);
    // Each finds the pages of its own version, and no others.
    b.serve_now(version(2, 2), Some(one.path())).await.unwrap();
    let cached = prompt_tokens(&engine).1;
    assert_eq!(
        ids(&found(&b).await),
        ids(&of_a),
        "the same adapter, as a version of another policy"
    );
    assert_eq!(prompt_tokens(&engine).1, cached);
    assert_eq!(found(&a).await, of_a);
    assert_eq!(prompt_tokens(&engine).1, cached + 39);
    // A running request keeps its version.
    let mut running = a.generate(endless(&engine, &[5, 9], 2, 400)).await.unwrap();
    a.publish(version(1, 3), None).unwrap();
    assert_eq!(found(&a).await.version, version(1, 3));
    assert_eq!(running.version, version(1, 1));
    assert!(running.events.recv().await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unloaded_policy_leaves_memory_once_no_request_uses_it() {
    let engine = start(SamplerConfig { kept_adapters: 4, ..small() });
    let dir = adapter_dir(3);
    let load = async |number| {
        let policy = PolicyEngine::new(Arc::clone(&engine), number);
        policy.serve_now(version(number, 1), Some(dir.path())).await.unwrap();
        policy
    };
    let held = || engine.shared.lock().held.len();
    let (first, other) = (load(1).await, PolicyEngine::new(Arc::clone(&engine), 2));
    let weights: Weak<AdapterWeights> = {
        let state = engine.shared.lock();
        Arc::downgrade(state.active(first.slot).unwrap().adapter.as_ref().unwrap())
    };
    // Kept, although another version is served.
    first.publish(version(1, 2), None).unwrap();
    assert!(weights.strong_count() == 1 && held() == 2);
    first.serve_now(version(1, 1), Some(dir.path())).await.unwrap();
    let running = first.generate(endless(&engine, &[5, 9, 2], 1, 300)).await.unwrap();
    drop(first);
    assert_eq!(held(), 1, "the base");
    assert_eq!(running.collect().await.unwrap().version, version(1, 1));
    until_idle(&engine).await;
    until_no_page_is_used(&engine).await;
    until(&engine, |_| weights.strong_count() == 0).await;
    assert_eq!(of_policy(&other, request(&[5, 9], 1, 4)).await.version, version(2, 0));
    let again = load(1).await;
    assert_eq!((again.active_version(), held()), (version(1, 1), 2));
}
