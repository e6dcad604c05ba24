//! Every name in the tables becomes a key or a note.

use serde_json::{Map, Value, json};

use crate::config::{parse, trl_names};

use super::super::convert;

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
