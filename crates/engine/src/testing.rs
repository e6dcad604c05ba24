//! An engine without a model, for tests of everything that uses an engine, and random JSON schemas.
//!
//! Slots, queue, preemption, versions, stop strings, limits and cancellation are real (`Admission`,
//! `GenerationRun`). Only the tokens come from a script. Under a grammar, `min_tokens` or `ignore_eos` the
//! real token sampler draws them from logits that prefer the script. Always compiled, so that integration
//! tests can use it; the daemon never does.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyVersion, TokenId};

use crate::admission::{Admission, Color, Lease, Owner, QueueLimits};
use crate::api::{
    Completion, Engine, EngineLoad, GenerateRequest, Generation, ModelInfo, Priority, Publisher,
    Token,
};
use crate::codec::Codec;
use crate::error::EngineError;
use crate::run::{self, GenerationRun};
use crate::sampling::TokenSampler;

/// Requests that a [`FakeEngine`] keeps for [`FakeEngine::requests`], so that long tests do not fill the memory.
const MOST_RECORDED: usize = 10_000;

/// Returns the text with which a version answers a request.
pub type Script = dyn Fn(&GenerateRequest, PolicyVersion) -> String + Send + Sync;

/// Properties of a [`FakeEngine`].
#[derive(Clone)]
pub struct FakeConfig {
    /// The model's name.
    pub name: String,
    /// Context length in tokens.
    pub context: usize,
    /// Logits per position.
    pub vocab: usize,
    /// Sequences that run at once.
    pub slots: usize,
    /// Live requests that may wait.
    pub queue: usize,
    /// Longest wait of a live request; `None` is without end.
    pub queue_timeout: Option<Duration>,
    /// Time before each token.
    pub delay: Duration,
    /// The answers. An answer that exceeds the token limit ends with `length`.
    pub script: Arc<Script>,
}

impl FakeConfig {
    /// Two slots, no delay, and one of ten short sentences as an answer, chosen by the seed.
    pub fn new(codec: &Codec) -> Self {
        Self {
            name: "fake".to_owned(),
            context: 512,
            vocab: codec.vocab(),
            slots: 2,
            queue: 64,
            queue_timeout: None,
            delay: Duration::ZERO,
            script: Arc::new(|request, _| format!("The answer is {}.", request.params.seed % 10)),
        }
    }
}

#[derive(Default)]
struct Records {
    requests: Vec<GenerateRequest>,
    staged: Vec<(PolicyVersion, Option<PathBuf>)>,
    next_stage_error: Option<EngineError>,
    /// The color staged last.
    color: Option<Color>,
    /// The color of the canary.
    canary: Option<Color>,
    next_generation_error: Option<EngineError>,
    trouble: Option<String>,
}

/// An [`Engine`] and [`Publisher`] that answers from a script. Generating needs a tokio runtime.
pub struct FakeEngine {
    info: ModelInfo,
    codec: Arc<Codec>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    delay: Duration,
    script: Arc<Script>,
    records: Mutex<Records>,
}

impl FakeEngine {
    /// A fake that serves version 0.
    pub fn new(codec: Arc<Codec>, config: FakeConfig, metrics: Arc<Metrics>) -> Arc<Self> {
        let FakeConfig { name, context, vocab, slots, queue, queue_timeout, delay, script } =
            config;
        let limits = QueueLimits { places: queue, timeout: queue_timeout };
        Arc::new(Self {
            info: ModelInfo { name, context, vocab, slots },
            codec,
            admission: Admission::new(slots, limits, PolicyVersion::BASE, Arc::clone(&metrics)),
            metrics,
            delay,
            script,
            records: Mutex::new(Records::default()),
        })
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock()
    }

    /// The first 10,000 requests, in order, including refused ones.
    pub fn requests(&self) -> Vec<GenerateRequest> {
        self.records().requests.clone()
    }

    /// Every staged version so far with its adapter directory, in order.
    pub fn staged(&self) -> Vec<(PolicyVersion, Option<PathBuf>)> {
        self.records().staged.clone()
    }

    fn record(&self, request: &GenerateRequest) {
        let mut records = self.records();
        if records.requests.len() < MOST_RECORDED {
            records.requests.push(request.clone());
        }
    }

