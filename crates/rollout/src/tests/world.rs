//! A ledger, a fake engine and routes to run rollout with.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;

use hone_core::metrics::Metrics;
use hone_core::types::{
    Group, GroupState, Interaction, InteractionId, Message, PolicyVersion, PromptSource, Role,
    Sample, SampleId, SampleOrigin, SamplingParams, now_ms,
};
use hone_dataset::DatasetConfig;
use hone_engine::testing::{FakeConfig, FakeEngine};
use hone_engine::{Codec, ModelDir};
use hone_reward::Routes;
use hone_reward::feedback::Aggregate;
use hone_reward::routes::RouteList;
use hone_store::{FeedbackEntry, Op, Store, StoreConfig};

use crate::{Rollout, RolloutConfig, RolloutError};

const ROUTES: &str = r#"
    [[route]]
    name = "graded"
    reward = [
        { name = "correct", kind = "numeric_match", extract = '(\d+)' },
        { name = "said", kind = "regex", pattern = "answer" },
    ]
    [[route]]
    name = "both"
    reward = [
        { name = "said", kind = "regex", pattern = "answer" },
        { name = "thumbs", kind = "feedback" },
    ]
    [[route]]
    name = "users"
    reward = [{ name = "thumbs", kind = "feedback" }, { name = "stars", kind = "feedback" }]
    [[route]]
    name = "numbers"
    reward = [
        { name = "correct", kind = "numeric_match", extract = '(\d+)' },
        { name = "thumbs", kind = "feedback" },
    ]
"#;

pub(super) struct World {
    pub dir: TempDir,
    pub store: Store,
    pub engine: Arc<FakeEngine>,
    pub routes: Arc<Routes>,
    pub metrics: Arc<Metrics>,
    pub config: RolloutConfig,
    /// The dataset, if its path is set.
    pub dataset: DatasetConfig,
}

