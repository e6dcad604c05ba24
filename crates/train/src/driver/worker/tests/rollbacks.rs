//! Activations of existing versions, which the trainer follows.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hone_core::types::{GroupState, PolicyState, PolicyVersion};

use super::world::{World, every_step};
use crate::TrainState;
use crate::driver::trainer::SETTLE_TIME;
use crate::policy::{CanaryConfig, PolicyConfig, Promotion, RELEARN};
use crate::testing::version_rating;

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_is_followed_and_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.train_versions(2).await;
    world.policies.activate(PolicyVersion(1), "test").await.unwrap();
    world.wait_for_version(1).await;
    world.stop().await;
    let world = World::start(dir.path()).await;
    assert_eq!(world.policies.active(), PolicyVersion(1));
    world.wait_for_state(TrainState::Paused).await;
    assert_eq!(world.worker.handle().status().policy_version, 1);
    let hold = "version 1 was activated: POST /admin/train/resume ends the pause";
    assert_eq!(world.worker.handle().status().hold.as_deref(), Some(hold));
    let [group, _] = world.batch(1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.state(group), GroupState::Ready, "the pause survives a restart");
    world.worker.handle().resume().unwrap();
    world.wait_for_version(3).await;
    assert_eq!(world.worker.handle().status().hold, None);
    let made = world.policies.list().unwrap().pop().unwrap();
    assert_eq!((made.version.0, made.parent, made.step), (3, Some(PolicyVersion(1)), 3));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_later_versions_learned_is_learned_again_if_the_operator_wants_it() {
    let world = World::fresh(|_| {}).await;
    let first = world.batch(0).await;
    world.wait_for_version(1).await;
    let second = world.batch(1).await;
    world.wait_for_version(2).await;
    let third = world.batch(2).await;
    world.wait_for_version(3).await;
    world.policies.activate(PolicyVersion(1), RELEARN).await.unwrap();
    world.wait_for_version(1).await;
    let ready = [second, third].concat();
    assert!(
        world.all_are(&ready, &GroupState::Ready) && world.all_are(&first, &GroupState::Trained(1))
    );
    // Samples of version 2 and 3 are of withdrawn versions, so they are late, not abandoned.
    world.worker.handle().resume().unwrap();
    world
        .until("trained", |w| ready.iter().all(|id| matches!(w.state(*id), GroupState::Trained(_))))
        .await;
    let is_new = |id| matches!(world.state(id), GroupState::Trained(step) if step > 3);
    assert!(ready.iter().all(|id| is_new(*id)));
    world.stop().await;
}

/// Users rate two versions until a condition holds.
async fn rate(world: &World, values: [(u64, f64); 2], until: impl Fn(&World) -> bool) {
    world
        .until("rated", |world| {
            for (version, value) in values {
                world.policies.rate(&version_rating(version, value));
            }
            until(world)
        })
        .await;
}

/// A trainer whose versions are canaries that few ratings decide.
async fn start_with_canaries(dir: &Path) -> World {
    let canary =
        CanaryConfig { shares: vec![0.5], margin: 0.3, alpha: 0.2, ..CanaryConfig::default() };
    let policy = PolicyConfig { promotion: Promotion::Canary, canary, ..every_step() };
    let world = World::start_as(dir, policy, |_| {}).await;
    world.publisher.canaries.store(true, Ordering::Release);
    world
}

