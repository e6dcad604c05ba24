//! The keys of `[train]` with their defaults and ranges.

mod check;
mod objective;
mod timetable;
mod train;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use strum::{EnumString, IntoStaticStr, VariantNames};

pub use objective::{
    AdvantageScale, CorrectionConfig, CorrectionMode, EntropyConfig, KlConfig, KlEstimator, Loss,
    LossKind, RatioLevel, RewardAggregation, ZeroVariance,
};
pub(crate) use timetable::day;
pub use timetable::{DailyWindow, TrainWhen};
pub use train::{ReplayConfig, TrainConfig};

// Choices of the optimizer, the schedule and the memory.

/// How the learning rate changes after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ScheduleKind {
    /// Stays at the peak.
    #[default]
    Constant,
    /// Falls linearly to 0 at the schedule's end.
    Linear,
    /// Falls to `min_learning_rate` at the schedule's end along half a cosine.
    Cosine,
    /// Falls to `min_learning_rate` at the schedule's end with the power `power`.
    Polynomial,
    /// Falls with the inverse square root of the steps, without an end.
    InverseSqrt,
}

hone_core::choice! {
    /// The learning-rate schedule after warm-up.
    pub struct Schedule of ScheduleKind {
        for Linear | Cosine | Polynomial {
            /// Its last step; 0 is `train.max_steps`.
            pub steps: u64 = 0,
        }
        for Cosine | Polynomial {
            /// Learning rate at its end.
            pub min_learning_rate: f64 = 0.0 => at_least(0.0),
        }
        for Polynomial {
            /// Its exponent.
            pub power: f64 = 1.0 => above(0.0),
        }
    }
}

impl Schedule {
    /// Whether it ends at a step.
    pub fn ends(&self) -> bool {
        !matches!(self.kind, ScheduleKind::Constant | ScheduleKind::InverseSqrt)
    }
}

/// The optimizer's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
pub enum OptimizerKind {
    /// AdamW with moments in 32 bits.
    #[default]
    #[strum(serialize = "adamw")]
    AdamW,
    /// AdamW with moments in 8 bits (Dettmers et al. 2021): a quarter of their memory.
    #[strum(serialize = "adamw_8bit")]
    AdamW8bit,
}

hone_core::choice! {
    /// The optimizer.
    pub struct OptimizerConfig of OptimizerKind {
        for AdamW | AdamW8bit {
            /// Decay of the first moment.
            pub beta1: f64 = 0.9 => below(0.0, 1.0),
            /// Decay of the second moment.
            pub beta2: f64 = 0.999 => below(0.0, 1.0),
            /// Added to the denominator of an update.
            pub eps: f64 = 1e-8 => above(0.0),
        }
    }
}

/// What is served and saved instead of the adapter's last values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum AverageKind {
    /// The last values themselves.
    #[default]
    None,
    /// Their exponential average.
    Ema,
    /// Their mean over all steps from one on (stochastic weight averaging).
    Swa,
}

hone_core::choice! {
    /// The average of the adapter over steps.
    pub struct AverageConfig of AverageKind {
        for Ema {
            /// The decay per step.
            pub decay: f64 = 0.99 => below(0.0, 1.0),
        }
        for Swa {
            /// The first step of the mean.
            pub start: u64 = 1,
        }
    }
}

/// Which layers the backward pass recomputes instead of keeping their activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// The first layers, as many as needed to keep at most 768 MiB of activations.
    #[default]
    Auto,
    /// All layers: least memory, about a third more time.
    Always,
    /// No layer.
    Never,
}

// Where passes run.

/// `model.device`: what computes the passes of the trainer and of the native engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU if there is one and the model does not fit the processor's caches, or else the processor.
    Auto,
    /// The processor.
    #[default]
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

impl Serialize for DeviceChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            Self::Cpu => serializer.serialize_str("cpu"),
            Self::Cuda(ordinal) => serializer.collect_str(&format_args!("cuda:{ordinal}")),
        }
    }
}

