//! Loading of the configuration: defaults, precedence and error messages.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::collections::BTreeSet;
use std::path::Path;

use insta::assert_snapshot;
use toml::{Table, Value};

use hone::config::{Config, environment_names, load_from, parse, validate};
use hone_engine::EngineBackend;
use hone_reward::kinds::{NumericMatch, RewardKind};
use hone_reward::routes::RewardConfig;

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

/// Collects the dotted path of every value that is not a table, including those in lists of tables.
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
fn the_default_file_equals_the_defaults() {
    assert_eq!(parse(&default_text()).unwrap(), Config::default());
    assert_eq!(parse("").unwrap(), Config::default());
    validate(&Config::default()).unwrap();
}

#[test]
fn the_default_file_contains_every_key_with_a_comment() {
    let text = default_text();
    let (mut written, mut known) = (BTreeSet::new(), BTreeSet::new());
    leaves("", &Value::Table(text.parse::<Table>().unwrap()), &mut written);
    leaves("", &Value::try_from(Config::default()).unwrap(), &mut known);
    // Those of a reward are in `hone rewards list`.
    known.retain(|key| !key.starts_with(".route[].reward[]") || written.contains(key));
    assert_eq!(written, known);
    // Keys without a default value are commented out.
    for optional in ["# model = ", "# reward_max = ", "# warmup_steps = "] {
        assert!(text.contains(&format!("\n{optional}")), "{optional} is missing");
    }
    let mut above = "";
    for line in text.lines() {
        if line.contains(" = ") && !line.starts_with('#') {
            assert!(above.starts_with('#'), "no comment above: {line}");
        }
        above = line;
    }
}

#[test]
fn every_key_has_its_own_variable() {
    let names = environment_names();
    let distinct: BTreeSet<_> = names.iter().map(|(variable, _)| variable).collect();
    assert_eq!(distinct.len(), names.len());
    let key_of = |variable: &str| {
        names.iter().find(|(v, _)| v == variable).map(|(_, key)| key.as_str().to_owned())
    };
    assert_eq!(key_of("HONE_MODEL_PATH").as_deref(), Some("model.path"));
    assert_eq!(key_of("HONE_TRAIN_LORA_R").as_deref(), Some("train.lora.r"));
    assert_eq!(key_of("HONE_DATASET_PATH").as_deref(), Some("dataset.path"));
}

#[test]
fn the_environment_overrides_the_file() {
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
        ("HONE_TRAIN_MAX_STEPS", "100"),
        ("HONE_TRAIN_WARMUP_STEPS", "7"),
        ("HONE_RUN_WARNINGS_REWARD_MAX", "1.5"),
        ("HONE_DATASET_PATH", "prompts.jsonl"),
        ("HONE_MODEL_PATH", "/models/tiny"),
        ("HONE_ENGINE_BACKEND", "native"),
        ("HONE_PORT", "tcp://10.0.0.1:8080"),
        ("PATH", "/bin"),
    ];
    let env = env.map(|(k, v)| (k.to_owned(), v.to_owned()));
    let config = load_from(Some(&file), env).unwrap();
    assert_eq!(config.train.learning_rate.fixed(), Some(2e-3));
    assert_eq!(config.train.seed, 3);
    assert_eq!(config.server.bind.to_string(), "[::1]:9");
    assert_eq!(config.server.client_keys, ["one", "two"]);
    assert_eq!(config.train.lora.r, 4);
    assert_eq!(config.train.lora.target_modules, ["q_proj", "v_proj"].into());
    assert!(!config.train.enabled);
    assert_eq!(config.train.warmup_steps, Some(7.0));
    assert_eq!(config.run.warnings.reward_max, Some(1.5));
    assert_eq!(config.dataset.path, Path::new("prompts.jsonl"));
    assert_eq!(config.model.path, "/models/tiny");
    assert_eq!(config.engine.backend, EngineBackend::Native);
}