    /// Occupies a slot of the color that holds `version` until the lease is dropped, as a long
    /// completion does; `None` if no color holds it or every slot is taken.
    pub fn hold_slot(&self, version: PolicyVersion) -> Option<Lease> {
        self.admission.acquire_on(self.admission.color_of(version)?)
    }

    /// Makes the next generation end with this error before its first token.
    pub fn fail_next_generation(&self, error: EngineError) {
        self.records().next_generation_error = Some(error);
    }

    /// Sets what [`Engine::trouble`] returns.
    pub fn set_trouble(&self, trouble: Option<&str>) {
        self.records().trouble = trouble.map(str::to_owned);
    }

    /// Makes the next staging fail.
    pub fn fail_next_stage(&self, error: EngineError) {
        self.records().next_stage_error = Some(error);
    }

    /// The log-probability of a token: a fixed negative function of its id.
    pub fn logprob(id: TokenId) -> f32 {
        -0.1 - (id % 10) as f32 / 10.0
    }

    fn run(&self, lease: Lease, request: &GenerateRequest) -> Result<Generation, EngineError> {
        let limit = run::check(request, self.info.context, self.info.vocab)?;
        let mut ids = request.scored.clone();
        if ids.is_empty() {
            ids = self.codec.encode(&(self.script)(request, lease.version))?;
            ids.extend(self.codec.stop_ids().first());
        }
        let params = &request.params;
        let is_limited = request.grammar.is_some() || params.min_tokens > 0 || params.ignore_eos;
        let mut limited = if is_limited {
            let sampler = TokenSampler::for_request(request, &self.codec, &self.metrics)?;
            Some((sampler, FakeLogits::new(&self.codec, self.info.vocab, params.seed)))
        } else {
            None
        };
        let (mut run, generation) =
            GenerationRun::new(&self.codec, request, limit, lease, &self.metrics);
        let (delay, top) = (self.delay, u32::from(request.top_logprobs));
        let kept_mass = if params.truncates() { 0.5 } else { 1.0 };
        let failure = self.records().next_generation_error.take();
        tokio::spawn(async move {
            if let Some(error) = failure {
                run.fail(error);
            }
            for position in 0..limit as usize {
                if !delay.is_zero() {
                    tokio::time::sleep(delay).await;
                }
                let scripted = ids.get(position).copied();
                let token = match (&mut limited, scripted) {
                    (Some((sampler, logits)), _) => {
                        match sampler.draw(logits.at(position, scripted)) {
                            Ok(token) => token,
                            Err(error) => {
                                run.fail(error.into());
                                break;
                            }
                        }
                    }
                    (None, Some(id)) => {
                        let logprob = Self::logprob(id);
                        let alternative = |k: u32| (id.saturating_add(k), logprob - k as f32);
                        let top = (0..top).map(alternative).collect();
                        Token { id, logprob, kept_mass, forced: false, top, text: String::new() }
                    }
                    (None, None) => break,
                };
                if run.is_over() || run.push(token) {
                    break;
                }
            }
            run.finish();
        });
        Ok(generation)
    }

    /// The color staged last.
    fn staged_color(&self) -> Result<Color, EngineError> {
        let color = self.records().color;
        color.ok_or_else(EngineError::nothing_staged)
    }
}

/// Logits that prefer a script, and without one the tokens that end texts and JSON values.
struct FakeLogits {
    values: Vec<f32>,
    /// Tokens that end something, each with its preference.
    ends: Vec<(TokenId, f32)>,
    seed: u64,
}

impl FakeLogits {
    fn new(codec: &Codec, vocab: usize, seed: u64) -> Self {
        let closes =
            |id: &TokenId| matches!(codec.token_bytes(*id).as_slice(), b"\"" | b"}" | b"]");
        let mut ends: Vec<(TokenId, f32)> =
            (0..codec.vocab() as TokenId).filter(closes).map(|id| (id, 4.0)).collect();
        ends.extend(codec.stop_ids().iter().map(|id| (*id, 6.0)));
        Self { values: vec![0.0; vocab], ends, seed }
    }