impl<'de> Deserialize<'de> for DeviceChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.as_str() {
            AUTO => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => {
                let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
                let wrong = "invalid value, expected \"auto\", \"cpu\" or \"cuda:N\"";
                ordinal.map(Self::Cuda).ok_or_else(|| de::Error::custom(wrong))
            }
        }
    }
}

// The peak learning rate: a number, or one that follows the model's size.

/// The word for [`PeakRate::Auto`].
const AUTO: &str = "auto";

/// The automatic rate times the square root of the number of parameters.
const SCALE: f64 = 1.2;

/// The peak learning rate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum PeakRate {
    /// A rate that falls with the size of the model, as [`PeakRate::of`] computes it.
    #[default]
    Auto,
    /// This rate.
    Fixed(f64),
}

impl PeakRate {
    /// The rate for a model with so many parameters.
    pub fn of(self, parameters: usize) -> f64 {
        match self {
            Self::Auto => Self::for_size(parameters),
            Self::Fixed(rate) => rate,
        }
    }

    /// 1.2 / sqrt(parameters), and at most 2e-3.
    ///
    /// The best rate of an adapter falls with the size of the model (Schulman et al. 2025, "LoRA Without
    /// Regret"). The formula agrees with what was measured with Hone, 2e-3 for half a million parameters
    /// (1.7e-3) and 1e-4 for 135 million (1.03e-4), and with the 1e-5 to 5e-5 that are usual for adapters of
    /// one to eight billion (3.8e-5 to 1.3e-5).
    #[expect(clippy::cast_precision_loss, reason = "a size")]
    fn for_size(parameters: usize) -> f64 {
        (SCALE / (parameters.max(1) as f64).sqrt()).min(2e-3)
    }

    /// The rate, if it does not depend on the model.
    pub fn fixed(self) -> Option<f64> {
        match self {
            Self::Auto => None,
            Self::Fixed(rate) => Some(rate),
        }
    }
}

impl Serialize for PeakRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            Self::Fixed(rate) => serializer.serialize_f64(*rate),
        }
    }
}

impl<'de> Deserialize<'de> for PeakRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let rate = match toml::Value::deserialize(deserializer)? {
            toml::Value::Float(rate) => Some(rate),
            #[expect(clippy::cast_precision_loss, reason = "a rate of such a size is refused")]
            toml::Value::Integer(rate) => Some(rate as f64),
            toml::Value::String(text) if text == AUTO => return Ok(Self::Auto),
            // Numbers in text are those of environment variables.
            toml::Value::String(text) => text.parse().ok(),
            _ => None,
        };
        let wrong = || de::Error::custom("invalid value, expected a number or \"auto\"");
        rate.map(Self::Fixed).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_automatic_rate_is_near_those_that_were_measured() {
        for (parameters, low, high) in [
            (530_000, 1.5e-3, 2e-3),
            (135_000_000, 9e-5, 1.2e-4),
            (1_000_000_000, 1e-5, 5e-5),
            (8_000_000_000, 1e-5, 5e-5),
        ] {
            let rate = PeakRate::Auto.of(parameters);
            assert!((low..=high).contains(&rate), "{parameters}: {rate}");
        }
        assert_eq!(PeakRate::Auto.of(0), 2e-3);
        assert_eq!(PeakRate::Fixed(0.5).of(1_000_000), 0.5);
    }

    #[test]
    fn rates_are_read_and_written() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Table {
            rate: PeakRate,
        }
        let read = |text: &str| toml::from_str::<Table>(&format!("rate = {text}"));
        for (text, rate) in [
            ("1e-4", PeakRate::Fixed(1e-4)),
            ("1", PeakRate::Fixed(1.0)),
            ("\"2e-5\"", PeakRate::Fixed(2e-5)),
            ("\"auto\"", PeakRate::Auto),
        ] {
            let found = read(text).unwrap();
            assert_eq!(found.rate, rate);
            assert_eq!(toml::from_str::<Table>(&toml::to_string(&found).unwrap()).unwrap(), found);
        }
        let error = read("\"fast\"").unwrap_err().to_string();
        assert!(error.contains("a number or \"auto\""), "{error}");
    }
}
