//! Random sequences of steps, publications, rejections, canaries, activations and crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use hone_core::types::{GroupState, PolicyRecord, PolicyState, PolicyVersion};

use super::world::{World, every_step};
use crate::TrainError;
use crate::TrainState;
use crate::policy::{CanaryConfig, PolicyConfig, PolicyError, Promotion};
use crate::testing::version_rating;

/// Longest wait for the record of a canary's begin or end.
const PATIENCE: Duration = Duration::from_secs(10);

/// What happens next. Indexes select among the versions so far.
#[derive(Clone, Debug)]
enum Event {
    /// A group sampled by a version gets ready.
    Group(prop::sample::Index),
    /// The trainer takes a step on the ready groups and publishes it.
    Step,
    /// As `Step`, and the engine serves the version differently than it was trained.
    RejectedStep,
    /// Users rate a canary in progress.
    Ratings { good: bool },
    /// An operator activates a version.
    Activate(prop::sample::Index),
    /// An operator activates versions faster than the trainer follows.
    Activations([prop::sample::Index; 3]),
    /// A rule finds the active version worse.
    Withdraw,
    /// An operator pins a version.
    Pin(prop::sample::Index),
    /// The process ends and starts again.
    Restart,
    /// As `Step`, and the process is killed before the ledger has any of it.
    LostStep,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => any::<prop::sample::Index>().prop_map(Event::Group),
        4 => Just(Event::Step),
        1 => Just(Event::RejectedStep),
        3 => any::<bool>().prop_map(|good| Event::Ratings { good }),
        1 => any::<prop::sample::Index>().prop_map(Event::Activate),
        1 => any::<[prop::sample::Index; 3]>().prop_map(Event::Activations),
        1 => Just(Event::Withdraw),
        1 => any::<prop::sample::Index>().prop_map(Event::Pin),
        1 => Just(Event::Restart),
        1 => Just(Event::LostStep),
    ]
}

fn policy(canary: bool) -> PolicyConfig {
    let promotion = if canary { Promotion::Canary } else { Promotion::Gate };
    let canary =
        CanaryConfig { shares: vec![0.5], margin: 0.3, alpha: 0.2, ..CanaryConfig::default() };
    PolicyConfig { promotion, canary, max_rejections: 0, ..every_step() }
}

struct Process<'a> {
    dir: &'a Path,
    canary: bool,
    world: World,
    token: u32,
    /// Versions that the operator activated, whatever their checks found.
    activated: BTreeSet<PolicyVersion>,
    /// Versions that were withdrawn at some time.
    withdrawn: BTreeSet<PolicyVersion>,
}

impl<'a> Process<'a> {
    async fn start(dir: &'a Path, canary: bool) -> Self {
        let world = World::start_as(dir, policy(canary), |_| {}).await;
        world.publisher.canaries.store(canary, Ordering::Release);
        world.worker.handle().pause().unwrap();
        world.wait_for_quiet().await;
        let none = BTreeSet::new;
        Self { dir, canary, world, token: 4, activated: none(), withdrawn: none() }
    }

    async fn restart(self) -> Self {
        let Self { dir, canary, world, activated, withdrawn, .. } = self;
        world.stop().await;
        Self { activated, withdrawn, ..Self::start(dir, canary).await }
    }

    fn version(&self, index: prop::sample::Index) -> PolicyVersion {
        *index
            .get(&self.world.policies.list().unwrap().iter().map(|r| r.version).collect::<Vec<_>>())
    }

