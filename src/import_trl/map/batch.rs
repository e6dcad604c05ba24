//! Sizes of groups, batches and completions, and evaluations, logs and memory of a run.

use serde_json::Value;

use super::TrlConversion;

impl TrlConversion {
    /// A count, TRL's default without a literal, and the comment for it.
    fn count_or(&mut self, name: &str, default: u64) -> Result<(u64, String), String> {
        let origin = self.options.origin(name);
        Ok((self.options.count(name)?.unwrap_or(default), origin))
    }

    pub(super) fn batch(&mut self) -> Result<(), String> {
        let aliases = ["num_generations", "num_generation", "group_size"];
        let name = aliases.into_iter().find(|name| self.options.has(name));
        let (size, origin) = self.count_or(name.unwrap_or("num_generations"), 8)?;
        self.settings.set_count("rollout.group_size", size, origin);
        let (tokens, origin) = self.count_or("max_completion_length", 512)?;
        self.settings.set_count("rollout.max_tokens", tokens, origin);

        let (pass, pass_origin) = self.count_or("per_device_train_batch_size", 8)?;
        let (passes, passes_origin) = self.count_or("gradient_accumulation_steps", 1)?;
        self.settings.set_count("train.micro_batch", pass, pass_origin.as_str());
        let batch = pass.saturating_mul(passes);
        let origin = format!("{pass_origin}, times {passes_origin}");
        // TRL refuses other batches. The guides, which have them, count prompts.
        let is_prompts = size > 0 && batch % size != 0;
        let (samples, origin) = if is_prompts {
            let why = format!(
                "{batch} is no multiple of num_generations, so it counts prompts, times {size}"
            );
            (batch.saturating_mul(size), format!("{origin}: {why}"))
        } else {
            (batch, origin)
        };
        self.settings.set_count("train.samples_per_step", samples, origin);
        let comment = "TRL samples from the weights of the last step, and has no gate";
        self.settings.set("policy.promotion", "direct", comment);
        self.settings.set_count("policy.publish_every", 1, comment);
        Ok(())
    }

    /// Evaluations, logs, checkpoints, the order of the prompts, and memory.
    pub(super) fn run(&mut self) -> Result<(), String> {
        if let Some(value) = self.options.take("report_to") {
            let names = match &value {
                Value::Array(names) => names.clone(),
                name => vec![name.clone()],
            };
            let has = |name: &str| names.iter().any(|known| known == name);
            let is_on = has("tensorboard") || has("all");
            if is_on || has("none") || names.is_empty() {
                self.settings.set("run.tensorboard", is_on, "report_to");
            } else {
                self.note_value(
                    "report_to",
                    &value,
                    "TensorBoard files and run/steps.jsonl are written",
                );
            }
        }
        let every = self.options.number("logging_steps")?;
        match self.options.flag("log_completions")? {
            Some(true) => {
                let steps = every.filter(|steps| *steps >= 1.0).unwrap_or(10.0);
                self.settings.set_count(
                    "run.samples_every",
                    whole(steps),
                    "log_completions, logging_steps",
                );
            }
            Some(false) => self.settings.set_count("run.samples_every", 0, "log_completions"),
            None => {}
        }
        if every.is_some() {
            self.settings.note("logging_steps", "every step is logged");
        }
        self.evaluation()?;
        if let Some(limit) = self.options.count("save_total_limit")? {
            self.settings.set_count("train.keep_checkpoints", limit.max(1), "save_total_limit");
        }
        for name in ["gradient_checkpointing", "use_gradient_checkpointing"] {
            match self.options.take(name) {
                Some(Value::Bool(false)) => self.settings.set("train.recompute", "never", name),
                // Unsloth's value is "unsloth".
                Some(_) => self.settings.set("train.recompute", "always", name),
                None => {}
            }
        }
        if let Some(shuffled) = self.options.flag("shuffle_dataset")? {
            let strategy = if shuffled { "shuffle" } else { "sequential" };
            self.settings.set("dataset.strategy", strategy, "shuffle_dataset");
        }
        match self.options.take("train_sampling_strategy") {
            Some(value) if value == "random" || value == "sequential" => {
                let strategy = if value == "random" { "shuffle" } else { "sequential" };
                self.settings.set("dataset.strategy", strategy, "train_sampling_strategy");
            }
            Some(value) => {
                self.note_value("train_sampling_strategy", &value, "compare dataset.strategy");
            }
            None => {}
        }
        if let Some(level) = self.options.text("log_level")? {
            match level.as_str() {
                "debug" | "info" | "error" => self.settings.set("log.level", level, "log_level"),
                "warning" => self.settings.set("log.level", "warn", "log_level"),
                "critical" => self.settings.set("log.level", "error", "log_level"),
                _ => self.note_value("log_level", &level.into(), "log.level keeps its default"),
            }
        }
        Ok(())
    }

    fn evaluation(&mut self) -> Result<(), String> {
        const NAMES: [&str; 2] = ["eval_strategy", "evaluation_strategy"];
        let name = NAMES.into_iter().find(|name| self.options.has(name)).unwrap_or(NAMES[0]);
        let strategy = self.options.text(name)?;
        let steps = self.options.number("eval_steps")?;
        match (strategy.as_deref(), steps) {
            (Some("no"), _) => self.settings.set_count("run.eval_every", 0, name),
            (Some("steps") | None, Some(steps)) if steps >= 1.0 => {
                self.settings.set_count("run.eval_every", whole(steps), "eval_steps");
                return Ok(());
            }
            (Some("steps"), None) => self.settings.set_count("run.eval_every", 10, name),
            (Some(other), _) => {
                self.note_value(name, &Value::from(other), "run.eval_every counts steps");
            }
            (None, _) => {}
        }
        if steps.is_some() {
            self.settings.note("eval_steps", "run.eval_every counts whole steps");
        }
        Ok(())
    }
}

/// A number of at least 1 without its fraction.
fn whole(number: f64) -> u64 {
    number.trunc().to_string().parse().unwrap_or(u64::MAX)
}
