//! Publication, rejection, rollback and restarts, over a real ledger and a scripted publisher.

mod canary;
mod gate;
mod version_dir;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyState, PolicyVersion, SamplingParams, TokenId};
use hone_engine::{Completion, EngineError, GenerateRequest, Probe, Publisher};
use hone_store::{Op, Store, StoreConfig};

use super::{
    Candidate, Policies, PolicyConfig, PolicyError, PolicySetup, PublishOutcome, ScoredBy,
};
use crate::error::LearnError;

/// Records the versions that it serves; its probe samples two tokens of log-probability -1.
#[derive(Default)]
struct ScriptedPublisher {
    staged: Mutex<Option<PolicyVersion>>,
    active: Mutex<PolicyVersion>,
    refuse: Mutex<Option<PolicyVersion>>,
}

#[async_trait]
impl Publisher for ScriptedPublisher {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        assert_eq!(adapter.is_none(), version == PolicyVersion::BASE);
        if *self.refuse.lock().unwrap() == Some(version) {
            return Err(EngineError::Internal("refused".to_owned()));
        }
        *self.staged.lock().unwrap() = Some(version);
        Ok(())
    }

    async fn probe(&self, _: &[TokenId], _: &SamplingParams) -> Result<Vec<Probe>, EngineError> {
        Ok(vec![Probe { sampler: "serving", dtype: "f32", tokens: vec![(5, -1.0), (6, -1.0)] }])
    }

    async fn complete_staged(&self, _: GenerateRequest) -> Result<Completion, EngineError> {
        Err(EngineError::nothing_staged())
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        *self.active.lock().unwrap() = self.staged.lock().unwrap().unwrap();
        Ok(Duration::from_micros(3))
    }
}

/// Weights whose file contains `content` and whose log-probabilities are all `logprob`.
struct Weights {
    content: &'static str,
    logprob: f32,
}

impl Candidate for Weights {
    fn write(&self, dir: &Path) -> Result<(), LearnError> {
        std::fs::write(dir.join("adapter_config.json"), "{}").unwrap();
        std::fs::write(dir.join("adapter_model.safetensors"), self.content).unwrap();
        Ok(())
    }

    fn score(
        &self,
        _: ScoredBy<'_>,
        _: &[TokenId],
        ids: &[TokenId],
        _: f32,
    ) -> Result<Vec<f32>, LearnError> {
        Ok(vec![self.logprob; ids.len()])
    }
}

const GOOD: Weights = Weights { content: "good", logprob: -1.0 };

struct World {
    dir: tempfile::TempDir,
    publisher: Arc<ScriptedPublisher>,
    store: Store,
    metrics: Arc<Metrics>,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let path = dir.path().join("ledger.redb");
        let store = Store::open(&path, &StoreConfig::default(), metrics.clone()).unwrap();
        Self { dir, publisher: Arc::default(), store, metrics }
    }

    async fn start(&self, keep: usize) -> Policies {
        let config = PolicyConfig { keep_versions: keep, ..PolicyConfig::default() };
        Policies::restore(PolicySetup {
            publisher: self.publisher.clone(),
            store: self.store.clone(),
            config,
            metrics: self.metrics.clone(),
            data_dir: self.dir.path().to_owned(),
            probe_prompt: vec![1, 2],
            examiner: None,
        })
        .await
        .unwrap()
    }

    fn adapter(&self, version: u64) -> PathBuf {
        self.dir.path().join(format!("adapters/v{version:06}/adapter_model.safetensors"))
    }

    fn served(&self) -> u64 {
        self.publisher.active.lock().unwrap().0
    }
}

