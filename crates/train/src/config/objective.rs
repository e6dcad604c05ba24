//! Choices of the loss and of the advantages.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use strum::{EnumString, IntoStaticStr, VariantNames};

use hone_core::config::Checked;
use hone_core::config::section::Parameters;

/// The loss: a surrogate per token, and how token losses are combined into the step's loss. It is written as its
/// name, or as a table of its name and its parameters, such as `{ kind = "vespo", k_pos = 2.0 }`.
#[derive(Clone, Copy, Debug, Default, PartialEq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum LossKind {
    /// Clipped ratio; mean over each sequence, then over sequences (Shao et al. 2024).
    Grpo,
    /// Clipped ratio; sum over tokens, divided by sequences x `rollout.max_tokens`.
    DrGrpo,
    /// Clipped ratio; mean over the tokens of the local batch, which is the optimizer step.
    Bnpo,
    /// Clipped ratio; mean over all tokens of the optimizer step.
    #[default]
    Dapo,
    /// The bounded ratio as a constant weight of the log-probability; mean over all tokens.
    Cispo,
    /// A sigmoid gate of the ratio; mean over each sequence, then over sequences.
    Sapo(SapoConfig),
    /// Clipped ratio; sum over tokens, mean over sequences.
    Luspo,
    /// `grpo` with one ratio per sequence.
    Gspo,
    /// Log-probability times advantage, without a ratio; mean over all tokens.
    Reinforce,
    /// `reinforce` with a smooth weight of the sequence's ratio; mean over all tokens.
    Vespo(VespoConfig),
}

impl LossKind {
    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The loss's own parameters, by name.
    fn parameters(&mut self) -> Vec<(&'static str, &mut f64)> {
        match self {
            Self::Sapo(own) => vec![("tau_pos", &mut own.tau_pos), ("tau_neg", &mut own.tau_neg)],
            Self::Vespo(own) => vec![
                ("k_pos", &mut own.k_pos),
                ("lambda_pos", &mut own.lambda_pos),
                ("k_neg", &mut own.k_neg),
                ("lambda_neg", &mut own.lambda_neg),
            ],
            _ => Vec::new(),
        }
    }

    /// Checks the ranges of the loss's own parameters.
    pub(super) fn check(self) -> Checked {
        match self {
            Self::Sapo(own) => own.check_in("train.loss."),
            Self::Vespo(own) => own.check_in("train.loss."),
            _ => Ok(()),
        }
    }
}

impl Serialize for LossKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut loss = *self;
        let parameters = loss.parameters();
        if parameters.is_empty() {
            return serializer.serialize_str(self.name());
        }
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("kind", self.name())?;
        for (name, value) in parameters {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for LossKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LossVisitor)
    }
}

struct LossVisitor;

impl<'de> Visitor<'de> for LossVisitor {
    type Value = LossKind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a loss, or a table of its kind and parameters")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<LossKind, E> {
        name.parse().map_err(|_| E::unknown_variant(name, LossKind::VARIANTS))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LossKind, A::Error> {
        let (mut kind, mut values) = (None::<String>, BTreeMap::<String, f64>::new());
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "kind" => kind = Some(map.next_value()?),
                _ => drop(values.insert(key, map.next_value()?)),
            }
        }
        let kind = kind.ok_or_else(|| de::Error::missing_field("kind"))?;
        let mut loss = self.visit_str(&kind)?;
        for (name, place) in loss.parameters() {
            *place = values.remove(name).unwrap_or(*place);
        }
        match values.keys().next() {
            None => Ok(loss),
            Some(key) => {
                let known: Vec<_> = loss.parameters().iter().map(|(name, _)| *name).collect();
                let known = if known.is_empty() { "kind".to_owned() } else { known.join("`, `") };
                Err(de::Error::custom(format!("unknown field `{key}`, expected one of `{known}`")))
            }
        }
    }
}

hone_core::parameters! {
    /// The sharpness tau of the gate of `sapo`.
    #[derive(Copy)]
    pub struct SapoConfig {
        /// For positive advantages.
        pub tau_pos: f64 = 1.0 => above(0.0),
        /// For other advantages.
        pub tau_neg: f64 = 1.05 => above(0.0),
    }
}

