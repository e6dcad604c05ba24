//! A trainer over a real ledger and a scripted publisher.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use candle_core::DType;
use tokio::sync::Semaphore;

use hone_core::metrics::Metrics;
use hone_core::types::{
    GroupId, GroupState, InteractionId, PolicyState, PolicyVersion, Reward, RewardSource, Sample,
    SampleOrigin, StepRecord, TokenId, now_ms,
};
use hone_engine::{Completion, EngineError, GenerateRequest, ModelDir, Probe, Publisher};
use hone_model::Model;
use hone_model::adapter::{LoraConfig, peft};
use hone_store::{Op, Store, StoreConfig};

use crate::config::{PeakRate, TrainConfig};
use crate::learning::Snapshot;
use crate::policy::{PARITY_TOLERANCE, Policies, PolicyConfig, PolicySetup};
use crate::testing::{group, interaction, reward, routes, sample, tiny_model};
use crate::{TrainHandle, TrainSetup, TrainState, TrainWorker};

/// Serves the adapters that it is given, except that its probe of the version `rejects` is wrong by
/// ten times the tolerance. Each staging waits for a permit.
pub(super) struct ScriptedPublisher {
    /// One permit per staging.
    pub(super) staging: Semaphore,
    /// The version whose probe differs from the trainer's scores.
    pub(super) rejects: AtomicU64,
    /// Whether every version's probe differs.
    pub(super) rejects_all: AtomicBool,
    /// Stagings that were requested, including those that still wait.
    pub(super) requested: AtomicU64,
    /// Whether canaries can be served, and activated versions at once.
    pub(super) canaries: AtomicBool,
    active: Mutex<PolicyVersion>,
    staged: Mutex<(PolicyVersion, Option<PathBuf>)>,
    model: Model,
}

impl Default for ScriptedPublisher {
    fn default() -> Self {
        Self {
            staging: Semaphore::new(Semaphore::MAX_PERMITS),
            rejects: AtomicU64::new(u64::MAX),
            rejects_all: AtomicBool::default(),
            requested: AtomicU64::default(),
            canaries: AtomicBool::default(),
            active: Mutex::default(),
            staged: Mutex::default(),
            model: tiny_model(DType::F32),
        }
    }
}

#[async_trait]
impl Publisher for ScriptedPublisher {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        self.requested.fetch_add(1, Ordering::AcqRel);
        self.staging.acquire().await.unwrap().forget();
        *self.staged.lock().unwrap() = (version, adapter.map(Path::to_owned));
        Ok(())
    }

    async fn probe(&self, request: GenerateRequest) -> Result<Vec<Probe>, EngineError> {
        let (version, adapter) = self.staged.lock().unwrap().clone();
        // Read from the files that were published.
        let (model, adapter) = (self.model.clone(), adapter.unwrap());
        let (config, lora) =
            peft::read(&adapter, model.spec(), DType::F32, model.device()).unwrap();
        let ids = [5, 9, 2];
        let snapshot = Snapshot { model, lora: Arc::new(lora), config, device: None };
        let logprobs = snapshot.score(&request.prompt_ids, &ids, 1.0).unwrap();
        let is_rejected = version.0 == self.rejects.load(Ordering::Acquire)
            || self.rejects_all.load(Ordering::Acquire);
        let tolerance = PARITY_TOLERANCE as f32;
        let error = if is_rejected { 10.0 * tolerance } else { 0.0 };
        let logprobs = logprobs.into_iter().map(|logprob| logprob + error);
        Ok(vec![Probe {
            sampler: "serving",
            dtype: "f32",
            tokens: ids.into_iter().zip(logprobs).collect(),
        }])
    }

    async fn complete_staged(&self, _: GenerateRequest) -> Result<Completion, EngineError> {
        Err(EngineError::nothing_staged())
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        *self.active.lock().unwrap() = self.staged.lock().unwrap().0;
        Ok(Duration::ZERO)
    }

    async fn serve_now(
        &self,
        version: PolicyVersion,
        _: Option<&Path>,
    ) -> Result<bool, EngineError> {
        let can = self.canaries.load(Ordering::Acquire);
        if can {
            *self.active.lock().unwrap() = version;
        }
        Ok(can)
    }

    async fn begin_canary(&self) -> Result<bool, EngineError> {
        Ok(self.canaries.load(Ordering::Acquire))
    }
}

impl ScriptedPublisher {
    /// The version that new requests would get.
    pub(super) fn served(&self) -> PolicyVersion {
        *self.active.lock().unwrap()
    }
}

pub(super) const ROUTES: &str =
    "[[route]]\nname = \"route\"\nreward = [{ name = \"thumbs\", kind = \"feedback\" }]";

