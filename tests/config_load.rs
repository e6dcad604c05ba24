//! The configuration: defaults, precedence, and one sentence for each mistake.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::collections::BTreeSet;
use std::path::Path;

use hone::config::{
    Config, RewardConfig, RewardKind, environment_names, load_from, parse, validate,
};
use insta::assert_snapshot;
use toml::{Table, Value};

fn default_text() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/default.toml");
    std::fs::read_to_string(path).unwrap()
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

fn with_env(pairs: &[(&str, &str)]) -> Result<Config, hone::config::ConfigError> {
    load_from(None, pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())))
}

/// Dotted paths of everything that is not a table; lists of tables are entered.
fn leaves(prefix: &str, value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Table(table) if !table.is_empty() => {
            for (name, inner) in table {
                leaves(&format!("{prefix}.{name}"), inner, found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_table) => {
            for item in items {
                leaves(&format!("{prefix}[]"), item, found);
            }
        }
        _ => {
            found.insert(prefix.to_owned());
        }
    }
}

#[test]
fn default_file_is_the_default() {
    assert_eq!(parse(&default_text()).unwrap(), Config::default());
    assert_eq!(parse("").unwrap(), Config::default());
    validate(&Config::default()).unwrap();
}

#[test]
fn default_file_is_complete() {
    let text = default_text();
    let (mut written, mut known) = (BTreeSet::new(), BTreeSet::new());
    leaves("", &Value::Table(text.parse::<Table>().unwrap()), &mut written);
    leaves("", &Value::try_from(Config::default()).unwrap(), &mut known);
    assert_eq!(written, known);
    // Keys without a default value are shown commented out.
    for optional in ["# dataset = ", "# model = "] {
        assert!(text.contains(&format!("\n{optional}")), "{optional} is missing");
    }
    // And every key has its comment.
    let mut above = "";
    for line in text.lines() {
        if line.contains(" = ") && !line.starts_with('#') {
            assert!(above.starts_with('#'), "no comment above: {line}");
        }
        above = line;
    }
}

#[test]
fn every_key_has_one_variable() {
    let names = environment_names();
    let distinct: BTreeSet<_> = names.iter().map(|(variable, _)| variable).collect();
    assert_eq!(distinct.len(), names.len());
    let key_of = |variable: &str| {
        names.iter().find(|(v, _)| v == variable).map(|(_, key)| key.as_str().to_owned())
    };
    assert_eq!(key_of("HONE_MODEL_PATH").as_deref(), Some("model.path"));
    assert_eq!(key_of("HONE_TRAIN_LORA_R").as_deref(), Some("train.lora.r"));
    assert_eq!(key_of("HONE_ROLLOUT_DATASET").as_deref(), Some("rollout.dataset"));
}

#[test]
fn environment_wins_over_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hone.toml");
    std::fs::write(&file, "[train]\nlearning_rate = 0.5\nseed = 3\n[server]\nbind = \"[::1]:9\"")
        .unwrap();
    let env = [
        ("HONE_TRAIN_LEARNING_RATE", "2e-3"),
        ("HONE_SERVER_CLIENT_KEYS", "one, two"),
        ("HONE_TRAIN__LORA__R", "4"),
        ("HONE_TRAIN_LORA_TARGET_MODULES", "q_proj,v_proj"),
        ("HONE_TRAIN_ENABLED", "false"),
        ("HONE_TRAIN_SCHEDULE", "cosine"),
        ("HONE_ROLLOUT_DATASET", "prompts.jsonl"),
        ("HONE_MODEL_PATH", "/models/tiny"),
        ("HONE_PORT", "tcp://10.0.0.1:8080"),
        ("PATH", "/bin"),
    ];
    let env = env.map(|(k, v)| (k.to_owned(), v.to_owned()));
    let config = load_from(Some(&file), env).unwrap();
    assert_eq!(config.train.learning_rate, 2e-3);
    assert_eq!(config.train.seed, 3);
    assert_eq!(config.server.bind.to_string(), "[::1]:9");
    assert_eq!(config.server.client_keys, ["one", "two"]);
    assert_eq!(config.train.lora.r, 4);
    assert_eq!(config.train.lora.target_modules.len(), 2);
    assert!(!config.train.enabled);
    assert_eq!(config.rollout.dataset.unwrap(), Path::new("prompts.jsonl"));
    assert_eq!(config.model.path, "/models/tiny");
}

