//! The loss, the advantages, the KL term and the correction of the sampler.

use serde_json::Value;

use super::TrlConversion;

/// Losses with the same name and meaning.
const LOSSES: [&str; 8] = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo"];

impl TrlConversion {
    pub(super) fn loss(&mut self) -> Result<(), String> {
        let given = self.options.text("loss_type")?;
        let known = given.as_deref().filter(|name| LOSSES.contains(name)).map(str::to_owned);
        match (&given, &known) {
            (_, Some(loss)) => self.settings.set("train.loss", loss.as_str(), "loss_type"),
            (Some(name), None) => {
                self.note_value("loss_type", &Value::from(name.as_str()), "compare train.loss");
            }
            (None, None) => {}
        }
        self.clips(known.as_deref().unwrap_or("dapo"))?;
        let level = self.options.text("importance_sampling_level")?;
        match level.as_deref() {
            Some(level @ ("token" | "sequence")) => {
                self.settings.set(
                    "train.importance_sampling_level",
                    level,
                    "importance_sampling_level",
                );
            }
            Some(other) => {
                let reason = "Hone has \"token\" and \"sequence\"";
                self.note_value("importance_sampling_level", &Value::from(other), reason);
            }
            None => {}
        }
        Ok(())
    }

    fn clips(&mut self, loss: &str) -> Result<(), String> {
        let guides = ["clip_range", "cliprange"].into_iter().find(|name| self.options.has(name));
        let name =
            if self.options.has("epsilon") { "epsilon" } else { guides.unwrap_or("epsilon") };
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

    pub(super) fn advantages(&mut self) -> Result<(), String> {
        if let Some(value) = self.options.take("scale_rewards") {
            let scale = match &value {
                Value::Bool(true) => "group",
                Value::Bool(false) => "none",
                other => other.as_str().unwrap_or_default(),
            };
            if ["group", "batch", "none"].contains(&scale) {
                self.settings.set("train.advantage_scale", scale, "scale_rewards");
            } else {
                self.note_value("scale_rewards", &value, "compare train.advantage_scale");
            }
        }
        let aggregation = self.options.text("multi_objective_aggregation")?;
        match aggregation.as_deref() {
            Some("sum_then_normalize") => self.settings.set(
                "train.reward_aggregation",
                "sum_then_normalize",
                "multi_objective_aggregation",
            ),
            Some("normalize_then_sum") => {
                let comment = "multi_objective_aggregation: TRL's normalize_then_sum";
                self.settings.set("train.reward_aggregation", "gdpo", comment);
            }
            Some(other) => {
                let reason = "compare train.reward_aggregation";
                self.note_value("multi_objective_aggregation", &Value::from(other), reason);
            }
            None => {}
        }
        Ok(())
    }

    pub(super) fn kl(&mut self) -> Result<(), String> {
        let guides = ["kl_coeff", "kl_coef"].into_iter().find(|name| self.options.has(name));
        let name = if self.options.has("beta") { "beta" } else { guides.unwrap_or("beta") };
        let origin = self.options.origin(name);
        let beta = self.options.number(name)?.unwrap_or(0.0);
        self.settings.set("train.beta", beta, origin);
        let origin = self.options.origin("use_bias_correction_kl");
        let corrected = self.options.flag("use_bias_correction_kl")?;
        let synced = self.options.flag("sync_ref_model")?;
        let steps = self.options.count("ref_model_sync_steps")?;
        let mixup = self.options.number("ref_model_mixup_alpha")?;
        if beta == 0.0 {
            let given = [
                ("use_bias_correction_kl", corrected.is_some()),
                ("sync_ref_model", synced.is_some()),
                ("ref_model_sync_steps", steps.is_some()),
                ("ref_model_mixup_alpha", mixup.is_some()),
            ];
            for (name, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
                self.settings.note(name, "without effect while train.beta is 0");
            }
            return Ok(());
        }
        let estimator = if corrected.unwrap_or(true) { "corrected" } else { "k3" };
        self.settings.set("train.kl.estimator", estimator, origin);
        if synced == Some(true) {
            let comment = "sync_ref_model, ref_model_sync_steps";
            self.settings.set_count("train.kl.sync_steps", steps.unwrap_or(512), comment);
            let comment = "ref_model_mixup_alpha";
            self.settings.set("train.kl.sync_mixup", mixup.unwrap_or(0.6), comment);
            return Ok(());
        }
        if synced.is_some() {
            self.settings.set_count("train.kl.sync_steps", 0, "sync_ref_model");
        }
        let given =
            [("ref_model_sync_steps", steps.is_some()), ("ref_model_mixup_alpha", mixup.is_some())];
        for (name, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
            self.settings.note(name, "without effect unless sync_ref_model is true");
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
                self.settings.set("train.sampler_correction.mode", chosen, name);
            }
            Some(other) => {
                self.note_value(name, &Value::from(other), "compare train.sampler_correction.mode");
            }
            None => {}
        }
        if mode.is_some() && is_on.is_some() {
            let text = "vllm_importance_sampling_mode sets train.sampler_correction.mode";
            self.settings.note("vllm_importance_sampling_correction", text);
        }
        for (name, value, key) in [
            ("vllm_importance_sampling_clip_min", low, "train.sampler_correction.clip_min"),
            ("vllm_importance_sampling_clip_max", high, "train.sampler_correction.clip_max"),
            ("vllm_importance_sampling_cap", cap, "train.sampler_correction.clip_max"),
        ] {
            if let Some(value) = value {
                self.settings.set(key, value, name);
            }
        }
        Ok(())
    }
}
