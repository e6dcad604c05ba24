//! Ranges of the keys of `[train]`, and combinations that are refused.

use std::fmt::Display;

use serde::Serialize;

use hone_core::config::choice::ConfigChoice;
use hone_core::config::section::Parameters;
use hone_core::config::{Checked, Problem, above, quoted};

use super::objective::{AdvantageScale, CorrectionMode, LossKind, RatioLevel, RewardAggregation};
use super::train::TrainConfig;

impl TrainConfig {
    /// Checks every range, including the adapter's and the loss's.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        self.check_in("train.")?;
        self.schedule.check("train.schedule")?;
        self.optimizer.check("train.optimizer")?;
        self.average.check("train.average")?;
        self.loss.check("train.loss")?;
        self.sampler_correction.check("train.sampler_correction")?;
        self.kl.check_in("train.kl.")?;
        self.entropy.check_in("train.entropy.")?;
        self.replay.check_in("train.replay.")?;
        ensure(
            self.epochs <= 0.0 || self.max_steps == 0,
            "train.epochs",
            self.epochs,
            format!("0 where train.max_steps ({}) is set", self.max_steps),
        )?;
        let rate = self.learning_rate.fixed();
        rate.map_or(Ok(()), |rate| above("train.learning_rate", rate, 0.0))?;
        schedule(self)?;
        objective(self)?;
        self.lora.check()
    }
}

/// Refuses `value` unless `ok`; `allowed` completes the sentence "it must be ...".
fn ensure(ok: bool, key: &str, value: impl Display, allowed: impl AsRef<str>) -> Checked {
    if ok { Ok(()) } else { Err(Problem::value(key, value, allowed.as_ref())) }
}

/// A value as TOML, strings in quotation marks.
fn toml_text(value: &impl Serialize) -> String {
    toml::Value::try_from(value).map_or_else(|e| e.to_string(), |v| v.to_string())
}

/// Keys of the loss and of the advantages.
fn objective(c: &TrainConfig) -> Checked {
    clips(c)?;
    ratios(c)?;
    kl(c)?;
    correction(c)?;
    ensure(
        c.reward_aggregation != RewardAggregation::Gdpo
            || c.advantage_scale == AdvantageScale::Group,
        "train.advantage_scale",
        toml_text(&c.advantage_scale),
        "\"group\" with train.reward_aggregation \"gdpo\", which divides by the group's deviation",
    )
}

fn clips(c: &TrainConfig) -> Checked {
    let unclipped =
        format!("0 with train.loss {:?}, which has no clipped ratio", c.loss.kind.name());
    ensure(c.delta == 0.0 || c.loss.kind.clips(), "train.delta", c.delta, unclipped)?;
    let high = 1.0 + c.clip_high;
    let allowed = format!("0 or greater than 1 + train.clip_high ({high})");
    ensure(c.delta == 0.0 || c.delta > high, "train.delta", c.delta, allowed)?;
    let in_range = c.dual_clip == 0.0 || c.dual_clip > 1.0;
    ensure(in_range, "train.dual_clip", c.dual_clip, "0 or greater than 1")
}

fn ratios(c: &TrainConfig) -> Checked {
    let why = match c.loss.kind {
        LossKind::Reinforce => "which has no importance ratio",
        LossKind::Vespo => "which weighs sequences by itself",
        _ => return Ok(()),
    };
    let with = format!("with train.loss {:?}", c.loss.kind.name());
    let level = c.importance_sampling_level;
    ensure(
        level == RatioLevel::Token,
        "train.importance_sampling_level",
        toml_text(&level),
        format!("\"token\" {with}, {why}"),
    )?;
    if c.loss.kind == LossKind::Reinforce {
        let iterations = c.num_iterations;
        let allowed = format!("1 {with}, {why}");
        return ensure(iterations <= 1, "train.num_iterations", iterations, allowed);
    }
    let mode = c.sampler_correction.kind;
    ensure(
        !matches!(mode, CorrectionMode::SequenceTruncate | CorrectionMode::SequenceMask),
        "train.sampler_correction",
        quoted(mode.into()),
        format!("\"none\", \"token_truncate\" or \"token_mask\" {with}"),
    )
}

fn kl(c: &TrainConfig) -> Checked {
    let (steps, target) = (c.kl.sync_steps, c.kl.target);
    let has_kl = c.beta != 0.0;
    let allowed = "0 with train.beta 0, which uses no reference";
    ensure(steps == 0 || has_kl, "train.kl.sync_steps", steps, allowed)?;
    let allowed = "0 with train.beta 0, which disables the KL term";
    ensure(target == 0.0 || has_kl, "train.kl.target", target, allowed)?;
    let coef = c.entropy.coef;
    let in_range = !c.entropy.is_adaptive() || coef <= 1.0;
    ensure(in_range, "train.entropy.coef", coef, "at most 1 with train.entropy.target")
}

fn correction(c: &TrainConfig) -> Checked {
    const CLIP_MAX: &str = "train.sampler_correction.clip_max";
    let (mode, low, high) =
        (c.sampler_correction.kind, c.sampler_correction.clip_min, c.sampler_correction.clip_max);
    let allowed = format!("0 or greater than train.sampler_correction.clip_min ({low})");
    ensure(high == 0.0 || high > low, CLIP_MAX, high, allowed)?;
    let truncates =
        matches!(mode, CorrectionMode::TokenTruncate | CorrectionMode::SequenceTruncate);
    let name: &str = mode.into();
    let allowed = format!("greater than 0, or clip_min, with {name:?}");
    ensure(!truncates || low != 0.0 || high != 0.0, CLIP_MAX, high, allowed)
}

fn schedule(c: &TrainConfig) -> Checked {
    // The lowest automatic rate is not known before the model; the schedule never ends above its peak.
    let peak = c.learning_rate.fixed().unwrap_or(f64::INFINITY);
    let low = c.schedule.min_learning_rate;
    let allowed = format!("at most train.learning_rate ({peak})");
    ensure(low <= peak, "train.schedule.min_learning_rate", low, allowed)?;
    // A schedule that ends, or a share of its steps, needs their number.
    let (ends, steps) = (c.schedule.ends(), c.schedule_steps());
    if steps == 0 && c.epochs > 0.0 {
        // The dataset determines their number, and the configuration is then checked again.
        return Ok(());
    }
    let key = if ends {
        "a train.schedule that ends but has no steps"
    } else {
        "train.warmup_steps below 1"
    };
    let allowed = format!("at least 1 with {key} and no train.epochs");
    // Ratings would be marked as trained and change nothing.
    let goes_on = ends && low == 0.0 && c.max_steps == 0 && c.epochs <= 0.0;
    let at_zero =
        "at least 1 with a train.schedule that ends at the rate 0, where nothing is learned";
    ensure(!goes_on || steps == 0, "train.max_steps", c.max_steps, at_zero)?;
    let is_endless = !ends && !c.warms_up_by_share();
    ensure(is_endless || steps > 0, "train.max_steps", c.max_steps, allowed)?;
    let allowed = format!("less than the schedule's steps ({steps})");
    let warmup = c.configured_warmup().unwrap_or(0);
    ensure(!ends || warmup < steps || c.warms_up_by_share(), "train.warmup_steps", warmup, allowed)
}
