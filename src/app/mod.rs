//! The composition root: builds the parts, joins them, and takes them apart in numbered phases.

pub mod adapters;
mod background;
mod own_model;
mod sampler;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use background::Background;
use own_model::OwnModel;
use sampler::RolloutSampler;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use hone_core::metrics::Metrics;
use hone_core::threads::set_background;
use hone_core::types::{Message, Role};
use hone_dataset::Curriculum;
use hone_engine::{Codec, Engine, ModelDir, Publisher};
use hone_mistral::MistralEngine;
use hone_reward::grader::Backends;
use hone_reward::routes::RouteConfig;
use hone_reward::sandbox::Setup;
use hone_reward::{GraderEndpoint, LazySandbox, Routes, Tools};
use hone_rollout::Rollout;
use hone_store::Store;
use hone_train;
use hone_train::TrainHandle;
use hone_train::monitoring::warnings::{HealthMonitor, MonitorState};
use hone_train::policy::Policies;

use crate::config::Config;
use crate::http;
use crate::http::AppState;

/// The ledger's file in the data directory.
pub const LEDGER: &str = "ledger.redb";

/// The loop without its HTTP surface: everything that serves, samples, scores and trains.
pub struct Core {
    /// Generates tokens.
    pub engine: Arc<dyn Engine>,
    /// Changes what the engine serves, behind the ledger's back: for evaluations.
    pub publisher: Arc<dyn Publisher>,
    /// The ledger.
    pub store: Store,
    /// Rewards.
    pub routes: Arc<Routes>,
    /// What OpenAI graders may use.
    pub backends: Backends,
    /// Versions.
    pub policies: Arc<Policies>,
    /// Groups.
    pub rollout: Rollout,
    /// Figures.
    pub metrics: Arc<Metrics>,
    trainer: hone_train::TrainWorker,
    sampler: Option<RolloutSampler>,
    /// Last, because the tasks of the parts above run there.
    _background: Background,
}