#[test]
fn environment_mistakes_name_the_variable() {
    let error = |k, v| with_env(&[(k, v)]).unwrap_err().to_string();
    assert_snapshot!(error("HONE_TRAIN_SEED", "abc"), @"");
    assert_snapshot!(error("HONE_TRAIN_LEARNING_RATE", "-1"), @"");
    assert_snapshot!(error("HONE_TRAIN_LEARNING_RAT", "1"), @"");
    assert_snapshot!(error("HONE_TRAIN_ENABLED", "yes"), @"");
    assert_snapshot!(error("HONE_SERVER_BIND", "8080"), @"");
}

#[test]
fn unknown_keys() {
    assert_snapshot!(error("[train]\nlerning_rate = 1"), @"");
    assert_snapshot!(error("[tran]\nseed = 1"), @"");
    assert_snapshot!(error("[engine]\nzzz = 1"), @"");
    assert_snapshot!(error("[train.lora]\nrank = 1"), @"");
    assert_snapshot!(error("[[route]]\nname = 'a'\nmodle = 'b'"), @"");
}

#[test]
fn wrong_types() {
    assert_snapshot!(error("[train]\nseed = 'x'"), @"");
    assert_snapshot!(error("[train]\nseed = -1"), @"");
    assert_snapshot!(error("[train]\nseed = 1.5"), @"");
    assert_snapshot!(error("[train]\nenabled = 1"), @"");
    assert_snapshot!(error("[train]\nschedule = 'sine'"), @"");
    assert_snapshot!(error("[train]\nlearning_rate = true"), @"");
    assert_snapshot!(error("train = 3"), @"");
    assert_snapshot!(error("[rollout]\nmax_tokens = 5000000000"), @"");
    assert_snapshot!(error("[rollout]\ndataset = 3"), @"");
    assert_snapshot!(error("[server]\nbind = 'localhost'"), @"");
    assert_snapshot!(error("[server]\nbind = 8080"), @"");
    assert_snapshot!(error("[server]\nclient_keys = 'sesame'"), @"");
    assert_snapshot!(error("[server]\nclient_keys = ['sesame', 5]"), @"");
    assert_snapshot!(error("[train.lora]\ntarget_modules = ['q_proj', 'x_proj']"), @"");
    assert_snapshot!(error("[train]\nseed = \n"), @"");
    assert_snapshot!(error("route = 3"), @"");
}

#[test]
fn values_out_of_range() {
    assert_snapshot!(error("[train]\nlearning_rate = -1"), @"");
    assert_snapshot!(error("[train]\nlearning_rate = nan"), @"");
    assert_snapshot!(error("[train]\nbeta = inf"), @"");
    assert_snapshot!(error("[train]\nnice = 20"), @"");
    assert_snapshot!(error("[train]\nadam_beta2 = 1.0"), @"");
    assert_snapshot!(error("[train]\nschedule = 'cosine'\nwarmup_steps = 2000"), @"");
    assert_snapshot!(error("[train.lora]\ndropout = 1.1"), @"");
    assert_snapshot!(error("[train.lora]\ntarget_modules = []"), @"");
    assert_snapshot!(error("[rollout]\ngroup_size = 1"), @"");
    assert_snapshot!(error("[rollout]\ntemperature = 0"), @"");
    assert_snapshot!(error("[rollout]\ndataset = 'a'\ndataset_route = 'none'"), @"");
    assert_snapshot!(error("[server]\nclient_keys = ['with space']"), @"");
    assert_snapshot!(error("[server]\nclient_keys = ['a']\nadmin_keys = ['a']"), @"");
    assert_snapshot!(error("[log]\nlevel = 'hone=loud'"), @"");
    assert_snapshot!(error("[data]\ndir = ''"), @"");
}