#[tokio::test(flavor = "multi_thread")]
async fn training_pauses_when_versions_are_worse_together() {
    let dir = tempfile::tempdir().unwrap();
    let world = start_with_canaries(dir.path()).await;
    for version in 1..3 {
        world.batch(version - 1).await;
        let is_served = |world: &World| world.policies.active() == PolicyVersion(version);
        rate(&world, [(version, 0.6), (version - 1, 0.5)], is_served).await;
        world.wait_for_version(version).await;
    }
    world.batch(2).await;
    world.until("recall", |world| world.policies.canary() == Some(PolicyVersion::BASE)).await;
    let is_left = |world: &World| world.policies.active() == PolicyVersion::BASE;
    rate(&world, [(2, 0.0), (0, 1.0)], is_left).await;
    world.wait_for_version(0).await;
    world.until("hold", |world| world.worker.handle().status().hold.is_some()).await;
    let hold = world.worker.handle().status().hold.unwrap();
    assert!(hold.starts_with("found worse than the anchor, version 0: worse"), "{hold}");
    // The pause survives a restart, and the next version descends from the anchor.
    world.stop().await;
    let world = start_with_canaries(dir.path()).await;
    world.wait_for_state(TrainState::Paused).await;
    world.batch(0).await;
    world.worker.handle().resume().unwrap();
    world.until("the next canary", |world| world.policies.canary() == Some(PolicyVersion(3))).await;
    let records = world.policies.list().unwrap();
    assert_eq!(records[3].parent, Some(PolicyVersion::BASE));
    assert!(records[1..3].iter().all(|record| record.state == PolicyState::RolledBack));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ratings_that_withdrew_a_canary_are_learned() {
    let dir = tempfile::tempdir().unwrap();
    let world = start_with_canaries(dir.path()).await;
    world.batch(0).await;
    world.until("a canary", |world| world.policies.canary() == Some(PolicyVersion(1))).await;
    let disliked = world.rewarded_group(4, 1, [0.0, 0.0]).await;
    let is_withdrawn =
        |world: &World| world.policies.list().unwrap()[1].state == PolicyState::RolledBack;
    rate(&world, [(1, 0.0), (0, 1.0)], is_withdrawn).await;
    world.rewarded_group(5, 0, [0.0, 1.0]).await;
    world.until("learned", |world| matches!(world.state(disliked), GroupState::Trained(_))).await;
    world.stop().await;
}

/// Activates versions 1 and 2 in turn, and returns the longest time between two activations.
async fn activate_in_turn(world: &World, count: u64) -> Duration {
    let (mut longest, mut before) = (Duration::ZERO, Instant::now());
    for i in 0..count {
        world.policies.activate(PolicyVersion(1 + i % 2), "test").await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        longest = longest.max(before.elapsed());
        before = Instant::now();
    }
    longest
}

#[tokio::test(flavor = "multi_thread")]
async fn activations_in_a_row_are_followed_once_at_their_end() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.train_versions(2).await;
    let checkpoints = dir.path().join("checkpoints");
    let state = || std::fs::read(checkpoints.join("step-000000000002/state.json")).unwrap();
    let is_marked = || checkpoints.join("activation").exists();
    // Void if the test's thread had to wait for so long that the trainer may have followed.
    let mut attempts = 0..50;
    let before = loop {
        world.until("followed", |_| !is_marked()).await;
        let before = state();
        let longest = activate_in_turn(&world, 21).await;
        let read = Instant::now();
        let now = state();
        if longest.max(read.elapsed()) < SETTLE_TIME / 4 {
            assert!(now == before, "a checkpoint was written after {longest:?}");
            break before;
        }
        assert!(attempts.next().is_some(), "every attempt was void");
        // What the trainer follows at the end must differ from what it may have followed already.
        world.policies.activate(PolicyVersion(2), "test").await.unwrap();
    };
    let hold = "version 1 was activated: POST /admin/train/resume ends the pause";
    let is_held = |world: &World| world.worker.handle().status().hold.as_deref() == Some(hold);
    world.until("held", is_held).await;
    world.wait_for_version(1).await;
    world.until("followed", |_| !is_marked()).await;
    assert!(state() != before && is_held(&world));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_activation_of_the_trainers_own_version_pauses_it_after_a_restart_too() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.train_versions(2).await;
    activate_in_turn(&world, 2).await;
    // The trainer has not followed yet, and its checkpoint descends from the active version.
    world.stop().await;
    let world = World::start(dir.path()).await;
    world.wait_for_state(TrainState::Paused).await;
    let hold = "version 2 was activated: POST /admin/train/resume ends the pause";
    assert_eq!(world.worker.handle().status().hold.as_deref(), Some(hold));
    world.batch(2).await;
    world.worker.handle().resume().unwrap();
    world.wait_for_version(3).await;
    let made = world.policies.list().unwrap().pop().unwrap();
    assert_eq!((made.version.0, made.parent, made.step), (3, Some(PolicyVersion(2)), 3));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_restores_moments_and_baselines() {
    // With and without the versions that are undone, the next step is the same.
    let mut digests = Vec::new();
    for undone in [0, 2] {
        let dir = tempfile::tempdir().unwrap();
        let world = World::start_with(dir.path(), |config| config.seed = 7).await;
        world.train_versions(2).await;
        for version in 2..2 + undone {
            // Other rewards, so that other baselines result.
            world.rewarded_group(7, version, [0.0, 5.0]).await;
            world.rewarded_group(8, version, [3.0, 0.0]).await;
            world.wait_for_version(version + 1).await;
        }
        if undone > 0 {
            world.policies.activate(PolicyVersion(2), "test").await.unwrap();
            // The trainer may not have followed the activation yet.
            world.worker.handle().resume().unwrap();
        }
        world.batch(2).await;
        world.wait_for_version(3 + undone).await;
        digests.push(world.policies.list().unwrap().pop().unwrap().sha256);
        world.stop().await;
    }
    assert_eq!(digests[0], digests[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_may_end_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let world =
        World::start_as(dir.path(), PolicyConfig { hold_seconds: 1, ..every_step() }, |_| {}).await;
    world.train_versions(2).await;
    world.policies.activate(PolicyVersion(1), "test").await.unwrap();
    world.wait_for_state(TrainState::Paused).await;
    let hold = world.worker.handle().status().hold.unwrap();
    assert!(hold.starts_with("version 1 was activated: training goes on at "), "{hold}");
    world.batch(1).await;
    world.wait_for_version(3).await;
    assert_eq!(world.worker.handle().status().hold, None);
    world.stop().await;
}
