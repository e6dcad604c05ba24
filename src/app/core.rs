//! The daemon without its HTTP surface.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::runtime::{Builder, Runtime};

use hone_core::files::keep_files_private;
use hone_core::metrics::Metrics;
use hone_core::threads::{set_background, to_background};
use hone_core::types::{Interaction, Message, PromptSource, Role};
use hone_cuda::DeviceMemory;
use hone_dataset::{Curriculum, Dataset, DatasetConfig, Prompt};
use hone_engine::{Engine, ModelDir, Publisher};
use hone_model::ModelSpec;
use hone_reward::Routes;
use hone_reward::grader::Backends;
use hone_reward::routes::RouteConfig;
use hone_rollout::Rollout;
use hone_store::{LEDGER, Retainer, Store, StoreConfig};
use hone_train::config::PeakRate;
use hone_train::monitoring::warnings::RewardRoles;
use hone_train::policy::{ExamPrompt, Examiner, Policies, PolicySetup, VersionAuthority};
use hone_train::{Learner, TrainHandle, TrainSetup, TrainWorker};

use super::engines::{Engines, EnginesNeeded};
use super::memory::MemoryReport;
use super::reward_tools;
use super::{claim, open_model};
use crate::config::Config;
use crate::fleet::outbox_of;
use crate::telemetry;

/// Longest time that a run on a dataset waits for the trainer's running step at its end.
pub const RUN_GRACE: Duration = Duration::from_secs(30);

/// The parts that serve, sample, score and train, without the HTTP surface.
pub struct Core {
    pub engine: Arc<dyn Engine>,
    /// Changes the served weights without a record in the ledger, for evaluations.
    pub publisher: Arc<dyn Publisher>,
    /// Records interactions, samples, feedback, steps and versions.
    pub store: Store,
    pub routes: Arc<Routes>,
    /// Services that OpenAI graders may call.
    pub backends: Backends,
    pub policies: Arc<Policies>,
    pub rollout: Rollout,
    pub metrics: Arc<Metrics>,
    trainer: TrainWorker,
    engines: Engines,
    _retainer: Retainer,
    /// Declared last, so that it is dropped last: it runs the tasks of the parts above.
    _background: Background,
}

/// Refuses files of policy versions without the ledger that records them: the daemon would begin from the base
/// model and later replace them.
fn require_ledger(data: &Path) -> anyhow::Result<()> {
    for folder in ["adapters", "checkpoints"] {
        anyhow::ensure!(
            data.join(LEDGER).exists() || is_empty(&data.join(folder)),
            "data.dir {}: there are files in {folder}/, but no {LEDGER}, which records what they are: restore it \
             from a backup, or set data.dir to an empty folder to begin from the base model",
            data.display()
        );
    }
    Ok(())
}

/// Refuses a ledger with optimizer steps without a checkpoint: training would begin from step 0 with another
/// optimizer state, beside versions of later steps.
fn require_checkpoints(config: &Config, data: &Path, store: &Store) -> anyhow::Result<()> {
    let Some(last) = store.last_step()?.filter(|_| config.train.enabled) else { return Ok(()) };
    anyhow::ensure!(
        !is_empty(&data.join("checkpoints")),
        "data.dir {}: {LEDGER} records {} optimizer steps, but there is no checkpoint in checkpoints/: restore it \
         from a backup, set train.enabled = false to serve without training, or set data.dir to an empty folder \
         to begin from the base model",
        data.display(),
        last.step
    );
    Ok(())
}

/// Whether a folder is missing or has no entry.
fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none())
}

impl Core {
    /// Builds and connects the configured parts, which report to `metrics`. In a fleet's server, `authority` decides
    /// about versions. `raters` is the number of API keys that may rate.
    pub async fn start(
        config: &Config,
        metrics: Arc<Metrics>,
        authority: Option<Arc<dyn VersionAuthority>>,
        raters: usize,
    ) -> anyhow::Result<Self> {
        Self::build(config, true, None, metrics, authority, raters).await
    }

    /// [`Self::start`] for a run without clients. The trainer pauses after step `step_limit`. Only the
    /// engine that samples is loaded.
    pub async fn start_offline(config: &Config, step_limit: Option<u64>) -> anyhow::Result<Self> {
        Self::build(config, false, step_limit, Arc::new(Metrics::new()?), None, 0).await
    }

