//! The HTTP surface with a scripted engine, a real ledger, and fakes of rollout, trainer and policies.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use reqwest::{Client, Method, Response};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use hone::config::{KeyConfig, KeyScope, ServerConfig};
use hone_core::metrics::Metrics;
use hone_core::types::{
    Interaction, InteractionId, PolicyRecord, PolicyState, PolicyVersion, Sample,
};
use hone_engine::testing::FakeConfig;
use hone_engine::{Codec, Engine, FakeEngine, ModelDir, Publisher};
use hone_http::{
    AppState, DiskLimit, FleetLink, KeyRing, LearningLimits, PolicyControl, ServedSink, Startup,
    Tls, TrainControl, serve,
};
use hone_reward::Routes;
use hone_reward::grader::Backends;
use hone_reward::routes::RouteList;
use hone_store::{Outbox, Store, StoreConfig, StoreStats};
use hone_train::policy::{PolicyError, VersionRating};
use hone_train::{TrainError, TrainHold, TrainState, TrainStatus};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");

/// The settings that a test can change before the server starts.
pub struct Setup {
    pub fake: FakeConfig,
    pub server: ServerConfig,
    pub routes: RouteList,
    pub graders: Backends,
    pub holdout_share: f64,
    pub learning: LearningLimits,
    /// Free bytes that the server needs to be ready.
    pub min_free: u64,
    pub in_fleet: bool,
}

/// Adds to what a fake was called with: the first 10,000 values, so that long tests do not fill the memory.
fn note<T>(list: &Mutex<Vec<T>>, value: T) {
    let mut list = list.lock().unwrap();
    if list.len() < 10_000 {
        list.push(value);
    }
}

/// Records the submitted completions.
#[derive(Default)]
pub struct FakeRollout(Mutex<Vec<(Arc<Interaction>, Vec<Sample>)>>);

impl ServedSink for FakeRollout {
    fn submit(&self, interaction: Arc<Interaction>, served: Vec<Sample>) {
        note(&self.0, (interaction, served));
    }
}

impl FakeRollout {
    pub fn submitted(&self) -> Vec<(Arc<Interaction>, Vec<Sample>)> {
        self.0.lock().unwrap().clone()
    }
}

/// A trainer without ready groups, unless a test sets `training`.
#[derive(Default)]
pub struct FakeTrainer {
    pub training: AtomicBool,
    paused: AtomicBool,
    pub longest_sample: AtomicUsize,
}