    async fn step(&self) {
        match self.world.worker.handle().step().await {
            Ok(_) | Err(TrainError::NothingReady | TrainError::CanaryRunning(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }

    async fn activate(&mut self, index: prop::sample::Index) {
        let version = self.version(index);
        match self.world.policies.activate(version, "test").await {
            Ok(record) => {
                assert_eq!(record.state, PolicyState::Active);
                self.activated.insert(version);
            }
            Err(PolicyError::Unservable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    async fn rate(&self, good: bool) {
        let policies = &self.world.policies;
        let Some(canary) = policies.canary() else { return };
        for n in 0..400 {
            policies.rate(&version_rating(policies.active().0, 0.5));
            policies.rate(&version_rating(canary.0, if good { 1.0 } else { 0.0 }));
            if n % 20 == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        self.world.wait_for_quiet().await;
    }

    async fn apply(mut self, event: &Event) -> Self {
        match event {
            Event::Group(index) => {
                self.token = 4 + (self.token + 1) % 20;
                let version = self.version(*index).0;
                self.world.group(self.token, version).await;
            }
            Event::Step => self.step().await,
            Event::RejectedStep => {
                let next = self.world.policies.list().unwrap().len() as u64;
                self.world.publisher.rejects.store(next, Ordering::Release);
                self.step().await;
            }
            Event::Ratings { good } => self.rate(*good).await,
            Event::Activate(index) => {
                self.activate(*index).await;
                self.world.wait_for_quiet().await;
            }
            Event::Activations(indexes) => {
                for index in indexes {
                    self.activate(*index).await;
                }
                self.world.wait_for_quiet().await;
            }
            Event::Withdraw => {
                let active = self.world.policies.active();
                self.world.policies.withdraw(active, "test").await.unwrap();
                self.world.wait_for_quiet().await;
            }
            Event::Pin(index) => {
                let version = self.version(*index);
                drop(self.world.policies.pin(version, true).await);
            }
            Event::Restart => return self.restart().await,
            Event::LostStep => {
                let (ledger, copy) = (self.dir.join("ledger.redb"), self.dir.join("copy.redb"));
                let Self { dir, canary, world, activated, withdrawn, .. } = self;
                world.stop().await;
                std::fs::copy(&ledger, &copy).unwrap();
                let killed = Self::start(dir, canary).await;
                killed.step().await;
                killed.world.stop().await;
                std::fs::rename(&copy, &ledger).unwrap();
                return Self { activated, withdrawn, ..Self::start(dir, canary).await };
            }
        }
        self
    }

    /// The records of all versions, and the canary in progress. Its begin and its end are recorded shortly
    /// before and after.
    async fn recorded(&self) -> (Vec<PolicyRecord>, Option<PolicyVersion>) {
        let started = Instant::now();
        loop {
            let (records, canary) =
                (self.world.policies.list().unwrap(), self.world.policies.canary());
            let mut canaries = records.iter().filter(|r| r.state == PolicyState::Canary);
            if canaries.all(|r| Some(r.version) == canary) || started.elapsed() > PATIENCE {
                return (records, canary);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// What must hold whenever the trainer rests.
    async fn check(&mut self) {
        let (records, canary) = self.recorded().await;
        let is_withdrawn = |record: &&PolicyRecord| {
            matches!(record.state, PolicyState::Rejected | PolicyState::RolledBack)
        };
        self.withdrawn.extend(records.iter().filter(is_withdrawn).map(|record| record.version));
        let world = &self.world;
        let lineage = world.store.lineage();
        let active: Vec<_> =
            records.iter().filter(|r| r.state == PolicyState::Active).map(|r| r.version).collect();
        assert_eq!(active, [world.policies.active()], "one version is active");
        assert_eq!(world.publisher.served(), world.policies.active(), "and it is the served one");
        for record in records.iter().filter(|r| r.version > PolicyVersion::BASE) {
            let version = record.version;
            match record.state {
                PolicyState::Candidate => panic!("{version} has no verdict"),
                PolicyState::Canary => assert_eq!(canary, Some(version), "it is being decided"),
                PolicyState::Rejected | PolicyState::RolledBack => {
                    assert!(record.reason.is_some(), "{version} has no reason");
                }
                PolicyState::Active | PolicyState::Retired => {
                    let passed = record.checks.iter().all(|check| check.passed);
                    let passed = passed || self.activated.contains(&version);
                    assert!(passed && !record.checks.is_empty(), "{record:?}");
                }
            }
        }
        // A promoted version was trained on samples of its ancestors, and of versions that were withdrawn.
        let by_version: BTreeMap<_, _> = records.iter().map(|r| (r.version, r)).collect();
        let promoted = records.iter().filter(|r| r.state.was_promoted() && r.step > 0);
        for record in promoted {
            let parent = by_version[&record.parent.unwrap()];
            for step in parent.step + 1..=record.step {
                for step in world.store.steps(step, 1).unwrap().iter().filter(|s| s.step == step) {
                    for id in &step.groups {
                        let group = world.store.group(*id).unwrap().unwrap();
                        if group.state != GroupState::Trained(step.step) {
                            // The step was undone.
                            continue;
                        }
                        let oldest = group.oldest_version;
                        let is_known = lineage.distance(parent.version, oldest).is_some();
                        let is_known = is_known || self.withdrawn.contains(&oldest);
                        assert!(is_known, "{} on {oldest}", record.version);
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn versions_are_decided_once_and_served_as_recorded(
        canary in any::<bool>(),
        events in prop::collection::vec(event(), 1..14),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let mut process = Process::start(dir.path(), canary).await;
            process.check().await;
            for event in &events {
                process = process.apply(event).await;
                process.check().await;
            }
            assert!(process.world.worker.handle().status().state != TrainState::Failed);
            process.world.stop().await;
        });
    }
}