    /// The logits of a position. They depend on it, on the scripted token and on the seed alone.
    fn at(&mut self, position: usize, scripted: Option<TokenId>) -> &[f32] {
        let start = self.seed.wrapping_mul(31).wrapping_add(position as u64 * 104_729);
        for (id, value) in (0..).zip(&mut self.values) {
            *value = (start.wrapping_add(id * 7919) % 1009) as f32 / 500.0;
        }
        let preferred = self.ends.iter().copied().chain(scripted.map(|id| (id, 12.0)));
        for (id, preference) in preferred {
            if let Some(value) = self.values.get_mut(id as usize) {
                *value += preference;
            }
        }
        &self.values
    }
}

#[async_trait]
impl Engine for FakeEngine {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn codec(&self) -> &Arc<Codec> {
        &self.codec
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        self.record(&request);
        run::check(&request, self.info.context, self.info.vocab)?;
        TokenSampler::new(&request.params, request.top_logprobs)?;
        let canary = self.records().canary.filter(|color| {
            request.version.is_some_and(|v| self.admission.color_of(v) == Some(*color))
        });
        let lease = match canary.and_then(|color| self.admission.acquire_on(color)) {
            Some(lease) => lease,
            None => self.admission.acquire_for(&request.owner, request.priority).await?,
        };
        self.run(lease, &request)
    }

    fn admits(&self, owner: &Owner, choices: usize) -> Result<(), EngineError> {
        self.admission.admits(owner, choices)
    }

    fn trouble(&self) -> Option<String> {
        self.records().trouble.clone()
    }

    fn active_version(&self) -> PolicyVersion {
        self.admission.active_version()
    }

    fn load(&self) -> EngineLoad {
        self.admission.load()
    }
}

#[async_trait]
impl Publisher for FakeEngine {
    async fn stage(
        &self,
        version: PolicyVersion,
        adapter: Option<&Path>,
    ) -> Result<(), EngineError> {
        self.records().color = None;
        if let Some(error) = self.records().next_stage_error.take() {
            return Err(error);
        }
        let color = match self.admission.color_of(version) {
            Some(color) => color,
            None => {
                let color = self.admission.idle_color();
                self.admission.wait_until_idle(color).await;
                self.admission.set_version(color, version);
                color
            }
        };
        let mut records = self.records();
        records.staged.push((version, adapter.map(Path::to_path_buf)));
        records.color = Some(color);
        Ok(())
    }

    async fn complete_staged(&self, request: GenerateRequest) -> Result<Completion, EngineError> {
        let lease = match self.admission.acquire_on(self.staged_color()?) {
            Some(lease) => lease,
            None => self.admission.acquire(Priority::Live).await?,
        };
        self.run(lease, &request)?.collect().await
    }

    async fn activate(&self) -> Result<Duration, EngineError> {
        let color = self.staged_color()?;
        let start = Instant::now();
        // A staged color holds a version.
        self.admission.activate(color);
        Ok(start.elapsed())
    }

    async fn serve_now(
        &self,
        version: PolicyVersion,
        _: Option<&Path>,
    ) -> Result<bool, EngineError> {
        Ok(self.admission.activate_version(version))
    }

    async fn begin_canary(&self) -> Result<bool, EngineError> {
        let color = self.staged_color()?;
        self.records().canary = Some(color);
        Ok(true)
    }

    fn end_canary(&self) {
        self.records().canary = None;
    }
}

/// The tokenizer of a fixture: byte-level, with few merges.
#[cfg(test)]
pub(crate) fn codec() -> &'static Arc<Codec> {
    static CODEC: std::sync::OnceLock<Arc<Codec>> = std::sync::OnceLock::new();
    CODEC.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen2-tiny");
        Arc::new(Codec::load(&crate::ModelDir::open(&dir).unwrap()).unwrap())
    })
}

// Random schemas for tests of grammars.

/// Schemas that contain each other in a random schema.
const MAX_DEPTH: usize = 3;

/// A random schema of supported keywords. Its values are short: strings and arrays have a bound, objects
/// have no additional properties, and schemas contain each other three times at most.
pub fn random_schema(seed: u64) -> Value {
    let mut random =
        RandomSchema { random: ChaCha8Rng::seed_from_u64(seed), definitions: Map::new() };
    let mut schema = random.object(0);
    if !random.definitions.is_empty() {
        schema["$defs"] = Value::Object(random.definitions);
    }
    schema
}

