//! The engines of a process. [`EnginesNeeded`] selects them; [`Engines::start`] starts and connects them.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use async_trait::async_trait;
use candle_core::Device;

use hone_core::config::Compute;
use hone_core::metrics::Metrics;
use hone_core::threads::BackgroundPriority;
use hone_core::types::SamplingParams;
use hone_cuda::{AdapterModule, DeviceSampler, SamplerLimits, StreamPriority};
use hone_engine::{
    Codec, Engine, EngineBackend, EngineConfig, EngineError, GenerateRequest, ModelDir, Priority,
    Publisher,
};
use hone_mistral::MistralEngine;
use hone_model::device::{CudaDevice, DeviceBase};
use hone_model::weights::Quantize;
use hone_model::{Model, ModelSpec};
use hone_reward::grader::{ModelClient, ModelFailure, ModelReply, ModelRequest, TokenUsage};
use hone_sampler::{BatchedEngine, BatchedPublisher, LiveTraffic, SamplerConfig};
use hone_train::Learner;
use hone_train::config::DeviceChoice;

use crate::config::Config;
use crate::usage;

/// The engines, and the weights that the native one shares with the trainer.
pub(super) struct Engines {
    /// Answers clients. Without clients it is the engine of the evaluations.
    pub live: Arc<dyn Engine>,
    /// Samples for the trainer, and answers the exam of the gate.
    pub rollouts: Arc<dyn Engine>,
    /// Publishes versions to all of them.
    pub publisher: Arc<dyn Publisher>,
    /// The weights of the native engine, if it runs.
    pub base: Option<Model>,
    /// The same on the GPU that `model.device` selects.
    pub device: Option<DeviceBase>,
    native: Option<Arc<BatchedEngine>>,
}

impl Engines {
    /// Starts the engines of `hone serve`, or without clients of `hone train` and `hone eval`.
    pub async fn start(
        config: &Config,
        dir: &ModelDir,
        data: &Path,
        has_clients: bool,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let mut config = config.clone();
        if !has_clients {
            // A run waits as long as it takes.
            config.engine.queue_timeout_seconds = 0;
        }
        let config = &config;
        let needed = EnginesNeeded::of(config, has_clients);
        needed.check(config, dir).map_err(usage)?;
        let mut serving = None;
        if needed.has_mistralrs() {
            serving = Some(start_mistral(&config.engine, dir, data, Arc::clone(metrics)).await?);
        }
        let engines = match needed.native_purpose(has_clients) {
            Some(purpose) => {
                Self::with_native(config, dir, data, serving, purpose, metrics).await?
            }
            None => {
                let serving = serving.context("no engine is needed")?;
                Self {
                    live: serving.clone(),
                    rollouts: serving.clone(),
                    publisher: serving,
                    base: None,
                    device: None,
                    native: None,
                }
            }
        };
        tracing::info!(engines = ?needed, slots = engines.live.info().slots, "engines started");
        if has_clients && let Some(hint) = needed.faster(config) {
            tracing::info!("{hint}");
        }
        Ok(engines)
    }

    /// The native engine for everything; or for the trainer beside `serving`, to which it yields. It then also
    /// answers canaries, and clients after a rollback until mistral.rs has loaded the version.
    async fn with_native(
        config: &Config,
        dir: &ModelDir,
        data: &Path,
        serving: Option<Arc<MistralEngine>>,
        purpose: NativePurpose,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let base = load_base(config, dir).await?;
        let codec = match &serving {
            Some(serving) => Arc::clone(serving.codec()),
            None => Arc::new(Codec::load(dir)?),
        };
        let clients = serving.clone();
        // Without another engine, clients are in its own batch, where they go first.
        let busy: LiveTraffic = Arc::new(move || {
            let load = clients.as_ref().map(|clients| clients.load());
            load.is_some_and(|load| load.live_running + load.live_waiting > 0)
        });
        let device = device(config, dir, data)?.filter(|_| serving.is_none());
        let device = match device {
            Some(device) => {
                let (model, compute, context) = (base.clone(), config.train.compute, dir.context());
                let load = move || device.load(&model, compute, context);
                Some(tokio::task::spawn_blocking(load).await?.map_err(usage)?)
            }
            None => None,
        };
        let metrics = Arc::clone(metrics);
        let native = match &device {
            Some(base) => start_on_device(config, dir, base, codec, purpose, metrics)?,
            None => start_native(config, dir, &base, codec, purpose, busy, metrics)?,
        };
        let other = serving.clone().map(|serving| serving as Arc<dyn Publisher>);
        let publisher = BatchedPublisher::new(other, Arc::clone(&native));
        Ok(Self {
            live: match serving {
                Some(serving) => Arc::new(publisher.live_engine(serving)),
                None => native.clone(),
            },
            rollouts: native.clone(),
            publisher: Arc::new(publisher),
            base: Some(base),
            device,
            native: Some(native),
        })
    }