impl Core {
    /// Builds and joins the parts that the configuration asks for.
    ///
    /// # Errors
    /// If the data directory is in use or the model cannot be served: the message says which and
    /// why.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::with(config, true, None).await
    }

    /// [`Self::start`] for a run that serves nobody, with a trainer that takes no step beyond `until`
    /// before it is told so. Where the native sampler is used, no serving engine is loaded.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub async fn start_alone(config: &Config, until: Option<u64>) -> anyhow::Result<Self> {
        Self::with(config, false, until).await
    }

    async fn with(config: &Config, serves: bool, until: Option<u64>) -> anyhow::Result<Self> {
        // Alone, there is nobody to give way to.
        if serves {
            set_background(config.train.priority);
        }
        let metrics = Arc::new(Metrics::new()?);
        let data = config.data.dir.clone();
        std::fs::create_dir_all(&data).with_context(|| format!("data.dir {}", data.display()))?;
        let data = data.canonicalize()?;
        let store = Store::open(&data.join(LEDGER), &config.store, metrics.clone())?;
        let tools = reward_tools(config, metrics.clone()).await?;
        let backends = tools.tools.backends();
        let routes = Arc::new(Routes::with(&config.routes, &tools.tools)?);

        let native = config.rollout.sampler.is_native(true);
        let (dir, serving) = load_engine(config, &data, serves || !native, metrics.clone()).await?;
        if config.uses_own_model() {
            tools.own_model.load(&dir, &data).await?;
        }
        let sampler = if native && (config.rollout.enabled || serving.is_none()) {
            Some(RolloutSampler::start(config, &dir, serving.as_ref(), metrics.clone()).await?)
        } else {
            None
        };
        let (engine, publisher): (Arc<dyn Engine>, Arc<dyn Publisher>) = match (&serving, &sampler)
        {
            (Some(serving), None) => (serving.clone(), serving.clone()),
            (Some(serving), Some(own)) => (serving.clone(), own.publisher(Some(serving))),
            (None, Some(own)) => (own.engine.clone(), own.publisher(None)),
            (None, None) => anyhow::bail!("nothing generates"),
        };
        let probe = engine
            .codec()
            .prompt(&[Message { role: Role::User, content: "What is 2 + 3?".to_owned() }])?;
        let policies = Arc::new(
            Policies::restore(
                publisher.clone(),
                store.clone(),
                config.policy.clone(),
                metrics.clone(),
                &data,
                probe,
            )
            .await?,
        );
        let samples: Arc<dyn Engine> = match &sampler {
            Some(sampler) => sampler.engine.clone(),
            None => engine.clone(),
        };
        let background = Background::start()?;
        let rollout = || {
            Rollout::start(
                &config.rollout,
                config.dataset_in_use().as_ref(),
                (config.train.seed, Some(data.join("dataset.json"))),
                samples,
                store.clone(),
                routes.clone(),
                metrics.clone(),
            )
        };
        let rollout = background.enter(rollout)?;
        let parts = hone_train::TrainSetup {
            config: config.train.clone(),
            publish_every: config.policy.publish_every,
            step_limit: until,
            peak_rates: peak_rates(config)?,
            max_completion_tokens: config.rollout.max_tokens as usize,
            model: dir,
            base: sampler.as_ref().map(|sampler| sampler.base.clone()),
            model_name: engine.info().name.clone(),
            checkpoints: data.join("checkpoints"),
            store: store.clone(),
            routes: routes.clone(),
            policies: policies.clone(),
            metrics: metrics.clone(),
        };
        let trainer = background.enter(|| hone_train::TrainWorker::start(parts))?;
        Ok(Self {
            engine,
            publisher,
            store,
            routes,
            backends,
            policies,
            rollout,
            metrics,
            trainer,
            sampler,
            _background: background,
        })
    }

    /// The trainer's status and commands.
    pub fn trainer(&self) -> TrainHandle {
        self.trainer.handle()
    }

    /// Takes the parts apart, in an order in which nothing that was acknowledged is lost.
    ///
    /// # Errors
    /// If the ledger cannot be closed.
    pub async fn shutdown(self) -> anyhow::Result<()> {
        tracing::info!("shutdown 2/4: rollout stops");
        self.rollout.stop().await;
        if let Some(sampler) = &self.sampler {
            sampler.engine.close(false);
        }
        tracing::info!("shutdown 3/4: trainer finishes its step");
        self.trainer.stop(Duration::from_secs(30)).await;
        tracing::info!("shutdown 4/4: ledger commits and closes");
        Ok(self.store.close().await?)
    }
}

/// A daemon that is up.
pub struct Daemon {
    /// Where it listens.
    pub addr: SocketAddr,
    stop: watch::Sender<bool>,
    server: JoinHandle<std::io::Result<()>>,
    monitor: JoinHandle<()>,
    core: Core,
}

/// How often the ledger is looked at for further steps.
const LOOK: Duration = Duration::from_secs(1);

/// Tells what goes wrong with the learning, from the steps taken from now on.
async fn watch_steps(mut monitor: HealthMonitor, store: Store, metrics: Arc<Metrics>) {
    let mut seen = store.last_step().ok().flatten().map_or(0, |last| last.step);
    loop {
        tokio::time::sleep(LOOK).await;
        // A ledger that cannot be read is told of where that matters.
        for record in store.steps(seen + 1, 64).unwrap_or_default() {
            seen = record.step;
            monitor.observe(&record, &metrics);
        }
    }
}