pub(super) fn every_step() -> PolicyConfig {
    PolicyConfig { publish_every: 1, ..PolicyConfig::default() }
}

/// The ledger, the registry and the trainer's inputs in a data directory.
pub(super) struct Parts {
    pub(super) publisher: Arc<ScriptedPublisher>,
    pub(super) store: Store,
    pub(super) policies: Arc<Policies>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) setup: TrainSetup,
}

pub(super) struct World {
    pub(super) publisher: Arc<ScriptedPublisher>,
    pub(super) store: Store,
    pub(super) policies: Arc<Policies>,
    pub(super) worker: TrainWorker,
    pub(super) metrics: Arc<Metrics>,
    _dir: Option<tempfile::TempDir>,
}

impl Parts {
    /// Opens a data directory for a trainer whose steps take two groups of two samples.
    pub(super) async fn open(
        dir: &Path,
        policy: PolicyConfig,
        change: impl FnOnce(&mut TrainConfig),
    ) -> Self {
        let metrics = Arc::new(Metrics::new().unwrap());
        let ledger = dir.join("ledger.redb");
        let store = Store::open(&ledger, &StoreConfig::default(), metrics.clone()).unwrap();
        let publisher = Arc::new(ScriptedPublisher::default());
        let policies = Policies::restore(PolicySetup {
            publisher: publisher.clone(),
            store: store.clone(),
            config: policy.clone(),
            metrics: metrics.clone(),
            data_dir: dir.to_owned(),
            probe_prompt: vec![1, 2],
            examiner: None,
            raters: 0,
            authority: None,
        });
        let policies = Arc::new(policies.await.unwrap());
        let mut config = TrainConfig {
            samples_per_step: 4,
            micro_batch: 4,
            max_staleness: 2,
            feedback_max_staleness: 2,
            rated_factor: 1,
            max_sampler_difference: 0.0,
            learning_rate: PeakRate::Fixed(0.01),
            warmup_steps: Some(0.0),
            threads: 1,
            lora: LoraConfig { r: 2, ..LoraConfig::default() },
            ..TrainConfig::default()
        };
        change(&mut config);
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/qwen2-tiny");
        let model = ModelDir::open(Path::new(fixture)).unwrap();
        let longest_sample = match config.max_tokens {
            0 => model.context(),
            tokens => tokens,
        };
        let setup = TrainSetup {
            config,
            device: None,
            policy,
            step_limit: None,
            peak_rates: Vec::new(),
            max_completion_tokens: 8,
            model,
            longest_sample,
            stages_weights: true,
            is_idle: Arc::new(|| true),
            base: None,
            model_name: "tiny".to_owned(),
            checkpoints: dir.join("checkpoints"),
            store: store.clone(),
            routes: Arc::new(routes(ROUTES)),
            policies: policies.clone(),
            metrics: metrics.clone(),
        };
        Self { publisher, store, policies, metrics, setup }
    }
}

/// Records a ready group of two samples of `version`.
pub(super) async fn record_group(
    store: &Store,
    prompt_ids: Vec<TokenId>,
    token: TokenId,
    version: u64,
    rewards: [f64; 2],
) -> GroupId {
    let prompt = interaction(InteractionId::new(), "route", prompt_ids);
    let samples = rewards.map(|_| Sample {
        origin: SampleOrigin::Shadow,
        created: now_ms(),
        ids: vec![token, 5],
        logprobs: vec![-2.0, -2.0],
        ..sample(prompt.id, version)
    });
    let group = group("route", "thumbs", &samples, now_ms());
    let (id, mut ops) = (group.id, vec![Op::Interaction(Box::new(prompt))]);
    for (sample, value) in samples.into_iter().zip(rewards) {
        let reward = reward(sample.id, "thumbs", Some(value), RewardSource::Feedback);
        let reward = Reward { created: now_ms(), ..reward };
        ops.extend([Op::Sample(Box::new(sample)), Op::Reward(Box::new(reward))]);
    }
    ops.push(Op::Group(Box::new(group)));
    store.commit(ops).await.unwrap();
    id
}

