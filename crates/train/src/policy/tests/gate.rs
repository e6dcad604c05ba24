//! The gate over scripted answers and log-probabilities, and publication with it.

use std::collections::BTreeSet;

use super::*;
use crate::policy::gate::{PARITY_TOLERANCE, PARITY_TOLERANCE_HALF};

#[tokio::test(flavor = "multi_thread")]
async fn an_equal_candidate_passes_every_check_in_order() {
    let world = World::start(equal, 12, config(|_| {})).await;
    let record = world.published(FakeWeights::default()).await;
    let names: Vec<&str> = record.checks.iter().map(|check| check.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "parity/serving",
            "drift/kl_base",
            "drift/kl_active",
            "drift/entropy",
            "drift/length",
            "drift/truncated",
            "drift/format/format",
            "exam/chat"
        ]
    );
    assert!(record.checks.iter().all(|check| check.passed), "{:?}", record.checks);
    assert_eq!(record.state, PolicyState::Active);
    assert!(record.checks[7].detail.contains("12 prompts"), "{:?}", record.checks[7]);
    let seeds: BTreeSet<u64> = world.engine.requests().iter().map(|r| r.params.seed).collect();
    assert_eq!(seeds.len(), 12, "each prompt has its own seed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_that_answers_worse_fails_the_exam() {
    let script = |request: &GenerateRequest, version: PolicyVersion| {
        if version.0 > 0 { "a: no".to_owned() } else { equal(request, version) }
    };
    let world = World::start(script, 12, config(|_| {})).await;
    let check = world.rejection(FakeWeights::default()).await;
    assert_eq!(check.name, "exam/chat");
    assert!(check.value.unwrap() < -0.5, "{check:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_in_bf16_may_differ_more_from_the_engine() {
    let own = (PARITY_TOLERANCE + PARITY_TOLERANCE_HALF) as f32 / 2.0;
    let world = World::start(equal, 12, config(|_| {})).await;
    let weights = FakeWeights { own, ..Default::default() };
    assert_eq!(world.rejection(weights).await.name, "parity/serving");
    let weights = FakeWeights { compute: Compute::Bf16, ..weights };
    world.published(weights).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_drift_is_rejected() {
    let by_version = |own: &'static str| {
        move |_: &GenerateRequest, version: PolicyVersion| {
            if version.0 > 0 { own.to_owned() } else { "a: yes".to_owned() }
        }
    };
    let drift = |weights: FakeWeights| async move {
        let world = World::start(equal, 12, config(|_| {})).await;
        world.rejection(weights).await.name
    };
    assert_eq!(drift(FakeWeights { base: 4.0, ..Default::default() }).await, "drift/kl_base");
    assert_eq!(drift(FakeWeights { base: f32::NAN, ..Default::default() }).await, "drift/kl_base");
    let long = "a: yes, and then many more words than the question needs, again and again";
    for (own, name) in [(long, "drift/length"), ("yes", "drift/format/format")] {
        let world = World::start(by_version(own), 12, config(|_| {}));
        assert_eq!(world.await.rejection(FakeWeights::default()).await.name, name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_active_version_is_the_adapter_that_it_compares_with() {
    let world = World::start(equal, 12, config(|_| {})).await;
    world.publish_good(1).await;
    let far = FakeWeights { active: -3.0, ..Default::default() };
    assert_eq!(world.rejection(far).await.name, "drift/kl_active");
    assert!(world.dir.path().join("adapters/v000002").exists(), "the files explain the rejection");
}

#[tokio::test(flavor = "multi_thread")]
async fn direct_promotion_checks_parity_only() {
    let worse = |_: &GenerateRequest, version: PolicyVersion| format!("{}", version.0);
    let direct = PolicyConfig { promotion: Promotion::Direct, ..config(|_| {}) };
    let world = World::start(worse, 12, direct).await;
    let record = world.published(FakeWeights { base: 9.0, ..Default::default() }).await;
    assert_eq!(record.checks.len(), 1);
    assert_eq!(record.checks[0].name, "parity/serving");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_prompts_the_comparison_is_skipped_and_recorded() {
    let world = World::start(equal, 0, config(|_| {})).await;
    let record = world.published(FakeWeights::default()).await;
    let skipped = record.checks.last().unwrap();
    assert!(skipped.passed && skipped.detail.starts_with("skipped"), "{skipped:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn small_drifts_do_not_add_up() {
    let script = |_: &GenerateRequest, version: PolicyVersion| match version.0 {
        0 => "a: yes".to_owned(),
        1 | 3 => "a: yes and no".to_owned(),
        _ => "a: yes and no, or maybe, or not at all".to_owned(),
    };
    let world = World::start(script, 12, config(|_| {})).await;
    let first = world.published(FakeWeights::default()).await;
    let check = world.rejection(FakeWeights::default()).await;
    assert_eq!(check.name, "drift/length", "{check:?} after {:?}", first.checks);
    assert!(check.detail.contains("of version 0 "), "{check:?}");
    // An operator who is content with the first version makes it the anchor.
    world.policies.pin(PolicyVersion(1), true).await.unwrap();
    let next = world.published(FakeWeights::default()).await;
    assert!(next.checks.iter().any(|check| check.detail.contains("of version 1 ")), "{next:?}");
}

/// Answers of 16 tokens whose entropies are about these shares of the first one's.
fn answers_of_entropy<const N: usize>(shares: [f64; N]) -> [String; N] {
    let codec = codec();
    let tokens = |text: &str| codec.encode(text).unwrap();
    let entropy = |text: &String| {
        let ids = tokens(text);
        let sum: f64 = ids.iter().map(|id| -f64::from(FakeEngine::logprob(*id))).sum();
        sum / f64::from(u32::try_from(ids.len()).unwrap())
    };
    let repeated = ('!'..='~').map(|letter| letter.to_string().repeat(16));
    let mut answers: Vec<_> = repeated.filter(|text| tokens(text).len() == 16).collect();
    answers.sort_by(|a, b| entropy(a).total_cmp(&entropy(b)));
    let most = entropy(answers.last().unwrap());
    let distance = |text: &String, share: f64| (entropy(text) - share * most).abs();
    shares.map(|share| {
        let nearer = |a: &&String, b: &&String| distance(a, share).total_cmp(&distance(b, share));
        answers.iter().min_by(nearer).unwrap().clone()
    })
}

/// A world whose second version has less entropy than the base permits.
async fn world_of_falling_entropy(prompts: TokenId) -> World {
    let [first, second, third] = answers_of_entropy([1.0, 0.5, 0.2]);
    let script = move |_: &GenerateRequest, version: PolicyVersion| match version.0 {
        0 => first.clone(),
        1 => second.clone(),
        _ => third.clone(),
    };
    World::start(script, prompts, config(|_| {})).await
}

#[tokio::test(flavor = "multi_thread")]
async fn small_losses_of_entropy_do_not_add_up() {
    let world = world_of_falling_entropy(12).await;
    world.rate(0, &[-1.0, 0.0, 0.5, 1.0]).await;
    world.published(FakeWeights::default()).await;
    // As good as the base, but not better.
    world.rate(1, &[-1.0, 0.0, 0.5, 1.0]).await;
    let check = world.rejection(FakeWeights::default()).await;
    assert_eq!(check.name, "drift/entropy", "{check:?}");
    assert!(check.detail.contains("of version 0 "), "{check:?}");
    assert!(check.detail.ends_with("pin it, and the drift is measured from it"), "{check:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn higher_ratings_permit_less_entropy() {
    let world = world_of_falling_entropy(12).await;
    world.rate(0, &[-1.0, -0.5, -1.0, -0.5]).await;
    world.published(FakeWeights::default()).await;
    world.rate(1, &[0.5, 1.0, 1.0, 1.0]).await;
    let record = world.published(FakeWeights::default()).await;
    let check = record.checks.iter().find(|check| check.name == "drift/entropy").unwrap();
    assert!(check.detail.ends_with("are above that version's"), "{check:?}");
    let base = world.store.policy(PolicyVersion::BASE).unwrap().unwrap();
    assert!(base.checks.iter().any(|check| check.name == "anchor/ratings"), "{base:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn higher_held_out_rewards_permit_less_entropy() {
    let script = |_: &GenerateRequest, version: PolicyVersion| match version.0 {
        0 => "a: no maybe not".to_owned(),
        _ => "a: yes".to_owned(),
    };
    let world = World::start(script, 12, config(|_| {})).await;
    world.published(FakeWeights::default()).await;
    // The base's entropy is as if it had been measured far above that of its answers.
    let mut base = world.store.policy(PolicyVersion::BASE).unwrap().unwrap();
    let entropy = base.checks.iter_mut().find(|check| check.name == "drift/entropy").unwrap();
    entropy.value = Some(1e3);
    world.store.commit(vec![Op::Policy(Box::new(base))]).await.unwrap();
    let record = world.published(FakeWeights::default()).await;
    let check = record.checks.iter().find(|check| check.name == "drift/entropy").unwrap();
    assert!(check.detail.ends_with("are above that version's"), "{check:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn small_rises_of_truncated_answers_do_not_add_up() {
    // A quarter more of the answers reaches the limit of 24 tokens with each version.
    let script = |request: &GenerateRequest, version: PolicyVersion| {
        let is_cut = (request.params.seed & 0xffff) < 3 * version.0;
        "?".repeat(if is_cut { 40 } else { 16 })
    };
    let world = World::start(script, 12, config(|_| {})).await;
    world.published(FakeWeights::default()).await;
    let check = world.rejection(FakeWeights::default()).await;
    assert_eq!(check.name, "drift/truncated", "{check:?}");
    assert!(check.detail.contains("of version 0 0.000"), "{check:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exam_covers_every_graded_route() {
    let script = |request: &GenerateRequest, version: PolicyVersion| {
        let is_last = request.prompt_ids[1] >= 100;
        if is_last && version.0 > 0 { "a: no".to_owned() } else { "a: yes".to_owned() }
    };
    let world = World::start(script, 12, config(|_| {})).await;
    for n in 0..9 {
        let tokens = if n == 8 { 100..112 } else { 0..12 };
        world.hold_out(&format!("route-{n}"), tokens).await;
    }
    // The last route alone becomes worse.
    let check = world.rejection(FakeWeights::default()).await;
    assert_eq!(check.name, "exam/route-8", "{check:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn small_losses_of_reward_do_not_add_up() {
    // Each version answers two prompts more wrongly, of twelve, which is no clear difference.
    let script = |request: &GenerateRequest, version: PolicyVersion| {
        let place = request.params.seed & 0xffff;
        if place < 2 * version.0 { "a: no".to_owned() } else { "a: yes".to_owned() }
    };
    let world = World::start(script, 12, config(|_| {})).await;
    world.published(FakeWeights::default()).await;
    let check = world.rejection(FakeWeights::default()).await;
    assert_eq!(check.name, "exam/chat", "{check:?}");
    assert!(check.detail.contains("of version 0 at least 1.00"), "{check:?}");
    // The base, whose rewards were measured with version 1, has them among its checks.
    let base = world.store.policy(PolicyVersion::BASE).unwrap().unwrap();
    assert!(base.checks.iter().any(|check| check.name == "anchor/exam/chat"), "{base:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_used_share_of_the_kl_budget_is_reported() {
    let world = World::start(equal, 12, config(|gate| gate.max_kl = 0.8)).await;
    world.published(FakeWeights { base: -0.9, ..Default::default() }).await;
    // exp(d) - 1 - d at d = -0.9.
    let used = world.metrics.policy_kl_budget.get();
    assert!((used - 0.3066 / 0.8).abs() < 1e-3, "{used}");
    let world = world.restart(config(|_| {})).await;
    assert_eq!(world.metrics.policy_kl_budget.get(), used, "also after a restart");
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_is_measured_from_the_initial_adapter() {
    let world = World::start(equal, 12, config(|_| {})).await;
    let far = FakeWeights { base: 4.0, active: 4.0, ..Default::default() };
    let adapter = world.policies.publish(&far, PolicyVersion::BASE, 0, BTreeMap::new()).await;
    assert!(matches!(adapter, Ok(PublishOutcome::Published(_))), "{adapter:?}");
    let near = FakeWeights { base: 4.0, ..Default::default() };
    world.published(near).await;
    let far = FakeWeights { active: 4.0, ..near };
    assert_eq!(world.rejection(far).await.name, "drift/kl_base");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_graded_route_has_prompts_of_its_own() {
    let world = World::start(equal, 0, config(|_| {})).await;
    let names: Vec<String> = (0..20).map(|n| format!("route-{n}")).collect();
    for name in &names {
        world.hold_out(name, 0..3).await;
    }
    let examiner = Examiner {
        engine: world.engine.clone(),
        routes: Arc::new(routes(&further_routes(20))),
        store: world.store.clone(),
        temperature: 1.0,
        max_tokens: 24,
        exam: Vec::new(),
        format_parts: Vec::new(),
    };
    let prompts = examiner.prompts(2, PolicyVersion(1)).unwrap();
    let of = |name: &String| prompts.iter().filter(|p| p.interaction.route == *name).count();
    assert!(names.iter().all(|name| of(name) == 2));
}
