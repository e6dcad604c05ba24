//! The meaning of TRL's options in Hone's keys.

mod copied;

use serde_json::{Map, Value};

use hone_core::text::shortened;

use super::options::{Given, TrlOptions};
use super::settings::TrlSettings;
use crate::config::counterpart;

/// Options in conversion: what remains of the file, and what it became.
struct TrlConversion {
    options: TrlOptions,
    settings: TrlSettings,
}

/// Converts every option into a key or a note.
///
/// # Errors
/// A value of the wrong type, with its line.
pub(super) fn convert(options: TrlOptions) -> Result<TrlSettings, String> {
    let mut conversion = TrlConversion { options, settings: TrlSettings::default() };
    conversion.copy()?;
    conversion.choose();
    if conversion.settings.has_any("train.optimizer.")
        && !conversion.settings.has("train.optimizer.kind")
    {
        conversion.settings.set("train.optimizer.kind", "adamw", "optim: TRL's default");
    }
    conversion.batch()?;
    conversion.duration()?;
    conversion.schedule()?;
    conversion.loss()?;
    conversion.entropy()?;
    conversion.kl()?;
    conversion.sampler_correction()?;
    conversion.lora()?;
    conversion.dataset()?;
    conversion.run()?;
    conversion.rewards();
    let TrlConversion { options, mut settings } = conversion;
    for (name, given, line) in options.rest() {
        note_rest(&mut settings, &name, &given, line);
    }
    Ok(settings)
}

/// Notes an option that became no key.
fn note_rest(settings: &mut TrlSettings, name: &str, given: &Given, line: Option<usize>) {
    let place = line.map_or_else(String::new, |line| format!("line {line}: "));
    let Some(row) = counterpart(name) else {
        let text = if name.starts_with('*') {
            format!("{place}these arguments are known only when the file runs")
        } else {
            "neither TRL's GRPOConfig nor Hone has this option".to_owned()
        };
        return settings.note(name, text);
    };
    let (keys, note) = (row.keys.join(", "), row.plain_note());
    let text = match given {
        _ if keys.is_empty() => note,
        Given::Expression(text) => {
            format!("{place}`{}` is not a literal: set {keys}", shortened(text, 60))
        }
        Given::Literal(_) if note.is_empty() => format!("compare {keys}"),
        Given::Literal(_) => format!("compare {keys}: {note}"),
    };
    settings.note(name, text);
}

impl TrlConversion {
    /// Notes an option whose value has no counterpart.
    fn note_value(&mut self, name: &str, value: &Value, reason: &str) {
        let shown = value.to_string();
        self.settings.note(name, format!("{}: {reason}", shortened(&shown, 60)));
    }

    /// Reward functions with their weights.
    fn rewards(&mut self) {
        let weights = self.options.take("reward_weights");
        let functions = match self.options.take("reward_funcs") {
            Some(Value::Array(functions)) => functions,
            Some(function) => vec![function],
            None => Vec::new(),
        };
        if let (Some(weights), true) = (&weights, functions.is_empty()) {
            self.note_value("reward_weights", weights, "set route.reward.weight of each part");
        }
        for (i, function) in functions.iter().enumerate() {
            let name = function.as_str().map_or_else(|| function.to_string(), str::to_owned);
            let weight = weights.as_ref().and_then(|weights| weights.get(i)?.as_f64());
            self.settings.rewards.push((name, weight));
        }
    }
}

// Sizes of groups, batches and completions, and evaluations and logs of a run.

impl TrlConversion {
    /// A count, TRL's default without a literal, and the comment for it.
    fn count_or(&mut self, name: &str, default: u64) -> Result<(u64, String), String> {
        let origin = self.options.origin(name);
        Ok((self.options.count(name)?.unwrap_or(default), origin))
    }

    fn batch(&mut self) -> Result<(), String> {
        let name = self.options.present(&["num_generations", "num_generation", "group_size"]);
        let (size, origin) = self.count_or(name, 8)?;
        self.settings.set_count("rollout.group_size", size, origin);
        let (tokens, origin) = self.count_or("max_completion_length", 512)?;
        self.settings.set_count("rollout.max_tokens", tokens, origin);

        let (pass, pass_origin) = self.count_or("per_device_train_batch_size", 8)?;
        let (passes, passes_origin) = self.count_or("gradient_accumulation_steps", 1)?;
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

    /// Evaluations, logs and checkpoints.
    fn run(&mut self) -> Result<(), String> {
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
            self.settings.set_count("policy.keep_versions", limit.max(2), "save_total_limit");
        }
        Ok(())
    }