/// One token per byte, and a stop token.
fn codec(dir: &Path) -> Arc<Codec> {
    let mut alphabet: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab: BTreeMap<String, usize> =
        alphabet.iter().enumerate().map(|(id, c)| (c.to_string(), id)).collect();
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{
            "id": 256, "content": "<|end|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        }],
        "pre_tokenizer": level.clone(),
        "decoder": level,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let model = ModelDir {
        path: dir.to_owned(),
        name: "test".to_owned(),
        config: json!({}),
        stop_ids: vec![256],
        chat_template: "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}".into(),
        weights: Vec::new(),
        special_tokens: BTreeMap::new(),
    };
    Arc::new(Codec::load(&model).unwrap())
}

impl World {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    /// A world with a changed fake engine.
    pub fn with(change: impl FnOnce(&mut FakeConfig)) -> Self {
        let dir = TempDir::new().unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let codec = codec(dir.path());
        let mut fake = FakeConfig::new(&codec);
        fake.vocab = 257;
        change(&mut fake);
        let engine = FakeEngine::new(codec, fake, Arc::clone(&metrics));
        let path = dir.path().join("ledger.redb");
        let store = Store::open(&path, &StoreConfig::default(), Arc::clone(&metrics)).unwrap();
        let tables: BTreeMap<String, RouteList> = toml::from_str(ROUTES).unwrap();
        let config = RolloutConfig {
            group_size: 4,
            feedback_wait_ms: 0,
            dataset_route: "graded".to_owned(),
            max_ready_groups: 32,
            ..RolloutConfig::default()
        };
        let routes = Arc::new(Routes::new(&tables["route"]).unwrap());
        let dataset = DatasetConfig::default();
        Self { dir, store, engine, routes, metrics, config, dataset }
    }

    pub fn try_start(&self) -> Result<Rollout, RolloutError> {
        let engine = Arc::clone(&self.engine);
        let (routes, metrics) = (Arc::clone(&self.routes), Arc::clone(&self.metrics));
        let config = &self.config;
        let dataset = Some(&self.dataset).filter(|dataset| !dataset.path.as_os_str().is_empty());
        let seed_and_state = (7, Some(self.dir.path().join("dataset.json")));
        let store = self.store.clone();
        Rollout::start(config, dataset, seed_and_state, engine, store, routes, metrics)
    }

    pub fn start(&self) -> Rollout {
        self.try_start().unwrap()
    }

    /// Records a served prompt as `http` does. The fake's answers contain a digit; 5 is correct.
    pub async fn serve(&self, route: &str, choices: u32) -> (Arc<Interaction>, Vec<Sample>) {
        let interaction = interaction(route);
        let served: Vec<Sample> = (0..choices).map(|c| served(&interaction, c)).collect();
        self.commit(&interaction, &served).await;
        (Arc::new(interaction), served)
    }

    /// As [`Self::serve`], a prompt without the metadata that its reward compares with.
    pub async fn serve_without_answer(&self) -> (Arc<Interaction>, Vec<Sample>) {
        let mut interaction = interaction("numbers");
        interaction.metadata.clear();
        let served = vec![served(&interaction, 0)];
        self.commit(&interaction, &served).await;
        (Arc::new(interaction), served)
    }

    pub async fn commit(&self, interaction: &Interaction, served: &[Sample]) {
        let mut ops = vec![Op::Interaction(Box::new(interaction.clone()))];
        ops.extend(served.iter().map(|sample| Op::Sample(Box::new(sample.clone()))));
        self.store.commit(ops).await.unwrap();
    }

    pub async fn feedback(&self, interaction: InteractionId, choice: u32, name: &str, value: f64) {
        let entry = feedback_entry(interaction, choice, name, value);
        self.store.commit(vec![Op::Feedback(vec![entry])]).await.unwrap();
    }

    /// Records feedback on a conversation of these prompts.
    pub async fn conversation(&self, turns: &[InteractionId], name: &str, value: f64) {
        let entry = |interaction: &InteractionId| feedback_entry(*interaction, 0, name, value);
        let op = Op::Conversation(turns.iter().map(entry).collect());
        self.store.commit(vec![op]).await.unwrap();
    }

    /// Records a prompt as [`Self::serve`], and submits it.
    pub async fn submit(
        &self,
        rollout: &Rollout,
        route: &str,
        choices: u32,
    ) -> (Arc<Interaction>, Vec<Sample>) {
        let (asked, samples) = self.serve(route, choices).await;
        rollout.submit(Arc::clone(&asked), samples.clone());
        (asked, samples)
    }

    /// Records a prompt with its completions, and submits it.
    pub async fn submit_recorded(
        &self,
        rollout: &Rollout,
        asked: &Interaction,
        samples: &[Sample],
    ) {
        self.commit(asked, samples).await;
        rollout.submit(Arc::new(asked.clone()), samples.to_vec());
    }

    /// The first group of a prompt, when it has one, which must be its only one.
    pub async fn group(&self, id: InteractionId) -> Group {
        self.groups(id, 1).await.remove(0)
    }

    /// Waits until a prompt has `count` groups, and returns them.
    pub async fn groups(&self, id: InteractionId, count: usize) -> Vec<Group> {
        self.until(|| self.store.groups_of(id).unwrap().len() >= count).await;
        let groups = self.store.groups_of(id).unwrap();
        assert_eq!(groups.len(), count, "{groups:?}");
        groups
    }

    /// Waits for a condition, or fails after ten seconds.
    pub async fn until(&self, condition: impl Fn() -> bool) {
        for _ in 0..2_000 {
            if condition() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("timed out: {}", self.metrics.encode().unwrap());
    }

    pub fn skipped(&self, reason: &str) -> u64 {
        self.metrics.rollout_skipped.with_label_values(&[reason]).get()
    }

    pub fn formed(&self, source: &str) -> u64 {
        self.metrics.rollout_groups.with_label_values(&[source]).get()
    }

    pub fn ungrouped(&self) -> Vec<(SampleId, String)> {
        self.store.ungrouped_feedback(now_ms(), 1_000).unwrap()
    }

    /// Marks every ready group as trained.
    pub async fn train(&self) {
        let ready = self.store.ready_groups(1_000).unwrap();
        let trained = |group: &Group| Op::GroupState(group.id, GroupState::Trained(1));
        self.store.commit(ready.iter().map(trained).collect()).await.unwrap();
    }
}

/// A prompt that no other has.
pub(crate) fn interaction(route: &str) -> Interaction {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Interaction {
        metadata: BTreeMap::from([("answer".to_owned(), "5".to_owned())]),
        params: SamplingParams { max_tokens: 64, ..SamplingParams::default() },
        prompt_ids: vec![1, number / 200 % 200, number % 200],
        ..Interaction::new(PromptSource::Live, route, vec![Message::new(Role::User, "2+3=")])
    }
}

pub(crate) fn served(interaction: &Interaction, choice: u32) -> Sample {
    Sample {
        choice,
        ids: vec![5, 256],
        logprobs: vec![-0.5, -0.1],
        text: "The answer is 5.".to_owned(),
        params: interaction.params.clone(),
        ..Sample::new(interaction.id, SampleOrigin::Served, PolicyVersion::BASE)
    }
}

fn feedback_entry(
    interaction: InteractionId,
    choice: u32,
    name: &str,
    value: f64,
) -> FeedbackEntry {
    FeedbackEntry {
        interaction,
        choice,
        name: name.to_owned(),
        value: Some(value),
        comment: None,
        idempotency_key: None,
        key_id: None,
        created: now_ms(),
        aggregate: Aggregate::Last,
        elsewhere: None,
    }
}
