//! Conversions of whole files.

use insta::assert_snapshot;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value, json};

use hone_train::config::{
    AdvantageScale, KlEstimator, Loss, LossKind, OptimizerKind, PeakRate, Recompute, ScheduleKind,
};
use hone_train::policy::Promotion;

use super::python::options;
use super::{ImportedConfig, convert, import};
use crate::config::{Config, parse, trl_names};

/// The configuration and the notes of a text in a format.
fn converted(extension: &str, text: &str) -> (Config, ImportedConfig) {
    let imported = convert(text.as_bytes(), extension, "run").unwrap();
    (parse(&imported.toml).unwrap(), imported)
}

fn refused(extension: &str, text: &str) -> String {
    convert(text.as_bytes(), extension, "run").unwrap_err()
}

/// The options of the guides' memory-optimized configuration.
const MEMORY: &str = r#"
from trl import GRPOConfig

training_args = GRPOConfig(
    output_dir="outputs/run",
    # Learning rate
    learning_rate=5e-6,  # lower is more stable
    adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1,
    lr_scheduler_type='cosine',
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_prompt_length=256,
    max_completion_length=512,
    num_train_epochs=1,
    max_steps=None,
    bf16=True,
    optim="adamw_8bit",
    max_grad_norm=0.1,
    logging_steps=1,
    save_steps=100,
    report_to="wandb",
)
"#;