    async fn build(
        config: &Config,
        has_clients: bool,
        step_limit: Option<u64>,
        metrics: Arc<Metrics>,
        authority: Option<Arc<dyn VersionAuthority>>,
        raters: usize,
    ) -> anyhow::Result<Self> {
        // Without clients, training has no other work to yield to.
        if has_clients {
            set_background(config.train.priority);
        }
        keep_files_private();
        telemetry::export_metrics(&metrics);
        let data = &config.data.dir;
        std::fs::create_dir_all(data).with_context(|| format!("data.dir {}", data.display()))?;
        let data = data.canonicalize()?;
        require_ledger(&data)?;
        let outbox = Some(outbox_of(config.fleet.role));
        let ledger = StoreConfig { outbox, ..StoreConfig::default() };
        let store = Store::open(&data.join(LEDGER), &ledger, metrics.clone())?;
        require_checkpoints(config, &data, &store)?;

        let rewards = reward_tools(config, metrics.clone()).await?;
        let backends = rewards.tools.backends();
        let routes = Arc::new(rewards.routes(config).await?);

        let model = open_model(config, &data).await?;
        if config.train.enabled {
            // What cannot be trained is refused before it is served.
            Learner::check(&model, &config.train)?;
        }
        let longest_sample = MemoryReport::at_start(config, &model, has_clients, &metrics)?;
        claim(&data, &model).await?;
        let engines = Engines::start(config, &model, &data, has_clients, &metrics).await?;
        if config.uses_self_judge() {
            let (base, device) = (engines.base.as_ref(), engines.device.as_ref());
            rewards.self_judge.load(config, &model, &data, base, device).await?;
        }
        if let Some(base) = &engines.device {
            let gpu = Arc::clone(base.model.gpu());
            metrics.read_with(move |metrics| {
                // A device that does not answer fails passes, whose errors are logged.
                let free = gpu.free_bytes().unwrap_or_default();
                metrics.device_memory_free.set(i64::try_from(free).unwrap_or(i64::MAX));
            });
        }
        let engine = engines.live.clone();

        let probe = engine.codec().prompt(&[Message::new(Role::User, "What is 2 + 3?")])?;
        let examiner = examiner(config, &engines.rollouts, &store, &routes)?;
        let policies = Arc::new(
            Policies::restore(PolicySetup {
                publisher: engines.publisher.clone(),
                store: store.clone(),
                config: config.policy.clone(),
                metrics: metrics.clone(),
                data_dir: data.clone(),
                probe_prompt: probe,
                examiner: Some(examiner),
                raters,
                authority,
            })
            .await?,
        );

        let background = Background::start()?;
        let settling = policies.clone();
        background.enter(|| tokio::spawn(async move { settling.settle().await }));
        let rollout = background.enter(|| {
            Rollout::start(
                &config.rollout.for_steps_of(config.train.samples_per_step),
                config.dataset_in_use(),
                (config.train.seed, Some(data.join("dataset.json"))),
                engines.rollouts.clone(),
                store.clone(),
                routes.clone(),
                metrics.clone(),
            )
        })?;
        let setup = TrainSetup {
            config: config.train.clone(),
            policy: config.policy.clone(),
            step_limit,
            peak_rates: peak_rates(config, &model)?,
            max_completion_tokens: config.rollout.max_tokens as usize,
            model,
            longest_sample,
            stages_weights: EnginesNeeded::of(config, has_clients).has_mistralrs(),
            is_idle: {
                let engine = engine.clone();
                Arc::new(move || {
                    let load = engine.load();
                    load.live_running + load.live_waiting == 0
                })
            },
            base: engines.base.clone(),
            device: engines.device.clone(),
            model_name: engine.info().name.clone(),
            checkpoints: data.join("checkpoints"),
            store: store.clone(),
            routes: routes.clone(),
            policies: policies.clone(),
            metrics: metrics.clone(),
        };
        let trainer = background.enter(|| TrainWorker::start(setup))?;
        let retainer = Retainer::start(store.clone(), config.store.retention, data.clone())?;
        Ok(Self {
            engine,
            publisher: engines.publisher.clone(),
            store,
            routes,
            backends,
            policies,
            rollout,
            metrics,
            trainer,
            engines,
            _retainer: retainer,
            _background: background,
        })
    }

    /// The trainer's status and commands.
    pub fn trainer(&self) -> TrainHandle {
        self.trainer.handle()
    }

