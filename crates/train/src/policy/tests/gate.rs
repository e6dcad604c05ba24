//! The gate over scripted answers and log-probabilities, and publication with it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use hone_core::metrics::Metrics;
use hone_core::types::{
    Interaction, InteractionId, PolicyCheck, PolicyState, PolicyVersion, PromptSource,
    SamplingParams, TokenId, now_ms,
};
use hone_engine::testing::FakeConfig;
use hone_engine::{Codec, FakeEngine, GenerateRequest, ModelDir};
use hone_model::kernels::compute::Compute;
use hone_reward::Routes;
use hone_reward::routes::RouteList;
use hone_store::{Op, Store, StoreConfig};

use crate::error::LearnError;
use crate::policy::{
    Candidate, Examiner, GateConfig, Policies, PolicyConfig, PolicySetup, Promotion,
    PublishOutcome, ScoredBy,
};

/// New weights that score tokens as the fake engine does, with differences of the other policies.
#[derive(Clone, Copy, Default)]
pub(super) struct FakeWeights {
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

#[derive(Deserialize)]
struct RouteFile {
    route: RouteList,
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
"#;

pub(super) struct World {
    pub(super) dir: tempfile::TempDir,
    pub(super) engine: Arc<FakeEngine>,
    pub(super) store: Store,
    pub(super) policies: Arc<Policies>,
}

impl World {
    /// Answers with `script` and has `prompts` held-out prompts.
    pub(super) async fn start(
        script: impl Fn(&GenerateRequest, PolicyVersion) -> String + Send + Sync + 'static,
        prompts: u64,
        config: PolicyConfig,
    ) -> Self {
        let world = Self::open(tempfile::tempdir().unwrap(), script, config).await;
        for n in 0..prompts {
            let prompt = Box::new(held_out_prompt(n));
            world.store.commit(vec![Op::Interaction(prompt)]).await.unwrap();
        }
        world
    }

    /// Ends this process and starts another one on its data, which answers alike for each version.
    pub(super) async fn restart(self, config: PolicyConfig) -> Self {
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
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/qwen2-tiny");
        let codec = Arc::new(Codec::load(&ModelDir::open(Path::new(fixture)).unwrap()).unwrap());
        let fake = FakeConfig { script: Arc::new(script), slots: 4, ..FakeConfig::new(&codec) };
        let engine = FakeEngine::new(codec, fake, Arc::clone(&metrics));
        let path = dir.path().join("ledger.redb");
        let store = Store::open(&path, &StoreConfig::default(), metrics.clone()).unwrap();
        let routes: RouteFile = toml::from_str(ROUTES).unwrap();
        let examiner = Examiner {
            engine: engine.clone(),
            routes: Arc::new(Routes::new(&routes.route).unwrap()),
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
            metrics,
            data_dir: dir.path().to_owned(),
            probe_prompt: vec![1, 2],
            examiner: Some(examiner),
        });
        let policies = Arc::new(policies.await.unwrap());
        Self { dir, engine, store, policies }
    }

