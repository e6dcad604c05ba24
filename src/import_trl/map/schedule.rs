//! The length of a run, the learning rate and the optimizer.

use serde_json::{Map, Value};

use super::TrlConversion;

impl TrlConversion {
    /// Steps or epochs.
    pub(super) fn duration(&mut self) -> Result<(), String> {
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

    pub(super) fn schedule(&mut self) -> Result<(), String> {
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
        self.settings.set("train.schedule", kind, origin);
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
            self.settings.set("train.min_learning_rate", lowest.min(rate), comment);
        }
        if kind == "polynomial"
            && let Some(power) = take_number(&mut more, "power")
        {
            self.settings.set("train.schedule_power", power, comment);
        }
        for (name, value) in more {
            self.note_value(
                &format!("lr_scheduler_kwargs.{name}"),
                &value,
                "the schedule has no such key",
            );
        }
        self.optimizer()
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
            } else if name == "warmup_steps" && value == 0.0 {
                self.settings.set_count("train.warmup_steps", 0, name);
            } else {
                self.settings.set("train.warmup_ratio", value, name);
            }
            is_set |= value > 0.0;
        }
        // Hone's default is not 0.
        if (is_ignored || !is_set) && !self.settings.has("train.warmup_steps") {
            self.settings.set_count("train.warmup_steps", 0, origin);
        }
        Ok(())
    }

    fn optimizer(&mut self) -> Result<(), String> {
        let Some(name) = self.options.text("optim")? else { return Ok(()) };
        let lower = name.rsplit('.').next().unwrap_or_default().to_lowercase();
        let kind = match lower.as_str() {
            "adamw" | "adamw_hf" | "adamw_torch" | "adamw_torch_fused" | "adamw_torch_xla"
            | "adamw_apex_fused" | "paged_adamw" | "paged_adamw_32bit" => "adamw",
            "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit" => "adamw_8bit",
            _ => {
                self.note_value(
                    "optim",
                    &Value::from(name),
                    "Hone has AdamW, also with 8-bit moments",
                );
                return Ok(());
            }
        };
        self.settings.set("train.optimizer", kind, "optim");
        Ok(())
    }
}

fn take_number(from: &mut Map<String, Value>, name: &str) -> Option<f64> {
    let number = from.get(name)?.as_f64()?;
    from.remove(name);
    Some(number)
}
