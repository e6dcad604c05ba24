//! Options that keep their values, or have a few values with counterparts.

use serde_json::Value;

use hone_hub::Hub;

use super::TrlConversion;
use crate::import_trl::settings::count_value;

/// The type of a copied value.
#[derive(Clone, Copy)]
enum CopiedType {
    Number,
    Count,
    Flag,
    Text,
}

use CopiedType::{Count, Flag, Number, Text};

/// Options that keep their values: the name, Hone's key, and the type.
const COPIED: &[(&str, &str, CopiedType)] = &[
    ("adam_beta1", "train.optimizer.beta1", Number),
    ("adam_beta2", "train.optimizer.beta2", Number),
    ("adam_epsilon", "train.optimizer.eps", Number),
    ("weight_decay", "train.weight_decay", Number),
    ("max_grad_norm", "train.max_grad_norm", Number),
    ("temperature", "rollout.temperature", Number),
    ("top_entropy_quantile", "train.top_entropy_quantile", Number),
    ("off_policy_mask_threshold", "train.off_policy_mask_threshold", Number),
    ("entropy_coef", "train.entropy.coef", Number),
    ("lora_dropout", "train.lora.dropout", Number),
    ("max_prompt_length", "dataset.max_prompt_tokens", Count),
    ("num_iterations", "train.num_iterations", Count),
    ("num_generations_eval", "run.eval_samples", Count),
    ("data_seed", "dataset.seed", Count),
    ("mask_truncated_completions", "train.mask_truncated_completions", Flag),
    ("use_rslora", "train.lora.use_rslora", Flag),
    ("output_dir", "data.dir", Text),
    ("model_name_or_path", "model.path", Text),
    ("pretrained_model_name_or_path", "model.path", Text),
    ("model_name", "model.path", Text),
    ("model", "model.path", Text),
];

/// Options with a few values: the name, Hone's key, TRL's values, each with Hone's after `=` if that differs,
/// and what to say about other values. `*` is any value.
const CHOICES: &[[&str; 4]] = &[
    [
        "importance_sampling_level",
        "train.importance_sampling_level",
        "token sequence",
        "Hone has \"token\" and \"sequence\"",
    ],
    [
        "scale_rewards",
        "train.advantage_scale",
        "group batch none true=group false=none",
        "compare train.advantage_scale",
    ],
    [
        "multi_objective_aggregation",
        "train.reward_aggregation",
        "sum_then_normalize normalize_then_sum=gdpo",
        "compare train.reward_aggregation",
    ],
    [
        "optim",
        "train.optimizer.kind",
        "adamw adamw_hf=adamw adamw_torch=adamw adamw_torch_fused=adamw adamw_torch_xla=adamw \
         adamw_apex_fused=adamw paged_adamw=adamw paged_adamw_32bit=adamw adamw_8bit \
         adamw_bnb_8bit=adamw_8bit paged_adamw_8bit=adamw_8bit",
        "Hone has AdamW, also with 8-bit moments",
    ],
    // Unsloth's value is "unsloth".
    ["gradient_checkpointing", "train.recompute", "false=never *=always", ""],
    ["use_gradient_checkpointing", "train.recompute", "false=never *=always", ""],
    [
        "init_lora_weights",
        "train.lora.init_weights",
        "true=kaiming gaussian",
        "Hone has true and \"gaussian\"",
    ],
    [
        "shuffle_dataset",
        "dataset.strategy",
        "true=shuffle false=sequential",
        "compare dataset.strategy",
    ],
    [
        "train_sampling_strategy",
        "dataset.strategy",
        "random=shuffle sequential",
        "compare dataset.strategy",
    ],
    [
        "report_to",
        "run.tracker",
        "none mlflow",
        "Hone's other tracker is run/steps.jsonl; compare run.tracker",
    ],
    [
        "log_level",
        "log.level",
        "debug info warning=warn error critical=error",
        "log.level keeps its default",
    ],
];

