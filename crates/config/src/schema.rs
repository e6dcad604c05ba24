//! The sections of the configuration that this package defines, and the whole configuration.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use hone_dataset::DatasetConfig;
use hone_engine::EngineConfig;
use hone_http::config::ServerConfig;
use hone_hub::HubConfig;
use hone_model::weights::{LoadOptions, Quantize};
use hone_reward::routes::{RouteConfig, RouteList};
use hone_reward::sandbox::SandboxConfig;
use hone_reward::tools::GradersConfig;
use hone_rollout::RolloutConfig;
use hone_store::Retention;
use hone_train::config::{DeviceChoice, TrainConfig};
use hone_train::monitoring::warnings::{HealthMonitor, MonitorState};
use hone_train::policy::PolicyConfig;

use super::run::RunConfig;
use super::services::Collector;

/// The whole configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Served model.
    pub model: ModelConfig,
    /// HTTP server.
    pub server: ServerConfig,
    /// Data directory.
    pub data: DataConfig,
    /// Hugging Face hub, which the loader reads from the environment.
    #[serde(skip)]
    pub hub: HubConfig,
    /// Ledger.
    pub store: LedgerConfig,
    /// Serving engine.
    pub engine: EngineConfig,
    /// Sampling of groups for training.
    pub rollout: RolloutConfig,
    /// Dataset of prompts.
    pub dataset: DatasetConfig,
    /// Trainer.
    pub train: TrainConfig,
    /// Sandbox for the code of completions and graders.
    pub sandbox: SandboxConfig,
    /// Endpoint of model graders.
    pub graders: GradersConfig,
    /// `hone train`: evaluations, tables, early stop, warnings.
    pub run: RunConfig,
    /// Publication and retention of policy versions.
    pub policy: PolicyConfig,
    /// Servers and trainers on several machines.
    pub fleet: FleetConfig,
    /// Logging.
    pub log: LogConfig,
    /// Rewards by request. The first matching route applies, so the last one should match all.
    #[serde(rename = "route")]
    pub routes: RouteList,
}

/// `[model]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A Hugging Face directory or hub id; empty for the embedded model.
    pub path: String,
    /// Names in `/v1/models`, the model's own first; empty for the name of the directory or the hub id.
    pub names: Vec<String>,
    /// Whether the frozen matrices are quantized while they are loaded. mistral.rs cannot serve these.
    pub quantize: Quantize,
    /// What computes the passes of the trainer and of the native engine: `cpu`, `cuda:N`, or `auto`.
    pub device: DeviceChoice,
}

hone_core::parameters! {
    /// `[data]`.
    pub struct DataConfig {
        /// Directory of the ledger, adapters and checkpoints.
        pub dir: PathBuf = PathBuf::from("hone-data"),
        /// Free bytes of its file system below which the server is not ready; 0 for any.
        #[serde(skip)]
        pub min_free_bytes: u64 = 256 << 20,
    }
}

hone_core::parameters! {
    /// `[store]`.
    pub struct LedgerConfig {
        /// How long records are kept.
        pub retention: Retention = Retention::default(),
    }
}

/// What a process of a fleet does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetRole {
    /// It serves and learns alone.
    #[default]
    All,
    /// It serves, grades and records.
    Server,
    /// It learns from the records of all servers and publishes.
    Trainer,
}

hone_core::parameters! {
    /// `[fleet]`.
    pub struct FleetConfig {
        /// The object store that servers and trainers share: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or
        /// `az://CONTAINER/PREFIX`; empty without a fleet. Credentials and endpoint come from the environment
        /// (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
        pub url: String = String::new(),
        /// PEM file of certificates to trust in addition to the system's; empty for none.
        pub ca_file: PathBuf = PathBuf::new(),
        /// Name of this process in `hone fleet status`; empty for the address that it listens on.
        pub name: String = String::new(),
        /// What the process does, which the flag `--role` says.
        #[serde(skip)]
        pub role: FleetRole = FleetRole::All,
    }
}

impl Config {
    /// How the frozen weights are held in memory.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions { dtype: self.train.base_dtype, quantize: self.model.quantize }
    }

    /// `[dataset]`, or `None` if its path is unset.
    pub fn dataset_in_use(&self) -> Option<&DatasetConfig> {
        Some(&self.dataset).filter(|dataset| !dataset.path.as_os_str().is_empty())
    }

    /// A monitor of the configured limits that continues from `state`. With a dataset, only the
    /// dataset's route determines the roles of reward parts.
    pub fn health_monitor(&self, state: MonitorState) -> HealthMonitor {
        let only = self.dataset_in_use().map(|_| self.rollout.dataset_route.as_str());
        HealthMonitor::new(&self.run.warnings, &self.routes, only, state)
    }

    /// Whether a judge uses the served base model.
    pub fn uses_self_judge(&self) -> bool {
        let mut kinds = self.routes.0.iter().flat_map(RouteConfig::parts).map(|part| part.kind);
        kinds.any(|kind| kind.needs_self_judge())
    }
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Human-readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

hone_core::parameters! {
    /// `[log]`.
    pub struct LogConfig {
        /// A tracing filter such as `info` or `hone=debug,warn`.
        pub level: String = "info".to_owned(),
        /// Format of log lines.
        pub format: LogFormat = LogFormat::Text,
        /// The collector of traces and metrics, which the loader reads from the environment.
        #[serde(skip)]
        pub collector: Option<Collector> = None,
    }
}