hone_core::parameters! {
    /// The weight of a sequence with ratio w in `vespo`: `w^k exp(lambda (1 - w))`.
    #[derive(Copy)]
    pub struct VespoConfig {
        /// k for advantages of 0 or more: how fast the weight falls for small ratios.
        pub k_pos: f64 = 2.0 => at_least(0.0),
        /// lambda for advantages of 0 or more: how fast the weight falls for large ratios.
        pub lambda_pos: f64 = 3.0 => at_least(1e-4),
        /// k for negative advantages.
        pub k_neg: f64 = 3.0 => at_least(0.0),
        /// lambda for negative advantages.
        pub lambda_neg: f64 = 2.0 => at_least(1e-4),
    }
}

/// Whether a sequence has one importance ratio or one per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// One ratio per token.
    #[default]
    Token,
    /// One ratio per sequence: the geometric mean over its tokens.
    Sequence,
}

/// The estimator of KL(policy || reference) in the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `logp - ref`
    K1,
    /// `(logp - ref)^2 / 2`
    K2,
    /// `exp(ref - logp) - (ref - logp) - 1`
    #[default]
    K3,
    /// `k3` times the importance ratio.
    Corrected,
}

hone_core::parameters! {
    /// The KL term and the reference policy.
    pub struct KlConfig {
        /// The estimator in the loss.
        pub estimator: KlEstimator = KlEstimator::default(),
        /// Adapt `train.beta` so that the KL approaches this, in nats per token; 0 keeps beta fixed.
        pub target: f64 = 0.0 => at_least(0.0),
        /// Steps between updates of the reference toward the policy; 0 keeps the reference.
        pub sync_steps: u64 = 0,
        /// The policy's share in such an update.
        pub sync_mixup: f64 = 0.6 => share(),
    }
}

hone_core::parameters! {
    /// The entropy bonus.
    pub struct EntropyConfig {
        /// Coefficient of the mean entropy, which is subtracted from the loss; with a target the initial one.
        pub coef: f64 = 0.0 => at_least(0.0),
        /// Mean entropy, in nats per token, at or below which the bonus acts and its coefficient rises; above it
        /// the coefficient falls. 0 keeps the coefficient fixed.
        pub target: f64 = 0.0 => at_least(0.0),
    }
}

impl EntropyConfig {
    /// Whether the coefficient follows the target.
    pub fn is_adaptive(&self) -> bool {
        self.target > 0.0
    }
}

/// How the difference between the sampler's and the trainer's log-probabilities is corrected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionMode {
    /// Not separately: the surrogate's ratio is taken against the recorded log-probabilities.
    #[default]
    None,
    /// One weight per token, clamped to the bounds.
    TokenTruncate,
    /// One weight per token, 0 outside the bounds.
    TokenMask,
    /// One weight per sequence, clamped to the bounds.
    SequenceTruncate,
    /// One weight per sequence, 0 outside the bounds.
    SequenceMask,
}

hone_core::parameters! {
    /// Importance weights of the trainer's policy over the sampler's.
    pub struct CorrectionConfig {
        /// The granularity of the weights, and what happens outside the bounds.
        pub mode: CorrectionMode = CorrectionMode::default(),
        /// Lower bound of a weight.
        pub clip_min: f64 = 0.0 => at_least(0.0),
        /// Upper bound of a weight; 0 is no bound.
        pub clip_max: f64 = 3.0 => at_least(0.0),
    }
}

/// The divisor of group advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageScale {
    /// The group's standard deviation (GRPO).
    #[default]
    Group,
    /// The batch's standard deviation.
    Batch,
    /// 1 (Dr. GRPO).
    None,
}

/// How several reward parts become one advantage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardAggregation {
    /// Sum the parts by weight, then normalize the sum (TRL's default).
    #[default]
    SumThenNormalize,
    /// Normalize each part, then sum them by weight.
    NormalizeThenSum,
    /// `normalize_then_sum`, then standardize over the batch.
    Gdpo,
}

/// The treatment of groups whose rewards are all equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroVariance {
    /// Their samples count in the normalizer and in the KL.
    #[default]
    Keep,
    /// They are not trained on, except members whose feedback differs from its running baseline.
    Drop,
}
