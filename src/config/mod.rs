//! Every key of the configuration, with its default.
//!
//! Invariant: only [`load`] reads the environment; the other modules get their own struct.
//! `configs/default.toml` states each key, its default and a comment; a test holds them equal.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

mod dataset;
mod describe;
mod graders;
mod load;
mod lora;
mod modules;
mod objective;
mod range;
pub mod reward;
mod run;
mod secret;
#[cfg(test)]
mod shipped_tests;
mod train;
mod validate;

pub use dataset::{
    DatasetConfig, DatasetFormat, DifficultyConfig, FewShot, MixConfig, OnBadRow, SamplingStrategy,
    StageConfig,
};
pub use describe::Problem;
pub use graders::GradersConfig;
pub use load::{environment_names, load, load_from, parse};
pub use lora::{LinearKind, LoraConfig, LoraInit};
pub use modules::{Factor, Modules, Patterns, Rules};
pub use objective::{
    AdvantageBaseline, AdvantageScale, CorrectionConfig, CorrectionMode, EntropyConfig, KlConfig,
    KlEstimator, LossKind, RatioLevel, RewardAggregation, VespoConfig, ZeroVariance,
};
pub use reward::{
    Aggregate, CallLimits, FeedbackParams, FeedbackType, JudgeMode, JudgeParams, KINDS, METRICS,
    OWN_MODEL, Preset, RewardConfig, RewardKind, RouteConfig, RouteList, Rubric, ShareRule,
    TokenLimitField, WebhookParams,
};
pub use run::{EarlyStopConfig, RunConfig, WarningConfig};
pub use secret::Secret;
pub use train::{
    BackgroundPriority, BaseDtype, OptimizerKind, Recompute, ScheduleKind, TrainConfig,
};
pub use validate::{ConfigError, validate};

/// The whole configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Which model to serve.
    pub model: ModelConfig,
    /// HTTP.
    pub server: ServerConfig,
    /// Where things are kept.
    pub data: DataConfig,
    /// Token generation.
    pub engine: EngineConfig,
    /// The ledger.
    pub store: StoreConfig,
    /// Shadow groups.
    pub rollout: RolloutConfig,
    /// The dataset.
    pub dataset: DatasetConfig,
    /// The trainer.
    pub train: TrainConfig,
    /// Where code of completions and graders runs.
    pub sandbox: SandboxConfig,
    /// Whom OpenAI's model graders ask.
    pub graders: GradersConfig,
    /// `hone train`.
    pub run: RunConfig,
    /// Versions.
    pub policy: PolicyConfig,
    /// Log lines.
    pub log: LogConfig,
    /// Which rewards apply to which requests; the first match wins, the last should match all.
    #[serde(rename = "route")]
    pub routes: RouteList,
}

/// Which model to serve.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A Hugging Face directory or hub id; empty is the embedded model.
    pub path: String,
    /// The name in `/v1/models`; empty takes the directory's or the hub id.
    pub name: String,
}

/// HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Address and port; port 0 picks a free one.
    pub bind: SocketAddr,
    /// Bearer keys for `/v1`; empty leaves it open.
    pub client_keys: Vec<String>,
    /// Bearer keys for `/admin`; empty allows loopback clients only.
    pub admin_keys: Vec<String>,
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
    /// `max_tokens` where a request names none.
    pub default_max_tokens: u32,
    /// Seconds that shutdown waits for running requests.
    pub shutdown_grace_seconds: u64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            client_keys: Vec::new(),
            admin_keys: Vec::new(),
            max_body_bytes: 1 << 20,
            default_max_tokens: 256,
            shutdown_grace_seconds: 30,
        }
    }
}

/// Where things are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Ledger, adapters, checkpoints.
    pub dir: PathBuf,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { dir: PathBuf::from("hone-data") }
    }
}