#[test]
fn memory_optimized_configuration_of_the_guides() {
    let (config, imported) = converted("py", MEMORY);
    let (train, rollout) = (&config.train, &config.rollout);
    assert_eq!(config.data.dir.to_str(), Some("outputs/run"));
    assert_eq!(
        (train.learning_rate, train.warmup_steps, train.epochs),
        (PeakRate::Fixed(5e-6), Some(0.1), 1.0)
    );
    assert_eq!(
        (train.optimizer.beta1, train.optimizer.beta2, train.weight_decay),
        (0.9, 0.99, 0.1)
    );
    assert_eq!(
        (train.schedule.kind, train.optimizer.kind),
        (ScheduleKind::Cosine, OptimizerKind::AdamW8bit)
    );
    // 1 x 4 is no multiple of 8, so the guide counts prompts.
    assert_eq!((rollout.group_size, train.samples_per_step), (8, 32));
    assert_eq!((rollout.max_tokens, config.dataset.max_prompt_tokens), (512, 256));
    assert_eq!((train.max_steps, train.max_grad_norm), (0, 0.1));
    // TRL's defaults.
    assert_eq!((train.beta, train.seed), (0.0, 42));
    assert_snapshot!(imported.notes.join("\n"), @r#"
    report_to: "wandb": Hone's other tracker is run/steps.jsonl; compare run.tracker
    peft_config: without one TRL trains all parameters; Hone trains an adapter of rank 16
    logging_steps: every step is logged
    bf16: compare train.compute: "bf16" rounds the factors of products with the base; the rest is in f32. engine.compute does the same for sampling
    save_steps: a complete checkpoint after each step
    "#);
    for note in &imported.notes {
        assert!(imported.toml.contains(&format!("\n# - {note}\n")), "{note}");
    }
    for line in ["# learning_rate\nlearning_rate = 5e-6\n", "# beta: TRL's default\nbeta = 0.0\n"] {
        assert!(imported.toml.contains(line), "{}", imported.toml);
    }
}

#[test]
fn high_performance_configuration_of_the_guides() {
    let text = "training_args = GRPOConfig(output_dir='out', learning_rate=1e-5, \
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=16, \
        max_prompt_length=512, max_completion_length=1024, num_train_epochs=1, bf16=True, \
        use_vllm=True, logging_steps=10)";
    let (config, imported) = converted("py", text);
    let (train, rollout) = (&config.train, &config.rollout);
    assert_eq!((rollout.group_size, rollout.max_tokens), (16, 1024));
    assert_eq!(train.samples_per_step, 128);
    assert_eq!(
        (train.schedule.kind, train.learning_rate),
        (ScheduleKind::Linear, PeakRate::Fixed(1e-5))
    );
    let vllm = imported.notes.iter().find(|note| note.starts_with("use_vllm")).unwrap();
    assert!(vllm.contains("rollout.sampler"), "{vllm}");
}

#[test]
fn a_whole_script_with_constants_an_adapter_and_rewards() {
    let text = r#"
"""A script: GRPOConfig(learning_rate=1) in a text is no call."""
import torch  # GRPOConfig(
MODEL: str = "Qwen/Qwen2.5-1.5B-Instruct"
MAX_PROMPT_LENGTH = 2_56
lr = 1e-5
lr = 2e-5

class GRPOConfigLike(Base): pass
def load_dataset(x): return x

data = datasets.load_dataset("openai/gsm8k", "main", split="train")
test = datasets.load_dataset("other/data", split="test")
model = AutoModelForCausalLM.from_pretrained(
    MODEL, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2", device_map="auto"
)
tokenizer = AutoTokenizer.from_pretrained("other/model")
peft = LoraConfig(lora_alpha=32, target_modules=["q_proj", 'v_' "proj"], task_type="CAUSAL_LM", bias="none",
                  lora_dropout=.05)
args = GRPOConfig(
    learning_rate=lr, max_prompt_length=MAX_PROMPT_LENGTH, num_generations=int(8), beta=+0.04,
    max_steps=500, reward_weights=[0.5, 2.0], lr_scheduler_kwargs={"num_cycles": 2}, **extra)
trainer = GRPOTrainer(model=model, reward_funcs=[format_reward, rewards.correct], args=args, peft_config=peft)
"#;
    let (config, imported) = converted("py", text);
    let train = &config.train;
    assert_eq!(config.model.path, "Qwen/Qwen2.5-1.5B-Instruct");
    assert_eq!(config.dataset.path.to_str(), Some("hf://openai/gsm8k"));
    assert_eq!((config.dataset.config.as_str(), config.dataset.split.as_str()), ("main", "train"));
    assert_eq!(config.dataset.max_prompt_tokens, 256);
    // PEFT's default rank.
    assert_eq!((train.lora.r, train.lora.alpha, train.lora.dropout), (8, 32.0, 0.05));
    assert_eq!(train.lora.target_modules, ["q_proj", "v_proj"].into());
    assert_eq!((train.max_steps, train.epochs), (500, 0.0));
    assert_eq!((train.beta, train.kl.estimator), (0.04, KlEstimator::Corrected));
    // A name with two values is no constant, and `int(8)` would have to run.
    assert_eq!((train.learning_rate, config.rollout.group_size), (PeakRate::Fixed(1e-6), 8));
    assert_snapshot!(imported.notes.join("\n"), @r"
    lr_scheduler_kwargs.num_cycles: 2: the schedule has no such key
    **extra: line 22: these arguments are known only when the file runs
    attn_implementation: kernels and memory have no options
    device_map: compare model.device: the processor or one GPU
    learning_rate: line 21: `lr` is not a literal: set train.learning_rate
    num_generations: line 21: `int(8)` is not a literal: set rollout.group_size
    torch_dtype: line 15: `torch.bfloat16` is not a literal: set train.base_dtype
    ");
    let parts = "# [[route.reward]]\n# name = \"correct\"\n# kind = \"python\"\n\
                 # path = \"rewards.py\"\n# function = \"correct\"\n# weight = 2.0\n";
    assert!(imported.toml.contains(parts), "{}", imported.toml);
}

#[test]
fn a_file_of_trls_command_line() {
    let text = "# trl grpo --config run.yaml\nmodel_name_or_path: Qwen/Qwen2-0.5B\n\
        dataset_name: trl-lib/math\nlearning_rate: 5e-6\nuse_peft: true\nlora_target_modules:\n  - q_proj\n\
        lora_r: 32\nlora: {lora_alpha: 64}\nloss_type: dr_grpo\nscale_rewards: false\nwarmup_steps: 0.1\n\
        reward_funcs: [accuracy_reward]\ngradient_checkpointing: yes\n";
    for (extension, text) in [("yaml", text), ("conf", text)] {
        let (config, imported) = converted(extension, text);
        let train = &config.train;
        assert_eq!(config.model.path, "Qwen/Qwen2-0.5B");
        assert_eq!(config.dataset.path.to_str(), Some("hf://trl-lib/math"));
        assert_eq!(
            (train.lora.r, train.lora.alpha, train.learning_rate),
            (32, 64.0, PeakRate::Fixed(5e-6))
        );
        assert_eq!(
            (train.loss.kind, train.advantage_scale),
            (LossKind::DrGrpo, AdvantageScale::None)
        );
        assert_eq!(train.warmup_steps, Some(0.1));
        assert_eq!(train.recompute, Recompute::Always);
        assert!(imported.toml.contains("# function = \"accuracy_reward\"\n"), "{}", imported.toml);
    }
}

/// What `GRPOConfig` of TRL 1.16 contains without arguments.
#[test]
fn all_defaults_of_trl() {
    let (config, imported) = converted("json", include_str!("trl_defaults.json"));
    let train = &config.train;
    assert_eq!((config.rollout.group_size, config.rollout.max_tokens), (8, 512));
    assert_eq!((train.samples_per_step, train.epochs), (8, 3.0));
    assert_eq!((train.learning_rate, train.beta, train.seed), (PeakRate::Fixed(1e-6), 0.0, 42));
    assert_eq!((train.warmup(), train.dual_clip), (0, 0.0));
    assert_eq!((config.policy.promotion, config.policy.publish_every), (Promotion::Direct, 1));
    assert_eq!(
        (train.schedule.kind, train.optimizer.kind),
        (ScheduleKind::Linear, OptimizerKind::AdamW)
    );
    assert_eq!((train.loss.kind, train.clip_low, train.clip_high), (LossKind::Dapo, 0.2, 0.2));
    assert!(
        imported.notes.iter().all(|note| !note.contains("neither TRL")),
        "{:?}",
        imported.notes
    );
}

#[test]
fn losses_with_bounds_of_their_own() {
    let train = |options: &str| converted("py", &format!("GRPOConfig({options})")).0.train;
    let clips = train("epsilon=0.1, epsilon_high=0.28, delta=1.5");
    assert_eq!((clips.clip_low, clips.clip_high, clips.delta), (0.1, 0.28, 1.5));
    assert_eq!(train("epsilon=0.1").dual_clip, 0.0);
    // TRL's bound of cispo is the ratio's.
    let bound = train("loss_type='cispo', epsilon_high=5.0, delta=1.5");
    assert_eq!((bound.loss.kind, bound.clip_high, bound.delta), (LossKind::Cispo, 4.0, 0.0));
    let own = train("loss_type='vespo', vespo_k_neg=1, sapo_temperature_pos=2.0");
    assert_eq!(own.loss, Loss { k_neg: 1.0, ..LossKind::Vespo.into() });
    let entropy = train("entropy_coef=0.01, use_adaptive_entropy=True").entropy;
    assert_eq!((entropy.coef, entropy.target), (0.01, 0.2));
    assert_eq!(train("entropy_target=0.3").entropy.target, 0.0);
    let synced = train("beta=0.1, sync_ref_model=True, use_bias_correction_kl=False");
    assert_eq!((synced.kl.sync_steps, synced.kl.estimator), (512, KlEstimator::K3));
    let large =
        train("per_device_train_batch_size=64, gradient_accumulation_steps=8, num_generations=4");
    assert_eq!(large.samples_per_step, 512);
}

/// Hone's default is not TRL's, so every conversion sets the warm-up.
#[test]
fn warm_up_is_that_of_trl() {
    let warmup = |options: &str| {
        let train = converted("py", &format!("GRPOConfig(max_steps=200, {options})")).0.train;
        train.warmup()
    };
    let cases = [
        ("beta=0.1", 0),
        ("warmup_steps=7", 7),
        ("warmup_ratio=0.1", 20),
        ("warmup_ratio=0.0", 0),
        ("warmup_steps=0, warmup_ratio=0.1", 20),
        ("lr_scheduler_type='constant', warmup_steps=7", 0),
        ("lr_scheduler_type='constant_with_warmup', warmup_steps=7", 7),
    ];
    for (options, steps) in cases {
        assert_eq!(warmup(options), steps, "{options}");
    }
}

#[test]
fn files_that_cannot_be_converted() {
    assert_snapshot!(refused("py", "print('no configuration')"), @"it has no call of GRPOConfig");
    assert_snapshot!(refused("py", "class GRPOConfig:\n    group_size: int = 4"), @"it has no call of GRPOConfig");
    assert_snapshot!(refused("py", "a = GRPOConfig()\nb = GRPOConfig()"), @"GRPOConfig is called in lines 1, 2: leave only the call to convert");
    assert_snapshot!(refused("py", "GRPOConfig('out')"), @r#"line 1: GRPOConfig has an argument without a name, "'out'""#);
    assert_snapshot!(refused("py", "\nGRPOConfig(beta=1"), @"line 2: the bracket of GRPOConfig is not closed");
    assert_snapshot!(refused("py", "x = '''\nGRPOConfig()"), @"line 1: a text is not closed");
    assert_snapshot!(refused("py", "GRPOConfig(\n  beta='high')"), @r#"line 2: beta is "high": it must be a number"#);
    assert_snapshot!(refused("json", r#"{"num_generations": 2.5}"#), @"num_generations is 2.5: it must be a whole number, 0 or more");
    assert_snapshot!(refused("json", r#"{"beta": -1}"#), @"train.beta is -1: it must be a finite number, 0 or more");
    assert_snapshot!(refused("json", r#"{"hidden_size": 64}"#), @"it has no option of TRL's GRPOConfig");
    assert_snapshot!(refused("json", "[1]"), @"it is no mapping of options to values");
    assert!(refused("json", "{").contains("line 1"));
    assert!(refused("yaml", "beta: [1").contains("line"));
    let binary = convert(&[0xff, 0xfe], "py", "run").unwrap_err();
    assert_snapshot!(binary, @"it is not UTF-8 text");
    let missing = import(std::path::Path::new("no-such-file.py")).unwrap_err();
    assert!(missing.to_string().starts_with("no-such-file.py cannot be read: "), "{missing}");
}

#[test]
fn names_and_texts_cannot_leave_their_comments() {
    let text = "{\"beta\": 0.1, \"a\\n[server]\\nbind\": 1, \"reward_funcs\": [\"x\\n[server]\"]}";
    let (config, imported) = converted("json", text);
    assert_eq!(config.server, Config::default().server);
    assert!(!imported.toml.contains("\n[server]"), "{}", imported.toml);
}

/// A value of the type that TRL gives the option, different from "not set".
fn sample(name: &str) -> Value {
    match name {
        "lr_scheduler_type" => json!("cosine"),
        "lr_scheduler_kwargs" => json!({"min_lr": 1e-8}),
        "optim" => json!("adamw_torch"),
        "loss_type" => json!("grpo"),
        "importance_sampling_level" => json!("sequence"),
        "multi_objective_aggregation" => json!("normalize_then_sum"),
        "scale_rewards" => json!("batch"),
        "report_to" | "train_sampling_strategy" | "log_level" | "eval_strategy" => json!("none"),
        "evaluation_strategy" => json!("steps"),
        "vllm_importance_sampling_mode" => json!("token_mask"),
        "reward_weights" => json!([1.0]),
        "reward_funcs" => json!(["f"]),
        "target_modules" | "lora_target_modules" | "exclude_modules" => json!(["q_proj"]),
        "layers_to_transform" => json!([0]),
        "rank_pattern" | "alpha_pattern" => json!({"q_proj": 8}),
        "output_dir" | "model" | "model_name" | "model_name_or_path" => json!("some/name"),
        "pretrained_model_name_or_path" | "dataset_name" | "train_dataset" => json!("some/name"),
        "dataset_config" | "dataset_config_name" | "dataset_train_split" => json!("main"),
        "delta" => json!(2),
        "bias" | "task_type" | "lora_task_type" => json!("other"),
        _ if is_flag(name) => json!(true),
        "top_entropy_quantile" | "adam_beta1" | "adam_beta2" | "lora_dropout" => json!(0.5),
        "ref_model_mixup_alpha" | "warmup_ratio" => json!(0.5),
        "group_size" | "num_generation" | "num_generations" | "num_return_sequences" => json!(4),
        _ => json!(1),
    }
}

fn is_flag(name: &str) -> bool {
    let flags =
        ["mask_truncated_completions", "log_completions", "shuffle_dataset", "sync_ref_model"];
    flags.contains(&name)
        || name.starts_with("use_")
        || name == "vllm_importance_sampling_correction"
        || name.starts_with("gradient_checkpointing") && !name.ends_with("kwargs")
        || name == "init_lora_weights"
}

#[test]
fn every_name_is_mapped_or_noted() {
    let mut mapped = 0;
    for name in trl_names() {
        let mut options = Map::from_iter([(name.to_owned(), sample(name))]);
        // Options that need another one.
        let needs = match name {
            "ref_model_sync_steps" | "ref_model_mixup_alpha" => {
                vec![("beta", json!(0.1)), ("sync_ref_model", json!(true))]
            }
            "sync_ref_model" | "use_bias_correction_kl" => vec![("beta", json!(0.1))],
            "lr_scheduler_kwargs" => vec![("lr_scheduler_type", json!("cosine_with_min_lr"))],
            "dataset_config" | "dataset_config_name" | "dataset_train_split" => {
                vec![("dataset_name", json!("some/name"))]
            }
            _ => Vec::new(),
        };
        options.extend(needs.into_iter().map(|(name, value)| (name.to_owned(), value)));
        let text = Value::Object(options).to_string();
        let imported =
            convert(text.as_bytes(), "json", "run").unwrap_or_else(|e| panic!("{name}: {e}"));
        parse(&imported.toml).unwrap();
        let names_it = |text: &str| {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            text.split(|c: char| !is_part(c)).any(|word| word == name)
        };
        let by_default = format!("{name}: TRL's default");
        let mut lines = imported.toml.lines();
        let is_key = lines.any(|line| {
            line.starts_with("# ")
                && !line.starts_with("# - ")
                && !line.contains(&by_default)
                && names_it(line)
        });
        let is_reward = name == "reward_funcs" && imported.toml.contains("# function = \"f\"");
        let is_noted = imported.notes.iter().any(|note| names_it(note));
        assert!(is_key || is_reward || is_noted, "{name}: {}", imported.toml);
        mapped += usize::from(is_key);
    }
    assert!(mapped > 60, "{mapped} names become keys");
}

/// The literal after `x=`; `None` if it is no literal.
fn value(text: &str) -> Option<Value> {
    options(&format!("A = 3\nGRPOConfig(x={text})")).unwrap().take("x")
}

#[test]
fn literals_are_read_as_python_does() {
    for (text, expected) in [
        ("1_000", json!(1000)),
        ("-5", json!(-5)),
        ("+5", json!(5)),
        ("0x1F", json!(31)),
        ("0b101", json!(5)),
        ("5e-6", json!(5e-6)),
        ("-1E+3", json!(-1000.0)),
        (".5", json!(0.5)),
        ("5.", json!(5.0)),
        ("True", json!(true)),
        ("'a' \"b\"", json!("ab")),
        (r"'\x41\u00e4\n\'\q'", json!("A\u{e4}\n'\\q")),
        (r"r'\d+\''", json!(r"\d+\'")),
        ("'''a\n'b''c'''", json!("a\n'b''c")),
        ("f'plain'", json!("plain")),
        ("[1, 'a', [True, ], ]", json!([1, "a", [true]])),
        ("(1,)", json!([1])),
        ("((1))", json!(1)),
        ("()", json!([])),
        ("{'a': 1, \"b\": [2]}", json!({"a": 1, "b": [2]})),
        ("[  # a comment, with a bracket )\n 1]", json!([1])),
        ("A", json!(3)),
        ("[A, \\\n -2]", json!([3, -2])),
    ] {
        assert_eq!(value(text), Some(expected), "{text}");
    }
    let no_literals = "2 * 8;int(3);f'{A}';b'a';1j;-A;[x for x in y];{1, 2};{**a};B;A.b;lambda: 1;\
        '\\N{DASH}';1 if A else 2;not A;[1][0];'a' + 'b';";
    for text in no_literals.split(';') {
        assert_eq!(value(text), None, "{text}");
    }
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    assert_eq!(value(&deep), None);
}

proptest! {
    #[test]
    fn any_bytes_are_converted_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        for extension in ["py", "json", "yaml", ""] {
            let _either = convert(&bytes, extension, "run");
        }
    }

    #[test]
    fn any_tokens_are_converted_or_refused(parts in vec(select(vec![
        "GRPOConfig", "(", ")", "[", "]", "{", "}", ",", "=", ":", "*", "**", "-", "1", "1e", "0x", ".",
        "'", "\"\"\"", "r'", "\\", "\n", "# ", " ", "beta", "learning_rate=", "num_generations=",
        "LoraConfig(", "reward_funcs=", "GRPOTrainer(", "load_dataset(", "None", "True", "\u{e4}", "\u{2028}",
        "max_steps=", "optim=", "lr_scheduler_kwargs=", "'cosine'", "1e308", "18446744073709551615", "&a",
    ]), 0..40)) {
        let text = parts.concat();
        let call = format!("GRPOConfig({text})");
        for extension in ["py", "yaml", "json"] {
            let _either = convert(text.as_bytes(), extension, "run");
            let _either = convert(call.as_bytes(), extension, "run");
        }
    }
}