impl World {
    /// Starts a trainer on a new data directory.
    pub(super) async fn fresh(change: impl FnOnce(&mut TrainConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = Self::start_with(dir.path(), change).await;
        Self { _dir: Some(dir), ..world }
    }

    pub(super) async fn pause(&self) -> TrainHandle {
        let handle = self.worker.handle();
        handle.pause().unwrap();
        self.wait_for_state(TrainState::Paused).await;
        handle
    }

    /// Starts a trainer on the data directory `dir`, whose steps take two groups of two samples.
    pub(super) async fn start(dir: &Path) -> Self {
        Self::start_with(dir, |_| {}).await
    }

    pub(super) async fn start_with(dir: &Path, change: impl FnOnce(&mut TrainConfig)) -> Self {
        Self::start_as(dir, every_step(), change).await
    }

    /// The same with other keys of `[policy]`.
    pub(super) async fn start_as(
        dir: &Path,
        policy: PolicyConfig,
        change: impl FnOnce(&mut TrainConfig),
    ) -> Self {
        Self::of(Parts::open(dir, policy, change).await)
    }

    pub(super) fn of(parts: Parts) -> Self {
        let Parts { publisher, store, policies, metrics, setup } = parts;
        let worker = TrainWorker::start(setup).unwrap();
        Self { publisher, store, policies, worker, metrics, _dir: None }
    }

    /// Records a ready group of two samples of `version`, rewarded with 0 and 1.
    pub(super) async fn group(&self, token: TokenId, version: u64) -> GroupId {
        self.rewarded_group(token, version, [0.0, 1.0]).await
    }

    pub(super) async fn rewarded_group(
        &self,
        token: TokenId,
        version: u64,
        rewards: [f64; 2],
    ) -> GroupId {
        self.group_of(vec![1, 2, 3], token, version, rewards).await
    }

    /// As [`Self::rewarded_group`], for this prompt.
    pub(super) async fn group_of(
        &self,
        prompt_ids: Vec<TokenId>,
        token: TokenId,
        version: u64,
        rewards: [f64; 2],
    ) -> GroupId {
        record_group(&self.store, prompt_ids, token, version, rewards).await
    }

    pub(super) async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            let status = self.worker.handle().status();
            assert!(started.elapsed() < Duration::from_secs(20), "{what}: {status:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Runs two steps until the second is computed and waits for the first one's version, whose
    /// staging is blocked.
    pub(super) async fn start_two_steps(&self) -> [GroupId; 4] {
        self.pause().await;
        self.publisher.staging.forget_permits(Semaphore::MAX_PERMITS);
        let mut groups = Vec::new();
        for token in [4, 6, 7, 8] {
            groups.push(self.group(token, 0).await);
        }
        self.worker.handle().resume().unwrap();
        // With a batch ready, the trainer waits for the version only after the second step.
        self.wait_for_state(TrainState::Publishing).await;
        groups.try_into().unwrap()
    }

    /// Waits until the trainer pauses and follows the active version.
    pub(super) async fn wait_for_quiet(&self) {
        self.until("quiet", |w| {
            let status = w.worker.handle().status();
            status.state == TrainState::Paused
                && status.policy_version == w.policies.active().0
                && w.store.policies().unwrap().iter().all(|r| r.state != PolicyState::Candidate)
        })
        .await;
    }

    pub(super) async fn wait_for_state(&self, state: TrainState) {
        self.until(state.as_str(), |w| w.worker.handle().status().state == state).await;
    }

    pub(super) async fn wait_for_version(&self, wanted: u64) {
        let what = format!("version {wanted}");
        self.until(&what, |w| w.worker.handle().status().policy_version == wanted).await;
    }

    /// Trains the first `count` versions, each on samples of the previous one.
    pub(super) async fn train_versions(&self, count: u64) {
        for version in 0..count {
            self.batch(version).await;
            self.wait_for_version(version + 1).await;
        }
    }

    /// Two groups of samples of `version`, which are enough for a step.
    pub(super) async fn batch(&self, version: u64) -> [GroupId; 2] {
        [self.group(4, version).await, self.group(6, version).await]
    }

    pub(super) fn state(&self, group: GroupId) -> GroupState {
        self.store.group(group).unwrap().unwrap().state
    }

    pub(super) fn all_are(&self, groups: &[GroupId], state: &GroupState) -> bool {
        groups.iter().all(|id| self.state(*id) == *state)
    }

    /// Waits until groups, and no others, are dropped for a reason and counted.
    pub(super) async fn wait_for_drops(&self, groups: &[GroupId], reason: &str) {
        let dropped = GroupState::Dropped(reason.to_owned());
        let count = self.metrics.train.dropped_groups.with_label_values(&[reason]);
        let all = groups.len() as u64;
        self.until(reason, |w| w.all_are(groups, &dropped) && count.get() == all).await;
        assert_eq!(self.worker.handle().status().dropped_groups.get(reason), Some(&all));
    }

    pub(super) fn last_step(&self) -> StepRecord {
        self.store.last_step().unwrap().unwrap()
    }

    pub(super) async fn stop(self) {
        self.worker.stop(Duration::from_secs(20)).await;
        self.store.close().await.unwrap();
    }
}
