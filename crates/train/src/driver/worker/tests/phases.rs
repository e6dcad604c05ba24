//! Every transition of the trainer's state machine, one turn at a time.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use hone_core::types::{GroupId, GroupState, PolicyState, PolicyVersion};

use super::world::{Parts, every_step, record_group};
use crate::config::{LossKind, TrainConfig, ZeroVariance};
use crate::driver::report::StatusCell;
use crate::driver::trainer::{SETTLE_TIME, TrainPhase, Trainer, replayable};
use crate::driver::{StepGate, ThreadPools, TrainState};
use crate::learning::checkpoint::step_dir;
use crate::policy::{PolicyConfig, Promotion};

/// A trainer without its thread. Every staging waits for a permit.
struct Stepper<'a> {
    runtime: &'a Runtime,
    parts: &'a Parts,
    status: &'a StatusCell,
    trainer: Trainer<'a>,
    phase: Option<TrainPhase>,
    /// The time until the next turn.
    wait: Duration,
    gate: StepGate,
    token: u32,
}

fn name(phase: &TrainPhase) -> &'static str {
    match phase {
        TrainPhase::Idle => "idle",
        TrainPhase::Starting(_) => "starting",
        TrainPhase::Publishing(_) => "publishing",
        TrainPhase::Ahead(..) => "ahead",
        TrainPhase::Activated(_) => "activated",
    }
}