    fn evaluation(&mut self) -> Result<(), String> {
        let name = self.options.present(&["eval_strategy", "evaluation_strategy"]);
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

// The length of a run and the learning rate.

impl TrlConversion {
    /// Steps or epochs.
    fn duration(&mut self) -> Result<(), String> {
        let steps = self.options.number("max_steps")?.filter(|steps| *steps > 0.0);
        let origin = self.options.origin("num_train_epochs");
        let given = self.options.number("num_train_epochs")?;
        match steps {
            Some(steps) => {
                let steps = steps.ceil().to_string().parse().unwrap_or(u64::MAX);
                self.settings.set_count("train.max_steps", steps, "max_steps");
                if given.is_some() {
                    self.settings.note("num_train_epochs", "max_steps takes precedence, as in TRL");
                }
            }
            None => self.settings.set("train.epochs", given.unwrap_or(3.0), origin),
        }
        Ok(())
    }

    fn schedule(&mut self) -> Result<(), String> {
        let mut origin = self.options.origin("learning_rate");
        let given = self.options.number("learning_rate")?;
        if given.is_none() {
            origin += ", for all parameters; adapters need 1e-5 to 1e-4";
        }
        let rate = given.unwrap_or(1e-6);
        self.settings.set("train.learning_rate", rate, origin);

        let origin = self.options.origin("lr_scheduler_type");
        let name = self.options.text("lr_scheduler_type")?.unwrap_or_else(|| "linear".to_owned());
        let mut more = match self.options.take("lr_scheduler_kwargs") {
            Some(Value::Object(more)) => more,
            Some(value) => {
                self.note_value("lr_scheduler_kwargs", &value, "it must be a mapping");
                Map::new()
            }
            None => Map::new(),
        };
        // `SchedulerType.COSINE` is "cosine".
        let name = name.rsplit('.').next().unwrap_or_default().to_lowercase();
        let kind = match name.as_str() {
            "constant_with_warmup" => "constant",
            "cosine_with_min_lr" | "cosine_warmup_with_min_lr" => "cosine",
            "constant" | "linear" | "cosine" | "polynomial" | "inverse_sqrt" => name.as_str(),
            other => {
                let reason = "Hone has constant, linear, cosine, polynomial and inverse_sqrt";
                self.note_value("lr_scheduler_type", &Value::from(other), reason);
                "constant"
            }
        };
        self.settings.set("train.schedule.kind", kind, origin);
        self.warmup(name == "constant")?;
        let comment = "lr_scheduler_kwargs";
        let lowest = match kind {
            "cosine" => {
                let share = take_number(&mut more, "min_lr_rate").map(|share| share * rate);
                take_number(&mut more, "min_lr").or(share)
            }
            "polynomial" => Some(take_number(&mut more, "lr_end").unwrap_or(1e-7)),
            _ => None,
        };
        if let Some(lowest) = lowest {
            self.settings.set("train.schedule.min_learning_rate", lowest.min(rate), comment);
        }
        if kind == "polynomial"
            && let Some(power) = take_number(&mut more, "power")
        {
            self.settings.set("train.schedule.power", power, comment);
        }
        for (name, value) in more {
            self.note_value(
                &format!("lr_scheduler_kwargs.{name}"),
                &value,
                "the schedule has no such key",
            );
        }
        Ok(())
    }

    /// Warm-up in steps, or below 1 as a share. TRL's `constant` schedule ignores it.
    fn warmup(&mut self, is_ignored: bool) -> Result<(), String> {
        let origin = if is_ignored {
            "lr_scheduler_type: \"constant\" has no warm-up in TRL".to_owned()
        } else {
            self.options.origin("warmup_steps")
        };
        let steps = self.options.number("warmup_steps")?;
        let share = self.options.number("warmup_ratio")?;
        let given = [("warmup_steps", steps), ("warmup_ratio", share)];
        let mut is_set = false;
        for (name, value) in given.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            if is_ignored && value > 0.0 {
                self.settings.note(name, "the schedule \"constant\" has no warm-up in TRL");
            } else if is_set && value > 0.0 {
                self.settings.note(name, "warmup_steps takes precedence, as in TRL");
            } else if value >= 1.0 {
                let steps = value.ceil().to_string().parse().unwrap_or(u64::MAX);
                self.settings.set_count("train.warmup_steps", steps, name);
            } else if value > 0.0 {
                self.settings.set("train.warmup_steps", value, name);
            }
            is_set |= value > 0.0;
        }
        // Hone's default is not 0.
        if (is_ignored || !is_set) && !self.settings.has("train.warmup_steps") {
            self.settings.set_count("train.warmup_steps", 0, origin);
        }
        Ok(())
    }
}

fn take_number(from: &mut Map<String, Value>, name: &str) -> Option<f64> {
    let number = from.get(name)?.as_f64()?;
    from.remove(name);
    Some(number)
}

// The loss, the KL term and the correction of the sampler.

/// Losses with the same name and meaning.
const LOSSES: [&str; 8] = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo"];

/// Parameters of losses: TRL's option, Hone's loss and the key in its table.
const PARAMETERS: [[&str; 3]; 6] = [
    ["sapo_temperature_pos", "sapo", "tau_pos"],
    ["sapo_temperature_neg", "sapo", "tau_neg"],
    ["vespo_k_pos", "vespo", "k_pos"],
    ["vespo_lambda_pos", "vespo", "lambda_pos"],
    ["vespo_k_neg", "vespo", "k_neg"],
    ["vespo_lambda_neg", "vespo", "lambda_neg"],
];

impl TrlConversion {
    pub(super) fn loss(&mut self) -> Result<(), String> {
        let given = self.options.text("loss_type")?;
        let known = given.as_deref().filter(|name| LOSSES.contains(name)).map(str::to_owned);
        let loss = known.as_deref().unwrap_or("dapo");
        let mut names = vec!["loss_type"];
        let mut table = toml::Table::from_iter([("kind".to_owned(), loss.into())]);
        for [name, of, key] in PARAMETERS {
            match self.options.number(name)? {
                Some(value) if of == loss => {
                    names.push(name);
                    table.insert(key.to_owned(), value.into());
                }
                Some(_) => self.settings.note(name, format!("without effect with the loss {loss}")),
                None => {}
            }
        }
        match (&given, &known) {
            (_, Some(_)) if names.len() > 1 => {
                self.settings.set("train.loss", table, names.join(", "));
            }
            (_, Some(loss)) => self.settings.set("train.loss", loss.as_str(), "loss_type"),
            (Some(name), None) => {
                self.note_value("loss_type", &Value::from(name.as_str()), "compare train.loss");
            }
            (None, None) => {}
        }
        self.clips(loss)
    }