    pub(super) async fn publish(&self, weights: FakeWeights) -> PublishOutcome {
        let parent = self.policies.active();
        self.policies.publish(&weights, parent, 1, BTreeMap::new()).await.unwrap()
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

fn held_out_prompt(n: u64) -> Interaction {
    Interaction {
        id: InteractionId::new(),
        created: now_ms(),
        source: PromptSource::Live,
        route: "chat".to_owned(),
        model: "fake".to_owned(),
        endpoint: Default::default(),
        key_id: None,
        messages: Vec::new(),
        metadata: BTreeMap::new(),
        params: SamplingParams::default(),
        prompt_ids: vec![1, u32::try_from(n).unwrap()],
        template_hash: String::new(),
        stop: Vec::new(),
        held_out: true,
        chat: Default::default(),
        grammar: None,
        continues: None,
    }
}

pub(super) fn config(change: impl FnOnce(&mut GateConfig)) -> PolicyConfig {
    let mut config = PolicyConfig::default();
    config.gate.prompts = 12;
    change(&mut config.gate);
    config
}

/// Both versions answer alike: right for three quarters of the seeds.
pub(super) fn equal(request: &GenerateRequest, _: PolicyVersion) -> String {
    if request.params.seed.is_multiple_of(4) { "a: no".to_owned() } else { "a: yes".to_owned() }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_equal_candidate_passes_every_check_in_order() {
    let world = World::start(equal, 12, config(|_| {})).await;
    let PublishOutcome::Published(record) = world.publish(FakeWeights::default()).await else {
        panic!("rejected")
    };
    let names: Vec<&str> = record.checks.iter().map(|check| check.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "parity/serving",
            "drift/kl_base",
            "drift/kl_active",
            "drift/entropy",
            "drift/length",
            "drift/truncated",
            "drift/format/format",
            "exam/chat"
        ]
    );
    assert!(record.checks.iter().all(|check| check.passed), "{:?}", record.checks);
    assert_eq!(record.state, PolicyState::Active);
    assert!(record.checks[7].detail.contains("12 prompts"), "{:?}", record.checks[7]);
    let seeds: BTreeSet<u64> = world.engine.requests().iter().map(|r| r.params.seed).collect();
    assert_eq!(seeds.len(), 12, "each prompt has its own seed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_that_answers_worse_fails_the_exam() {
    let script = |request: &GenerateRequest, version: PolicyVersion| {
        if version.0 > 0 { "a: no".to_owned() } else { equal(request, version) }
    };
    let world = World::start(script, 12, config(|_| {})).await;
    let check = world.rejection(FakeWeights::default()).await;
    assert_eq!(check.name, "exam/chat");
    assert!(check.value.unwrap() < -0.5, "{check:?}");
    // A margin as large as the difference lets it pass.
    let world = World::start(script, 12, config(|gate| gate.exam_margin = 1.0)).await;
    assert!(matches!(world.publish(FakeWeights::default()).await, PublishOutcome::Published(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_in_bf16_may_differ_more_from_the_engine() {
    let config = config(|_| {});
    let own = (config.parity_tolerance + config.parity_tolerance_half) as f32 / 2.0;
    let world = World::start(equal, 12, config).await;
    let weights = FakeWeights { own, ..Default::default() };
    assert_eq!(world.rejection(weights).await.name, "parity/serving");
    let weights = FakeWeights { compute: Compute::Bf16, ..weights };
    assert!(matches!(world.publish(weights).await, PublishOutcome::Published(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_drift_is_rejected() {
    let by_version = |own: &'static str| {
        move |_: &GenerateRequest, version: PolicyVersion| {
            if version.0 > 0 { own.to_owned() } else { "a: yes".to_owned() }
        }
    };
    let drift = |weights: FakeWeights| async move {
        let world = World::start(equal, 12, config(|_| {})).await;
        world.rejection(weights).await.name
    };
    assert_eq!(drift(FakeWeights { own: 0.5, ..Default::default() }).await, "parity/serving");
    assert_eq!(drift(FakeWeights { own: f32::NAN, ..Default::default() }).await, "parity/serving");
    assert_eq!(drift(FakeWeights { base: 4.0, ..Default::default() }).await, "drift/kl_base");
    assert_eq!(drift(FakeWeights { base: f32::NAN, ..Default::default() }).await, "drift/kl_base");
    let long = "a: yes, and then more words than the question needs";
    for (own, name) in [(long, "drift/length"), ("yes", "drift/format/format")] {
        let world = World::start(by_version(own), 12, config(|gate| gate.max_length_ratio = 1.1));
        assert_eq!(world.await.rejection(FakeWeights::default()).await.name, name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_active_version_is_the_adapter_that_it_compares_with() {
    let world = World::start(equal, 12, config(|_| {})).await;
    assert!(matches!(world.publish(FakeWeights::default()).await, PublishOutcome::Published(_)));
    let far = FakeWeights { active: -3.0, ..Default::default() };
    assert_eq!(world.rejection(far).await.name, "drift/kl_active");
    assert!(world.dir.path().join("adapters/v000002").exists(), "the files explain the rejection");
}

#[tokio::test(flavor = "multi_thread")]
async fn direct_promotion_checks_parity_only() {
    let worse = |_: &GenerateRequest, version: PolicyVersion| format!("{}", version.0);
    let direct = PolicyConfig { promotion: Promotion::Direct, ..config(|_| {}) };
    let world = World::start(worse, 12, direct).await;
    let PublishOutcome::Published(record) =
        world.publish(FakeWeights { base: 9.0, ..Default::default() }).await
    else {
        panic!("rejected")
    };
    assert_eq!(record.checks.len(), 1);
    assert_eq!(record.checks[0].name, "parity/serving");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_prompts_the_comparison_is_skipped_and_recorded() {
    let world = World::start(equal, 0, config(|_| {})).await;
    let PublishOutcome::Published(record) = world.publish(FakeWeights::default()).await else {
        panic!("rejected")
    };
    let skipped = record.checks.last().unwrap();
    assert!(skipped.passed && skipped.detail.starts_with("skipped"), "{skipped:?}");
}