    /// Ends what the native engine still generates, and refuses new requests. Clients have had their
    /// grace period. The requests of mistral.rs end with their readers.
    pub fn close(&self) {
        if let Some(native) = &self.native {
            native.close(true);
        }
    }
}

// The device.

/// Parameters of models that the processor's caches hold, for which a GPU's launches take longer than the products.
const CACHED_PARAMETERS: usize = 16 << 20;

/// The GPU that `model.device` selects for a model, or `None` for the processor. Compiled kernels are kept in the data
/// directory.
pub(crate) fn device(
    config: &Config,
    model: &ModelDir,
    data: &Path,
) -> anyhow::Result<Option<CudaDevice>> {
    let ordinal = match config.model.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Cuda(ordinal) => Some(ordinal),
        DeviceChoice::Auto => {
            let is_small = ModelSpec::from_config(&model.config)?.parameters() < CACHED_PARAMETERS;
            let can = config.model.quantize == Quantize::None && config.train.lora.dropout == 0.0;
            let is_any = || hone_cuda::inventory().devices.is_ok_and(|found| !found.is_empty());
            (!is_small && can && !model.is_gguf() && is_any()).then_some(0)
        }
    };
    Ok(ordinal.map(|ordinal| CudaDevice { ordinal, kernels: data.join("kernels") }))
}

// Starts mistral.rs.