/// Starts everything that the configuration asks for and returns once requests are answered.
///
/// # Errors
/// If the address is taken, and as for [`Core::start`].
pub async fn start(config: Config) -> anyhow::Result<Daemon> {
    let listener = TcpListener::bind(config.server.bind)
        .await
        .with_context(|| format!("server.bind {}", config.server.bind))?;
    let addr = listener.local_addr()?;
    let core = Core::start(&config).await?;
    let (stop, stopped) = watch::channel(false);
    let state = AppState::new(
        core.engine.clone(),
        core.store.clone(),
        core.routes.clone(),
        core.backends.clone(),
        core.rollout.clone(),
        core.policies.clone(),
        core.trainer(),
        core.metrics.clone(),
        config.server.clone(),
    );
    let server = tokio::spawn(http::serve(listener, state, wait_for(stopped)));
    let monitor = config.health_monitor(MonitorState::default());
    let monitor = watch_steps(monitor, core.store.clone(), core.metrics.clone());
    let monitor = tokio::spawn(monitor);
    let data = config.data.dir.display();
    tracing::info!(%addr, model = %config.model.path, %data, "ready");
    Ok(Daemon { addr, stop, server, monitor, core })
}

/// The learning rates of the dataset's stages.
fn peak_rates(config: &Config) -> anyhow::Result<Vec<(u64, f64)>> {
    let stages = config.dataset_in_use().map(|dataset| dataset.stages).unwrap_or_default();
    let curriculum = Curriculum::new(&stages)?;
    let rate = config.train.learning_rate;
    Ok(curriculum.stages().map(|s| (s.first_step, s.learning_rate.resolve(rate))).collect())
}

/// The tools of the rewards that a configuration asks for.
pub struct RewardTools {
    /// For [`Routes::with`].
    pub tools: Tools,
    /// The model behind [`Tools::own_model`].
    own_model: Arc<OwnModel>,
}

/// Sets up what the configured rewards need: the sandbox is tried before it is trusted.
///
/// # Errors
/// If a reward runs Python and it cannot be confined here, or a client cannot be made.
pub async fn reward_tools(config: &Config, metrics: Arc<Metrics>) -> anyhow::Result<RewardTools> {
    let own_model = Arc::new(OwnModel::default());
    let python = Arc::new(LazySandbox::new(Setup {
        python: config.sandbox.python.clone(),
        concurrency: config.sandbox.concurrency,
        uid: config.sandbox.uid,
        ..Setup::default()
    }));
    let mut kinds = config.routes.0.iter().flat_map(RouteConfig::parts).map(|part| part.kind);
    let sandbox = match kinds.any(|kind| kind.needs_sandbox()) {
        true => Some(python.get().await.context("the sandbox")?),
        false => None,
    };
    let endpoint = GraderEndpoint::new(&config.graders, &metrics).context("[graders]")?;
    let tools = Tools {
        metrics: Some(metrics),
        own_model: Some(own_model.clone()),
        endpoint,
        sandbox,
        python: Some(python),
    };
    Ok(RewardTools { tools, own_model })
}

/// The tokenizer of the configured model and its rewards: no engine is loaded but that of a judge
/// that asks this server's own base model.
///
/// # Errors
/// If the model cannot be found or read, or as for [`reward_tools`].
pub async fn rewards_alone(config: &Config) -> anyhow::Result<(Codec, Routes)> {
    let data = &config.data.dir;
    let dir = open_model(config, data)?;
    let tools = reward_tools(config, Arc::new(Metrics::new()?)).await?;
    let routes = Routes::with(&config.routes, &tools.tools)?;
    if config.uses_own_model() {
        tools.own_model.load(&dir, data).await?;
    }
    Ok((Codec::load(&dir)?, routes))
}

/// What the trainer would need in memory for the configured model, by part, as a table, and what the
/// machine has left.
///
/// # Errors
/// If the model cannot be found, read or trained.
pub fn explain_memory(config: &Config) -> anyhow::Result<String> {
    let dir = open_model(config, &config.data.dir)?;
    hone_train::Learner::check(&dir, &config.train)?;
    let spec = hone_model::ModelSpec::from_config(&dir.config)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if config.train.threads == 0 { cores } else { config.train.threads };
    let base = hone_train::memory::BaseMemory::read(&spec, &dir.weights, config.train.base_dtype)?;
    let plan = hone_train::MemoryPlan::new(&spec, base, &config.train, threads, 0);
    let available = hone_train::available_memory().map(|bytes| {
        format!("\n{:<18} {:>9.1} MiB", "available", bytes as f64 / f64::from(1 << 20))
    });
    Ok(format!("{plan}{}", available.unwrap_or_default()))
}

