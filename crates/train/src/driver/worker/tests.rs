//! The worker over a real ledger and a scripted publisher: steps, commands, drops, crashes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::Semaphore;

use hone_core::metrics::Metrics;
use hone_core::types::{
    FinishReason, Group, GroupId, GroupState, Interaction, InteractionId, PolicyState,
    PolicyVersion, PromptSource, Reward, RewardId, RewardSource, Sample, SampleId, SampleOrigin,
    SamplingParams, TokenId, now_ms,
};
use hone_engine::{EngineError, ModelDir, Publisher};
use hone_model::adapter::LoraConfig;
use hone_reward::Routes;
use hone_reward::kinds::{FeedbackParams, RewardKind};
use hone_reward::routes::{RewardConfig, RouteConfig, RouteList};
use hone_store::{Op, Store, StoreConfig};

use crate::config::TrainConfig;
use crate::policy::{Policies, PolicyConfig};
use crate::{TrainError, TrainSetup, TrainState, TrainWorker};

/// Serves nothing; agrees to everything but what it is told to reject, once it may stage.
struct Scripted {
    /// A permit for every staging to come.
    staging: Semaphore,
    /// The version whose probe is no number.
    rejects: AtomicU64,
    staged: AtomicU64,
    /// Stagings asked for.
    asked: AtomicU64,
}

impl Default for Scripted {
    fn default() -> Self {
        let staging = Semaphore::new(Semaphore::MAX_PERMITS);
        let [staged, asked] = <[AtomicU64; 2]>::default();
        Self { staging, rejects: AtomicU64::new(u64::MAX), staged, asked }
    }
}

#[async_trait]
impl Publisher for Scripted {
    async fn stage(&self, version: PolicyVersion, _: Option<&Path>) -> Result<(), EngineError> {
        self.asked.fetch_add(1, Ordering::AcqRel);
        self.staging.acquire().await.unwrap().forget();
        self.staged.store(version.0, Ordering::Release);
        Ok(())
    }

    async fn probe(
        &self,
        _: &[TokenId],
        _: &SamplingParams,
    ) -> Result<Vec<(TokenId, f32)>, EngineError> {
        let staged = self.staged.load(Ordering::Acquire);
        let rejected = staged == self.rejects.load(Ordering::Acquire);
        Ok(vec![(1, if rejected { f32::NAN } else { -1.0 })])
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        Ok(Duration::ZERO)
    }
}

struct World {
    publisher: Arc<Scripted>,
    store: Store,
    policies: Arc<Policies>,
    worker: TrainWorker,
    metrics: Arc<Metrics>,
}

impl World {
    /// A daemon's parts around the data in `dir`, with groups of two making a step of four.
    async fn start(dir: &Path) -> Self {
        Self::start_from(dir, Path::new("")).await
    }

    /// [`Self::start`] with an adapter to start from.
    async fn start_from(dir: &Path, init_adapter: &Path) -> Self {
        let metrics = Arc::new(Metrics::new().unwrap());
        let ledger = dir.join("ledger.redb");
        let store = Store::open(&ledger, &StoreConfig::default(), metrics.clone()).unwrap();
        let routes = RouteList(vec![RouteConfig {
            name: "route".to_owned(),
            rewards: vec![RewardConfig::new(
                "thumbs",
                1.0,
                RewardKind::Feedback(FeedbackParams::default()),
            )],
            ..RouteConfig::default()
        }]);
        let config = PolicyConfig { parity_tolerance: 1e9, ..PolicyConfig::default() };
        let publisher = Arc::new(Scripted::default());
        let policies = Policies::restore(
            publisher.clone(),
            store.clone(),
            config,
            metrics.clone(),
            dir,
            vec![1, 2],
        );
        let policies = Arc::new(policies.await.unwrap());
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/qwen2-tiny");
        let worker = TrainWorker::start(TrainSetup {
            config: TrainConfig {
                samples_per_step: 4,
                micro_batch: 4,
                max_staleness: 2,
                max_sampler_difference: 0.0,
                learning_rate: 0.01,
                threads: 1,
                lora: LoraConfig {
                    r: 2,
                    init_adapter: init_adapter.to_owned(),
                    ..LoraConfig::default()
                },
                ..TrainConfig::default()
            },
            publish_every: 1,
            until: None,
            peak_rates: Vec::new(),
            max_completion_tokens: 8,
            model: ModelDir::open(Path::new(fixture)).unwrap(),
            base: None,
            model_name: "tiny".to_owned(),
            checkpoints: dir.join("checkpoints"),
            store: store.clone(),
            routes: Arc::new(Routes::new(&routes).unwrap()),
            policies: policies.clone(),
            metrics: metrics.clone(),
        })
        .unwrap();
        Self { publisher, store, policies, worker, metrics }
    }

