//! Steps, commands, dropped groups and crashes.

mod corrections;
mod phases;
mod properties;
mod replay;
mod rollbacks;
mod world;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Semaphore;

use hone_core::types::{GroupId, GroupState, PolicyState, PolicyVersion, SampleId};

use crate::config::{TrainConfig, ZeroVariance};
use crate::{TrainError, TrainState};
use world::World;

#[tokio::test(flavor = "multi_thread")]
async fn enough_ready_groups_make_a_step_and_a_version() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let first = world.group(4, 0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.worker.handle().status().step, 0, "two samples of four are not enough");
    let second = world.group(6, 0).await;
    world.wait_for_version(1).await;
    for group in [first, second] {
        assert_eq!(world.state(group), GroupState::Trained(1));
    }
    let step = world.store.last_step().unwrap().unwrap();
    assert_eq!((step.step, step.groups), (1, vec![first, second]));
    assert!((step.metrics["reward_mean"] - 0.5).abs() < 1e-9);
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 4);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_step_is_computed_while_a_version_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let groups = world.start_two_steps().await;
    // The second step is not recorded before the first one's version is served.
    let states = groups.map(|id| world.state(id));
    let [trained, ready] = [GroupState::Trained(1), GroupState::Ready];
    assert_eq!(states, [trained.clone(), trained.clone(), ready.clone(), ready]);
    assert_eq!(world.policies.active(), PolicyVersion::BASE);
    world.publisher.staging.add_permits(1000);
    world.wait_for_version(2).await;
    assert_eq!(
        groups.map(|id| world.state(id))[2..],
        [GroupState::Trained(2), GroupState::Trained(2)]
    );
    // The second step trained version 1 on samples of the base.
    let step = world.store.last_step().unwrap().unwrap();
    assert!((step.metrics["staleness_versions"] - 1.0).abs() < 1e-9, "{:?}", step.metrics);
    let parents: Vec<_> = world.policies.list().unwrap().into_iter().map(|p| p.parent).collect();
    assert_eq!(parents[1..], [Some(PolicyVersion(0)), Some(PolicyVersion(1))]);
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 8);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_with_a_long_shard_waits_for_the_publication() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start_with(dir.path(), |config| config.max_tokens = 400).await;
    let handle = world.worker.handle();
    handle.pause().unwrap();
    world.wait_for_state(TrainState::Paused).await;
    world.publisher.staging.forget_permits(Semaphore::MAX_PERMITS);
    let short = [world.group(4, 0).await, world.group(6, 0).await];
    let mut long = Vec::new();
    for token in [7, 8] {
        // The usual shards of this model have 256 tokens.
        long.push(world.group_of(vec![1; 300], token, 0, [0.0, 1.0]).await);
    }
    handle.resume().unwrap();
    world.until("staging", |w| w.publisher.requested.load(Ordering::Acquire) > 0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(handle.status().state, TrainState::Waiting);
    assert!(short.iter().all(|id| world.state(*id) == GroupState::Trained(1)));
    assert!(long.iter().all(|id| world.state(*id) == GroupState::Ready));
    world.publisher.staging.add_permits(1000);
    world.wait_for_version(2).await;
    assert!(long.iter().all(|id| world.state(*id) == GroupState::Trained(2)));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_versions_groups_are_trained_on_again() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.publisher.rejects.store(1, Ordering::Release);
    let groups = world.start_two_steps().await;
    world.publisher.staging.add_permits(1000);
    world.wait_for_version(3).await;
    let states = groups.map(|id| world.state(id));
    let (second, third) = (GroupState::Trained(2), GroupState::Trained(3));
    assert_eq!(states, [second.clone(), second, third.clone(), third]);
    let policies = world.policies.list().unwrap();
    let versions: Vec<_> = policies[1..].iter().map(|p| (p.step, p.parent, p.state)).collect();
    let (base, published) = (Some(PolicyVersion::BASE), Some(PolicyVersion(2)));
    let expected = [
        (1, base, PolicyState::Rejected),
        (2, base, PolicyState::Retired),
        (3, published, PolicyState::Active),
    ];
    assert_eq!(versions, expected);
    // Each rating is counted once, when it reaches clients.
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 8);
    assert_eq!(world.worker.handle().status().restarts, 0);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_rejections_drop_no_group_for_parity_and_pause_training() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.publisher.rejects_all.store(true, Ordering::Release);
    let groups = [world.group(4, 0).await, world.group(6, 0).await];
    world.wait_for_state(TrainState::Paused).await;
    let hold = world.worker.handle().status().hold.unwrap();
    assert!(hold.starts_with("3 versions in a row were not promoted"), "{hold}");
    assert!(hold.contains("parity/serving") && hold.contains("/admin/train/resume"), "{hold}");
    assert_eq!(groups.map(|id| world.state(id)), [GroupState::Ready, GroupState::Ready]);
    assert_eq!(world.policies.list().unwrap().len(), 4);
    // The pause survives a restart, and a resume tries again.
    world.stop().await;
    let world = World::start(dir.path()).await;
    world.wait_for_state(TrainState::Paused).await;
    world.worker.handle().resume().unwrap();
    world.wait_for_version(4).await;
    assert_eq!(world.state(groups[0]), GroupState::Trained(4));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_from_superseded_weights_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.train_versions(2).await;
    let groups = world.prepare_two_steps(2).await;
    // The activation comes first, so the third step's version waits for it.
    let requested = world.publisher.requested.load(Ordering::Acquire);
    let policies = Arc::clone(&world.policies);
    let activation = tokio::spawn(async move { policies.activate(PolicyVersion(1), "test").await });
    world.until("activation", |w| w.publisher.requested.load(Ordering::Acquire) > requested).await;
    world.worker.handle().resume().unwrap();
    world.wait_for_state(TrainState::Publishing).await;
    world.publisher.staging.add_permits(1000);
    activation.await.unwrap().unwrap();
    world.wait_for_state(TrainState::Paused).await;
    world.worker.handle().resume().unwrap();
    // All groups are samples of version 2, which is abandoned, also those of the undone third step.
    let abandoned = GroupState::Dropped("abandoned".to_owned());
    world.until("abandoned", |w| groups.iter().all(|id| w.state(*id) == abandoned)).await;
    world.group(4, 1).await;
    world.group(6, 1).await;
    world.wait_for_version(3).await;
    let policies = world.policies.list().unwrap();
    let versions: Vec<_> = policies[2..].iter().map(|p| (p.version.0, p.step, p.parent)).collect();
    assert_eq!(versions, [(2, 2, Some(PolicyVersion(1))), (3, 4, Some(PolicyVersion(1)))]);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_takes_effect_before_further_ready_steps() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let groups = world.start_two_steps().await;
    // Each group sends a wake-up, and every two are enough for another step.
    for token in [9, 10, 11, 12, 13, 14] {
        world.group(token, 0).await;
    }
    world.worker.handle().pause().unwrap();
    world.publisher.staging.add_permits(1000);
    world.wait_for_state(TrainState::Paused).await;
    assert_eq!(world.store.last_step().unwrap().unwrap().step, 2);
    assert_eq!(world.state(groups[3]), GroupState::Trained(2));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_trainer_steps_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let handle = world.worker.handle();
    handle.pause().unwrap();
    world.wait_for_state(TrainState::Paused).await;
    assert!(matches!(handle.step().await, Err(TrainError::NothingReady)));
    let (first, second) = (world.group(4, 0).await, world.group(6, 0).await);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.state(first), GroupState::Ready);
    assert_eq!(handle.step().await.unwrap().step, 1);
    assert_eq!(world.state(second), GroupState::Trained(1));
    world.group(4, 1).await;
    world.group(6, 1).await;
    handle.resume().unwrap();
    world.wait_for_version(2).await;
    // A step limit has the same effect.
    handle.set_step_limit(Some(2)).unwrap();
    let waiting = [world.group(4, 2).await, world.group(6, 2).await];
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(waiting.map(|id| world.state(id)), [GroupState::Ready, GroupState::Ready]);
    handle.set_step_limit(None).unwrap();
    world.wait_for_version(3).await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_and_invalid_groups_are_dropped_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.train_versions(3).await;
    let stale = world.group(4, 0).await;
    let invalid = world.group(1_000_000, 3).await;
    let (good, better) = (world.group(4, 3).await, world.group(6, 3).await);
    world.wait_for_version(4).await;
    assert_eq!(world.state(stale), GroupState::Dropped("stale".to_owned()));
    assert_eq!(world.state(invalid), GroupState::Dropped("invalid".to_owned()));
    for group in [good, better] {
        assert_eq!(world.state(group), GroupState::Trained(4));
    }
    assert_eq!(world.worker.handle().status().restarts, 0);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_of_equal_rewards_are_dropped_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let drop = |config: &mut TrainConfig| config.zero_variance_groups = ZeroVariance::Drop;
    let world = World::start_with(dir.path(), drop).await;
    let handle = world.worker.handle();
    for skipped in 1..=2 {
        let (first, second) = (
            world.rewarded_group(4, 0, [1.0, 1.0]).await,
            world.rewarded_group(6, 0, [0.0, 0.0]).await,
        );
        let dropped = GroupState::Dropped("no_sample".to_owned());
        world.until("dropped", |w| [first, second].iter().all(|id| w.state(*id) == dropped)).await;
        assert_eq!(handle.status().skipped_batches, skipped);
    }
    let status = handle.status();
    let reason = "all 2 groups of the batch have equal rewards";
    assert_eq!((status.step, status.last_error.as_deref()), (0, Some(reason)));
    let counter = &world.metrics.train.skipped_steps;
    assert_eq!(counter.with_label_values(&["no_sample"]).get(), 2);
    // One group with a difference is enough to learn from.
    world.rewarded_group(4, 0, [1.0, 1.0]).await;
    world.group(6, 0).await;
    world.wait_for_version(1).await;
    assert_eq!((handle.status().step, handle.status().skipped_batches), (1, 2));
    let json = serde_json::to_value(handle.status()).unwrap();
    assert_eq!(json["skipped_batches"], 2);
    world.stop().await;
}