/// Finds or unpacks the model.
fn open_model(config: &Config, data: &Path) -> anyhow::Result<ModelDir> {
    let wanted = &config.model.path;
    let path = if wanted.is_empty() {
        hone_model::embedded::unpack(data).context("unpacking the embedded model")?
    } else {
        ModelDir::resolve(wanted, &data.join("hub"))?
    };
    let mut dir = ModelDir::open(&path)?;
    if !config.model.name.is_empty() {
        dir.name.clone_from(&config.model.name);
    } else if wanted.is_empty() {
        hone_model::embedded::NAME.clone_into(&mut dir.name);
    } else if !Path::new(wanted).exists() {
        dir.name.clone_from(wanted);
    }
    Ok(dir)
}

/// Finds or unpacks the model and, where it `serves`, loads it into the engine, off the async
/// threads.
async fn load_engine(
    config: &Config,
    data: &Path,
    serves: bool,
    metrics: Arc<Metrics>,
) -> anyhow::Result<(ModelDir, Option<Arc<MistralEngine>>)> {
    let (config, data) = (config.clone(), data.to_owned());
    tokio::task::spawn_blocking(move || {
        let dir = open_model(&config, &data)?;
        if config.train.enabled {
            // What the trainer refuses is told before anything is served.
            hone_train::Learner::check(&dir, &config.train)?;
        }
        claim(&data, &dir)?;
        if !serves {
            return Ok((dir, None));
        }
        let normalized = dir.write_normalized(&data.join("models"))?;
        let engine = MistralEngine::start(&dir, &normalized, &config.engine, metrics)?;
        anyhow::Ok((dir, Some(engine)))
    })
    .await?
}

/// Writes down which model the data directory belongs to, and refuses another one: its adapters,
/// checkpoints and recorded ids would mean nothing.
fn claim(data: &Path, model: &ModelDir) -> anyhow::Result<()> {
    let mut hasher = Sha256::new();
    for file in ["config.json", "tokenizer.json"] {
        hasher.update(std::fs::read(model.path.join(file))?);
    }
    for file in &model.weights {
        hasher.update(std::fs::metadata(file)?.len().to_le_bytes());
    }
    let digest: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let path = data.join("model.json");
    if !path.exists() {
        let claimed = serde_json::json!({ "name": model.name, "sha256": digest });
        let whole = data.join("model.json.tmp");
        std::fs::write(&whole, format!("{claimed:#}\n"))?;
        return Ok(std::fs::rename(whole, path)?);
    }
    let held: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)
        .with_context(|| format!("{} is damaged", path.display()))?;
    anyhow::ensure!(
        held.get("sha256").and_then(|v| v.as_str()) == Some(digest.as_str()),
        "data.dir {} holds the training of the model {}, not of {}: give each model a data \
         directory of its own",
        data.display(),
        held.get("name").unwrap_or(&serde_json::Value::Null),
        model.path.display(),
    );
    Ok(())
}

async fn wait_for(mut stopped: watch::Receiver<bool>) {
    // A dropped sender means that the daemon is going away too.
    let _gone = stopped.wait_for(|stop| *stop).await;
}

impl Daemon {
    /// Takes the daemon apart: nothing that was acknowledged is lost, running requests finish
    /// within `server.shutdown_grace_seconds`.
    ///
    /// # Errors
    /// If the ledger cannot be closed or the server failed; the later phases run all the same.
    pub async fn shutdown(self) -> anyhow::Result<()> {
        tracing::info!("shutdown 1/4: no new requests, running ones finish");
        self.stop.send_replace(true);
        self.monitor.abort();
        let served = self.server.await;
        let closed = self.core.shutdown().await;
        served??;
        closed
    }
}

/// Returns on Ctrl-C or SIGTERM.
///
/// # Errors
/// If signals cannot be listened to.
pub async fn until_told_to_stop() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};

        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            result = tokio::signal::ctrl_c() => result,
            _ = terminate.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}
