//! The effective configuration as text, for the reports of runs.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::load::flattened;
use super::schema::Config;

/// The whole configuration as TOML that [`load`](super::load()) reads again. Each bearer key of
/// `[server]` is replaced by a random one: without a key, the server would accept every client.
///
/// # Errors
/// Never for a configuration that was loaded.
pub fn effective(config: &Config) -> Result<String, toml::ser::Error> {
    let mut shown = config.clone();
    let server = &mut shown.server;
    let hidden = || format!("hidden-{}", uuid::Uuid::now_v7().simple());
    for key in server.client_keys.iter_mut().chain(&mut server.admin_keys) {
        *key = hidden();
    }
    for entry in &mut server.keys {
        (entry.key, entry.sha256) = (hidden(), String::new());
    }
    toml::to_string(&shown)
}

/// The keys whose values differ from the defaults, in alphabetical order, with their values as TOML.
/// Of a list of tables, such as the stages of a dataset, only the length is shown; routes are left out.
///
/// # Errors
/// As [`effective`].
pub fn differences(config: &Config) -> Result<Vec<(String, String)>, toml::ser::Error> {
    let defaults = flattened(&Table::try_from(Config::default())?);
    let table = effective(config)?.parse::<Table>().unwrap_or_default();
    let keys: BTreeMap<String, Value> = flattened(&table);
    let different = keys.into_iter().filter(|(key, value)| defaults.get(key) != Some(value));
    let shown = different.filter(|(key, _)| key != "route").map(|(key, value)| {
        let value = match &value {
            _ if key == "server.client_keys" || key == "server.admin_keys" => "hidden".to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{load_from, parse};

    const TEXT: &str = "[server]\nclient_keys = ['sesame', 'open']\nadmin_keys = ['admin']\n\
        [[server.keys]]\nname = 'web'\nkey = 'swordfish'\nscopes = ['chat']\nexpires = 2999-12-31\n\
        [dataset]\npath = 'a.jsonl'\nfew_shot = [{ user = '1+1', assistant = '2' }]\n\
        [train]\nlearning_rate = 'auto'\nbeta = 0.5\n[train.lora]\nrank_pattern = { q_proj = 4 }\n\
        [[route]]\nname = 'default'\n[[route.reward]]\nname = 'judged'\nkind = 'judge'\n\
        base_url = 'http://127.0.0.1:1'\nmodel = 'm'\napi_key_env = 'JUDGE_KEY'\nrubric = 'helpfulness'\n";

    #[test]
    fn the_text_loads_again_without_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, TEXT).unwrap();
        let env = || [("JUDGE_KEY".to_owned(), "sk-secret".to_owned())];
        let config = load_from(Some(&file), env()).unwrap();
        let text = effective(&config).unwrap();
        for secret in ["sesame", "open", "'admin'", "\"admin\"", "swordfish", "sk-secret"] {
            assert!(!text.contains(secret), "{text}");
        }
        std::fs::write(&file, &text).unwrap();
        let mut again = load_from(Some(&file), env()).unwrap();
        let hidden: Vec<String> = again.server.client_keys.clone();
        assert!(hidden.len() == 2 && hidden[0] != hidden[1], "{hidden:?}");
        again.server.client_keys.clone_from(&config.server.client_keys);
        again.server.admin_keys.clone_from(&config.server.admin_keys);
        again.server.keys[0].key.clone_from(&config.server.keys[0].key);
        assert_eq!(again, config);
    }

    #[test]
    fn only_changed_keys_differ() {
        assert_eq!(differences(&Config::default()).unwrap(), []);
        let shown = differences(&parse(TEXT).unwrap()).unwrap();
        let lines: Vec<String> = shown.iter().map(|(k, v)| format!("{k} = {v}")).collect();
        insta::assert_snapshot!(lines.join("\n"), @r#"
        dataset.few_shot = 1 table
        dataset.path = "a.jsonl"
        server.admin_keys = hidden
        server.client_keys = hidden
        server.keys = 1 table
        train.beta = 0.5
        train.lora.rank_pattern.q_proj = 4
        "#);
    }
}