#[test]
fn errors_name_the_variable() {
    let error = |k, v| with_env(&[(k, v)]).unwrap_err().to_string();
    assert_snapshot!(error("HONE_TRAIN_SEED", "abc"), @r#"train.seed (HONE_TRAIN_SEED) is "abc": it must be a whole number, 0 or more"#);
    assert_snapshot!(error("HONE_TRAIN_LEARNING_RATE", "-1"), @"train.learning_rate (HONE_TRAIN_LEARNING_RATE) is -1: it must be greater than 0");
    assert_snapshot!(error("HONE_TRAIN_LEARNING_RAT", "1"), @"HONE_TRAIN_LEARNING_RAT names no key of the configuration: did you mean HONE_TRAIN_LEARNING_RATE?");
    assert_snapshot!(error("HONE_TRAIN_ENABLED", "yes"), @r#"train.enabled (HONE_TRAIN_ENABLED) is "yes": it must be true or false"#);
    assert_snapshot!(error("HONE_SERVER_BIND", "8080"), @r#"server.bind (HONE_SERVER_BIND) is "8080": it must be an address and a port, such as "127.0.0.1:8080""#);
}

#[test]
fn variables_never_empty_the_lists_of_keys() {
    let error = |k, v| with_env(&[(k, v)]).unwrap_err().to_string();
    assert_snapshot!(error("HONE_SERVER_CLIENT_KEYS", ""), @"HONE_SERVER_CLIENT_KEYS (server.client_keys) lists no key, which would open the server to everyone: unset the variable, or list keys");
    assert_snapshot!(error("HONE_SERVER_ADMIN_KEYS", " , "), @"HONE_SERVER_ADMIN_KEYS (server.admin_keys) lists no key, which would open the server to everyone: unset the variable, or list keys");
}

#[test]
fn devices_are_named_and_refuse_what_they_cannot_train() {
    assert_snapshot!(error("[model]\ndevice = 'gpu'"), @r#"model.device is "gpu": it must be "auto", "cpu" or "cuda:N""#);
    assert_snapshot!(error("[model]\ndevice = 'cuda:-1'"), @r#"model.device is "cuda:-1": it must be "auto", "cpu" or "cuda:N""#);
    assert_snapshot!(error("[model]\ndevise = 'cpu'"), @"model.devise is not a key: did you mean model.device?");
    let on_gpu = "[model]\ndevice = 'cuda:1'\n";
    assert_snapshot!(error(&format!("{on_gpu}quantize = 'q8_0'")), @r#"model.quantize is "q8_0": it must be "none" with model.device = "cuda:1""#);
    assert_snapshot!(error(&format!("{on_gpu}[train.lora]\ndropout = 0.1")), @r#"train.lora.dropout is 0.1: it must be 0 with model.device = "cuda:1""#);
}

#[test]
fn unknown_keys_are_refused() {
    assert_snapshot!(error("[train]\nlerning_rate = 1"), @"train.lerning_rate is not a key: did you mean train.learning_rate?");
    assert_snapshot!(error("[tran]\nseed = 1"), @"tran is not a key: did you mean train?");
    assert_snapshot!(error("[engine]\nzzz = 1"), @"engine.zzz is not a key: the keys there are backend, replicas, slots, queue, share_prefixes, compute");
    assert_snapshot!(error("[train.lora]\nrank = 1"), @"train.lora.rank is not a key: the keys there are r, alpha, use_rslora, dropout, target_modules, exclude_modules, layers_to_transform, rank_pattern, alpha_pattern, init_weights, init_adapter");
    assert_snapshot!(error("[[route]]\nname = 'a'\nmodle = 'b'"), @"route[0].modle is not a key: did you mean route[0].model?");
}

#[test]
fn values_of_the_wrong_type_are_refused() {
    assert_snapshot!(error("[train]\nseed = 'x'"), @r#"train.seed is "x": it must be a whole number, 0 or more"#);
    assert_snapshot!(error("[train]\nseed = -1"), @"train.seed is -1: it must be a whole number, 0 or more");
    assert_snapshot!(error("[train]\nseed = 1.5"), @"train.seed is 1.5: it must be a whole number, 0 or more");
    assert_snapshot!(error("[train]\nenabled = 1"), @"train.enabled is 1: it must be true or false");
    assert_snapshot!(error("[train]\nschedule = 'sine'"), @r#"train.schedule is "sine": it must be "constant", "linear", "cosine", "polynomial" or "inverse_sqrt""#);
    assert_snapshot!(error("[rollout]\nmax_ready_groups = 7"), @"rollout.max_ready_groups is 7: it must be 0 (as many as two steps need), or 8 or more, so that groups of rollout.group_size 8 hold train.samples_per_step 64");
    assert_snapshot!(error("[train]\nlearning_rate = true"), @r#"train.learning_rate is true: it must be a number or "auto""#);
    assert_snapshot!(error("train = 3"), @"train is 3: it must be a table");
    assert_snapshot!(error("[rollout]\nmax_tokens = 5000000000"), @"rollout.max_tokens is 5000000000: it must be a whole number from 0 to 4294967295");
    assert_snapshot!(error("[run.warnings]\nactions = { kl_explosion = 'stop' }"), @r#"run.warnings.actions.kl_explosion is "stop": it must be "log", "lower_rate", "pause" or "roll_back""#);
    assert_snapshot!(error("[run.warnings]\nactions = { colapse = 'pause' }"), @"run.warnings.actions.colapse is not a key: did you mean run.warnings.actions.collapse?");
    assert_snapshot!(error("[dataset]\npath = 3"), @"dataset.path is 3: it must be a path in quotes");
    assert_snapshot!(error("[server]\nbind = 'localhost'"), @r#"server.bind is "localhost": it must be an address and a port, such as "127.0.0.1:8080""#);
    assert_snapshot!(error("[server]\nbind = 8080"), @r#"server.bind is 8080: it must be an address and a port, such as "127.0.0.1:8080""#);
    assert_snapshot!(error("[server]\nclient_keys = 'sesame'"), @"server.client_keys is a hidden value: it must be a list");
    assert_snapshot!(error("[server]\nclient_keys = ['sesame', 5]"), @"server.client_keys[1] is a hidden value: it must be a text in quotes");
    assert_snapshot!(error("[train.lora]\ntarget_modules = ['q_proj', 'x_proj']"), @r#"train.lora.target_modules[1] is "x_proj": it must be "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj" or "gate_up_proj", or a name that ends in a dot and one of them"#);
    assert_snapshot!(error("[train.lora]\ntarget_modules = 3"), @r#"train.lora.target_modules is 3: it must be a list of names, a regular expression or "all-linear""#);
    assert_snapshot!(error("[train.lora]\ninit_weights = 'pissa'"), @r#"train.lora.init_weights is "pissa": it must be "kaiming" or "gaussian""#);
    assert_snapshot!(error("[train]\nseed = \n"), @"the configuration is not valid TOML at line 2: string values must be quoted, expected literal string");
    assert_snapshot!(error("route = 3"), @"route is 3: it must be a list");
}

#[test]
fn values_out_of_range_are_refused() {
    assert_snapshot!(error("[train]\nlearning_rate = -1"), @"train.learning_rate is -1: it must be greater than 0");
    assert_snapshot!(error("[train]\nlearning_rate = nan"), @"train.learning_rate is NaN: it must be greater than 0");
    assert_snapshot!(error("[train]\nbeta = inf"), @"train.beta is inf: it must be a finite number, 0 or more");
    assert_snapshot!(
        error("[train]\npriority = \"nice\""),
        @r#"train.priority is "nice": it must be "idle", "low" or "normal""#
    );
    assert_snapshot!(error("[train.optimizer]\nkind = 'adamw'\nbeta2 = 1.0"), @"train.optimizer.beta2 is 1: it must be at least 0 and less than 1");
    assert_snapshot!(error("[train]\nschedule = 'cosine'\nmax_steps = 1000\nwarmup_steps = 2000"), @"train.warmup_steps is 2000: it must be less than the schedule's steps (1000)");
    assert_snapshot!(error("[train]\nschedule = 'cosine'"), @"train.max_steps is 0: it must be at least 1 with a train.schedule that ends but has no steps and no train.epochs");
    assert_snapshot!(error("[train]\nwarmup_steps = 0.1"), @"train.max_steps is 0: it must be at least 1 with train.warmup_steps below 1 and no train.epochs");
    assert!(parse("[train]\nschedule = 'cosine'\nwarmup_steps = 0.1\nepochs = 1").is_ok());
    // The default warm-up fits any schedule.
    assert!(parse("[train]\nschedule = 'cosine'\nmax_steps = 3").is_ok());
    assert!(parse("[train]\nwarmup_steps = 0.1\nmax_steps = 3").is_ok());
    assert_snapshot!(error("[train]\nepochs = -0.5"), @"train.epochs is -0.5: it must be from 0 to 1000000");
    assert_snapshot!(error("[train]\nepochs = 2\nmax_steps = 100"), @"train.epochs is 2: it must be 0 where train.max_steps (100) is set");
    assert_snapshot!(error("[train.lora]\ndropout = 1.1"), @"train.lora.dropout is 1.1: it must be at least 0 and less than 1");
    assert_snapshot!(error("[train.lora]\ntarget_modules = []"), @r#"train.lora.target_modules is []: it must be "all-linear", a regular expression or at least one name"#);
    assert_snapshot!(error("[train.lora]\ntarget_modules = ['q_proj', 'q_proj']"), @r#"train.lora.target_modules[1] is "q_proj": it must be a name that is not in the list already"#);
    assert_snapshot!(error("[train.lora]\ntarget_modules = '(.*q_proj'"), @"train.lora.target_modules: error: unclosed group");
    assert_snapshot!(error("[train.lora]\ntarget_modules = '.*q_proj'\nlayers_to_transform = [1]"), @"train.lora.layers_to_transform is [1]: it must be [] where train.lora.target_modules is a regular expression: name the layers there");
    assert_snapshot!(error("[train.lora]\nexclude_modules = 'all-linear'"), @r#"train.lora.exclude_modules is "all-linear": it must be less than every linear layer"#);
    assert_snapshot!(error("[train.lora]\nrank_pattern = { q_proj = 0 }"), @r#"train.lora.rank_pattern."q_proj" is 0: it must be from 1 to 4096"#);
    assert_snapshot!(error("[train.lora]\nalpha_pattern = { q_proj = -1 }"), @r#"train.lora.alpha_pattern."q_proj" is -1: it must be greater than 0"#);
    assert_snapshot!(error("[train]\nwarmup_steps = 1.5"), @"train.warmup_steps is 1.5: it must be a number of steps, or a share of them below 1");
    assert_snapshot!(error("[train]\nlearning_rate = 2e-5\nschedule = { kind = 'cosine', min_learning_rate = 1.0 }"), @"train.schedule.min_learning_rate is 1: it must be at most train.learning_rate (0.00002)");
    assert_snapshot!(error("[train]\nschedule = { kind = 'linear', min_learning_rate = 1e-6 }"), @"train.schedule.min_learning_rate is not a key: the keys there are kind, steps");
    assert_snapshot!(error("[train]\nschedule = { kind = 'linear', steps = 1.5 }"), @"train.schedule is a table: steps must be a whole number, 0 or more");
    assert_snapshot!(error("[train]\naverage = { kind = 'ema', decay = 1.0 }"), @"train.average.decay is 1: it must be at least 0 and less than 1");
    assert_snapshot!(error("[train]\naverage = { kind = 'ema', start = 5 }"), @"train.average.start is not a key: the keys there are kind, decay");
    assert_snapshot!(error("[rollout]\ngroup_size = 1"), @"rollout.group_size is 1: it must be from 2 to 1024");
    assert_snapshot!(error("[rollout]\ntemperature = 0"), @"rollout.temperature is 0: it must be from 0.01 to 10");
    assert_snapshot!(error("[rollout]\nmax_batch_tokens = 31"), @"rollout.max_batch_tokens is 31: it must be from 32 to 1073741824");
    assert_snapshot!(error("[rollout]\nmax_batch_tokens = 100"), @r#"rollout.max_batch_tokens is 100: it must be 288 or more, so that a prompt and rollout.max_tokens 256 fit, or rollout.sampler = "engine""#);
    assert!(parse("[rollout]\nsampler = \"engine\"\nmax_batch_tokens = 100").is_ok());
    let native = "[engine]\nbackend = \"native\"\n";
    for sampler in ["auto", "engine", "native"] {
        assert!(parse(&format!("{native}[rollout]\nsampler = \"{sampler}\"")).is_ok());
    }
    assert_snapshot!(
        error(&format!("{native}[rollout]\nsampler = \"engine\"\nmax_batch_tokens = 100")),
        @r#"rollout.max_batch_tokens is 100: it must be 288 or more with engine.backend = "native", so that a prompt and rollout.max_tokens 256 fit"#
    );
    assert_snapshot!(error(&format!("{native}replicas = 2")), @r#"engine.replicas is 2: it must be 1 with engine.backend = "native", which runs up to engine.slots sequences in one batch"#);
    assert_snapshot!(error("[engine]\nbackend = \"vllm\""), @r#"engine.backend is "vllm": it must be "mistralrs" or "native""#);
    assert_snapshot!(error("[model]\nnames = ['a', 'a']"), @r#"model.names[1] is "a": it must be a name that occurs once"#);
    assert!(error("[model]\nnames = ['']").starts_with(r#"model.names[0] is """#));
    assert_snapshot!(error("[engine]\nslots = 0"), @"engine.slots is 0: it must be from 1 to 65536");
    assert!(
        error("[rollout]\nsampler = \"fast\"")
            .starts_with(r#"rollout.sampler is "fast": it must be "#)
    );
    assert_snapshot!(error("[dataset]\npath = 'a'\n[rollout]\ndataset_route = 'none'"), @r#"rollout.dataset_route is "none": it must be the name of a route"#);
    assert_snapshot!(error("[server]\nclient_keys = ['with space']"), @"server.client_keys[0] cannot be a bearer key: it must be printable ASCII without spaces");
    assert_snapshot!(error("[server]\nclient_keys = ['a']\nadmin_keys = ['a']"), @"server.admin_keys shares a key with server.client_keys: each must have its own");
    assert_snapshot!(error("[log]\nlevel = 'hone=loud'"), @r#"log.level is "hone=loud": it must be a tracing filter such as "info" or "hone=debug,warn""#);
    assert_snapshot!(error("[data]\ndir = ''"), @r#"data.dir is "": it must be the path of a directory"#);
}

/// Every number of the defaults is refused by name if it is NaN, below its range, or above its range
/// (if it has an upper bound).
#[test]
fn every_number_has_a_range() {
    let unbounded =
        ["train.seed", "train.max_steps", "train.max_staleness", "train.feedback_max_staleness"];
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
fn routes_are_parsed_and_serialized() {
    let config = parse(
        "[[route]]\nname = 'math'\nmetadata = { answer = '*' }\n\
         [[route.reward]]\nname = 'right'\nkind = 'numeric_match'\nweight = 1\ntolerance = 0.5\n\
         [[route.reward]]\nname = 'thumbs'\nkind = 'feedback'\n",
    )
    .unwrap();
    let [route] = &config.routes.0[..] else { panic!("{config:?}") };
    assert_eq!(route.metadata["answer"], "*");
    let RewardConfig { name, weight, kind, .. } = &route.rewards[0];
    assert_eq!((name.as_str(), *weight), ("right", 1.0));
    let RewardKind::NumericMatch(NumericMatch { reference, tolerance, extract, .. }) = kind else {
        panic!("{kind:?}")
    };
    assert_eq!((reference.as_str(), *tolerance), ("answer", 0.5));
    assert!(extract.contains("<answer>"));
    assert_eq!(route.rewards[1].weight, 1.0);
    assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
}

#[test]
fn errors_name_the_key_of_a_reward() {
    let error = |lines: &str| error(&format!("[[route]]\nname = 'a'\n[[route.reward]]\n{lines}"));
    assert_snapshot!(error("name = 'x'\nkind = 'numeric_match'\ntolerence = 1"), @"route[0].reward[0].tolerence is not a key: did you mean tolerance?");
    assert_snapshot!(error("name = 'x'\nkind = 'numeric_match'\ntolerance = 'a'"), @r#"route[0].reward[0].tolerance is "a": it must be a number"#);
    assert_snapshot!(error("name = 'x'\nkind = 'numeric_match'\ntolerance = -1"), @"route[0].reward[0].tolerance is -1: it must be a finite number, 0 or more");
    assert_snapshot!(error("name = 'x'\nkind = 'feedback'\npattern = 'a'"), @"route[0].reward[0].pattern is not a key: the keys there are type, range, aggregate, max_key_share");
    assert_snapshot!(error("name = 'x'\nkind = 'magic'"), @r#"route[0].reward[0].kind is "magic": it must be "feedback", "exact_match", "fuzzy_match", "numeric_match", "math_equal", "reasoning_accuracy", "multiple_choice", "contains", "regex", "format_strict", "format_soft", "format_incremental", "think_format", "think_answer", "think_graded", "json_valid", "json_schema", "integer_answer", "length", "length_range", "cosine_scaled", "soft_overlong", "reasoning_steps", "connectors", "citations", "repetition_penalty", "diversity", "forbidden_phrases", "language", "keywords", "ensemble", "text_similarity", "code", "code_syntax", "python", "grader", "webhook", "judge" or "learned""#);
    assert_snapshot!(error("name = 'x'"), @r#"route[0].reward[0].kind is missing: it must be "feedback", "exact_match", "fuzzy_match", "numeric_match", "math_equal", "reasoning_accuracy", "multiple_choice", "contains", "regex", "format_strict", "format_soft", "format_incremental", "think_format", "think_answer", "think_graded", "json_valid", "json_schema", "integer_answer", "length", "length_range", "cosine_scaled", "soft_overlong", "reasoning_steps", "connectors", "citations", "repetition_penalty", "diversity", "forbidden_phrases", "language", "keywords", "ensemble", "text_similarity", "code", "code_syntax", "python", "grader", "webhook", "judge" or "learned""#);
    assert_snapshot!(error("kind = 'feedback'"), @"route[0].reward[0].name is missing");
    assert_snapshot!(error("name = 'x'\nkind = 'regex'"), @"route[0].reward[0].pattern is missing");
    assert_snapshot!(error("name = 'x'\nkind = 'feedback'\nweight = 'a'"), @r#"route[0].reward[0].weight is "a": it must be a number"#);
    assert_snapshot!(error("name = 'x'\nkind = 'feedback'\nweight = nan"), @"route[0].reward[0].weight is NaN: it must be a finite number");
    assert_snapshot!(error("name = ''\nkind = 'feedback'"), @r#"route[0].reward[0].name is "": it must be 1 to 64 letters, digits, '_', '-' or '.'"#);
    assert_snapshot!(error("name = 'x'\nkind = 'length'\nideal = 5\nspread = 0"), @"route[0].reward[0].spread is 0: it must be from 1 to 1048576");
}

#[test]
fn an_unreadable_file_is_named() {
    let missing = load_from(Some(Path::new("no-such.toml")), []).unwrap_err().to_string();
    assert!(missing.starts_with("no-such.toml cannot be read: "), "{missing}");
}

/// The fenced `toml` blocks of a Markdown document.
fn toml_blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        match (&mut open, line.trim()) {
            (None, "```toml") => open = Some(String::new()),
            (Some(_), "```") => blocks.extend(open.take()),
            (Some(block), _) => {
                block.push_str(line);
                block.push('\n');
            }
            _ => {}
        }
    }
    blocks
}

#[test]
fn every_configuration_in_the_documents_is_valid() {
    let mut seen = 0;
    let documents = [
        "README.md",
        "docs/rewards.md",
        "docs/datasets.md",
        "docs/from-trl.md",
        "docs/training.md",
    ];
    for document in documents {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(document);
        for block in toml_blocks(&std::fs::read_to_string(path).unwrap()) {
            // A block with only a part needs a route around it.
            let alone =
                block.find("[[route.reward]]").is_some_and(|at| !block[..at].contains("[[route]]"));
            let whole = match alone {
                true => block.replacen(
                    "[[route.reward]]",
                    "[[route]]\nname = \"r\"\n[[route.reward]]",
                    1,
                ),
                false => block.clone(),
            };
            let checked = hone::config::parse(&whole);
            assert!(checked.is_ok(), "{document}: {}\n{block}", checked.unwrap_err());
            seen += 1;
        }
    }
    assert!(seen > 15, "only {seen} blocks");
}

#[test]
fn configurations_of_examples_are_valid() {
    for file in ["examples/agent.toml", "tests/clients/serve.toml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let error = parse(&std::fs::read_to_string(path).unwrap()).err();
        assert!(error.is_none(), "{file}: {error:?}");
    }
}

#[test]
fn services_are_read_from_the_variables_of_their_clients() {
    let refused = |pairs: &[(&str, &str)]| with_env(pairs).unwrap_err().to_string();
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/");
    let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20a, x-tenant=b");
    let collector = with_env(&[endpoint, headers]).unwrap().log.collector.unwrap();
    assert_eq!(collector.url("traces"), "http://collector:4318/v1/traces");
    assert_eq!(collector.headers()["authorization"], "Bearer a");
    for unused in [("OTEL_SDK_DISABLED", "true"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "")] {
        assert_eq!(with_env(&[endpoint, unused]).unwrap().log.collector, None);
    }
    assert_snapshot!(refused(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "collector")]), @r#"OTEL_EXPORTER_OTLP_ENDPOINT is "collector": it must be an http:// or https:// URL"#);
    assert_snapshot!(refused(&[endpoint, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]), @r#"OTEL_EXPORTER_OTLP_PROTOCOL is "grpc": it must be http/protobuf, or not set, with an endpoint such as http://localhost:4318"#);

    let tracker = ("HONE_RUN_TRACKER", "mlflow");
    let pairs =
        [tracker, ("MLFLOW_TRACKING_URI", "https://mlflow/"), ("MLFLOW_TRACKING_USERNAME", "a")];
    let server = with_env(&pairs).unwrap().run.mlflow.unwrap();
    assert_eq!((&*server.address, &*server.experiment), ("https://mlflow", "Default"));
    assert!(server.user.is_some() && server.token.is_none() && server.run_id.is_none());
    assert_eq!(with_env(&pairs[1..]).unwrap().run.mlflow, None, "without the key nothing is sent");
    assert_snapshot!(refused(&[tracker]), @r#"run.tracker is "mlflow": the environment variable MLFLOW_TRACKING_URI must be set to the URL of the server"#);
    assert_snapshot!(refused(&[tracker, ("MLFLOW_TRACKING_URI", "databricks")]), @r#"MLFLOW_TRACKING_URI is "databricks": it must be an http:// or https:// URL"#);
    assert_snapshot!(refused(&[("HONE_RUN_TRACKER", "wandb")]), @r#"run.tracker (HONE_RUN_TRACKER) is "wandb": it must be "none" or "mlflow""#);
}