/// Loads the model into mistral.rs. All that blocks runs off the async threads.
async fn start_mistral(
    config: &EngineConfig,
    dir: &ModelDir,
    data: &Path,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Arc<MistralEngine>> {
    let (config, dir, models) = (config.clone(), dir.clone(), data.join("models"));
    tokio::task::spawn_blocking(move || {
        anyhow::Ok(MistralEngine::start(&dir, &models, &config, metrics)?)
    })
    .await?
}

// The served base model as a judge. It has a separate engine, so that judging neither waits for the
// policy's slots nor uses the policy that is judged.

/// A judge without a model until [`SelfJudge::load`], because routes are checked before a model is
/// loaded.
#[derive(Default)]
pub(in crate::app) struct SelfJudge(OnceLock<Arc<dyn Engine>>);

impl SelfJudge {
    /// Starts an engine of its own, of `engine.backend`, for the base model. The native one uses the
    /// weights on a GPU, or else the weights `base`, if they are loaded already.
    pub async fn load(
        &self,
        config: &Config,
        dir: &ModelDir,
        data: &Path,
        base: Option<&Model>,
        device: Option<&DeviceBase>,
    ) -> anyhow::Result<()> {
        // Separate metrics: the exported ones describe only the policy's engines.
        let metrics = Arc::new(Metrics::new()?);
        let engine: Arc<dyn Engine> = match config.engine.backend {
            EngineBackend::Mistralrs => {
                let config = EngineConfig {
                    replicas: 1,
                    queue: JUDGE_QUEUE,
                    queue_timeout_seconds: 0,
                    ..config.engine.clone()
                };
                start_mistral(&config, dir, data, metrics).await?
            }
            EngineBackend::Native => {
                let (codec, purpose) = (Arc::new(Codec::load(dir)?), NativePurpose::Judging);
                if let Some(base) = device {
                    start_on_device(config, dir, base, codec, purpose, metrics)?
                } else {
                    let base = match base {
                        Some(base) => base.clone(),
                        None => load_base(config, dir).await?,
                    };
                    let idle = Arc::new(|| false);
                    start_native(config, dir, &base, codec, purpose, idle, metrics)?
                }
            }
        };
        self.0.set(engine).map_err(|_| anyhow::anyhow!("the judge's model is loaded already"))
    }
}

/// Token limit of an answer if a model grader sets none.
const ANSWER_TOKENS: u32 = 512;

#[async_trait]
impl ModelClient for SelfJudge {
    /// Ignores the schema of the answer; graders accept bare scores and labels.
    async fn complete(&self, asked: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        let failed = |error: &str| ModelFailure::Server(error.to_owned());
        let model_error = |error: EngineError| failed(&format!("the model failed: {error}"));
        let missing = || failed("base_url = `self`: no model of this server can judge here");
        let engine = self.0.get().ok_or_else(missing)?;
        let prompt_ids = engine.codec().prompt(&asked.messages).map_err(model_error)?;
        let prompt_tokens = prompt_ids.len() as u64;
        let request = GenerateRequest::new(
            prompt_ids,
            SamplingParams {
                temperature: asked.sampling.temperature.unwrap_or(0.0) as f32,
                max_tokens: asked.sampling.max_tokens.unwrap_or(ANSWER_TOKENS),
                seed: asked.sampling.seed.map_or(0, i64::unsigned_abs),
                ..SamplingParams::default()
            },
            Priority::Live,
        );
        let generation = engine.generate(request).await.map_err(model_error)?;
        let completion = generation.collect().await.map_err(model_error)?;
        let completion_tokens = completion.tokens.len() as u64;
        let usage = TokenUsage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            cached_tokens: 0,
        };
        Ok(ModelReply { text: completion.text, model: asked.model.clone(), usage })
    }
}

// The native engine: its settings for each purpose, and the weights that it shares with the trainer.

/// Sequences that a judge's engine runs at once.
const JUDGE_SLOTS: usize = 16;

/// Positions of the cache of a judge's engine, unless `rollout.max_batch_tokens` is less.
const JUDGE_POSITIONS: usize = 8192;

/// Requests that wait for a judge. Rewards are computed in the background and have no deadline.
const JUDGE_QUEUE: usize = 4096;

/// What a native engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::app) enum NativePurpose {
    /// Answers clients, and samples for the trainer in the same batches.
    Serving,
    /// Samples for the trainer, beside another engine that has the clients or without clients.
    Sampling,
    /// Answers a judge's questions with the base model.
    Judging,
}

impl NativePurpose {
    /// Sequences that the engine runs at once.
    pub fn slots(self, config: &Config) -> usize {
        if self == Self::Judging { JUDGE_SLOTS } else { config.engine.slots }
    }

    /// Positions of the engine's cache of keys and values.
    pub fn cache_positions(self, config: &Config) -> usize {
        let positions = config.rollout.max_batch_tokens;
        if self == Self::Judging { positions.min(JUDGE_POSITIONS) } else { positions }
    }

    /// Adapters of the versions that the engine answers with, without the one that is being staged. With
    /// clients, the version before the active one, or a canary, still answers requests.
    pub fn versions(self) -> usize {
        match self {
            Self::Serving => 2,
            Self::Sampling => 1,
            Self::Judging => 0,
        }
    }

    /// Adapters that the engine keeps in memory. A sampler keeps the active one, which another engine loads
    /// later.
    pub fn kept_versions(self, config: &Config) -> usize {
        match self {
            Self::Serving => config.engine.kept_versions,
            Self::Sampling => 1,
            Self::Judging => 0,
        }
    }

