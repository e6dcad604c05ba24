//! Publication, rejection, rollback and restarts, over a real ledger and a fake engine.

mod canary;
mod gate;
mod version_dir;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hone_core::metrics::Metrics;
use hone_core::types::{
    Interaction, InteractionId, PolicyCheck, PolicyRecord, PolicyState, PolicyVersion, Sample,
    TokenId, now_ms,
};
use hone_engine::testing::FakeConfig;
use hone_engine::{Codec, Engine, EngineError, FakeEngine, GenerateRequest, ModelDir};
use hone_model::kernels::compute::Compute;
use hone_store::{Op, Store, StoreConfig};

use super::{
    Candidate, Examiner, GateConfig, Policies, PolicyConfig, PolicyError, PolicySetup, Promotion,
    PublishOutcome, ScoredBy,
};
use crate::error::LearnError;
use crate::testing::{interaction, rating, routes, sample};

/// New weights that score tokens as the fake engine does, with differences of the other policies.
#[derive(Clone, Copy, Default)]
struct FakeWeights {
    /// Log-probability of each token under the candidate minus that of the engine.
    own: f32,
    /// The same under the base and under the active version.
    base: f32,
    active: f32,
    compute: Compute,
}

impl Candidate for FakeWeights {
    fn write(&self, dir: &Path) -> Result<(), LearnError> {
        std::fs::write(dir.join("adapter_config.json"), "{}").unwrap();
        std::fs::write(dir.join("adapter_model.safetensors"), "weights").unwrap();
        Ok(())
    }

    fn compute(&self) -> Compute {
        self.compute
    }

    fn score(
        &self,
        policy: ScoredBy<'_>,
        _: &[TokenId],
        ids: &[TokenId],
        _: f32,
    ) -> Result<Vec<f32>, LearnError> {
        let difference = match policy {
            ScoredBy::Candidate => self.own,
            ScoredBy::Base => self.base,
            ScoredBy::Adapter(_) => self.active,
        };
        Ok(ids.iter().map(|id| FakeEngine::logprob(*id) + difference).collect())
    }
}

/// The word "yes" earns 1; a reward for the format looks for a colon.
const ROUTES: &str = r#"
[[route]]
name = "chat"
[[route.reward]]
name = "right"
kind = "regex"
pattern = "yes"
[[route.reward]]
name = "format"
kind = "regex"
pattern = ":"
weight = 0.001
[[route.reward]]
name = "stars"
kind = "feedback"
"#;

/// The routes `route-0` to `route-N`, which reward "yes".
fn further_routes(count: u32) -> String {
    let route = |n| {
        format!(
            "[[route]]\nname = \"route-{n}\"\n\
             reward = [{{ name = \"right\", kind = \"regex\", pattern = \"yes\" }}]\n"
        )
    };
    (0..count).map(route).collect()
}

fn codec() -> Arc<Codec> {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/qwen2-tiny");
    Arc::new(Codec::load(&ModelDir::open(Path::new(fixture)).unwrap()).unwrap())
}

struct World {
    dir: tempfile::TempDir,
    engine: Arc<FakeEngine>,
    store: Store,
    metrics: Arc<Metrics>,
    policies: Arc<Policies>,
}

impl World {
    /// Answers with `script` and has `prompts` held-out prompts.
    async fn start(
        script: impl Fn(&GenerateRequest, PolicyVersion) -> String + Send + Sync + 'static,
        prompts: TokenId,
        config: PolicyConfig,
    ) -> Self {
        let world = Self::open(tempfile::tempdir().unwrap(), script, config).await;
        world.hold_out("chat", 0..prompts).await;
        world
    }

    /// Records held-out prompts of a route, which end with these tokens.
    async fn hold_out(&self, route: &str, tokens: Range<TokenId>) {
        for token in tokens {
            let prompt = interaction(InteractionId::new(), route, vec![1, token]);
            let prompt = Interaction { held_out: true, ..prompt };
            self.store.commit(vec![Op::Interaction(Box::new(prompt))]).await.unwrap();
        }
    }

    /// Records ratings of completions of a version, from -1 to 1.
    async fn rate(&self, version: u64, ratings: &[f64]) {
        for value in ratings {
            let id = InteractionId::new();
            let ops = vec![
                Op::Interaction(Box::new(interaction(id, "chat", vec![1]))),
                Op::Sample(Box::new(Sample { created: now_ms(), ..sample(id, version) })),
                rating(id, *value, None, now_ms()),
            ];
            self.store.commit(ops).await.unwrap();
        }
    }

    /// Ends this process and starts another one on its data, which answers alike for each version.
    async fn restart(self, config: PolicyConfig) -> Self {
        let Self { dir, store, policies, .. } = self;
        drop(policies);
        store.close().await.unwrap();
        drop(store);
        Self::open(dir, equal, config).await
    }