/// Every number of the defaults, set to NaN or far below and above its range, is refused by name
/// (unless 0 to the largest integer is allowed).
#[test]
fn every_number_has_a_range() {
    let unbounded = ["train.seed", "train.max_steps", "train.warmup_steps", "train.max_staleness"];
    let mut numbers = 0;
    let defaults = Table::try_from(Config::default()).unwrap();
    for (_, key) in environment_names() {
        let value =
            key.split('.').try_fold(&Value::Table(defaults.clone()), |v, k| v.get(k)).cloned();
        let bad = match value {
            Some(Value::Integer(_)) => Value::Integer(-1),
            Some(Value::Float(_)) => Value::Float(f64::NAN),
            _ => continue,
        };
        numbers += 1;
        let message = set(&key, bad).unwrap_err();
        assert!(message.starts_with(&format!("{key} is ")), "{message}");
        if !unbounded.contains(&key.as_str()) {
            let huge = match value {
                Some(Value::Float(_)) => Value::Float(f64::INFINITY),
                _ => Value::Integer(i64::MAX),
            };
            if let Err(message) = set(&key, huge) {
                assert!(message.starts_with(&format!("{key} is ")), "{message}");
            }
        }
    }
    assert!(numbers > 35, "{numbers}");
}

fn set(key: &str, value: Value) -> Result<Config, String> {
    let nested =
        key.rsplit('.').fold(value, |v, k| Value::Table(Table::from_iter([(k.to_owned(), v)])));
    parse(&toml::to_string(&nested).unwrap()).map_err(|e| e.to_string())
}

#[test]
fn routes_are_flat_tables() {
    let config = parse(
        "[[route]]\nname = 'math'\nmetadata = { answer = '*' }\n\
         [[route.reward]]\nname = 'right'\nkind = 'numeric_match'\nweight = 1\ntolerance = 0.5\n\
         [[route.reward]]\nname = 'thumbs'\nkind = 'feedback'\n",
    )
    .unwrap();
    let [route] = &config.routes.0[..] else { panic!("{config:?}") };
    assert_eq!(route.metadata["answer"], "*");
    let RewardConfig { name, weight, kind } = &route.rewards[0];
    assert_eq!((name.as_str(), *weight), ("right", 1.0));
    let RewardKind::NumericMatch { reference, tolerance, extract } = kind else {
        panic!("{kind:?}")
    };
    assert_eq!((reference.as_str(), *tolerance), ("answer", 0.5));
    assert!(extract.contains("<answer>"));
    assert_eq!(route.rewards[1].weight, 1.0);
    // What was read can be written and read again.
    assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
}

#[test]
fn reward_mistakes() {
    let error = |lines: &str| error(&format!("[[route]]\nname = 'a'\n[[route.reward]]\n{lines}"));
    assert_snapshot!(error("name = 'x'\nkind = 'numeric_match'\ntolerence = 1"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'numeric_match'\ntolerance = 'a'"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'numeric_match'\ntolerance = -1"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'feedback'\npattern = 'a'"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'magic'"), @"");
    assert_snapshot!(error("name = 'x'"), @"");
    assert_snapshot!(error("kind = 'feedback'"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'regex'"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'feedback'\nweight = 'a'"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'feedback'\nweight = nan"), @"");
    assert_snapshot!(error("name = ''\nkind = 'feedback'"), @"");
    assert_snapshot!(error("name = 'x'\nkind = 'length'\nideal = 5\nspread = 0"), @"");
}

#[test]
fn files_that_cannot_be_read() {
    let missing = load_from(Some(Path::new("no-such.toml")), []).unwrap_err().to_string();
    assert!(missing.starts_with("no-such.toml cannot be read: "), "{missing}");
}