    /// The linear layers of its adapters on a GPU, and the sizes of its passes there: with room for the adapters of all
    /// versions that it answers with and of the one that is staged. A judge has no adapter.
    pub fn on_device(
        self,
        config: &Config,
        dir: &ModelDir,
        spec: &ModelSpec,
        workspace: u64,
    ) -> anyhow::Result<(Vec<AdapterModule>, SamplerLimits)> {
        let modules = match self {
            Self::Judging => Vec::new(),
            Self::Serving | Self::Sampling => Learner::adapter_modules(spec, &config.train)?,
        };
        let limits = self.settings(config, dir).device_limits(self.versions() + 1, workspace)?;
        Ok((modules, limits))
    }

    /// The engine's settings.
    pub fn settings(self, config: &Config, dir: &ModelDir) -> SamplerConfig {
        let mut settings = SamplerConfig {
            name: dir.name.clone(),
            context: dir.context(),
            slots: self.slots(config),
            max_batch_tokens: self.cache_positions(config),
            share_prefixes: config.engine.share_prefixes,
            kept_adapters: self.kept_versions(config),
            serves_clients: self == Self::Serving,
            ..SamplerConfig::default()
        };
        let limits = config.engine.queue_limits();
        match self {
            Self::Serving => {
                settings.queue = limits.places;
                // As a fraction of the steps, which have the rest of the time.
                settings.background_share = config.train.min_share / (1.0 - config.train.min_share);
            }
            Self::Sampling => {}
            Self::Judging => settings.queue = JUDGE_QUEUE,
        }
        if self != Self::Judging {
            // Beside mistral.rs it answers clients of a canary, and after a rollback.
            settings.queue_timeout = limits.timeout;
        }
        if self == Self::Serving {
            return settings;
        }
        if config.train.priority != BackgroundPriority::Normal {
            // The operating system's scheduler already prefers the serving threads.
            settings.busy_share = 1.0;
        }
        settings
    }
}

/// Loads the frozen weights, which native engines and the trainer share.
pub(in crate::app) async fn load_base(config: &Config, dir: &ModelDir) -> anyhow::Result<Model> {
    let (spec, files) = (ModelSpec::from_config(&dir.config)?, dir.weights.clone());
    let options = config.load_options();
    let load = move || Model::load(spec, &files, options, &Device::Cpu);
    tokio::task::spawn_blocking(load).await?.context("the weights of the native engine")
}

