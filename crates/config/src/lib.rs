//! The configuration: its keys and defaults, and how it is loaded and validated.
//!
//! Invariant: only [`load`] reads the environment; every other module receives its section as a
//! struct. `configs/default.toml` contains each key with its default; a test compares both.

pub mod flags;
mod run;
mod schema;
mod services;
mod trl;
mod validate;

use std::collections::BTreeMap;
use std::path::Path;

use toml::{Table, Value};

use hone_core::config::describe::{Problem, describe, nearest};
use hone_core::types::new_uuid;
use hone_hub::HubConfig;

use trl::{answer, translated};
use validate::check;

pub use hone_http::config::{
    ConnectionsConfig, GraderLimits, KeyConfig, KeyExpiry, KeyHash, KeyLimits, KeyScope,
    ServerConfig, TlsConfig, hash_key,
};
pub use run::{EarlyStopConfig, RunConfig, RunTracker};
pub use schema::{Config, DataConfig, FleetConfig, FleetRole, LogConfig, LogFormat, ModelConfig};
pub use services::{Collector, MlflowServer};
pub use trl::{Counterpart, counterpart, trl_names};
pub use validate::validate;

pub use hone_core::config::ConfigError;

// The effective configuration as text, for the reports of runs.

/// The whole configuration as TOML that [`load`] reads again. Each bearer key of
/// `[server]` is replaced by a random one: without a key, the server would accept every client.
///
/// # Errors
/// Never for a configuration that was loaded.
pub fn effective(config: &Config) -> Result<String, toml::ser::Error> {
    let mut shown = config.clone();
    let server = &mut shown.server;
    let hidden = || format!("hidden-{}", new_uuid().simple());
    for key in server.client_keys.iter_mut().chain(&mut server.admin_keys) {
        *key = hidden();
    }
    for entry in &mut server.keys {
        (entry.key, entry.sha256) = (hidden(), String::new());
    }
    toml::to_string(&shown)
}

/// The keys whose values differ from the defaults, as [`values`] shows them.
///
/// # Errors
/// As [`effective`].
pub fn differences(config: &Config) -> Result<Vec<(String, String)>, toml::ser::Error> {
    let defaults = values(&Config::default())?;
    let different = values(config)?.into_iter().filter(|pair| !defaults.contains(pair));
    Ok(different.collect())
}

/// Every key with its value as TOML, in alphabetical order, without secrets. Of a list of tables, such as the stages of
/// a dataset, only the length is shown; routes are left out.
///
/// # Errors
/// As [`effective`].
pub fn values(config: &Config) -> Result<Vec<(String, String)>, toml::ser::Error> {
    let table = effective(config)?.parse::<Table>().unwrap_or_default();
    let keys = flattened(&table).into_iter();
    let shown = keys.filter(|(key, _)| key != "route").map(|(key, value)| {
        let value = match &value {
            Value::Array(items) if KEYS.contains(&key.as_str()) && !items.is_empty() => {
                "hidden".to_owned()
            }
            Value::Array(items) if items.iter().any(Value::is_table) => match items.len() {
                1 => "1 table".to_owned(),
                n => format!("{n} tables"),
            },
            other => other.to_string(),
        };
        (key, value)
    });
    Ok(shown.collect())
}

// Loads the configuration from a file and the environment, which takes precedence. The caller then
// applies command-line flags. No other module reads the environment.

/// Keys without a default, which the serialized default configuration therefore does not contain, each
/// with a value of its type.
const OPTIONAL: [(&str, Value); 2] =
    [("run.warnings.reward_max", Value::Float(0.0)), ("train.warmup_steps", Value::Float(0.0))];

/// Parses and validates TOML, without the environment.
///
/// # Errors
/// A sentence with the key, its value and the allowed values.
pub fn parse(text: &str) -> Result<Config, ConfigError> {
    read(table(text, "the configuration")?, &BTreeMap::new())
}

/// [`load_from`] with the environment of the process.
///
/// # Errors
/// As [`load_from`].
pub fn load(file: Option<&Path>) -> Result<Config, ConfigError> {
    // Variables of Hone are Unicode, so others are skipped.
    let env = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    load_from(file, env)
}

