//! Every key of the configuration, with its default.
//!
//! Invariant: only [`load`] reads the environment; the other modules get their own struct.
//! `configs/default.toml` states each key, its default and a comment; a test holds them equal.

mod load;
mod run;
mod validate;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use hone_dataset::DatasetConfig;
use hone_engine::EngineConfig;
use hone_reward::routes::{RouteConfig, RouteList};
use hone_reward::sandbox::SandboxConfig;
use hone_reward::tools::GradersConfig;
use hone_rollout::RolloutConfig;
use hone_store::StoreConfig;
use hone_train::config::TrainConfig;
use hone_train::monitoring::warnings::{HealthMonitor, MonitorState};
use hone_train::policy::PolicyConfig;

pub use load::{environment_names, load, load_from, parse};
pub use run::{EarlyStopConfig, RunConfig};
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

impl Config {
    /// The dataset to use: `[dataset]`, its path from `dataset.path` or else `rollout.dataset`
    /// (validation refuses two different ones); `None` where neither names a file.
    pub fn dataset_in_use(&self) -> Option<DatasetConfig> {
        let path = match &self.rollout.dataset {
            _ if !self.dataset.path.as_os_str().is_empty() => &self.dataset.path,
            Some(path) => path,
            None => return None,
        };
        Some(DatasetConfig { path: path.clone(), ..self.dataset.clone() })
    }

    /// A monitor of the configured limits that continues from `state`. With a dataset, reward parts
    /// have the roles that they have in the dataset's route.
    pub fn health_monitor(&self, state: MonitorState) -> HealthMonitor {
        let only = self.dataset_in_use().map(|_| self.rollout.dataset_route.as_str());
        HealthMonitor::new(&self.run.warnings, &self.routes, only, state)
    }

    /// Whether a reward asks this server's own base model.
    pub fn uses_own_model(&self) -> bool {
        let mut kinds = self.routes.0.iter().flat_map(RouteConfig::parts).map(|part| part.kind);
        kinds.any(|kind| kind.needs_own_model())
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

#[cfg(test)]
mod tests;