#[async_trait]
impl TrainControl for FakeTrainer {
    fn status(&self) -> TrainStatus {
        let state = match (self.training.load(Ordering::SeqCst), self.paused.load(Ordering::SeqCst))
        {
            (true, _) => TrainState::Training,
            (false, true) => TrainState::Paused,
            (false, false) => TrainState::Waiting,
        };
        let max_sample_tokens = self.longest_sample.load(Ordering::SeqCst);
        TrainStatus { state, step: 7, max_sample_tokens, ..TrainStatus::default() }
    }
    fn pause(&self) -> Result<(), TrainError> {
        self.paused.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn resume(&self) -> Result<(), TrainError> {
        self.paused.store(false, Ordering::SeqCst);
        Ok(())
    }
    async fn hold(&self) -> Result<TrainHold, TrainError> {
        Err(TrainError::Disabled)
    }
    async fn step(&self) -> Result<TrainStatus, TrainError> {
        if self.training.load(Ordering::SeqCst) {
            Ok(TrainStatus { step: 8, ..self.status() })
        } else {
            Err(TrainError::NothingReady)
        }
    }
}

/// Versions 0 and 1 can be served; version 2 was rejected.
pub struct FakePolicies {
    engine: Arc<FakeEngine>,
    /// The keys of requests.
    pub assigned: Mutex<Vec<String>>,
    /// Whether no canary runs.
    pub is_quiet: AtomicBool,
    pub ratings: Mutex<Vec<VersionRating>>,
    pub answers: Mutex<Vec<(PolicyVersion, bool)>>,
}

fn record(version: u64, state: PolicyState) -> PolicyRecord {
    PolicyRecord {
        version: PolicyVersion(version),
        parent: version.checked_sub(1).map(PolicyVersion),
        step: version,
        adapter: (version > 0).then(|| format!("adapters/{version}")),
        sha256: None,
        metrics: [("reward_mean".to_owned(), 0.5)].into(),
        state,
        reason: None,
        created: 1_700_000_000_000,
        pinned: false,
        checks: Vec::new(),
    }
}

#[async_trait]
impl PolicyControl for FakePolicies {
    fn list(&self) -> Result<Vec<PolicyRecord>, PolicyError> {
        Ok(vec![
            record(0, PolicyState::Active),
            record(1, PolicyState::Retired),
            record(2, PolicyState::Rejected),
        ])
    }
    fn active(&self) -> PolicyVersion {
        self.engine.active_version()
    }
    async fn activate(
        &self,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<PolicyRecord, PolicyError> {
        match version.0 {
            0 | 1 => {
                self.engine.stage(version, None).await?;
                self.engine.activate().await?;
                let reason = Some(reason.to_owned());
                Ok(PolicyRecord { reason, ..record(version.0, PolicyState::Active) })
            }
            2 => Err(PolicyError::Unservable { version, reason: "it was rejected".to_owned() }),
            _ => Err(PolicyError::Unknown(version)),
        }
    }
    async fn pin(&self, version: PolicyVersion, pinned: bool) -> Result<PolicyRecord, PolicyError> {
        match version.0 {
            0 | 1 => Ok(PolicyRecord { pinned, ..record(version.0, PolicyState::Retired) }),
            _ => Err(PolicyError::Unknown(version)),
        }
    }
    fn assign(&self, key: &str) -> Option<PolicyVersion> {
        note(&self.assigned, key.to_owned());
        None
    }
    fn counts_ratings(&self) -> bool {
        !self.is_quiet.load(Ordering::SeqCst)
    }
    fn rate(&self, rating: &VersionRating) {
        note(&self.ratings, rating.clone());
    }
    fn answered(&self, version: PolicyVersion, failed: bool) {
        note(&self.answers, (version, failed));
    }
}

pub struct Server {
    pub addr: SocketAddr,
    pub client: Client,
    pub engine: Arc<FakeEngine>,
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub rollout: Arc<FakeRollout>,
    pub trainer: Arc<FakeTrainer>,
    pub policies: Arc<FakePolicies>,
    pub ready: Arc<AtomicBool>,
    pub keys: Arc<KeyRing>,
    pub tls: Arc<Tls>,
    pub stop: Option<oneshot::Sender<()>>,
    pub task: JoinHandle<std::io::Result<()>>,
    _dir: tempfile::TempDir,
}

pub fn model() -> ModelDir {
    ModelDir::open(Path::new(MODEL)).unwrap()
}

impl Server {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut Setup)) -> Self {
        Self::open(model(), change).await
    }

    /// A server whose model has another chat template, and room for long prompts.
    pub async fn with_template(template: &str, change: impl FnOnce(&mut Setup)) -> Self {
        let mut model = model();
        model.chat_template = template.to_owned();
        let change = |setup: &mut Setup| {
            setup.fake.context = 8192;
            change(setup);
        };
        Self::open(model, change).await
    }

    /// A server that answers with `text`, and has room for long prompts.
    pub async fn answering(text: &str, change: impl FnOnce(&mut Setup)) -> Self {
        let text = text.to_owned();
        Self::with(|setup| {
            setup.fake.context = 8192;
            setup.fake.script = Arc::new(move |_, _| text.clone());
            change(setup);
        })
        .await
    }