/// Loads and validates the defaults, overridden by `file`, overridden by the `HONE_*` variables in
/// `env`. A caller that changes the result must call [`validate`] again.
///
/// The name of a variable is the path of its key in capitals, joined by `_`, such as
/// `HONE_TRAIN_LORA_R`; `HONE_TRAIN__LORA__R` is the same. List items are separated by commas. Lists of
/// tables (routes, few-shot examples, stages, API keys) and actions of warnings can be set only in the file. A `HONE_<SECTION>_*`
/// variable that matches no key is refused; other `HONE_*` variables are ignored, because Kubernetes
/// sets some, such as `HONE_PORT`, for a service with the name hone.
///
/// # Errors
/// A sentence with the key (and the variable), its value and the allowed values.
pub fn load_from(
    file: Option<&Path>,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<Config, ConfigError> {
    let mut root = match file {
        None => Table::new(),
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { file: path.to_owned(), source })?;
            table(&text, &name)?
        }
    };
    let env: BTreeMap<String, String> = env.into_iter().collect();
    let set_by = apply(&mut root, env.iter().map(|(k, v)| (k.clone(), v.clone())))?;
    let mut config = read(root, &set_by)?;
    for (i, route) in config.routes.0.iter_mut().enumerate() {
        for (j, part) in route.rewards.iter_mut().enumerate() {
            part.kind
                .resolve(&|name| env.get(name).cloned())
                .map_err(|error| ConfigError::Invalid(format!("route[{i}].reward[{j}].{error}")))?;
        }
    }
    let resolved = config.graders.resolve(|name| env.get(name).cloned());
    resolved.map_err(|error| ConfigError::Invalid(format!("graders.api_key_env{error}")))?;
    let variable = |name: &str| env.get(name).filter(|value| !value.is_empty()).cloned();
    config.log.collector = Collector::from_environment(variable).map_err(ConfigError::Invalid)?;
    if config.run.tracker == RunTracker::Mlflow {
        let server = MlflowServer::from_environment(variable).map_err(ConfigError::Invalid)?;
        config.run.mlflow = Some(server);
    }
    let hub = HubConfig::from_environment(|name| env.get(name).cloned());
    config.hub = hub.map_err(ConfigError::Invalid)?;
    Ok(config)
}

/// Every key and the environment variable that sets it.
pub fn environment_names() -> Vec<(String, String)> {
    keys().into_keys().map(|key| (variable(&key), key)).collect()
}

fn variable(key: &str) -> String {
    format!("HONE_{}", key.replace('.', "_").to_uppercase())
}

fn table(text: &str, name: &str) -> Result<Table, ConfigError> {
    text.parse::<Table>().map_err(|e| {
        let line = e.span().map_or(1, |s| text[..s.start.min(text.len())].lines().count().max(1));
        let message = e.message().lines().collect::<Vec<_>>().join(", ");
        ConfigError::Invalid(format!("{name} is not valid TOML at line {line}: {message}"))
    })
}

/// Lists of tables, which variables cannot set.
const TABLES: [&str; 4] = ["route", "dataset.few_shot", "dataset.stage", "server.keys"];

/// Lists of API keys. A variable without a value, which a missing secret causes, must not empty them.
const KEYS: [&str; 2] = ["server.client_keys", "server.admin_keys"];

/// Every key that a variable can set, with a value of its type.
fn keys() -> BTreeMap<String, Value> {
    let mut found: BTreeMap<String, Value> =
        OPTIONAL.map(|(key, value)| (key.to_owned(), value)).into();
    // The default configuration always serializes; a test checks it.
    if let Ok(table) = Table::try_from(Config::default()) {
        let set = flattened(&table).into_iter();
        found.extend(set.filter(|(key, _)| !TABLES.contains(&key.as_str())));
    }
    found
}