    /// Stops the parts in an order that loses no acknowledged record: the ledger closes last. Requests
    /// of clients that still run after their grace period are cancelled. A step that the trainer does not
    /// finish within `patience` is lost; its groups stay ready.
    pub async fn shutdown(self, patience: Duration) -> anyhow::Result<()> {
        let started = Instant::now();
        tracing::info!("shutdown 2/4: rollout stops");
        self.rollout.stop().await;
        self.engines.close();
        tracing::info!("shutdown 3/4: trainer finishes its step");
        self.trainer.stop(patience.saturating_sub(started.elapsed())).await;
        tracing::info!("shutdown 4/4: ledger commits and closes");
        Ok(self.store.close().await?)
    }
}

/// The first step and the peak learning rate of each stage of the dataset.
fn peak_rates(config: &Config, model: &ModelDir) -> anyhow::Result<Vec<(u64, f64)>> {
    if !config.train.enabled {
        return Ok(Vec::new());
    }
    let parameters = ModelSpec::from_config(&model.config)?.parameters();
    let rate = config.train.learning_rate.of(parameters);
    if config.train.learning_rate == PeakRate::Auto {
        tracing::info!(rate, parameters, "train.learning_rate is \"auto\"");
    }
    let stages = config.dataset_in_use().map(|dataset| dataset.stages.clone()).unwrap_or_default();
    let curriculum = Curriculum::new(&stages)?;
    Ok(curriculum.stages().map(|s| (s.first_step, s.learning_rate(rate))).collect())
}

// A runtime with low-priority threads, for the tasks that no client waits for.

/// The runtime of rollouts, their rewards and the trainer's asynchronous calls. It may be dropped in a task: its
/// threads end by themselves then, because a task must not block on them. `None` only while it is dropped.
struct Background(Option<Runtime>);

impl Background {
    fn start() -> std::io::Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.thread_name("hone-background").on_thread_start(to_background);
        Ok(Self(Some(runtime.enable_all().build()?)))
    }

    /// Runs `f` so that the tasks it spawns run on this runtime.
    fn enter<T>(&self, f: impl FnOnce() -> T) -> T {
        let _guard = self.0.as_ref().map(Runtime::enter);
        f()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

// The gate's prompts and rewards.

/// What the gate needs. Reads the exam's file, if there is one.
fn examiner(
    config: &Config,
    engine: &Arc<dyn Engine>,
    store: &Store,
    routes: &Arc<Routes>,
) -> anyhow::Result<Examiner> {
    let gate = &config.policy.gate;
    let parts: Vec<_> = config.routes.0.iter().flat_map(RouteConfig::parts).collect();
    let roles = RewardRoles::of(parts.iter().map(|part| (part.name.as_str(), part.kind.name())));
    let exam = if gate.exam_file.is_empty() {
        Vec::new()
    } else {
        exam_prompts(config, engine, routes).context("policy.gate.exam_file")?
    };
    Ok(Examiner {
        engine: Arc::clone(engine),
        routes: Arc::clone(routes),
        store: store.clone(),
        temperature: config.rollout.temperature,
        max_tokens: config.rollout.max_tokens,
        exam,
        format_parts: roles.format,
    })
}

/// The rows of the exam's file, which the dataset's route scores.
fn exam_prompts(
    config: &Config,
    engine: &Arc<dyn Engine>,
    routes: &Arc<Routes>,
) -> anyhow::Result<Vec<ExamPrompt>> {
    let route = routes.require("rollout.dataset_route", &config.rollout.dataset_route)?;
    let file = DatasetConfig {
        path: Path::new(&config.policy.gate.exam_file).to_owned(),
        eval_path: Default::default(),
        ..config.dataset.clone()
    };
    let Dataset { train, held_out, .. } = Dataset::open(&file)?;
    let exam = |prompt: &Arc<Prompt>| {
        let interaction = Interaction {
            model: engine.info().name.clone(),
            metadata: prompt.metadata.clone(),
            prompt_ids: engine.codec().prompt(&prompt.messages)?,
            template_hash: engine.codec().template_hash().to_owned(),
            held_out: true,
            ..Interaction::new(PromptSource::Dataset, &route.name, prompt.messages.clone())
        };
        let (interaction, route) = (Arc::new(interaction), Some(Arc::clone(route)));
        anyhow::Ok(ExamPrompt { interaction, route, held_out: true })
    };
    train.iter().chain(&held_out).map(exam).collect()
}
