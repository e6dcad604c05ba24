//! Steps, commands, dropped groups and crashes.

mod corrections;
mod learned;
mod phases;
mod properties;
mod replay;
mod rollbacks;
mod world;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Semaphore;

use hone_core::types::{GroupId, GroupState, PolicyVersion, SampleId, TokenId};

use crate::{TrainError, TrainState};
use world::World;

#[test]
fn a_version_of_many_steps_is_stale_sooner() {
    for ((versions, publish_every), expected) in [
        ((8, 4), 8),
        ((8, 1), 8),
        ((8, 8), 8),
        ((8, 32), 2),
        ((8, 1_000), 2),
        ((0, 32), 0),
        ((1, 64), 1),
    ] {
        let found = super::staleness_limit(versions, publish_every);
        assert_eq!(found, expected, "{versions} versions of {publish_every} steps");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn enough_ready_groups_make_a_step_and_a_version() {
    let world = World::fresh(|_| {}).await;
    let first = world.group(4, 0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.worker.handle().status().step, 0, "two samples of four are not enough");
    let second = world.group(6, 0).await;
    world.wait_for_version(1).await;
    assert!(world.all_are(&[first, second], &GroupState::Trained(1)));
    let step = world.last_step();
    assert_eq!((step.step, step.groups), (1, vec![second, first]));
    assert!((step.metrics["reward_mean"] - 0.5).abs() < 1e-9);
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 4);
    world.stop().await;
}

/// A step computes four of sixteen samples, which stand for the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_chooses_among_the_ratings_that_wait() {
    let world = World::fresh(|config| config.rated_factor = 4).await;
    let handle = world.pause().await;
    let mut waiting = Vec::new();
    for token in 4..12 {
        waiting.push(world.group(token, 0).await);
    }
    handle.resume().unwrap();
    world.wait_for_version(1).await;
    let step = world.last_step();
    assert!(world.all_are(&waiting, &GroupState::Trained(1)));
    let [samples, represented] = ["samples", "represented_samples"].map(|name| step.metrics[name]);
    assert_eq!((samples, represented), (4.0, 12.0));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_with_a_long_shard_waits_for_the_publication() {
    // The usual shards of this model have 256 tokens.
    let long = [vec![1; 300], vec![1; 300]];
    waits_for_the_publication(long).await;
    // No group is longer, but two that share a prefix.
    let common = |own| [[1; 100], [own; 100]].concat();
    waits_for_the_publication([common(2), common(3)]).await;
}

/// Checks that a step on groups of two prompts does not run beside a publication.
async fn waits_for_the_publication(prompts: [Vec<TokenId>; 2]) {
    let world = World::fresh(|config| config.max_tokens = 400).await;
    let handle = world.pause().await;
    world.publisher.staging.forget_permits(Semaphore::MAX_PERMITS);
    let mut long = Vec::new();
    for (prompt, token) in prompts.into_iter().zip([7, 8]) {
        long.push(world.group_of(prompt, token, 0, [0.0, 1.0]).await);
    }
    let short = world.batch(0).await;
    handle.resume().unwrap();
    world.until("staging", |w| w.publisher.requested.load(Ordering::Acquire) > 0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(handle.status().state, TrainState::Waiting);
    assert!(world.all_are(&short, &GroupState::Trained(1)));
    assert!(world.all_are(&long, &GroupState::Ready));
    world.publisher.staging.add_permits(1000);
    world.wait_for_version(2).await;
    assert!(world.all_are(&long, &GroupState::Trained(2)));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_rejections_drop_no_group_for_parity_and_pause_training() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.publisher.rejects_all.store(true, Ordering::Release);
    let groups = world.batch(0).await;
    world.wait_for_state(TrainState::Paused).await;
    let hold = world.worker.handle().status().hold.unwrap();
    assert!(hold.starts_with("3 versions in a row were not promoted"), "{hold}");
    assert!(hold.contains("parity/serving") && hold.contains("/admin/train/resume"), "{hold}");
    assert!(world.all_are(&groups, &GroupState::Ready));
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
async fn a_pause_takes_effect_before_further_ready_steps() {
    let world = World::fresh(|_| {}).await;
    let groups = world.start_two_steps().await;
    // Each group sends a wake-up, and every two are enough for another step.
    for token in [9, 10, 11, 12, 13, 14] {
        world.group(token, 0).await;
    }
    world.worker.handle().pause().unwrap();
    world.publisher.staging.add_permits(1000);
    world.wait_for_state(TrainState::Paused).await;
    assert_eq!(world.last_step().step, 2);
    assert_eq!(world.state(groups[0]), GroupState::Trained(2));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_trainer_steps_only_on_request() {
    let world = World::fresh(|_| {}).await;
    let handle = world.pause().await;
    assert!(matches!(handle.step().await, Err(TrainError::NothingReady)));
    let [first, second] = world.batch(0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.state(first), GroupState::Ready);
    assert_eq!(handle.step().await.unwrap().step, 1);
    assert_eq!(world.state(second), GroupState::Trained(1));
    world.batch(1).await;
    handle.resume().unwrap();
    world.wait_for_version(2).await;
    // A step limit has the same effect.
    handle.set_step_limit(Some(2)).unwrap();
    let waiting = world.batch(2).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(world.all_are(&waiting, &GroupState::Ready));
    handle.set_step_limit(None).unwrap();
    world.wait_for_version(3).await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_and_invalid_groups_are_dropped_with_the_reason() {
    let world = World::fresh(|_| {}).await;
    world.train_versions(3).await;
    let handle = world.pause().await;
    let [good, better] = world.batch(3).await;
    let stale = world.group(4, 0).await;
    let invalid = world.group(1_000_000, 3).await;
    handle.resume().unwrap();
    world.wait_for_version(4).await;
    assert_eq!(world.state(stale), GroupState::Dropped("stale".to_owned()));
    assert_eq!(world.state(invalid), GroupState::Dropped("invalid".to_owned()));
    assert!(world.all_are(&[good, better], &GroupState::Trained(4)));
    assert_eq!(world.worker.handle().status().restarts, 0);
    world.stop().await;
}

/// With a blocked publication, the trainer's thread cannot end. The runtime of the test must end anyway,
/// as that of a process does at SIGTERM.
#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_that_does_not_stop_in_time_is_not_waited_for() {
    let world = World::fresh(|_| {}).await;
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
    let [first, second] = world.batch(0).await;
    world.stop().await;
    std::fs::copy(&ledger, &copy).unwrap();

    let world = World::start(dir.path()).await;
    world.wait_for_version(1).await;
    world.stop().await;
    // The ledger from before the step and the checkpoint from after it.
    std::fs::copy(&copy, &ledger).unwrap();
    let world = World::start(dir.path()).await;
    world.wait_for_version(1).await;
    assert!(world.all_are(&[first, second], &GroupState::Trained(1)));
    assert_eq!(world.last_step().step, 1);
    assert_eq!(world.policies.active(), PolicyVersion(1));
    world.stop().await;
}

/// Two ready groups, and the marker of a step with them that ended the process, for the second time if `again`.
async fn interrupted(dir: &Path, again: bool) -> ([GroupId; 2], SampleId) {
    let world = World::start(dir).await;
    world.pause().await;
    let groups = world.batch(0).await;
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
    assert!(world.all_are(&groups, &GroupState::Trained(1)));
    assert!(!dir.path().join("checkpoints/attempt.json").exists());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_ended_the_process_twice_is_not_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let (groups, sample) = interrupted(dir.path(), true).await;
    let marker = dir.path().join("checkpoints/attempt.json");
    let world = World::start(dir.path()).await;
    world.wait_for_drops(&groups, "interrupted").await;
    let error = world.worker.handle().status().last_error.unwrap();
    assert!(error.contains(&sample.to_string()) && error.contains("6000 tokens"), "{error}");
    // The next groups are trained on, and a step that ends leaves no marker.
    world.batch(0).await;
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
        let groups = world.batch(active).await;
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
    let groups = world.batch(0).await;
    world.wait_for_drops(&groups, "too_long").await;
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