    pub(super) fn entropy(&mut self) -> Result<(), String> {
        let adaptive = self.options.flag("use_adaptive_entropy")?;
        let target = self.options.number("entropy_target")?;
        match (adaptive, target) {
            (Some(true), target) => {
                let comment = "use_adaptive_entropy, entropy_target";
                let target = target.unwrap_or(0.2);
                self.settings.set("train.entropy.target", target, comment);
                if target <= 0.0 {
                    self.settings.note("entropy_target", "at 0 Hone's coefficient is fixed");
                }
            }
            (adaptive, target) => {
                if adaptive.is_some() {
                    self.settings.set("train.entropy.target", 0.0, "use_adaptive_entropy");
                }
                if target.is_some() {
                    self.settings.note(
                        "entropy_target",
                        "without effect unless use_adaptive_entropy is true",
                    );
                }
            }
        }
        Ok(())
    }

    fn clips(&mut self, loss: &str) -> Result<(), String> {
        let name = self.options.present(&["epsilon", "clip_range", "cliprange"]);
        let low = self.options.number(name)?;
        let high = self.options.number("epsilon_high")?;
        let is_bound = loss == "cispo";
        if let Some(low) = low {
            self.settings.set("train.clip_low", low, name);
            if high.is_none() && !is_bound {
                self.settings.set("train.clip_high", low, name);
            }
        }
        match high {
            Some(high) if is_bound && high >= 1.0 => {
                let comment = "epsilon_high, less 1: TRL's bounds the ratio itself";
                self.settings.set("train.clip_high", high - 1.0, comment);
            }
            Some(high) if is_bound => {
                let reason = "with the loss cispo it bounds the ratio, so it must be at least 1";
                self.note_value("epsilon_high", &Value::from(high), reason);
            }
            Some(high) => self.settings.set("train.clip_high", high, "epsilon_high"),
            None => {}
        }
        let clips = !["cispo", "sapo", "vespo"].contains(&loss);
        match self.options.number("delta")? {
            Some(_) if !clips => {
                self.settings.note("delta", format!("the loss {loss} has no clipped ratio"));
            }
            Some(delta) => self.settings.set("train.delta", delta, "delta"),
            None if clips => self.settings.set("train.dual_clip", 0.0, "TRL has no dual clip"),
            None => {}
        }
        Ok(())
    }