/// Runs a test on a trainer that publishes each step.
fn stepped(test: impl FnOnce(&mut Stepper<'_>)) {
    let dir = tempfile::tempdir().unwrap();
    stepped_in(dir.path(), every_step(), |_| {}, test);
}

fn stepped_in(
    dir: &Path,
    policy: PolicyConfig,
    change: impl FnOnce(&mut TrainConfig),
    test: impl FnOnce(&mut Stepper<'_>),
) {
    let runtime = Runtime::new().unwrap();
    let parts = runtime.block_on(Parts::open(dir, policy, change));
    parts.publisher.staging.forget_permits(Semaphore::MAX_PERMITS);
    let status = StatusCell::new(TrainState::Waiting, Arc::clone(&parts.metrics));
    let (handle, pools) = (runtime.handle().clone(), ThreadPools::new(1).unwrap());
    let (wake, _commands) = channel();
    let (trainer, phase) = Trainer::restore(&parts.setup, &status, &handle, &pools, &wake).unwrap();
    let mut stepper = Stepper {
        runtime: &runtime,
        parts: &parts,
        status: &status,
        trainer,
        phase: Some(phase),
        wait: Duration::ZERO,
        gate: StepGate::default(),
        token: 3,
    };
    test(&mut stepper);
    let Stepper { mut trainer, phase, .. } = stepper;
    trainer.finish(phase.unwrap()).unwrap();
    runtime.block_on(parts.store.close()).unwrap();
}

impl Stepper<'_> {
    /// A turn after which something follows at once.
    fn moves_to(&mut self, wanted: &str) {
        assert_eq!((self.turn(), true), (wanted, self.wait.is_zero()));
    }

    /// A turn in which nothing happens.
    fn rests_in(&mut self, wanted: &str, state: TrainState) {
        let phase = self.turn();
        assert_eq!((phase, self.status.read().state), (wanted, state));
        assert!(!self.wait.is_zero(), "something follows {wanted}");
    }

    /// The name of the phase that follows.
    fn turn(&mut self) -> &'static str {
        let (phase, wait) = self.trainer.tick(self.phase.take().unwrap(), &self.gate).unwrap();
        self.wait = wait;
        name(self.phase.insert(phase))
    }

    /// Records the groups of a step, sampled by `version`.
    fn batch(&mut self, version: u64, rewards: [f64; 2]) -> [GroupId; 2] {
        [(); 2].map(|()| self.group(version, rewards))
    }

    fn group(&mut self, version: u64, rewards: [f64; 2]) -> GroupId {
        self.token += 1;
        let group = record_group(&self.parts.store, vec![1, 2, 3], self.token, version, rewards);
        self.runtime.block_on(group)
    }

    fn state(&self, group: GroupId) -> GroupState {
        self.parts.store.group(group).unwrap().unwrap().state
    }

    fn all_are(&self, groups: &[GroupId], state: &GroupState) -> bool {
        groups.iter().all(|group| self.state(*group) == *state)
    }

    /// Step, parent and state of each version after the base.
    fn versions(&self) -> Vec<(u64, u64, PolicyState)> {
        let records = self.parts.policies.list().unwrap().into_iter().skip(1);
        records.map(|r| (r.step, r.parent.unwrap().0, r.state)).collect()
    }

    /// Number of recorded steps.
    fn steps(&self) -> u64 {
        self.parts.store.last_step().unwrap().map_or(0, |step| step.step)
    }

    /// Permits a staging, and waits for the end of the publication.
    fn publication_ends(&self) {
        self.parts.publisher.staging.add_permits(1);
        self.wait_for_end();
    }

    fn wait_for_end(&self) {
        let started = Instant::now();
        while !self.phase.as_ref().unwrap().publication().unwrap().is_finished() {
            assert!(started.elapsed() < Duration::from_secs(20), "the publication does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn activate(&self, version: u64) {
        self.parts.publisher.staging.add_permits(1);
        let activation = self.parts.policies.activate(PolicyVersion(version), "test");
        self.runtime.block_on(activation).unwrap();
    }

    /// The version that the step proposed is published, or rejected.
    fn ends_in(&mut self, wanted: &str) {
        self.publication_ends();
        self.moves_to(wanted);
    }

    fn resume(&mut self) {
        self.phase = Some(self.trainer.resume(self.phase.take().unwrap()).unwrap());
    }

    /// Takes a step and publishes it.
    fn publish(&mut self) {
        self.batch(self.parts.policies.active().0, [0.0, 1.0]);
        self.moves_to("publishing");
        self.ends_in("idle");
    }
}

#[test]
fn steps_and_publications() {
    stepped(|trainer| {
        trainer.rests_in("idle", TrainState::Waiting);
        trainer.gate.paused = true;
        let first = trainer.batch(0, [0.0, 1.0]);
        trainer.rests_in("idle", TrainState::Paused);
        trainer.gate.paused = false;
        trainer.moves_to("publishing");
        assert_eq!(trainer.state(first[0]), GroupState::Trained(1));
        trainer.rests_in("publishing", TrainState::Waiting);
        trainer.gate.paused = true;
        trainer.rests_in("publishing", TrainState::Publishing);
        trainer.gate.paused = false;
        // The next step is recorded, and published, once the version is served.
        let second = trainer.batch(0, [0.0, 1.0]);
        trainer.moves_to("ahead");
        assert_eq!((trainer.steps(), trainer.state(second[0])), (1, GroupState::Ready));
        trainer.batch(0, [0.0, 1.0]);
        trainer.rests_in("ahead", TrainState::Publishing);
        assert_eq!(trainer.parts.policies.active(), PolicyVersion::BASE);
        trainer.ends_in("publishing");
        assert_eq!((trainer.steps(), trainer.state(second[1])), (2, GroupState::Trained(2)));
        assert_eq!(trainer.parts.policies.active(), PolicyVersion(1));
        // The second step trained version 1 on samples of the base.
        let step = trainer.parts.store.last_step().unwrap().unwrap();
        assert_eq!(step.metrics["staleness_versions"], 1.0);
        trainer.moves_to("ahead");
        trainer.ends_in("publishing");
        trainer.ends_in("idle");
        trainer.rests_in("idle", TrainState::Waiting);
        let retired = PolicyState::Retired;
        let expected = [(1, 0, retired), (2, 1, retired), (3, 2, PolicyState::Active)];
        assert_eq!(trainer.versions(), expected);
        assert_eq!(trainer.parts.metrics.feedback_to_policy.get_sample_count(), 12);
    });
}

#[test]
fn a_rejected_version_undoes_the_step_after_it_and_its_groups_are_trained_on_again() {
    stepped(|trainer| {
        trainer.parts.publisher.rejects.store(1, Ordering::Release);
        let groups = [trainer.batch(0, [0.0, 1.0]), trainer.batch(0, [0.0, 1.0])].concat();
        trainer.moves_to("publishing");
        trainer.moves_to("ahead");
        trainer.ends_in("idle");
        assert!(trainer.all_are(&groups, &GroupState::Ready));
        trainer.moves_to("publishing");
        trainer.ends_in("idle");
        assert!(trainer.all_are(&groups[2..], &GroupState::Trained(2)));
        trainer.moves_to("publishing");
        trainer.ends_in("idle");
        assert!(trainer.all_are(&groups[..2], &GroupState::Trained(3)));
        let rejected = (1, 0, PolicyState::Rejected);
        let expected = [rejected, (2, 0, PolicyState::Retired), (3, 2, PolicyState::Active)];
        assert_eq!(trainer.versions(), expected);
        // Each rating is counted once, when it reaches clients.
        assert_eq!(trainer.parts.metrics.feedback_to_policy.get_sample_count(), 8);
    });
}

#[test]
fn a_resume_makes_nothing_durable_of_a_step_that_is_not_recorded() {
    stepped(|trainer| {
        let _groups = [trainer.batch(0, [0.0, 1.0]), trainer.batch(0, [0.0, 1.0])];
        trainer.moves_to("publishing");
        trainer.moves_to("ahead");
        trainer.trainer.progress.rate_halvings = 1;
        trainer.resume();
        assert_eq!(name(trainer.phase.as_ref().unwrap()), "ahead");
        assert_eq!(trainer.trainer.progress.rate_halvings, 0);
        let saved = |step| step_dir(&trainer.parts.setup.checkpoints, step).exists();
        assert!(saved(1) && !saved(2));
        trainer.ends_in("publishing");
        let saved = |step| step_dir(&trainer.parts.setup.checkpoints, step).exists();
        assert!(saved(2));
        trainer.ends_in("idle");
    });
}

#[test]
fn activations_are_followed_after_a_while_or_before_a_step() {
    stepped(|trainer| {
        trainer.publish();
        trainer.publish();
        let version = |trainer: &Stepper<'_>| trainer.status.read().policy_version;
        trainer.activate(1);
        trainer.rests_in("activated", TrainState::Paused);
        assert_eq!(version(trainer), 2);
        std::thread::sleep(SETTLE_TIME);
        trainer.moves_to("idle");
        trainer.rests_in("idle", TrainState::Paused);
        assert_eq!(version(trainer), 1);
        trainer.activate(2);
        trainer.rests_in("activated", TrainState::Paused);
        trainer.resume();
        trainer.rests_in("idle", TrainState::Waiting);
        assert_eq!(version(trainer), 2);
        // A warning's withdrawal is followed at once, without a pause.
        trainer.parts.publisher.staging.add_permits(1);
        let withdrawal = trainer.parts.policies.withdraw(PolicyVersion(2), "test");
        trainer.runtime.block_on(withdrawal).unwrap();
        trainer.rests_in("idle", TrainState::Waiting);
        assert_eq!(version(trainer), 1);
    });
}

#[test]
fn an_activation_ends_a_publication_and_undoes_its_steps() {
    stepped(|trainer| {
        trainer.publish();
        let groups = [trainer.batch(1, [0.0, 1.0]), trainer.batch(1, [0.0, 1.0])].concat();
        trainer.moves_to("publishing");
        trainer.moves_to("ahead");
        let policies = Arc::clone(&trainer.parts.policies);
        let activation = trainer
            .runtime
            .spawn(async move { policies.activate(PolicyVersion::BASE, "test").await });
        trainer.wait_for_end();
        trainer.parts.publisher.staging.add_permits(1);
        trainer.runtime.block_on(activation).unwrap().unwrap();
        trainer.rests_in("activated", TrainState::Paused);
        assert!(trainer.all_are(&groups, &GroupState::Ready));
        // They are samples of version 1, which is abandoned. The next version descends from the base.
        trainer.resume();
        trainer.rests_in("idle", TrainState::Waiting);
        assert!(trainer.all_are(&groups, &GroupState::Dropped("abandoned".to_owned())));
        trainer.publish();
        assert_eq!(trainer.versions().pop(), Some((3, 0, PolicyState::Active)));
    });
}

#[test]
fn an_adapter_to_start_from_is_published_before_a_step() {
    let (before, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let digest = |trainer: &Stepper<'_>| trainer.parts.policies.list().unwrap()[1].sha256.clone();
    let mut source = None;
    stepped_in(
        before.path(),
        every_step(),
        |_| {},
        |trainer| {
            trainer.publish();
            source = digest(trainer);
        },
    );
    let start = |test: &dyn Fn(&mut Stepper<'_>)| {
        let adapter = before.path().join("adapters/v000001");
        let change = |config: &mut TrainConfig| config.lora.init_adapter = adapter;
        stepped_in(dir.path(), every_step(), change, test);
    };
    start(&|trainer| {
        trainer.rests_in("starting", TrainState::Publishing);
        trainer.batch(0, [0.0, 1.0]);
        trainer.rests_in("starting", TrainState::Publishing);
        trainer.ends_in("idle");
        assert_eq!(trainer.versions(), [(0, 0, PolicyState::Active)]);
        assert_eq!(digest(trainer), source, "the same weights");
    });
    // A restart before the first step publishes no second version of it.
    start(&|trainer| {
        assert_eq!(trainer.versions().len(), 1);
        trainer.moves_to("publishing");
        trainer.ends_in("idle");
        assert_eq!(trainer.versions()[1..], [(1, 1, PolicyState::Active)]);
    });
    // A start continues from the checkpoint once there is one.
    start(&|trainer| {
        trainer.rests_in("idle", TrainState::Waiting);
        assert_eq!(trainer.versions().len(), 2);
    });
}

#[test]
fn unpublished_steps_are_published_once_no_step_may_follow() {
    let dir = tempfile::tempdir().unwrap();
    let policy = PolicyConfig { publish_every: 2, ..PolicyConfig::default() };
    let change = |config: &mut TrainConfig| config.max_steps = 3;
    stepped_in(dir.path(), policy, change, |trainer| {
        trainer.batch(0, [0.0, 1.0]);
        trainer.moves_to("idle");
        trainer.rests_in("idle", TrainState::Waiting);
        trainer.batch(0, [0.0, 1.0]);
        trainer.moves_to("publishing");
        trainer.ends_in("idle");
        trainer.batch(1, [0.0, 1.0]);
        trainer.moves_to("idle");
        assert_eq!(trainer.steps(), 3);
        // This was the last step of `train.max_steps`.
        trainer.moves_to("publishing");
        trainer.rests_in("publishing", TrainState::Publishing);
        trainer.ends_in("idle");
        trainer.rests_in("idle", TrainState::Finished);
    });
}

#[test]
fn batches_of_equal_rewards_are_dropped_and_counted_and_change_no_phase() {
    let drop = |config: &mut TrainConfig| config.zero_variance_groups = ZeroVariance::Drop;
    let dir = tempfile::tempdir().unwrap();
    stepped_in(dir.path(), every_step(), drop, |trainer| {
        let dropped = GroupState::Dropped("no_sample".to_owned());
        for skipped in 1..=2 {
            let equal = trainer.batch(0, [1.0, 1.0]);
            trainer.moves_to("idle");
            assert!(trainer.all_are(&equal, &dropped));
            assert_eq!(trainer.status.read().skipped_batches, skipped);
        }
        trainer.rests_in("idle", TrainState::Waiting);
        let status = trainer.status.read();
        let reason = "all 2 groups of the batch have equal rewards";
        assert_eq!((status.step, status.last_error.as_deref()), (0, Some(reason)));
        assert_eq!(serde_json::to_value(status).unwrap()["skipped_batches"], 2);
        let counter = &trainer.parts.metrics.train.skipped_steps;
        assert_eq!(counter.with_label_values(&["no_sample"]).get(), 2);
        // One group with a difference is enough to learn from.
        trainer.group(0, [1.0, 1.0]);
        trainer.group(0, [0.0, 1.0]);
        trainer.moves_to("publishing");
        let equal = trainer.batch(0, [1.0, 1.0]);
        trainer.moves_to("publishing");
        assert!(trainer.all_are(&equal, &dropped));
    });
}

#[test]
fn the_newest_fifty_steps_may_be_replayed() {
    assert!(replayable(0).is_empty());
    assert_eq!([3, 50, 51].map(replayable), [1..=3, 1..=50, 2..=51]);
}

/// A canary takes more ratings than its version was trained on: the next version learns from what waits.
#[test]
fn a_version_waits_for_the_steps_of_a_backlog() {
    let policy = PolicyConfig { promotion: Promotion::Canary, ..every_step() };
    let dir = tempfile::tempdir().unwrap();
    stepped_in(
        dir.path(),
        policy,
        // Without a ratio to clip: the recorded log-probabilities are far from the policy.
        |config| config.loss = LossKind::Reinforce.into(),
        |trainer| {
            let batches = [(); 6].map(|()| trainer.batch(0, [0.0, 1.0]));
            // At most four times `policy.publish_every`, the newest ratings first.
            for step in 1..=3 {
                trainer.moves_to("idle");
                assert_eq!(trainer.steps(), step);
            }
            trainer.moves_to("publishing");
            assert_eq!(trainer.steps(), 4);
            assert!(trainer.all_are(&batches[5], &GroupState::Trained(1)));
            assert!(trainer.all_are(&batches[1], &GroupState::Ready));
            assert!(trainer.parts.metrics.train.oldest_waiting.get() > 0.0);
            trainer.publication_ends();
        },
    );
}
