//! Options that keep their values.

use serde_json::Value;

use hone_hub::Hub;

use super::TrlConversion;

const NUMBERS: &[(&str, &str)] = &[
    ("adam_beta1", "train.adam_beta1"),
    ("adam_beta2", "train.adam_beta2"),
    ("adam_epsilon", "train.adam_eps"),
    ("weight_decay", "train.weight_decay"),
    ("max_grad_norm", "train.max_grad_norm"),
    ("temperature", "rollout.temperature"),
    ("sapo_temperature_pos", "train.sapo_tau_pos"),
    ("sapo_temperature_neg", "train.sapo_tau_neg"),
    ("vespo_k_pos", "train.vespo.k_pos"),
    ("vespo_lambda_pos", "train.vespo.lambda_pos"),
    ("vespo_k_neg", "train.vespo.k_neg"),
    ("vespo_lambda_neg", "train.vespo.lambda_neg"),
    ("top_entropy_quantile", "train.top_entropy_quantile"),
    ("off_policy_mask_threshold", "train.off_policy_mask_threshold"),
    ("entropy_coef", "train.entropy.coef"),
    ("entropy_coef_min", "train.entropy.coef_min"),
    ("entropy_coef_max", "train.entropy.coef_max"),
    ("entropy_coef_delta", "train.entropy.coef_delta"),
    ("entropy_target", "train.entropy.target"),
    ("lora_dropout", "train.lora.dropout"),
];

const COUNTS: &[(&str, &str)] = &[
    ("max_prompt_length", "dataset.max_prompt_tokens"),
    ("num_iterations", "train.num_iterations"),
    ("num_generations_eval", "run.eval_samples"),
    ("num_completions_to_print", "run.samples_shown"),
    ("data_seed", "dataset.seed"),
];

const FLAGS: &[(&str, &str)] = &[
    ("mask_truncated_completions", "train.mask_truncated_completions"),
    ("use_adaptive_entropy", "train.entropy.adaptive"),
    ("use_rslora", "train.lora.use_rslora"),
];

const TEXTS: &[(&str, &str)] = &[
    ("output_dir", "data.dir"),
    ("model_name_or_path", "model.path"),
    ("pretrained_model_name_or_path", "model.path"),
    ("model_name", "model.path"),
    ("model", "model.path"),
];

impl TrlConversion {
    pub(super) fn copy(&mut self) -> Result<(), String> {
        for (name, key) in NUMBERS {
            if let Some(value) = self.options.number(name)? {
                self.settings.set(key, value, *name);
            }
        }
        for (name, key) in COUNTS {
            if let Some(value) = self.options.count(name)? {
                self.settings.set_count(key, value, *name);
            }
        }
        for (name, key) in FLAGS {
            if let Some(value) = self.options.flag(name)? {
                self.settings.set(key, value, *name);
            }
        }
        for (name, key) in TEXTS {
            if let Some(value) = self.options.text(name)? {
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
        match self.options.take("init_lora_weights") {
            Some(Value::Bool(true)) => {
                self.settings.set("train.lora.init_weights", "kaiming", "init_lora_weights");
            }
            Some(value) if value == "gaussian" => {
                self.settings.set("train.lora.init_weights", "gaussian", "init_lora_weights");
            }
            Some(value) => {
                self.note_value("init_lora_weights", &value, "Hone has true and \"gaussian\"")
            }
            None => {}
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