/// Token generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Engines a colour, each running one sequence at a time on CPU. Two colours are loaded, so
    /// memory holds twice this many copies of the weights.
    pub replicas: usize,
    /// Live requests that may wait for a slot before 429.
    pub queue: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { replicas: 1, queue: 64 }
    }
}

/// The ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreConfig {
    /// Milliseconds for which a commit gathers writes.
    pub group_commit_ms: u64,
    /// Writes that may wait; beyond it shadow samples are shed first, and counted.
    pub queue: usize,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { group_commit_ms: 2, queue: 8192 }
    }
}

/// Shadow groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutConfig {
    /// Whether to sample shadow siblings at all.
    pub enabled: bool,
    /// Members of a group, the served completion included where it may be trained on.
    pub group_size: usize,
    /// Sampling temperature of shadows.
    pub temperature: f32,
    /// Token limit of shadows.
    pub max_tokens: u32,
    /// Shadow sequences that may run at once; 0 takes every slot that no client needs.
    pub max_concurrent: usize,
    /// What samples shadows.
    pub sampler: SamplerKind,
    /// Tokens, prompts included, whose keys and values the native sampler's cache holds.
    pub max_batch_tokens: usize,
    /// Prompts that may wait for a group; a full queue skips new prompts and counts them.
    pub queue: usize,
    /// Milliseconds a completed group waits for its client's feedback before it is handed on.
    pub feedback_wait_ms: u64,
    /// The same as `dataset.path`: prompts that are sampled when live ones run out.
    pub dataset: Option<PathBuf>,
    /// Route whose rewards score the dataset.
    pub dataset_route: String,
    /// Hold rollout back while this many groups wait for the trainer.
    pub max_ready_groups: usize,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            group_size: 8,
            temperature: 1.0,
            max_tokens: 256,
            max_concurrent: 0,
            sampler: SamplerKind::Auto,
            max_batch_tokens: 32_768,
            queue: 256,
            feedback_wait_ms: 500,
            dataset: None,
            dataset_route: "default".to_owned(),
            max_ready_groups: 32,
        }
    }
}

/// What samples shadows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum SamplerKind {
    /// The native sampler on the CPU, else the engine.
    #[default]
    Auto,
    /// The engine that serves, in slots that no client needs.
    Engine,
    /// The trainer's own model, in batches.
    Native,
}

impl SamplerKind {
    /// Whether the native sampler is meant where the engine runs on the CPU or not.
    pub fn is_native(self, cpu: bool) -> bool {
        match self {
            Self::Auto => cpu,
            Self::Engine => false,
            Self::Native => true,
        }
    }
}

/// Where code of completions and graders runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxConfig {
    /// The Python interpreter: a path, or a name to be found on `PATH`.
    pub python: PathBuf,
    /// Programs that may run at once.
    pub concurrency: usize,
    /// The user id that programs get where the daemon is root; nothing else should run under it.
    pub uid: u32,
}

impl Default for SandboxConfig {
    fn default() -> Self {
        Self { python: PathBuf::from("python3"), concurrency: 2, uid: 65_534 }
    }
}

impl Config {
    /// Whether a reward asks this server's own base model.
    pub fn uses_own_model(&self) -> bool {
        let mut kinds = self.routes.0.iter().flat_map(RouteConfig::parts).map(|part| part.kind);
        kinds.any(|kind| kind.needs_own_model())
    }
}

/// Versions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    /// Optimiser steps between published versions.
    pub publish_every: u64,
    /// Adapter directories to keep, the active and the previous one always among them.
    pub keep_versions: usize,
    /// Reject a version whose served log-probabilities differ from the trainer's by more than
    /// this in the mean.
    pub parity_tolerance: f64,
    /// Tokens that the parity probe samples.
    pub probe_tokens: u32,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self { publish_every: 1, keep_versions: 20, parity_tolerance: 1e-3, probe_tokens: 16 }
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Log lines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// A tracing filter such as `info` or `hone=debug,warn`.
    pub level: String,
    /// Text or JSON.
    pub format: LogFormat,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}