/// The values in nested tables by their paths.
fn flattened(table: &Table) -> BTreeMap<String, Value> {
    fn walk(prefix: &str, table: &Table, found: &mut BTreeMap<String, Value>) {
        for (name, value) in table {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match value {
                Value::Table(inner) => walk(&key, inner, found),
                _ => drop(found.insert(key, value.clone())),
            }
        }
    }
    let mut found = BTreeMap::new();
    walk("", table, &mut found);
    found
}

/// Sets the keys that `env` contains. Returns each key that was set with the name of its variable.
fn apply(
    root: &mut Table,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<BTreeMap<String, String>, ConfigError> {
    let keys = keys();
    let by_variable: BTreeMap<String, &String> = keys.keys().map(|k| (variable(k), k)).collect();
    let mut sections: Vec<String> =
        keys.keys().filter_map(|k| k.split_once('.')).map(|(s, _)| variable(s) + "_").collect();
    sections.dedup();
    let mut set_by = BTreeMap::new();
    for (name, text) in env {
        if !name.starts_with("HONE_") {
            continue;
        }
        let plain = name.replace("__", "_");
        if let Some(key) = by_variable.get(&plain) {
            if KEYS.contains(&key.as_str()) && text.split(',').all(|item| item.trim().is_empty()) {
                let what = "lists no key, which would open the server to everyone";
                return Err(ConfigError::Invalid(format!(
                    "{name} ({key}) {what}: unset the variable, or list keys"
                )));
            }
            insert(root, key, from_text(keys.get(*key), &text))?;
            set_by.insert((*key).clone(), name);
        } else if let Some(rest) = sections.iter().find_map(|s| plain.strip_prefix(s.as_str())) {
            let known: Vec<&str> = by_variable.keys().map(String::as_str).collect();
            let near = || nearest(&plain, &known).map(|near| format!("did you mean {near}?"));
            let hint = answer(&rest.to_lowercase()).or_else(near);
            let hint = hint.map_or_else(String::new, |hint| format!(": {hint}"));
            return Err(ConfigError::Invalid(format!(
                "{name} names no key of the configuration{hint}"
            )));
        }
    }
    Ok(set_by)
}

/// Converts a variable's text to the type of its key. Text that does not parse stays text, so that
/// deserialization reports it with the key.
fn from_text(typed: Option<&Value>, text: &str) -> Value {
    let as_text = || Value::String(text.to_owned());
    match typed {
        Some(Value::Integer(_)) => text.parse().map_or_else(|_| as_text(), Value::Integer),
        Some(Value::Float(_)) => text.parse().map_or_else(|_| as_text(), Value::Float),
        Some(Value::Boolean(_)) => text.parse().map_or_else(|_| as_text(), Value::Boolean),
        Some(Value::Array(_)) => {
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            Value::Array(items.map(|item| Value::String(item.to_owned())).collect())
        }
        _ => as_text(),
    }
}

fn insert(root: &mut Table, key: &str, value: Value) -> Result<(), ConfigError> {
    let (sections, name) = key.rsplit_once('.').unwrap_or(("", key));
    let mut table = root;
    for section in sections.split('.').filter(|s| !s.is_empty()) {
        let entry = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
        let Value::Table(inner) = entry else {
            let problem = Problem::value(section, entry, "a table");
            return Err(ConfigError::Invalid(problem.sentence()));
        };
        table = inner;
    }
    table.insert(name.to_owned(), value);
    Ok(())
}

fn read(root: Table, set_by: &BTreeMap<String, String>) -> Result<Config, ConfigError> {
    let root = Value::Table(root);
    let typed: Result<Config, Problem> = serde_path_to_error::deserialize(root.clone())
        .map_err(|e| translated(describe(e.path(), e.inner().message(), &root)));
    let checked = typed.and_then(|mut config| {
        config.server.model_aliases = config.model.names.iter().skip(1).cloned().collect();
        check(&config).map(|()| config)
    });
    checked.map_err(|mut problem| {
        if let Some(variable) = set_by.get(&problem.key) {
            problem.key = format!("{} ({variable})", problem.key);
        }
        ConfigError::Invalid(problem.sentence())
    })
}

#[cfg(test)]
mod tests;