/// Starts an engine on loaded weights. It yields while `busy` returns true.
pub(in crate::app) fn start_native(
    config: &Config,
    dir: &ModelDir,
    base: &Model,
    codec: Arc<Codec>,
    purpose: NativePurpose,
    busy: LiveTraffic,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Arc<BatchedEngine>> {
    let settings = purpose.settings(config, dir);
    let compute = config.engine.compute;
    let model = base.clone().with_compute(compute);
    let engine = BatchedEngine::start(&model, codec, settings, busy, metrics);
    let engine = engine.context("the native engine")?;
    if compute == Compute::Bf16 && engine.dtype() != "bf16" {
        let dtype = engine.dtype();
        tracing::warn!(
            dtype,
            "engine.compute = \"bf16\" has no effect: it needs weights that are stored in bf16, Linux, and \
             AMD's processor from Zen 4 on"
        );
    }
    Ok(engine)
}

/// Starts an engine on the weights on a GPU. It waits for no other thread. Other kernels go before those of a judge.
fn start_on_device(
    config: &Config,
    dir: &ModelDir,
    base: &DeviceBase,
    codec: Arc<Codec>,
    purpose: NativePurpose,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Arc<BatchedEngine>> {
    let settings = purpose.settings(config, dir);
    let spec = ModelSpec::from_config(&dir.config)?;
    let (name, priority) = match purpose {
        NativePurpose::Judging => ("the judge", StreamPriority::Training),
        NativePurpose::Serving | NativePurpose::Sampling => {
            ("the native engine", StreamPriority::Serving)
        }
    };
    let (modules, limits) = purpose.on_device(config, dir, &spec, base.workspace)?;
    let DeviceBase { model, kernels, reserve, .. } = base;
    let sampler = DeviceSampler::open(model, kernels, &modules, &limits, *reserve, priority);
    let sampler = sampler.with_context(|| format!("model.device: {name}"))?;
    let idle = Arc::new(|| false);
    let engine = BatchedEngine::start_on_device(spec, sampler, codec, settings, idle, metrics);
    engine.with_context(|| format!("{name} on the GPU"))
}

// Which engines a configuration needs.

/// The engines of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::app) enum EnginesNeeded {
    /// mistral.rs answers clients and samples for the trainer.
    Mistralrs,
    /// mistral.rs answers clients, and the native engine samples for the trainer.
    Both,
    /// The native engine does both.
    Native,
}

impl EnginesNeeded {
    /// The engines of `hone serve`, or without clients of `hone train` and `hone eval`.
    pub fn of(config: &Config, has_clients: bool) -> Self {
        // The only device so far is the CPU.
        let samples_natively = config.rollout.sampler.is_native(true);
        match config.engine.backend {
            EngineBackend::Native => Self::Native,
            EngineBackend::Mistralrs if !samples_natively => Self::Mistralrs,
            // Nothing else is left to generate.
            EngineBackend::Mistralrs if !has_clients => Self::Native,
            EngineBackend::Mistralrs if config.rollout.enabled => Self::Both,
            EngineBackend::Mistralrs => Self::Mistralrs,
        }
    }

    /// Refuses weights that mistral.rs cannot serve where it would.
    ///
    /// # Errors
    /// With the key and the value that do not fit `engine.backend`.
    pub fn check(self, config: &Config, model: &ModelDir) -> anyhow::Result<()> {
        let judges = config.uses_self_judge() && config.engine.backend == EngineBackend::Mistralrs;
        if !self.has_mistralrs() && !judges {
            return Ok(());
        }
        if let DeviceChoice::Cuda(ordinal) = config.model.device {
            anyhow::bail!(
                "model.device is \"cuda:{ordinal}\", which needs engine.backend = \"native\": mistral.rs serves on the \
                 processor"
            );
        }
        let quantize = config.model.quantize;
        anyhow::ensure!(
            quantize == Quantize::None,
            "model.quantize is \"{}\", which needs engine.backend = \"native\": mistral.rs cannot \
             serve these weights with adapters",
            quantize.as_str()
        );
        anyhow::ensure!(
            !model.is_gguf(),
            "model.path is {:?}: a GGUF file needs engine.backend = \"native\", because mistral.rs \
             cannot serve it with adapters",
            model.path.display().to_string()
        );
        Ok(())
    }

    /// Why the native engine would serve faster than the engines in use, if it would.
    fn faster(self, config: &Config) -> Option<String> {
        self.has_mistralrs().then(|| {
            format!(
                "`--backend native` would serve this model faster: on a CPU mistral.rs decodes one \
                 request at a time in each of engine.replicas = {} engines, and the native engine \
                 up to engine.slots = {} in one batch",
                config.engine.replicas, config.engine.slots
            )
        })
    }

    /// Whether mistral.rs loads the model.
    pub fn has_mistralrs(self) -> bool {
        self != Self::Native
    }

    /// What the native engine does, if it runs.
    pub fn native_purpose(self, has_clients: bool) -> Option<NativePurpose> {
        match self {
            Self::Mistralrs => None,
            Self::Native if has_clients => Some(NativePurpose::Serving),
            Self::Both | Self::Native => Some(NativePurpose::Sampling),
        }
    }
}

#[cfg(test)]
#[path = "../../crates/cuda/tests/kernels/fake.rs"]
mod fake;

#[cfg(test)]
mod tests {
    use hone_core::types::{Message, Role};
    use hone_cuda::{Arena, ArenaPlan, DeviceMemory};
    use hone_reward::grader::GraderSampling;

    use super::*;

    #[test]
    fn a_judge_on_a_device_answers_as_on_the_processor() {
        fake::run("app::engines::tests::judge", &fake::ALL, &[]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "started by `a_judge_on_a_device_answers_as_on_the_processor`"]
    async fn judge() {
        let config = crate::config::parse("engine.backend = 'native'\nmodel.device = 'cuda:0'");
        let (config, folder) = (config.unwrap(), tempfile::tempdir().unwrap());
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");
        let dir = ModelDir::open(Path::new(path)).unwrap();
        let base = load_base(&config, &dir).await.unwrap();
        let device = CudaDevice { ordinal: 0, kernels: folder.path().join("kernels") };
        let device = device.load(&base, config.train.compute, dir.context()).unwrap();
        let load = async |device| {
            let judge = SelfJudge::default();
            let loaded = judge.load(&config, &dir, folder.path(), Some(&base), device).await;
            loaded.map(|()| judge)
        };
        let asked = |temperature| ModelRequest {
            model: "self".to_owned(),
            messages: vec![Message::new(Role::User, "Is 2 + 3 = 5?")],
            sampling: GraderSampling {
                temperature,
                seed: Some(3),
                max_tokens: Some(12),
                ..GraderSampling::default()
            },
            response_format: serde_json::Value::Null,
        };
        let (host, judge) = (load(None).await.unwrap(), load(Some(&device)).await.unwrap());
        for temperature in [None, Some(1.0)] {
            let asked = asked(temperature);
            let [expected, found] = [&host, &judge].map(|judge| judge.complete(&asked));
            assert_eq!(found.await.unwrap().text, expected.await.unwrap().text);
        }
        // A second one has no room beside what takes the rest.
        let (gpu, mut plan) = (device.model.gpu(), ArenaPlan::new("the rest"));
        plan.add("all", gpu.free_bytes().unwrap() & !0xfff);
        let _rest = Arena::allocate(gpu, vec![plan], 0).unwrap();
        let error = format!("{:#}", load(Some(&device)).await.err().unwrap());
        assert!(error.starts_with("model.device: the judge: "), "{error}");
        assert!(error.contains("keys and values"), "{error}");
    }

    #[test]
    fn backend_sampler_and_clients_select_the_engines() {
        use EnginesNeeded::{Both, Mistralrs, Native};
        let needed = |lines: &str| {
            let config = crate::config::parse(lines).unwrap();
            [true, false].map(|has_clients| EnginesNeeded::of(&config, has_clients))
        };
        assert_eq!(needed(""), [Both, Native]);
        let faster = Both.faster(&Config::default()).unwrap();
        assert!(faster.contains("`--backend native`"), "{faster}");
        assert_eq!(Native.faster(&Config::default()), None);
        assert_eq!(needed("rollout.enabled = false"), [Mistralrs, Native]);
        assert_eq!(needed("rollout.sampler = 'engine'"), [Mistralrs, Mistralrs]);
        for sampler in ["auto", "engine", "native"] {
            let lines = format!("engine.backend = 'native'\nrollout.sampler = '{sampler}'");
            assert_eq!(needed(&lines), [Native, Native], "{sampler}");
        }
    }

    #[test]
    fn a_native_engine_has_the_adapters_and_slots_of_its_purpose() {
        let all = [NativePurpose::Serving, NativePurpose::Sampling, NativePurpose::Judging];
        let kept = |config: &Config| all.map(|purpose| purpose.kept_versions(config));
        let mut config = Config::default();
        assert_eq!(kept(&config), [8, 1, 0]);
        (config.engine.kept_versions, config.engine.slots) = (0, 9);
        assert_eq!(kept(&config), [0, 1, 0]);
        assert_eq!(all.map(|purpose| purpose.slots(&config)), [9, 9, JUDGE_SLOTS]);
        let (serving, sampling) = (NativePurpose::Serving, NativePurpose::Sampling);
        assert_eq!(EnginesNeeded::Native.native_purpose(true), Some(serving));
        assert_eq!(EnginesNeeded::Native.native_purpose(false), Some(sampling));
        assert_eq!(EnginesNeeded::Both.native_purpose(true), Some(sampling));
        assert_eq!(EnginesNeeded::Mistralrs.native_purpose(true), None);
    }
}