impl TrlConversion {
    /// Sets the keys of [`CHOICES`].
    pub(super) fn choose(&mut self) {
        for [name, key, values, reason] in CHOICES {
            let Some(value) = self.options.take(name) else { continue };
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_lowercase);
            // `OptimizerNames.ADAMW_TORCH` is "adamw_torch".
            let plain = text.rsplit('.').next().unwrap_or_default();
            let mut pairs = values.split(' ').map(|v| v.split_once('=').unwrap_or((v, v)));
            match pairs.find(|(theirs, _)| *theirs == plain || *theirs == "*") {
                Some((_, ours)) => self.settings.set(key, ours, *name),
                None => self.note_value(name, &value, reason),
            }
        }
    }

    pub(super) fn copy(&mut self) -> Result<(), String> {
        for (name, key, kind) in COPIED {
            let value: Option<toml::Value> = match kind {
                Number => self.options.number(name)?.map(Into::into),
                Count => self.options.count(name)?.map(count_value),
                Flag => self.options.flag(name)?.map(Into::into),
                Text => self.options.text(name)?.map(Into::into),
            };
            if let Some(value) = value {
                self.settings.set(key, value, *name);
            }
        }
        let origin = self.options.origin("seed");
        let seed = self.options.count("seed")?.unwrap_or(42);
        self.settings.set_count("train.seed", seed, origin);
        Ok(())
    }

    /// The adapter. PEFT's defaults apply where the file calls `LoraConfig`.
    pub(super) fn lora(&mut self) -> Result<(), String> {
        let is_peft = self.options.has_lora_config;
        for name in ["r", "lora_r", "lora_rank"] {
            if let Some(rank) = self.options.count(name)? {
                self.settings.set_count("train.lora.r", rank, name);
            }
        }
        if is_peft && !self.settings.has("train.lora.r") {
            self.settings.set_count("train.lora.r", 8, "r: PEFT's default");
        }
        match self.options.number("lora_alpha")? {
            Some(alpha) => self.settings.set("train.lora.alpha", alpha, "lora_alpha"),
            None if is_peft => {
                self.settings.set("train.lora.alpha", 8.0, "lora_alpha: PEFT's default")
            }
            None => {}
        }
        for (names, key) in [
            (&["target_modules", "lora_target_modules"][..], "train.lora.target_modules"),
            (&["exclude_modules"], "train.lora.exclude_modules"),
            (&["layers_to_transform"], "train.lora.layers_to_transform"),
            (&["rank_pattern"], "train.lora.rank_pattern"),
            (&["alpha_pattern"], "train.lora.alpha_pattern"),
        ] {
            for name in names {
                if let Some(value) = self.options.take(name) {
                    self.copy_modules(name, key, value);
                }
            }
        }
        if !is_peft && !self.options.has("use_peft") && !self.settings.has_any("train.lora.") {
            let text = "without one TRL trains all parameters; Hone trains an adapter of rank 16";
            self.settings.note("peft_config", text);
        }
        // Values that describe every adapter of Hone.
        for (name, usual) in
            [("bias", "none"), ("task_type", "CAUSAL_LM"), ("lora_task_type", "CAUSAL_LM")]
        {
            if let Some(value) = self.options.take(name).filter(|value| value != usual) {
                self.note_value(
                    name,
                    &value,
                    "an adapter consists of the two matrices of each linear layer",
                );
            }
        }
        Ok(())
    }

    /// A value with names or patterns of modules. One layer becomes a list.
    fn copy_modules(&mut self, name: &str, key: &'static str, value: Value) {
        let value = if value.is_number() { Value::Array(vec![value]) } else { value };
        match toml::Value::try_from(&value) {
            Ok(converted) => self.settings.set(key, converted, name),
            Err(_) => self.note_value(name, &value, &format!("set {key}")),
        }
    }

    pub(super) fn dataset(&mut self) -> Result<(), String> {
        let mut on_hub = false;
        for name in ["dataset_name", "train_dataset"] {
            let Some(path) = self.options.text(name)? else { continue };
            let extensions = [".json", ".jsonl", ".csv", ".tsv", ".parquet"];
            let has_extension = extensions.iter().any(|extension| path.ends_with(extension));
            if path.starts_with("hf://") || has_extension {
                on_hub |= path.starts_with("hf://");
                self.settings.set("dataset.path", path, name);
            } else if Hub::is_model_id(&path) {
                on_hub = true;
                self.settings.set("dataset.path", format!("hf://{path}"), name);
            } else {
                let reason = "set dataset.path to a file or to hf://OWNER/NAME";
                self.note_value(name, &Value::from(path), reason);
            }
        }
        for (name, key) in [
            ("dataset_config", "dataset.config"),
            ("dataset_config_name", "dataset.config"),
            ("dataset_train_split", "dataset.split"),
        ] {
            let Some(value) = self.options.text(name)? else { continue };
            if on_hub && !value.contains('[') {
                self.settings.set(key, value, name);
            } else {
                let reason = format!("{key} names a part of a dataset of the hub");
                self.note_value(name, &Value::from(value), &reason);
            }
        }
        Ok(())
    }
}