    /// Records a ready group of two samples of `version`, one liked and one not.
    async fn group(&self, token: TokenId, version: u64) -> GroupId {
        let interaction = InteractionId::new();
        let mut ops = vec![Op::Interaction(Box::new(Interaction {
            id: interaction,
            created: now_ms(),
            source: PromptSource::Live,
            route: "route".to_owned(),
            model: "default".to_owned(),
            key_id: None,
            messages: Vec::new(),
            metadata: std::collections::BTreeMap::new(),
            params: SamplingParams::default(),
            prompt_ids: vec![1, 2, 3],
            template_hash: String::new(),
        }))];
        let mut members = Vec::new();
        for value in [0.0, 1.0] {
            let id = SampleId::new();
            members.push(id);
            ops.push(Op::Sample(Box::new(Sample {
                id,
                interaction,
                choice: 0,
                origin: SampleOrigin::Shadow,
                created: now_ms(),
                ids: vec![token, 5],
                logprobs: vec![-2.0, -2.0],
                kept_mass: 1.0,
                text: String::new(),
                finish: FinishReason::Stop,
                version: PolicyVersion(version),
                params: SamplingParams::default(),
                untrainable: None,
            })));
            ops.push(Op::Reward(Box::new(Reward {
                id: RewardId::new(),
                sample: id,
                name: "thumbs".to_owned(),
                value: Some(value),
                source: RewardSource::Feedback,
                created: now_ms(),
                idempotency_key: None,
                comment: None,
                key_id: None,
            })));
        }
        let id = GroupId::new();
        ops.push(Op::Group(Box::new(Group {
            id,
            interaction,
            route: "route".to_owned(),
            members,
            parts: vec!["thumbs".to_owned()],
            oldest_version: PolicyVersion(version),
            created: now_ms(),
            state: GroupState::Ready,
        })));
        self.store.commit(ops).await.unwrap();
        id
    }

    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            let status = self.worker.handle().status();
            assert!(started.elapsed() < Duration::from_secs(20), "{what}: {status:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Pauses, forbids stagings and records groups of `version` for two steps.
    async fn two_steps_at_hand(&self, version: u64) -> [GroupId; 4] {
        self.worker.handle().pause().unwrap();
        self.reaches(TrainState::Paused).await;
        self.publisher.staging.forget_permits(Semaphore::MAX_PERMITS);
        let mut groups = Vec::new();
        for token in [4, 6, 7, 8] {
            groups.push(self.group(token, version).await);
        }
        groups.try_into().unwrap()
    }

    /// Lets both steps be taken, until the second has been computed and waits for the first one's
    /// version, which cannot be staged.
    async fn two_steps_at_once(&self) -> [GroupId; 4] {
        let groups = self.two_steps_at_hand(0).await;
        self.worker.handle().resume().unwrap();
        // Not before: with a batch at hand it is waited for only when that has been computed.
        self.reaches(TrainState::Publishing).await;
        groups
    }

    async fn reaches(&self, state: TrainState) {
        self.until(state.as_str(), |w| w.worker.handle().status().state == state).await;
    }

    async fn version(&self, wanted: u64) {
        let what = format!("version {wanted}");
        self.until(&what, |w| w.worker.handle().status().policy_version == wanted).await;
    }

    /// Trains the first `count` versions, each on samples of the one before.
    async fn versions(&self, count: u64) {
        for version in 0..count {
            self.group(4, version).await;
            self.group(6, version).await;
            self.version(version + 1).await;
        }
    }

    fn state(&self, group: GroupId) -> GroupState {
        self.store.group(group).unwrap().unwrap().state
    }

    async fn stop(self) {
        self.worker.stop(Duration::from_secs(20)).await;
        self.store.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn enough_groups_make_a_step_and_a_version() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let first = world.group(4, 0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.worker.handle().status().step, 0, "two samples of four are not enough");
    let second = world.group(6, 0).await;
    world.version(1).await;
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
async fn a_step_is_computed_while_a_version_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let groups = world.two_steps_at_once().await;
    // The first is written down; the second not before the first is served.
    let written = groups.map(|id| world.state(id));
    let [trained, ready] = [GroupState::Trained(1), GroupState::Ready];
    assert_eq!(written, [trained.clone(), trained.clone(), ready.clone(), ready]);
    assert_eq!(world.policies.active(), PolicyVersion::BASE);
    world.publisher.staging.add_permits(1000);
    world.version(2).await;
    assert_eq!(
        groups.map(|id| world.state(id))[2..],
        [GroupState::Trained(2), GroupState::Trained(2)]
    );
    // Its samples were of the base, and its weights those of version 1.
    let step = world.store.last_step().unwrap().unwrap();
    assert!((step.metrics["staleness_versions"] - 1.0).abs() < 1e-9, "{:?}", step.metrics);
    let parents: Vec<_> = world.policies.list().unwrap().into_iter().map(|p| p.parent).collect();
    assert_eq!(parents[1..], [Some(PolicyVersion(0)), Some(PolicyVersion(1))]);
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 8);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_on_weights_that_are_rejected_is_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.publisher.rejects.store(1, Ordering::Release);
    let groups = world.two_steps_at_once().await;
    world.publisher.staging.add_permits(1000);
    world.version(2).await;
    let states = groups.map(|id| world.state(id));
    let (first, second) = (GroupState::Trained(1), GroupState::Trained(2));
    assert_eq!(states, [first.clone(), first, second.clone(), second]);
    let policies = world.policies.list().unwrap();
    let told: Vec<_> = policies[1..].iter().map(|p| (p.step, p.parent, p.state)).collect();
    let base = Some(PolicyVersion::BASE);
    assert_eq!(told, [(1, base, PolicyState::Rejected), (2, base, PolicyState::Active)]);
    let step = world.store.last_step().unwrap().unwrap();
    assert!(step.metrics["staleness_versions"].abs() < 1e-9, "{:?}", step.metrics);
    // Of both steps: a rejected version reaches nobody.
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 8);
    assert_eq!(world.worker.handle().status().restarts, 0);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_on_weights_that_are_overruled_is_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.versions(2).await;
    let groups = world.two_steps_at_hand(2).await;
    // By hand first: the third step's version has to wait for it.
    let asked = world.publisher.asked.load(Ordering::Acquire);
    let policies = Arc::clone(&world.policies);
    let by_hand = tokio::spawn(async move { policies.activate(PolicyVersion(1), "test").await });
    world.until("by hand", |w| w.publisher.asked.load(Ordering::Acquire) > asked).await;
    world.worker.handle().resume().unwrap();
    world.reaches(TrainState::Publishing).await;
    world.publisher.staging.add_permits(1000);
    by_hand.await.unwrap().unwrap();
    world.version(3).await;
    let policies = world.policies.list().unwrap();
    let told: Vec<_> = policies[2..].iter().map(|p| (p.version.0, p.step, p.parent)).collect();
    assert_eq!(told, [(2, 2, Some(PolicyVersion(1))), (3, 4, Some(PolicyVersion(1)))]);
    let states = groups.map(|id| world.state(id));
    let (third, fourth) = (GroupState::Trained(3), GroupState::Trained(4));
    assert_eq!(states, [third.clone(), third, fourth.clone(), fourth]);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_goes_before_the_steps_that_wait() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let groups = world.two_steps_at_once().await;
    // A wake-up each, and a step more for two of them.
    for token in [9, 10, 11, 12, 13, 14] {
        world.group(token, 0).await;
    }
    world.worker.handle().pause().unwrap();
    world.publisher.staging.add_permits(1000);
    world.reaches(TrainState::Paused).await;
    assert_eq!(world.store.last_step().unwrap().unwrap().step, 2);
    assert_eq!(world.state(groups[3]), GroupState::Trained(2));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_trainer_steps_only_when_told() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    let handle = world.worker.handle();
    handle.pause().unwrap();
    world.reaches(TrainState::Paused).await;
    assert!(matches!(handle.step().await, Err(TrainError::NothingReady)));
    let (first, second) = (world.group(4, 0).await, world.group(6, 0).await);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.state(first), GroupState::Ready);
    assert_eq!(handle.step().await.unwrap().step, 1);
    assert_eq!(world.state(second), GroupState::Trained(1));
    world.group(4, 1).await;
    world.group(6, 1).await;
    handle.resume().unwrap();
    world.version(2).await;
    // A bound holds it back in the same way.
    handle.until(Some(2)).unwrap();
    let waiting = [world.group(4, 2).await, world.group(6, 2).await];
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(waiting.map(|id| world.state(id)), [GroupState::Ready, GroupState::Ready]);
    handle.until(None).unwrap();
    world.version(3).await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_and_impossible_groups_are_dropped_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.versions(3).await;
    let stale = world.group(4, 0).await;
    let impossible = world.group(1_000_000, 3).await;
    let (good, better) = (world.group(4, 3).await, world.group(6, 3).await);
    world.version(4).await;
    assert_eq!(world.state(stale), GroupState::Dropped("stale".to_owned()));
    assert_eq!(world.state(impossible), GroupState::Dropped("invalid".to_owned()));
    for group in [good, better] {
        assert_eq!(world.state(group), GroupState::Trained(4));
    }
    assert_eq!(world.worker.handle().status().restarts, 0);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_is_followed_and_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path()).await;
    world.versions(2).await;
    world.policies.activate(PolicyVersion(1), "test").await.unwrap();
    world.version(1).await;
    world.stop().await;
    let world = World::start(dir.path()).await;
    assert_eq!(world.policies.active(), PolicyVersion(1));
    world.version(1).await;
    world.group(4, 1).await;
    world.group(6, 1).await;
    world.version(3).await;
    let made = world.policies.list().unwrap().pop().unwrap();
    assert_eq!((made.version.0, made.parent, made.step), (3, Some(PolicyVersion(1)), 3));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_the_checkpoint_repeats_the_record_and_the_publication() {
    let dir = tempfile::tempdir().unwrap();
    let (ledger, kept) = (dir.path().join("ledger.redb"), dir.path().join("kept.redb"));
    let world = World::start(dir.path()).await;
    let handle = world.worker.handle();
    handle.pause().unwrap();
    let (first, second) = (world.group(4, 0).await, world.group(6, 0).await);
    world.stop().await;
    std::fs::copy(&ledger, &kept).unwrap();

    let world = World::start(dir.path()).await;
    world.version(1).await;
    world.stop().await;
    // The ledger as it was before the step, beside the checkpoint of after it.
    std::fs::copy(&kept, &ledger).unwrap();
    let world = World::start(dir.path()).await;
    world.version(1).await;
    for group in [first, second] {
        assert_eq!(world.state(group), GroupState::Trained(1));
    }
    assert_eq!(world.store.last_step().unwrap().unwrap().step, 1);
    assert_eq!(world.policies.active(), PolicyVersion(1));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_to_start_from_is_served_before_it_is_trained() {
    let (before, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let world = World::start(before.path()).await;
    world.group(4, 0).await;
    world.group(6, 0).await;
    world.version(1).await;
    let given = world.policies.list().unwrap().pop().unwrap();
    world.stop().await;
    let adapter = before.path().join(given.adapter.unwrap());

    let world = World::start_from(dir.path(), &adapter).await;
    world.version(1).await;
    let first = world.policies.list().unwrap().pop().unwrap();
    assert_eq!((first.step, first.parent), (0, Some(PolicyVersion::BASE)));
    assert_eq!(first.sha256, given.sha256, "the same weights");
    // Nothing was trained yet; a restart makes no second version of it.
    world.stop().await;
    let world = World::start_from(dir.path(), &adapter).await;
    world.version(1).await;
    assert_eq!(world.policies.list().unwrap().len(), 2);
    let group = world.group(4, 1).await;
    world.group(6, 1).await;
    world.version(2).await;
    assert_eq!(world.state(group), GroupState::Trained(1));
    // Once there is a checkpoint, that is what a start goes on from.
    world.stop().await;
    let world = World::start_from(dir.path(), &adapter).await;
    world.version(2).await;
    assert_eq!(world.policies.list().unwrap().len(), 3);
    world.stop().await;
}