async fn publish(policies: &Policies, step: u64) -> PublishOutcome {
    let parent = policies.active();
    policies.publish(&GOOD, parent, step, BTreeMap::new()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn publishes_versions_with_lineage_files_and_one_active() {
    let world = World::new();
    let policies = world.start(20).await;
    assert_eq!(policies.active(), PolicyVersion::BASE);
    publish(&policies, 1).await;
    publish(&policies, 2).await;
    assert_eq!((policies.active().0, world.served()), (2, 2));
    let list = policies.list().unwrap();
    let states: Vec<_> = list.iter().map(|r| (r.version.0, r.state)).collect();
    assert_eq!(
        states,
        [(0, PolicyState::Retired), (1, PolicyState::Retired), (2, PolicyState::Active)]
    );
    assert_eq!(list[2].parent, Some(PolicyVersion(1)));
    assert_eq!(list[2].sha256.as_deref().map(str::len), Some(64));
    let manifest = world.adapter(2).with_file_name("manifest.json");
    let manifest: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(manifest).unwrap()).unwrap();
    assert_eq!(manifest["sha256"], list[2].sha256.clone().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_the_engine_serves_differently_is_rejected() {
    let world = World::new();
    let policies = world.start(20).await;
    for logprob in [-1.5, f32::NAN] {
        let wrong = Weights { content: "wrong", logprob };
        let outcome =
            policies.publish(&wrong, PolicyVersion::BASE, 1, BTreeMap::new()).await.unwrap();
        let PublishOutcome::Rejected(record) = outcome else { panic!("published") };
        assert!(record.reason.unwrap().starts_with("parity"));
    }
    assert_eq!(policies.active(), PolicyVersion::BASE);
    let error = policies.activate(PolicyVersion(1), "try").await.unwrap_err();
    assert!(matches!(error, PolicyError::Unservable { .. }), "{error}");
    // Rejected version numbers are not reused.
    publish(&policies, 1).await;
    assert_eq!(policies.active().0, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_published_over_an_operators_activation() {
    let world = World::new();
    let policies = world.start(20).await;
    publish(&policies, 1).await;
    publish(&policies, 2).await;
    policies.activate(PolicyVersion(1), "test").await.unwrap();
    let child_of_two = policies.publish(&GOOD, PolicyVersion(2), 3, BTreeMap::new()).await.unwrap();
    assert!(matches!(child_of_two, PublishOutcome::Superseded), "{child_of_two:?}");
    assert_eq!((policies.active().0, world.served()), (1, 1));
    assert_eq!(policies.list().unwrap().len(), 3);
    let PublishOutcome::Published(next) = publish(&policies, 3).await else {
        panic!("not published")
    };
    assert_eq!((next.version.0, next.parent), (3, Some(PolicyVersion(1))));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operators_activation_rolls_back_and_notifies_the_trainer() {
    let world = World::new();
    let policies = world.start(20).await;
    publish(&policies, 1).await;
    publish(&policies, 2).await;
    let watch = policies.watch_rollback();
    let record = policies.activate(PolicyVersion(1), "worse").await.unwrap();
    assert_eq!((record.state, record.reason.as_deref()), (PolicyState::Active, Some("worse")));
    assert_eq!(world.served(), 1);
    assert_eq!((watch.borrow().count, watch.borrow().version), (1, PolicyVersion(1)));
    policies.activate(PolicyVersion::BASE, "base").await.unwrap();
    assert_eq!(world.served(), 0);
    // Version numbers continue; the parent is the version that was active.
    let PublishOutcome::Published(next) = publish(&policies, 3).await else { panic!("rejected") };
    assert_eq!((next.version.0, next.parent), (3, Some(PolicyVersion::BASE)));
    let error = policies.activate(PolicyVersion(99), "no").await.unwrap_err();
    assert!(matches!(error, PolicyError::Unknown(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_stage_changes_nothing() {
    let world = World::new();
    let policies = world.start(20).await;
    publish(&policies, 1).await;
    *world.publisher.refuse.lock().unwrap() = Some(PolicyVersion(2));
    let error = policies.publish(&GOOD, PolicyVersion(1), 2, BTreeMap::new()).await.unwrap_err();
    assert!(matches!(error, PolicyError::Engine(_)), "{error}");
    assert_eq!((policies.active().0, world.served()), (1, 1));
    drop(policies);
    // The next start rejects the interrupted candidate.
    let policies = world.start(20).await;
    assert_eq!((policies.active().0, world.served()), (1, 1));
    let left = policies.list().unwrap().pop().unwrap();
    assert_eq!((left.version.0, left.state), (2, PolicyState::Rejected));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_serves_the_active_version_or_its_nearest_intact_ancestor() {
    let world = World::new();
    let policies = world.start(20).await;
    publish(&policies, 1).await;
    publish(&policies, 2).await;
    drop(policies);
    assert_eq!(world.start(20).await.active().0, 2);
    std::fs::write(world.adapter(2), "tampered").unwrap();
    assert_eq!(world.start(20).await.active().0, 1);
    assert_eq!(world.served(), 1);
    let active: Vec<_> = world
        .store
        .policies()
        .unwrap()
        .into_iter()
        .filter(|r| r.state == PolicyState::Active)
        .map(|r| r.version.0)
        .collect();
    assert_eq!(active, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn pruning_keeps_the_newest_adapters_and_the_whole_lineage() {
    let world = World::new();
    let policies = world.start(3).await;
    for step in 1..=6 {
        publish(&policies, step).await;
    }
    let kept: Vec<u64> = (1..=6).filter(|v| world.adapter(*v).exists()).collect();
    assert_eq!(kept, [4, 5, 6]);
    assert_eq!(policies.list().unwrap().len(), 7);
    let error = policies.activate(PolicyVersion(1), "old").await.unwrap_err();
    assert!(matches!(error, PolicyError::Unservable { .. }), "{error}");
    assert_eq!(policies.active().0, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_rejects_a_candidate_without_files() {
    let world = World::new();
    let mut record = world.start(20).await.list().unwrap().pop().unwrap();
    record.version = PolicyVersion(1);
    record.state = PolicyState::Candidate;
    world.store.commit(vec![Op::Policy(Box::new(record))]).await.unwrap();
    let policies = world.start(20).await;
    assert_eq!(policies.list().unwrap().pop().unwrap().state, PolicyState::Rejected);
}
