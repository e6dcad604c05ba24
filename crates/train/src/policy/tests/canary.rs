//! Canaries, and activations while a version is staged or examined, over a fake engine.

use std::time::Duration;

use tokio::task::JoinHandle;

use hone_core::types::SamplingParams;
use hone_engine::Priority;
use hone_store::AnswerCounts;

use super::*;
use crate::policy::CanaryConfig;
use crate::testing::version_rating;

fn canary() -> PolicyConfig {
    let canary = CanaryConfig {
        shares: vec![0.2, 0.5],
        stage_ratings: 4,
        margin: 0.2,
        ..CanaryConfig::default()
    };
    PolicyConfig { promotion: Promotion::Canary, canary, ..config(|_| {}) }
}

fn publish(world: &World) -> JoinHandle<PublishOutcome> {
    let policies = Arc::clone(&world.policies);
    tokio::spawn(async move {
        let parent = policies.active();
        let weights = FakeWeights::default();
        policies.publish(&weights, parent, 1, BTreeMap::new()).await.unwrap()
    })
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..4_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what}");
}

/// Users who ask with sessions and rate what they get, until the canary ends. Returns how many
/// requests the canary and the active version answered.
async fn users(world: &World, value: impl Fn(PolicyVersion) -> f64) -> [u64; 2] {
    let mut answered = [0, 0];
    for n in 0_u64.. {
        if world.policies.canary().is_none() {
            break;
        }
        let version = world.policies.assign(&format!("user-{}", n % 50));
        let request = GenerateRequest {
            version,
            grammar: None,
            priority: Priority::Live,
            ..GenerateRequest::probe(&[1], &SamplingParams::default())
        };
        let generation = world.engine.generate(request).await.unwrap();
        let completion = generation.collect().await.unwrap();
        if let Some(version) = version
            && world.policies.canary().is_some()
        {
            assert_eq!(completion.version, version, "the assigned version answers");
        }
        answered[usize::from(version.is_none())] += 1;
        world.policies.rate(&version_rating(completion.version.0, value(completion.version)));
        world.policies.answered(completion.version, false);
        assert!(n < 5_000, "no decision");
    }
    answered
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_ratings_promote_a_canary() {
    let world = World::start(equal, 12, canary()).await;
    let publication = publish(&world);
    until("the canary begins", || world.policies.canary().is_some()).await;
    let version = PolicyVersion(1);
    assert_eq!(world.policies.canary(), Some(version));
    assert_eq!(world.policies.active(), PolicyVersion::BASE);
    let record = world.store.policy(version).unwrap().unwrap();
    assert_eq!(record.state, PolicyState::Canary);
    // A session meets one version while the share stays.
    let keys: Vec<String> = (0..200).map(|n| format!("user-{n}")).collect();
    let assigned: Vec<_> = keys.iter().map(|key| world.policies.assign(key)).collect();
    let again: Vec<_> = keys.iter().map(|key| world.policies.assign(key)).collect();
    assert_eq!(assigned, again);
    let share = assigned.iter().flatten().count();
    assert!((20..=60).contains(&share), "{share} of 200 keys for a share of 0.2");

    let [canary, active] = users(&world, |_| 1.0).await;
    assert!(canary > 0 && active > canary / 4, "{canary} {active}");
    let PublishOutcome::Published(record) = publication.await.unwrap() else { panic!("rejected") };
    assert_eq!(record.state, PolicyState::Active);
    let check = record.checks.last().unwrap();
    assert!(check.name == "canary/ratings" && check.detail.starts_with("not worse"), "{check:?}");
    assert_eq!((world.policies.active(), world.engine.active_version()), (version, version));
    assert_eq!(world.policies.assign("user-1"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn worse_ratings_roll_a_canary_back() {
    let world = World::start(equal, 12, canary()).await;
    let publication = publish(&world);
    until("the canary begins", || world.policies.canary().is_some()).await;
    users(&world, |version| if version.0 == 1 { 0.0 } else { 1.0 }).await;
    let PublishOutcome::Rejected(record) = publication.await.unwrap() else { panic!("promoted") };
    assert_eq!(record.state, PolicyState::RolledBack);
    assert!(record.reason.as_ref().unwrap().starts_with("canary/ratings: worse"), "{record:?}");
    assert_eq!(world.store.policy(PolicyVersion(1)).unwrap().unwrap(), record);
    assert_eq!(world.engine.active_version(), PolicyVersion::BASE);
    // The next candidate is another version, and an operator may still serve this one.
    let next = publish(&world);
    until("the next canary", || world.policies.canary() == Some(PolicyVersion(2))).await;
    world.policies.activate(PolicyVersion(1), "try").await.unwrap();
    assert!(matches!(next.await.unwrap(), PublishOutcome::Superseded));
    let second = world.store.policy(PolicyVersion(2)).unwrap().unwrap();
    assert_eq!(second.state, PolicyState::RolledBack);
}

/// Publishes the next version, which users rate better than the one before.
async fn promoted(world: &World) {
    let (publication, parent) = (publish(world), world.policies.active());
    let next = || world.policies.canary().is_some_and(|version| version > parent);
    until("the canary begins", next).await;
    users(world, |version| if version > parent { 1.0 } else { 0.8 }).await;
    assert!(matches!(publication.await.unwrap(), PublishOutcome::Published(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_versions_that_are_worse_together_are_left_for_their_anchor() {
    let world = World::start(equal, 12, canary()).await;
    promoted(&world).await;
    promoted(&world).await;
    let publication = publish(&world);
    until("the base is recalled", || world.policies.canary() == Some(PolicyVersion::BASE)).await;
    let status = world.policies.canary_status().unwrap();
    assert!(status.is_recall && status.control == PolicyVersion(2), "{status:?}");
    users(&world, |version| if version.0 == 2 { 0.0 } else { 1.0 }).await;
    assert!(matches!(publication.await.unwrap(), PublishOutcome::Superseded));
    assert_eq!(world.served(), (0, 0));
    let records = world.policies.list().unwrap();
    let states: Vec<_> = records.iter().map(|record| record.state).collect();
    assert_eq!(states, [PolicyState::Active, PolicyState::RolledBack, PolicyState::RolledBack]);
    let reason = records[2].reason.as_deref().unwrap();
    assert!(reason.starts_with("found worse than the anchor, version 0: worse"), "{reason}");
    assert_eq!(crate::policy::recalled(&records[0]), Some(reason));
    assert_eq!(records[2].checks.last().unwrap().name, "canary/anchor");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_better_than_its_anchor_takes_its_place() {
    let world = World::start(equal, 12, canary()).await;
    promoted(&world).await;
    promoted(&world).await;
    let publication = publish(&world);
    until("the base is recalled", || world.policies.canary() == Some(PolicyVersion::BASE)).await;
    {
        // The comparison goes on after a restart.
        let _suspension = world.policies.suspend();
        assert!(matches!(publication.await.unwrap(), PublishOutcome::Suspended));
    }
    let world = world.restart(canary()).await;
    let publication = publish(&world);
    until("the base is recalled", || world.policies.canary() == Some(PolicyVersion::BASE)).await;
    users(&world, |version| if version.0 == 2 { 1.0 } else { 0.0 }).await;
    until("the canary begins", || world.policies.canary() == Some(PolicyVersion(3))).await;
    users(&world, |_| 1.0).await;
    assert!(matches!(publication.await.unwrap(), PublishOutcome::Published(_)));
    // Version 2 is the anchor of the following ones, so version 3 needs no comparison.
    promoted(&world).await;
    let check = world.store.policy(PolicyVersion(3)).unwrap().unwrap().checks.pop().unwrap();
    assert_eq!(check.name, "canary/ratings");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_canary_continues_after_a_restart() {
    let world = World::start(equal, 12, canary()).await;
    let publication = publish(&world);
    until("the canary begins", || world.policies.canary().is_some()).await;
    // One rating of each version, which this process does not count.
    for version in [0, 1] {
        world.rate(version, &[1.0]).await;
    }
    let began = world.policies.canary_status().unwrap().stages[0];
    {
        let _suspension = world.policies.suspend();
        assert!(matches!(publication.await.unwrap(), PublishOutcome::Suspended));
    }
    let suspended = world.store.policy(PolicyVersion(1)).unwrap().unwrap();
    assert_eq!(suspended.state, PolicyState::Canary);

    let world = world.restart(canary()).await;
    assert_eq!(world.policies.active(), PolicyVersion::BASE);
    let publication = publish(&world);
    until("the canary continues", || world.policies.canary() == Some(PolicyVersion(1))).await;
    let status = world.policies.canary_status().unwrap();
    assert_eq!((status.canary.ratings, status.active.ratings, status.stages[0]), (1, 1, began));
    assert_eq!(status.mean, Some(0.0));
    users(&world, |_| 1.0).await;
    let PublishOutcome::Published(record) = publication.await.unwrap() else { panic!("rejected") };
    assert_eq!(record.version, PolicyVersion(1));
    let exams = record.checks.iter().filter(|check| check.name == "exam/chat").count();
    assert_eq!(exams, 1, "the gate is not repeated");
    assert_eq!(world.policies.list().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_activation_does_not_wait_for_a_staging_that_drains() {
    let world = World::direct(20).await;
    world.publish_good(2).await;
    // Version 2 is active; version 1's color runs a sequence that ends when it is dropped.
    let held = world.engine.hold_slot(PolicyVersion(1));
    let publication = publish(&world);
    until("the third version waits", || world.policies.list().unwrap().len() == 4).await;
    let policies = Arc::clone(&world.policies);
    let activation = tokio::time::timeout(Duration::from_secs(1), async move {
        policies.activate(PolicyVersion(1), "worse").await
    });
    activation.await.expect("within a second").unwrap();
    assert_eq!(world.engine.active_version(), PolicyVersion(1));
    assert!(matches!(publication.await.unwrap(), PublishOutcome::Superseded));
    let third = world.store.policy(PolicyVersion(3)).unwrap().unwrap();
    assert_eq!(third.state, PolicyState::Rejected);
    assert!(third.reason.unwrap().contains("another version was activated"));
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawn_version_is_rolled_back_to_its_parent() {
    let world = World::direct(20).await;
    world.publish_good(2).await;
    let policies = &world.policies;
    assert!(policies.withdraw(PolicyVersion(1), "old").await.unwrap().is_none(), "not active");
    let served = policies.withdraw(PolicyVersion(2), "the reward fell").await.unwrap().unwrap();
    assert_eq!((served.version, policies.active()), (PolicyVersion(1), PolicyVersion(1)));
    let withdrawn = world.store.policy(PolicyVersion(2)).unwrap().unwrap();
    assert_eq!(withdrawn.state, PolicyState::RolledBack);
    assert_eq!(withdrawn.reason.as_deref(), Some("the reward fell"));
    assert!(!policies.watch_rollback().borrow().by_operator);
    // The base is what remains in the end.
    policies.withdraw(PolicyVersion(1), "too").await.unwrap().unwrap();
    assert_eq!(policies.active(), PolicyVersion::BASE);
    assert!(policies.withdraw(PolicyVersion::BASE, "last").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn pinned_versions_keep_their_files() {
    let world = World::direct(2).await;
    world.publish_good(1).await;
    let pinned = world.policies.pin(PolicyVersion(1), true).await.unwrap();
    assert!(pinned.pinned);
    world.publish_good(5).await;
    let files = |version: u64| world.adapter(version).exists();
    assert_eq!([1, 3, 6].map(files), [true, false, true]);
    assert!(world.policies.list().unwrap()[1].pinned, "later records keep the pin");
    world.policies.pin(PolicyVersion(1), false).await.unwrap();
    world.publish_good(1).await;
    assert!(!files(1));
    let error = world.policies.pin(PolicyVersion(3), true).await.unwrap_err().to_string();
    assert!(error.starts_with("policy version 3 cannot be served"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_follows_the_versions_that_the_trainer_chose() {
    let trainer = World::direct(9).await;
    trainer.publish_good(2).await;
    let server = World::direct(9).await;
    for version in [1, 2] {
        let to = server.adapter(version);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(trainer.adapter(version), to).unwrap();
    }
    let records = trainer.policies.list().unwrap();
    let ([first, second], none) = ([1, 2].map(PolicyVersion), BTreeMap::new());
    server.policies.follow(records.clone(), first, Some((second, 0.5)), &none).await.unwrap();
    assert_eq!(server.served(), (1, 1));
    assert_eq!(server.policies.canary(), Some(second));
    // The arm of a user is a hash of the user and the version, so it is the same on each server.
    let in_canary = |world: &World| {
        let users = (0..200).map(|n| world.policies.assign(&format!("user-{n}")));
        users.map(|version| version.is_some()).collect::<Vec<_>>()
    };
    let share = in_canary(&server).iter().filter(|canary| **canary).count();
    assert!((70..130).contains(&share), "{share}");
    let other = World::direct(9).await;
    other.policies.canary.follow(Some((second, 0.5)));
    assert_eq!(in_canary(&other), in_canary(&server));
    // Its promotion, and an end without one.
    server.policies.follow(Vec::new(), second, None, &none).await.unwrap();
    assert_eq!((server.served(), server.policies.canary()), ((2, 2), None));
    server.policies.follow(records, first, None, &none).await.unwrap();
    assert_eq!(server.served(), (1, 1));
    // An engine that computes something else does not serve the version.
    let probe = trainer.policies.probe_of(second).unwrap();
    let mut other = probe.clone();
    other.logprobs[0] -= 1.0;
    let wrong = BTreeMap::from([(second, other)]);
    let refused = server.policies.follow(Vec::new(), second, None, &wrong).await.unwrap_err();
    assert!(refused.to_string().ends_with("is this the trainer's model?"), "{refused}");
    assert_eq!(server.served(), (1, 1));
    let right = BTreeMap::from([(second, probe)]);
    server.policies.follow(Vec::new(), second, None, &right).await.unwrap();
    server.policies.follow(Vec::new(), first, None, &none).await.unwrap();
    // Requests are counted for the trainer while it decides about a canary.
    server.policies.answered(first, false);
    assert!(server.policies.take_answers().is_empty());
    server.policies.canary.follow(Some((second, 0.5)));
    for failed in [false, true] {
        server.policies.answered(second, failed);
    }
    let counts = AnswerCounts { requests: 2, failures: 1 };
    assert_eq!(server.policies.take_answers(), BTreeMap::from([(second, counts)]));
    assert!(server.policies.take_answers().is_empty());
    server.policies.canary.follow(None);
    // Files that are missing change nothing.
    std::fs::remove_file(server.adapter(2)).unwrap();
    let missing = server.policies.follow(Vec::new(), second, None, &none).await;
    assert!(matches!(missing, Err(PolicyError::Unservable { .. })), "{missing:?}");
    assert_eq!(server.served(), (1, 1));
}