    async fn open(
        dir: tempfile::TempDir,
        script: impl Fn(&GenerateRequest, PolicyVersion) -> String + Send + Sync + 'static,
        config: PolicyConfig,
    ) -> Self {
        let metrics = Arc::new(Metrics::new().unwrap());
        let codec = codec();
        let fake = FakeConfig { script: Arc::new(script), slots: 4, ..FakeConfig::new(&codec) };
        let engine = FakeEngine::new(codec, fake, Arc::clone(&metrics));
        let path = dir.path().join("ledger.redb");
        let store = Store::open(&path, &StoreConfig::default(), metrics.clone()).unwrap();
        let examiner = Examiner {
            engine: engine.clone(),
            routes: Arc::new(routes(&(ROUTES.to_owned() + &further_routes(9)))),
            store: store.clone(),
            temperature: 1.0,
            max_tokens: 24,
            exam: Vec::new(),
            format_parts: vec!["format".to_owned()],
        };
        let policies = Policies::restore(PolicySetup {
            publisher: engine.clone(),
            store: store.clone(),
            config,
            metrics: metrics.clone(),
            data_dir: dir.path().to_owned(),
            probe_prompt: vec![1, 2],
            examiner: Some(examiner),
            raters: 0,
            authority: None,
        });
        let policies = Arc::new(policies.await.unwrap());
        Self { dir, engine, store, metrics, policies }
    }

    /// With checks of parity alone.
    async fn direct(keep_versions: usize) -> Self {
        let promotion = Promotion::Direct;
        Self::start(equal, 0, PolicyConfig { promotion, keep_versions, ..config(|_| {}) }).await
    }

    async fn publish(&self, weights: FakeWeights) -> PublishOutcome {
        let parent = self.policies.active();
        self.policies.publish(&weights, parent, 1, BTreeMap::new()).await.unwrap()
    }

    /// Publishes weights that must be served; returns the record.
    async fn published(&self, weights: FakeWeights) -> PolicyRecord {
        match self.publish(weights).await {
            PublishOutcome::Published(record) => record,
            outcome => panic!("{outcome:?}"),
        }
    }

    /// Publishes good weights so many times.
    async fn publish_good(&self, count: u64) {
        for _ in 0..count {
            self.published(FakeWeights::default()).await;
        }
    }

    /// The numbers of the active version and of the one that the engine serves.
    fn served(&self) -> (u64, u64) {
        (self.policies.active().0, self.engine.active_version().0)
    }

    fn adapter(&self, version: u64) -> PathBuf {
        self.dir.path().join(format!("adapters/v{version:06}/adapter_model.safetensors"))
    }

    /// Publishes weights that must be rejected; returns the failed check.
    async fn rejection(&self, weights: FakeWeights) -> PolicyCheck {
        let before = self.policies.active();
        let PublishOutcome::Rejected(record) = self.publish(weights).await else {
            panic!("published")
        };
        assert_eq!(self.policies.active(), before);
        // As text, because NaN differs from itself.
        let recorded = self.store.policy(record.version).unwrap().unwrap();
        assert_eq!(format!("{recorded:?}"), format!("{record:?}"));
        assert_eq!(record.state, PolicyState::Rejected);
        assert_eq!(record.checks.iter().filter(|check| !check.passed).count(), 1);
        let failed = record.checks.last().unwrap().clone();
        assert!(record.reason.unwrap().starts_with(&failed.name));
        failed
    }
}

fn config(change: impl FnOnce(&mut GateConfig)) -> PolicyConfig {
    let mut config = PolicyConfig::default();
    config.gate.prompts = 12;
    change(&mut config.gate);
    config
}

/// Both versions answer alike: right for three quarters of the seeds.
fn equal(request: &GenerateRequest, _: PolicyVersion) -> String {
    if request.params.seed.is_multiple_of(4) { "a: no".to_owned() } else { "a: yes".to_owned() }
}