struct RandomSchema {
    random: ChaCha8Rng,
    definitions: Map<String, Value>,
}

impl RandomSchema {
    fn schema(&mut self, depth: usize) -> Value {
        let kinds = if depth < MAX_DEPTH { 17 } else { 10 };
        let inner = depth + 1;
        match self.random.random_range(0..kinds) {
            10 | 11 => self.object(inner),
            12 => {
                let least = self.random.random_range(0..2);
                let most = least + self.random.random_range(0..2);
                json!({"type": "array", "items": self.schema(inner), "minItems": least, "maxItems": most})
            }
            13 => {
                let items = [self.schema(inner), self.leaf()];
                json!({"type": "array", "prefixItems": items, "items": false, "minItems": 2})
            }
            14 => self.union(inner),
            15 => {
                let schema = self.schema(inner);
                let number = self.definitions.len();
                self.definitions.insert(format!("part {number}"), schema);
                json!({"$ref": format!("#/$defs/part%20{number}")})
            }
            16 => json!({
                "type": "object", "patternProperties": {"^k[0-9]$": self.leaf()},
                "additionalProperties": false, "minProperties": 1, "maxProperties": 2,
            }),
            _ => self.leaf(),
        }
    }

    fn leaf(&mut self) -> Value {
        let low = self.random.random_range(-200..200_i64);
        let (high, bound) = (low + self.random.random_range(0..1000), low as f64 / 8.0);
        let short = self.random.random_range(0..4);
        let leaves = [
            json!({"type": "null", "description": "nothing"}),
            json!({"type": "boolean"}),
            json!({"type": "integer"}),
            json!({"type": "integer", "minimum": low, "exclusiveMaximum": high + 1}),
            json!({"type": "integer", "minimum": 0, "maximum": 300, "multipleOf": 7}),
            json!({"allOf": [{"type": "integer", "minimum": low}, {"maximum": high}]}),
            json!({"type": ["number", "null"]}),
            json!({"type": "number", "maximum": bound}),
            json!({"type": "number", "exclusiveMinimum": bound, "maximum": bound + 12.5}),
            json!({"type": "string", "minLength": short, "maxLength": short + 6}),
            json!({"enum": ["red", "green", 7, null, 2.5, true, ["a", 1], {"k": "v"}]}),
            json!({"const": {"x": null}}),
        ];
        let texts = [
            ("pattern", "^[A-Z][a-z]{1,5}$"),
            ("pattern", "^(yes|no|maybe)$"),
            ("pattern", "^\\d{3}-\\d{2}$"),
            ("pattern", "^a.b$"),
            ("format", "date"),
            ("format", "time"),
            ("format", "date-time"),
            ("format", "uuid"),
            ("format", "ipv4"),
            ("format", "ipv6"),
        ];
        let texts = texts.map(|(key, value)| json!({"type": "string", key: value}));
        let kind: &[Value] = if self.random.random_ratio(1, 8) { &texts } else { &leaves };
        kind.choose(&mut self.random).cloned().unwrap_or_default()
    }

    fn object(&mut self, depth: usize) -> Value {
        let (mut properties, mut required) = (Map::new(), Vec::new());
        for name in ["name", "a b", "größe", "x\"y"].iter().take(self.random.random_range(1..=4))
        {
            properties.insert((*name).to_owned(), self.schema(depth));
            if !self.random.random_ratio(1, 3) {
                required.push(*name);
            }
        }
        json!({
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": false,
        })
    }

    fn union(&mut self, depth: usize) -> Value {
        let (integer, text) =
            (json!({"type": "integer"}), json!({"type": "string", "maxLength": 5}));
        let option = |kind: &str, value: &Value| {
            json!({
                "type": "object", "required": ["kind", "value"],
                "properties": {"kind": {"const": kind}, "value": value},
                "additionalProperties": false,
            })
        };
        match self.random.random_range(0..3) {
            0 => json!({"anyOf": [self.schema(depth), {"type": "null"}]}),
            1 => {
                json!({"oneOf": [integer, text, {"type": "array", "items": self.leaf(), "maxItems": 2}]})
            }
            _ => json!({"oneOf": [option("a", &integer), option("b", &text)]}),
        }
    }
}