    pub(super) fn kl(&mut self) -> Result<(), String> {
        let name = self.options.present(&["beta", "kl_coeff", "kl_coef"]);
        let origin = self.options.origin(name);
        let beta = self.options.number(name)?.unwrap_or(0.0);
        self.settings.set("train.beta", beta, origin);
        let origin = self.options.origin("use_bias_correction_kl");
        let corrected = self.options.flag("use_bias_correction_kl")?;
        let synced = self.options.flag("sync_ref_model")?;
        let steps = self.options.count("ref_model_sync_steps")?;
        let mixup = self.options.number("ref_model_mixup_alpha")?;
        let given = [
            ("use_bias_correction_kl", corrected.is_some()),
            ("sync_ref_model", synced.is_some()),
            ("ref_model_sync_steps", steps.is_some()),
            ("ref_model_mixup_alpha", mixup.is_some()),
        ];
        let mut without_effect = |given: &[(&str, bool)], reason| {
            for (name, _) in given.iter().filter(|(_, is_given)| *is_given) {
                self.settings.note(name, format!("without effect {reason}"));
            }
        };
        if beta == 0.0 {
            without_effect(&given, "while train.beta is 0");
            return Ok(());
        }
        if synced != Some(true) {
            without_effect(&given[2..], "unless sync_ref_model is true");
        }
        let estimator = if corrected.unwrap_or(true) { "corrected" } else { "k3" };
        self.settings.set("train.kl.estimator", estimator, origin);
        let comment = "sync_ref_model, ref_model_sync_steps";
        match synced {
            Some(true) => {
                self.settings.set_count("train.kl.sync_steps", steps.unwrap_or(512), comment);
                let comment = "ref_model_mixup_alpha";
                self.settings.set("train.kl.sync_mixup", mixup.unwrap_or(0.6), comment);
            }
            Some(false) => self.settings.set_count("train.kl.sync_steps", 0, "sync_ref_model"),
            None => {}
        }
        Ok(())
    }

    /// These apply only with vLLM, so TRL's defaults of them are not written.
    pub(super) fn sampler_correction(&mut self) -> Result<(), String> {
        const MODES: [&str; 4] =
            ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"];
        const NAMES: [&str; 5] = [
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
        ];
        if self.options.is("use_vllm", &Value::Bool(false)) {
            for name in NAMES {
                if self.options.take(name).is_some() {
                    self.settings.note(name, "without effect while use_vllm is false");
                }
            }
            return Ok(());
        }
        let is_on = self.options.flag("vllm_importance_sampling_correction")?;
        let mode = self.options.text("vllm_importance_sampling_mode")?;
        let low = self.options.number("vllm_importance_sampling_clip_min")?;
        let cap = self.options.number("vllm_importance_sampling_cap")?;
        let high = self.options.number("vllm_importance_sampling_clip_max")?;
        let name = if mode.is_some() {
            "vllm_importance_sampling_mode"
        } else {
            "vllm_importance_sampling_correction"
        };
        let chosen = match (is_on, mode.as_deref()) {
            (Some(false), _) => Some("none"),
            (None, None) if low.or(cap).or(high).is_none() => None,
            (_, mode) => Some(mode.unwrap_or("sequence_mask")),
        };
        match chosen {
            Some(chosen) if chosen == "none" || MODES.contains(&chosen) => {
                self.settings.set("train.sampler_correction.kind", chosen, name);
            }
            Some(other) => {
                self.note_value(name, &Value::from(other), "compare train.sampler_correction.kind");
            }
            None => {}
        }
        if mode.is_some() && is_on.is_some() {
            let text = "vllm_importance_sampling_mode sets train.sampler_correction.kind";
            self.settings.note("vllm_importance_sampling_correction", text);
        }
        let is_corrected = matches!(chosen, Some(kind) if MODES.contains(&kind));
        for (name, value, key) in [
            ("vllm_importance_sampling_clip_min", low, "train.sampler_correction.clip_min"),
            ("vllm_importance_sampling_clip_max", high, "train.sampler_correction.clip_max"),
            ("vllm_importance_sampling_cap", cap, "train.sampler_correction.clip_max"),
        ] {
            match value {
                Some(value) if is_corrected => self.settings.set(key, value, name),
                Some(_) => self.settings.note(name, "without effect without a correction"),
                None => {}
            }
        }
        Ok(())
    }
}