#[tokio::test(flavor = "multi_thread")]
async fn publishes_versions_with_lineage_files_and_one_active() {
    let world = World::direct(20).await;
    assert_eq!(world.policies.active(), PolicyVersion::BASE);
    world.publish_good(2).await;
    assert_eq!(world.served(), (2, 2));
    let list = world.policies.list().unwrap();
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
    let world = World::direct(20).await;
    for own in [-0.5, f32::NAN] {
        let check = world.rejection(FakeWeights { own, ..Default::default() }).await;
        assert_eq!(check.name, "parity/serving");
    }
    let error = world.policies.activate(PolicyVersion(1), "try").await.unwrap_err();
    assert!(matches!(error, PolicyError::Unservable { .. }), "{error}");
    // Rejected version numbers are not reused.
    world.publish_good(1).await;
    assert_eq!(world.served(), (3, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operators_activation_rolls_back_and_is_not_published_over() {
    let world = World::direct(20).await;
    let policies = &world.policies;
    world.publish_good(2).await;
    let watch = policies.watch_rollback();
    let record = policies.activate(PolicyVersion(1), "worse").await.unwrap();
    assert_eq!((record.state, record.reason.as_deref()), (PolicyState::Active, Some("worse")));
    assert_eq!((watch.borrow().count, watch.borrow().version), (1, PolicyVersion(1)));
    let weights = FakeWeights::default();
    let child = policies.publish(&weights, PolicyVersion(2), 3, BTreeMap::new()).await.unwrap();
    assert!(matches!(child, PublishOutcome::Superseded), "{child:?}");
    assert_eq!((world.served(), policies.list().unwrap().len()), ((1, 1), 3));
    let next = world.published(weights).await;
    assert_eq!((next.version.0, next.parent), (3, Some(PolicyVersion(1))));
    policies.activate(PolicyVersion::BASE, "base").await.unwrap();
    assert_eq!(world.served(), (0, 0));
    // Version numbers continue; the parent is the version that was active.
    let next = world.published(weights).await;
    assert_eq!((next.version.0, next.parent), (4, Some(PolicyVersion::BASE)));
    let error = policies.activate(PolicyVersion(99), "no").await.unwrap_err();
    assert!(matches!(error, PolicyError::Unknown(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_stage_changes_nothing_and_a_start_rejects_its_candidate() {
    let world = World::direct(20).await;
    world.publish_good(1).await;
    world.engine.fail_next_stage(EngineError::Internal("refused".to_owned()));
    let weights = FakeWeights::default();
    let failed = world.policies.publish(&weights, PolicyVersion(1), 2, BTreeMap::new()).await;
    let error = failed.unwrap_err();
    assert!(matches!(error, PolicyError::Engine(_)), "{error}");
    assert_eq!(world.served(), (1, 1));
    // A killed process leaves a candidate.
    let mut record = world.policies.list().unwrap().pop().unwrap();
    assert_eq!((record.version.0, record.state), (2, PolicyState::Rejected));
    record.state = PolicyState::Candidate;
    world.store.commit(vec![Op::Policy(Box::new(record))]).await.unwrap();
    let world = world.restart(config(|_| {})).await;
    assert_eq!(world.served(), (1, 1));
    let left = world.policies.list().unwrap().pop().unwrap();
    assert_eq!((left.version.0, left.state), (2, PolicyState::Rejected));
}

/// Fills the ledger's queue during the checks, so that the commit after the activation fails.
struct FillsQueue(Arc<Metrics>);

impl Candidate for FillsQueue {
    fn write(&self, dir: &Path) -> Result<(), LearnError> {
        FakeWeights::default().write(dir)
    }

    fn score(
        &self,
        policy: ScoredBy<'_>,
        prompt: &[TokenId],
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>, LearnError> {
        self.0.store_queue_bytes.set(1 << 40);
        FakeWeights::default().score(policy, prompt, ids, temperature)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_activation_that_cannot_be_recorded_is_taken_back() {
    let world = World::direct(20).await;
    world.publish_good(1).await;
    let policies = &world.policies;
    let active = || {
        let records = policies.list().unwrap().into_iter();
        let active = records.filter(|r| r.state == PolicyState::Active);
        active.map(|r| r.version.0).collect::<Vec<_>>()
    };
    let candidate = FillsQueue(world.metrics.clone());
    let failed = policies.publish(&candidate, PolicyVersion(1), 2, BTreeMap::new()).await;
    assert!(matches!(failed.unwrap_err(), PolicyError::Store(_)));
    assert_eq!((world.served(), active()), ((1, 1), vec![1]));
    let failed = policies.activate(PolicyVersion::BASE, "worse").await;
    assert!(matches!(failed.unwrap_err(), PolicyError::Store(_)));
    assert_eq!((world.served(), active()), ((1, 1), vec![1]));
    // The next publication gets a number of its own.
    world.metrics.store_queue_bytes.set(0);
    let next = world.published(FakeWeights::default()).await;
    assert_eq!((next.version.0, world.served(), active()), (3, (3, 3), vec![3]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_serves_the_active_version_or_its_nearest_intact_ancestor() {
    let world = World::direct(20).await;
    world.publish_good(2).await;
    let world = world.restart(config(|_| {})).await;
    assert_eq!(world.served(), (2, 2));
    std::fs::write(world.adapter(2), "tampered").unwrap();
    let world = world.restart(config(|_| {})).await;
    assert_eq!(world.served(), (1, 1));
    let records = world.policies.list().unwrap().into_iter();
    let active: Vec<_> =
        records.filter(|r| r.state == PolicyState::Active).map(|r| r.version.0).collect();
    assert_eq!(active, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn pruning_keeps_the_newest_adapters_and_the_whole_lineage() {
    let world = World::direct(3).await;
    world.publish_good(6).await;
    let kept: Vec<u64> = (1..=6).filter(|v| world.adapter(*v).exists()).collect();
    assert_eq!(kept, [4, 5, 6]);
    assert_eq!(world.policies.list().unwrap().len(), 7);
    let error = world.policies.activate(PolicyVersion(1), "old").await.unwrap_err();
    assert!(matches!(error, PolicyError::Unservable { .. }), "{error}");
    assert_eq!(world.policies.active().0, 6);
}