/// With a blocked publication, the trainer's thread cannot end. The runtime of the test must end anyway,
/// as that of a process does at SIGTERM.
#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_that_does_not_stop_in_time_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.start_two_steps().await;
    world.worker.stop(Duration::from_millis(50)).await;
    world.store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_the_checkpoint_repeats_the_record_and_the_publication() {
    let dir = tempfile::tempdir().unwrap();
    let (ledger, copy) = (dir.path().join("ledger.redb"), dir.path().join("copy.redb"));
    let world = World::start(dir.path()).await;
    let handle = world.worker.handle();
    handle.pause().unwrap();
    let (first, second) = (world.group(4, 0).await, world.group(6, 0).await);
    world.stop().await;
    std::fs::copy(&ledger, &copy).unwrap();

    let world = World::start(dir.path()).await;
    world.wait_for_version(1).await;
    world.stop().await;
    // The ledger from before the step and the checkpoint from after it.
    std::fs::copy(&copy, &ledger).unwrap();
    let world = World::start(dir.path()).await;
    world.wait_for_version(1).await;
    for group in [first, second] {
        assert_eq!(world.state(group), GroupState::Trained(1));
    }
    assert_eq!(world.store.last_step().unwrap().unwrap().step, 1);
    assert_eq!(world.policies.active(), PolicyVersion(1));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_initial_adapter_is_served_before_the_first_step() {
    let (before, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let world = World::start(before.path()).await;
    world.group(4, 0).await;
    world.group(6, 0).await;
    world.wait_for_version(1).await;
    let source = world.policies.list().unwrap().pop().unwrap();
    world.stop().await;
    let adapter = before.path().join(source.adapter.unwrap());

    let world = World::start_from(dir.path(), &adapter).await;
    world.wait_for_version(1).await;
    let first = world.policies.list().unwrap().pop().unwrap();
    assert_eq!((first.step, first.parent), (0, Some(PolicyVersion::BASE)));
    assert_eq!(first.sha256, source.sha256, "the same weights");
    // A restart before the first step publishes no second version of it.
    world.stop().await;
    let world = World::start_from(dir.path(), &adapter).await;
    world.wait_for_version(1).await;
    assert_eq!(world.policies.list().unwrap().len(), 2);
    let group = world.group(4, 1).await;
    world.group(6, 1).await;
    world.wait_for_version(2).await;
    assert_eq!(world.state(group), GroupState::Trained(1));
    // A start continues from the checkpoint once there is one.
    world.stop().await;
    let world = World::start_from(dir.path(), &adapter).await;
    world.wait_for_version(2).await;
    assert_eq!(world.policies.list().unwrap().len(), 3);
    world.stop().await;
}

/// Two ready groups, and the marker of a step with them that ended the process, for the second time if `again`.
async fn interrupted(dir: &Path, again: bool) -> ([GroupId; 2], SampleId) {
    let world = World::start(dir).await;
    world.worker.handle().pause().unwrap();
    world.wait_for_state(TrainState::Paused).await;
    let groups = [world.group(4, 0).await, world.group(6, 0).await];
    world.stop().await;
    std::fs::create_dir_all(dir.join("checkpoints")).unwrap();
    let repeated: &[GroupId] = if again { &groups } else { &[] };
    let sample = SampleId::new();
    let attempt = serde_json::json!(
        {"groups": groups, "repeated": repeated, "samples": [sample], "longest": 6000});
    std::fs::write(dir.join("checkpoints/attempt.json"), attempt.to_string()).unwrap();
    (groups, sample)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ratings_of_an_interrupted_step_are_trained() {
    let dir = tempfile::tempdir().unwrap();
    let (groups, _) = interrupted(dir.path(), false).await;
    let world = World::start(dir.path()).await;
    world.wait_for_version(1).await;
    assert_eq!(groups.map(|id| world.state(id)), [GroupState::Trained(1), GroupState::Trained(1)]);
    assert!(!dir.path().join("checkpoints/attempt.json").exists());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_ended_the_process_twice_is_not_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let (groups, sample) = interrupted(dir.path(), true).await;
    let marker = dir.path().join("checkpoints/attempt.json");
    let world = World::start(dir.path()).await;
    let dropped = GroupState::Dropped("interrupted".to_owned());
    world.until("dropped", |w| groups.iter().all(|id| w.state(*id) == dropped)).await;
    let error = world.worker.handle().status().last_error.unwrap();
    assert!(error.contains(&sample.to_string()) && error.contains("6000 tokens"), "{error}");
    let counter = &world.metrics.train.dropped_groups;
    assert_eq!(counter.with_label_values(&["interrupted"]).get(), 2);
    // The next groups are trained on, and a step that ends leaves no marker.
    world.group(4, 0).await;
    world.group(6, 0).await;
    world.wait_for_version(1).await;
    assert!(!marker.exists());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn training_continues_from_the_newest_whole_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = dir.path().join("checkpoints");
    let world = World::start(dir.path()).await;
    world.train_versions(2).await;
    world.stop().await;
    let newest = || crate::learning::checkpoint::list(&checkpoints).unwrap().pop().unwrap();
    for file in ["state.json", "adapter.safetensors", "moments.safetensors"] {
        let damaged = newest();
        let path = damaged.join(file);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let world = World::start(dir.path()).await;
        let active = world.policies.active().0;
        let groups = [world.group(4, active).await, world.group(6, active).await];
        let is_trained = |state| matches!(state, GroupState::Trained(step) if step >= 2);
        world.until("trained", |w| groups.iter().all(|id| is_trained(w.state(*id)))).await;
        world.wait_for_state(TrainState::Waiting).await;
        assert_eq!(world.metrics.train.damaged_checkpoints.get(), 1, "{file}");
        assert_eq!(world.worker.handle().status().restarts, 0);
        world.stop().await;
        let aside = format!("damaged-{}", damaged.file_name().unwrap().to_string_lossy());
        assert!(checkpoints.join(aside).join(file).exists(), "{file}");
    }
    // Without any whole one, nothing is set aside, and the error names the newest one.
    for dir in crate::learning::checkpoint::list(&checkpoints).unwrap() {
        std::fs::write(dir.join("state.json"), "{").unwrap();
    }
    std::fs::remove_dir_all(checkpoints.join("versions")).unwrap();
    let world = World::start(dir.path()).await;
    world.until("the error", |w| w.worker.handle().status().last_error.is_some()).await;
    let error = world.worker.handle().status().last_error.unwrap();
    assert!(error.contains(&newest().display().to_string()), "{error}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sample_that_does_not_fit_is_dropped_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    // The samples have a prompt of two tokens or more and two sampled ones.
    let world = World::start_with(dir.path(), |config| config.max_tokens = 3).await;
    world.until("the limit", |w| w.worker.handle().status().max_sample_tokens == 3).await;
    let groups = [world.group(4, 0).await, world.group(6, 0).await];
    let dropped = GroupState::Dropped("too_long".to_owned());
    world.until("dropped", |w| groups.iter().all(|id| w.state(*id) == dropped)).await;
    let counter = &world.metrics.train.dropped_groups;
    assert_eq!(counter.with_label_values(&["too_long"]).get(), 2);
    assert_eq!(world.worker.handle().status().step, 0);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schedule_and_the_limit_of_a_day_hold_back_steps() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start_with(dir.path(), |config| config.max_steps_per_day = 1).await;
    for token in [4, 6, 7, 8] {
        world.group(token, 0).await;
    }
    world.wait_for_state(TrainState::Scheduled).await;
    let status = world.worker.handle().status();
    assert_eq!(status.schedule.as_deref(), Some("train.max_steps_per_day (1) is reached"));
    assert_eq!(status.step, 1);
    assert_eq!(status.policy_version, 1, "the last step of the day is published");
    world.stop().await;
    // The limit survives a restart; without it, training continues. A window that is never open now
    // holds it back again.
    let minute = hone_core::types::now_ms() / 60_000 % 1440;
    let clock = |minute: u64| format!("{:02}:{:02}", minute % 1440 / 60, minute % 60);
    let later = format!("{}-{}", clock(minute + 120), clock(minute + 180));
    for (limit, when) in [(1, "always"), (0, later.as_str())] {
        let world = World::start_with(dir.path(), |config| {
            config.max_steps_per_day = limit;
            config.when = when.parse().unwrap();
        });
        let world = world.await;
        world.wait_for_state(TrainState::Scheduled).await;
        world.stop().await;
    }
    let world = World::start(dir.path()).await;
    world.wait_for_version(2).await;
    world.stop().await;
}