    async fn open(model: ModelDir, change: impl FnOnce(&mut Setup)) -> Self {
        let codec = Codec::load(&model).unwrap();
        let mut setup = Setup {
            fake: FakeConfig::new(&codec),
            // Each token has its own event, whenever it is sampled.
            server: ServerConfig { stream_interval_ms: 0, ..ServerConfig::default() },
            routes: RouteList::default(),
            graders: Backends::default(),
            holdout_share: 0.0,
            learning: LearningLimits { enabled: true, max_staleness: 2, correction_weight: 0.5 },
            min_free: 0,
            in_fleet: false,
        };
        change(&mut setup);
        let dir = tempfile::tempdir().unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let ledger = dir.path().join("hone.redb");
        let outbox = setup.in_fleet.then_some(Outbox::Server);
        let records = StoreConfig { outbox, ..StoreConfig::default() };
        let store = Store::open(&ledger, &records, metrics.clone()).unwrap();
        let engine = FakeEngine::new(Arc::new(codec), setup.fake, metrics.clone());
        let (rollout, trainer) =
            (Arc::new(FakeRollout::default()), Arc::new(FakeTrainer::default()));
        let ready = Arc::new(AtomicBool::new(true));
        let policies = Arc::new(FakePolicies {
            engine: engine.clone(),
            assigned: Mutex::default(),
            is_quiet: AtomicBool::new(false),
            ratings: Mutex::default(),
            answers: Mutex::default(),
        });
        let keys = Arc::new(KeyRing::load(&setup.server).unwrap());
        let tls = Arc::new(Tls::load(&setup.server.tls).unwrap());
        let config = Arc::new(setup.server);
        let state = AppState {
            engine: engine.clone(),
            store: store.clone(),
            routes: Arc::new(Routes::new(&setup.routes).unwrap()),
            graders: setup.graders,
            rollout: Some(rollout.clone()),
            policies: policies.clone(),
            train: trainer.clone(),
            fleet: setup.in_fleet.then(|| FleetLink {
                problem: watch::channel(None).1,
                share_erasure: Arc::new(|_| {
                    Box::pin(async { Err("the store is away".to_owned()) })
                }),
            }),
            learning: setup.learning,
            metrics: metrics.clone(),
            holdout_share: setup.holdout_share,
            config: config.clone(),
            recent_turns: Default::default(),
            keys: keys.clone(),
            disk: DiskLimit {
                dir: dir.path().to_owned(),
                min_free: setup.min_free,
                ..DiskLimit::default()
            },
            ready: ready.clone(),
            started: 1_700_000_000_000,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let startup = Startup::new(config, metrics.clone(), ready.clone()).with_tls(tls.clone());
        startup.finish(state);
        let task = tokio::spawn(serve(listener, startup, async {
            let _ = stopped.await;
        }));
        let client = Client::builder().timeout(Duration::from_secs(30)).no_proxy().build().unwrap();
        Self {
            addr,
            client,
            engine,
            store,
            metrics,
            rollout,
            trainer,
            policies,
            ready,
            keys,
            tls,
            stop: Some(stop),
            task,
            _dir: dir,
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        read(self.client.get(self.url(path)).send().await.unwrap()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        read(self.send(path, body).await).await
    }

    pub async fn chat_as(&self, key: &str, body: &Value) -> Response {
        let request = self.client.post(self.url("/v1/chat/completions"));
        request.bearer_auth(key).json(body).send().await.unwrap()
    }

    /// A request with a bearer key.
    pub async fn as_key(
        &self,
        key: &str,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> (u16, Value) {
        let mut request = self.client.request(method, self.url(path)).bearer_auth(key);
        if let Some(body) = body {
            request = request.json(body);
        }
        read(request.send().await.unwrap()).await
    }

    pub async fn get_as(&self, key: &str, path: &str) -> (u16, Value) {
        self.as_key(key, Method::GET, path, None).await
    }

    pub async fn post_as(&self, key: &str, path: &str, body: &Value) -> (u16, Value) {
        self.as_key(key, Method::POST, path, Some(body)).await
    }

    pub async fn send(&self, path: &str, body: &Value) -> Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    pub async fn chat(&self, body: &Value) -> (u16, Value) {
        self.post("/v1/chat/completions", body).await
    }

    pub async fn send_chat(&self, body: &Value) -> Response {
        self.send("/v1/chat/completions", body).await
    }

    /// The id of a new completion.
    pub async fn completion(&self) -> String {
        ok(self.chat(&ask(json!({}))).await)["id"].as_str().unwrap().to_owned()
    }

    /// The counts of the ledger after everything that is queued for it.
    pub async fn stats(&self) -> StoreStats {
        self.store.commit(Vec::new()).await.unwrap();
        self.store.stats().unwrap()
    }

    /// A recorded request.
    pub async fn interaction(&self, id: InteractionId) -> Interaction {
        self.store.commit(Vec::new()).await.unwrap();
        self.store.interaction(id).unwrap().unwrap()
    }

    /// The first choice of a recorded request.
    pub async fn sample(&self, id: InteractionId) -> Sample {
        self.store.commit(Vec::new()).await.unwrap();
        self.store.samples_of(id).unwrap().remove(0)
    }

    /// Posts bodies that are refused, each with its status, the wrong field and a part of the message.
    pub async fn refuses<const N: usize>(&self, path: &str, cases: [(Value, u16, &str, &str); N]) {
        for (body, status, field, part) in cases {
            let (found, answer) = self.post(path, &body).await;
            let param = &answer["error"]["param"];
            assert_eq!((found, param), (status, &json!(field)), "{body}: {answer}");
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(message.contains(part), "{body}: {message}");
        }
    }

    /// A line for the error of each body, all of which are refused with status 400.
    pub async fn refusals(&self, path: &str, bodies: impl IntoIterator<Item = Value>) -> String {
        let mut lines = Vec::new();
        for body in bodies {
            let (status, answer) = self.post(path, &body).await;
            assert_eq!(status, 400, "{body}: {answer}");
            assert_eq!(answer["error"]["type"], "invalid_request_error");
            lines.push(error(&answer));
        }
        assert!(self.engine.requests().is_empty());
        lines.join("\n")
    }

    /// The value of the first line of `/metrics` that starts with `name`.
    pub async fn metric(&self, name: &str) -> Option<f64> {
        let text =
            self.client.get(self.url("/metrics")).send().await.unwrap().text().await.unwrap();
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }
}

/// An answer with two calls.
pub const CALLS: &str = "Let me see.\n\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2, \"b\": \"é\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

pub async fn read(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
}

/// The answer of a request that succeeded.
#[track_caller]
pub fn ok((status, answer): (u16, Value)) -> Value {
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The message, field and code of an error.
pub fn error(answer: &Value) -> String {
    let error = answer["error"].as_object().unwrap_or_else(|| panic!("no error: {answer}"));
    assert_eq!(error.len(), 4, "{answer}");
    let text = |key: &str| error[key].as_str().unwrap_or("-");
    format!("{} | {} | {}", text("message"), text("param"), text("code"))
}

/// The events of a stream. The name of each is its type.
pub fn named_events(text: &str) -> Vec<Value> {
    let blocks = text.split_terminator("\n\n").filter(|block| !block.starts_with(": "));
    let event = |block: &str| {
        let (name, data) = block.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let event: Value = serde_json::from_str(data).unwrap();
        assert_eq!(event["type"], name);
        event
    };
    blocks.map(event).collect()
}

/// An object with the fields of `more` added or replaced.
pub fn merged(mut body: Value, more: Value) -> Value {
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

pub fn id_of(answer: &Value) -> InteractionId {
    InteractionId::from_completion_id(answer["id"].as_str().unwrap()).unwrap()
}

pub fn key(name: &str, scopes: &[KeyScope]) -> KeyConfig {
    KeyConfig {
        name: name.to_owned(),
        key: name.to_owned(),
        scopes: scopes.to_vec(),
        ..KeyConfig::default()
    }
}

/// A chat request with the fields `more`.
pub fn ask(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "What is 2 + 3?"}]);
    merged(json!({"model": "default", "messages": messages, "seed": 5}), more)
}

/// Waits until `holds` returns true.
pub async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    };
    within_a_minute(what, poll).await;
}

/// Ends a test that would wait forever.
pub async fn within_a_minute<T>(what: &str, event: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(60);
    tokio::time::timeout(limit, event).await.unwrap_or_else(|_| panic!("never happened: {what}"))
}
