//! File, then environment, then (by the command line) flags: later ones win.
//!
//! The only place that reads the environment.

use std::collections::BTreeMap;
use std::path::Path;

use toml::{Table, Value};

use hone_core::config::describe::{Problem, describe, nearest};

use super::validate::check;
use super::{Config, ConfigError};

/// Keys whose default is absent, so that the serialised default does not show them.
const OPTIONAL: [&str; 2] = ["rollout.dataset", "run.warnings.reward_max"];

/// Parses and validates TOML, without the environment.
///
/// # Errors
/// One sentence with the key, the value and what is allowed.
pub fn parse(text: &str) -> Result<Config, ConfigError> {
    read(table(text, "the configuration")?, &BTreeMap::new())
}

/// [`load_from`] with the process's environment.
///
/// # Errors
/// As [`load_from`].
pub fn load(file: Option<&Path>) -> Result<Config, ConfigError> {
    // Variables that are not Unicode cannot be ours.
    let env = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    load_from(file, env)
}

/// Defaults < `file` < `HONE_*` in `env`. Flags are set by the caller on the result, who then
/// calls [`super::validate`] again.
///
/// A variable's name is the key's path in capitals, joined by `_`: `HONE_SERVER_BIND`,
/// `HONE_TRAIN_LEARNING_RATE`, `HONE_TRAIN_LORA_R`; `__` between the parts of the path is the same
/// (`HONE_TRAIN__LORA__R`). Lists are separated by commas. Routes, examples and
/// stages are set in the file only.
/// A `HONE_<SECTION>_*` variable that names no key is refused; other `HONE_*` variables are not
/// ours to judge (Kubernetes sets `HONE_PORT` beside a service named hone).
///
/// # Errors
/// One sentence with the key (and variable), the value and what is allowed.
pub fn load_from(
    file: Option<&Path>,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<Config, ConfigError> {
    let mut root = match file {
        None => Table::new(),
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path)
                .map_err(|e| ConfigError(format!("{name} cannot be read: {e}")))?;
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
                .map_err(|error| ConfigError(format!("route[{i}].reward[{j}].{error}")))?;
        }
    }
    let resolved = config.graders.resolve(|name| env.get(name).cloned());
    resolved.map_err(|error| ConfigError(format!("graders.api_key_env{error}")))?;
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
        ConfigError(format!("{name} is not valid TOML at line {line}: {message}"))
    })
}

/// Lists of tables, which no variable can hold.
const TABLES: [&str; 3] = ["route", "dataset.few_shot", "dataset.stage"];

/// Every key that holds one value, with its default; lists of tables excepted.
fn keys() -> BTreeMap<String, Option<Value>> {
    fn walk(prefix: &str, table: &Table, found: &mut BTreeMap<String, Option<Value>>) {
        for (name, value) in table {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match value {
                Value::Table(inner) => walk(&key, inner, found),
                _ if TABLES.contains(&key.as_str()) => {}
                _ => {
                    found.insert(key, Some(value.clone()));
                }
            }
        }
    }
    let mut found: BTreeMap<String, Option<Value>> =
        OPTIONAL.iter().map(|k| ((*k).to_owned(), None)).collect();
    // A default that does not serialise would leave no key; a test holds that it does.
    if let Ok(table) = Table::try_from(Config::default()) {
        walk("", &table, &mut found);
    }
    found
}

/// Puts the environment's values in their places; returns which variable set which key.
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
            let default = keys.get(*key).and_then(Option::as_ref);
            insert(root, key, from_text(default, &text))?;
            set_by.insert((*key).clone(), name);
        } else if sections.iter().any(|s| plain.starts_with(s)) {
            let known: Vec<&str> = by_variable.keys().map(String::as_str).collect();
            let hint = nearest(&plain, &known)
                .map_or_else(String::new, |near| format!(": did you mean {near}?"));
            return Err(ConfigError(format!("{name} names no key of the configuration{hint}")));
        }
    }
    Ok(set_by)
}

/// A variable's text as the type its key has; what does not parse stays text and is refused later
/// with the key's name.
fn from_text(default: Option<&Value>, text: &str) -> Value {
    let as_text = || Value::String(text.to_owned());
    match default {
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
            return Err(ConfigError(problem.sentence()));
        };
        table = inner;
    }
    table.insert(name.to_owned(), value);
    Ok(())
}

fn read(root: Table, set_by: &BTreeMap<String, String>) -> Result<Config, ConfigError> {
    let root = Value::Table(root);
    let typed: Result<Config, Problem> = serde_path_to_error::deserialize(root.clone())
        .map_err(|e| describe(e.path(), e.inner().message(), &root));
    let checked = typed.and_then(|config| check(&config).map(|()| config));
    checked.map_err(|mut problem| {
        if let Some(variable) = set_by.get(&problem.key) {
            problem.key = format!("{} ({variable})", problem.key);
        }
        ConfigError(problem.sentence())
    })
}
