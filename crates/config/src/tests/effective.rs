use super::super::*;
use crate::{load_from, parse};

const TEXT: &str = "[server]\nclient_keys = ['sesame', 'open']\nadmin_keys = ['admin']\n\
        [[server.keys]]\nname = 'web'\nkey = 'swordfish'\nscopes = ['chat']\nexpires = 2999-12-31\n\
        [dataset]\npath = 'a.jsonl'\nfew_shot = [{ user = '1+1', assistant = '2' }]\n\
        [train]\nlearning_rate = 'auto'\nbeta = 0.5\noptimizer = { kind = 'adamw', beta2 = 0.99 }\n\
        schedule = { kind = 'cosine', steps = 9, min_learning_rate = 1e-6 }\n[train.lora]\nrank_pattern = { q_proj = 4 }\n\
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
        train.optimizer.beta2 = 0.99
        train.optimizer.kind = "adamw"
        train.schedule.kind = "cosine"
        train.schedule.min_learning_rate = 0.000001
        train.schedule.steps = 9
        "#);
}
