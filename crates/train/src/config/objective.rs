//! Keys of the loss and of the advantages.

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;
use hone_core::config::range::{Checked, above, at_least, between, finite};

use super::TrainConfig;

/// Which loss: the surrogate and how token losses are summed to the optimiser step's loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Clipped ratio; mean per sequence, then over sequences.
    Grpo,
    /// Clipped ratio; sum over sequences x `max_completion_tokens`.
    DrGrpo,
    /// Clipped ratio; mean over the tokens of the batch, which is the optimiser step.
    Bnpo,
    /// Clipped ratio; mean over all tokens of the optimiser step.
    #[default]
    Dapo,
    /// The bounded ratio as a constant weight of the log-probability; mean over all tokens.
    Cispo,
    /// A sigmoid gate of the ratio; mean per sequence, then over sequences.
    Sapo,
    /// Clipped ratio; sum over tokens, mean over sequences: weighted by length.
    Luspo,
    /// `grpo` with the ratio of whole sequences.
    Gspo,
    /// Log-probability times advantage, without a ratio; mean over all tokens.
    Reinforce,
    /// The same times a smooth weight of the whole sequence's ratio; mean over all tokens.
    Vespo,
}

impl LossKind {
    /// As in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::DrGrpo => "dr_grpo",
            Self::Bnpo => "bnpo",
            Self::Dapo => "dapo",
            Self::Cispo => "cispo",
            Self::Sapo => "sapo",
            Self::Luspo => "luspo",
            Self::Gspo => "gspo",
            Self::Reinforce => "reinforce",
            Self::Vespo => "vespo",
        }
    }

    /// Whether the surrogate is PPO's clipped one.
    pub fn clips(self) -> bool {
        !matches!(self, Self::Cispo | Self::Sapo | Self::Reinforce | Self::Vespo)
    }
}

/// The weight that `vespo` gives a sequence of ratio w: `w^k exp(lambda (1 - w))`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VespoConfig {
    /// k of advantages of 0 or more: how fast small ratios lose weight.
    pub k_pos: f64,
    /// lambda of advantages of 0 or more: how fast large ratios do.
    pub lambda_pos: f64,
    /// k of negative advantages.
    pub k_neg: f64,
    /// lambda of negative advantages.
    pub lambda_neg: f64,
}

impl Default for VespoConfig {
    fn default() -> Self {
        Self { k_pos: 2.0, lambda_pos: 3.0, k_neg: 3.0, lambda_neg: 2.0 }
    }
}

/// What the importance ratio is taken of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// Each token.
    #[default]
    Token,
    /// The sequence: the geometric mean over its tokens.
    Sequence,
}

/// The estimator of the KL to the reference in the loss.
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
    /// k3 times the importance ratio.
    Corrected,
}

/// The KL to the reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KlConfig {
    /// The estimator in the loss.
    pub estimator: KlEstimator,
    /// Steer beta so that the KL comes to this, in nats a token; 0 keeps beta fixed.
    pub target: f64,
    /// Samples over which beta follows: smaller is faster.
    pub horizon: f64,
    /// Steps after which the reference follows the policy; 0 keeps the base.
    pub sync_steps: u64,
    /// The policy's share when it does.
    pub sync_mixup: f64,
}

impl Default for KlConfig {
    fn default() -> Self {
        Self {
            estimator: KlEstimator::default(),
            target: 0.0,
            horizon: 10_000.0,
            sync_steps: 0,
            sync_mixup: 0.6,
        }
    }
}

/// The entropy bonus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EntropyConfig {
    /// Coefficient of the mean entropy, which is subtracted from the loss; where it is adaptive,
    /// its first value.
    pub coef: f64,
    /// Raise the coefficient while the entropy is at or below the target, lower it otherwise.
    pub adaptive: bool,
    /// The adaptive coefficient's least value.
    pub coef_min: f64,
    /// The adaptive coefficient's greatest value.
    pub coef_max: f64,
    /// What it changes by in one update.
    pub coef_delta: f64,
    /// The entropy to hold, in nats a token.
    pub target: f64,
}

impl Default for EntropyConfig {
    fn default() -> Self {
        Self {
            coef: 0.0,
            adaptive: false,
            coef_min: 0.0,
            coef_max: 1.0,
            coef_delta: 0.005,
            target: 0.2,
        }
    }
}

/// How the difference of the sampler from the trainer's policy is corrected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionMode {
    /// Not apart: the surrogate's ratio is against the recorded log-probabilities.
    #[default]
    None,
    /// A weight for each token, held within the bounds.
    TokenTruncate,
    /// A weight for each token, 0 outside the bounds.
    TokenMask,
    /// A weight for each sequence, held within the bounds.
    SequenceTruncate,
    /// A weight for each sequence, 0 outside the bounds.
    SequenceMask,
}

/// Importance weights of the trainer's policy over the sampler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CorrectionConfig {
    /// Which weights.
    pub mode: CorrectionMode,
    /// Lower bound of the weight.
    pub clip_min: f64,
    /// Upper bound of the weight; 0 is none.
    pub clip_max: f64,
}

impl Default for CorrectionConfig {
    fn default() -> Self {
        Self { mode: CorrectionMode::default(), clip_min: 0.0, clip_max: 3.0 }
    }
}

/// What group advantages are divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageScale {
    /// The group's standard deviation (GRPO).
    #[default]
    Group,
    /// The batch's standard deviation.
    Batch,
    /// Nothing (Dr. GRPO).
    None,
}

/// What a group's rewards are compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageBaseline {
    /// The group's mean (GRPO).
    #[default]
    Mean,
    /// The mean of the group's other members (RLOO).
    LeaveOneOut,
}

/// How several rewards become one advantage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardAggregation {
    /// Each part is compared and scaled, then they are summed by weight.
    #[default]
    NormalizeThenSum,
    /// The weighted sum of the parts is compared and scaled.
    SumThenNormalize,
    /// `normalize_then_sum`, then standardised over the batch.
    Gdpo,
}

/// What happens to groups whose rewards are all equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroVariance {
    /// They count in the normaliser and in the KL.
    #[default]
    Keep,
    /// They are not trained on, but for members that feedback tells apart.
    Drop,
}

/// Ranges of the loss's keys, and what makes no sense together.
pub(crate) fn check(c: &TrainConfig) -> Checked {
    at_least("train.beta", c.beta, 0.0)?;
    between("train.clip_low", c.clip_low, 0.0, 1.0)?;
    at_least("train.clip_high", c.clip_high, 0.0)?;
    at_least("train.delta", c.delta, 0.0)?;
    at_least("train.dual_clip", c.dual_clip, 0.0)?;
    above("train.sapo_tau_pos", c.sapo_tau_pos, 0.0)?;
    above("train.sapo_tau_neg", c.sapo_tau_neg, 0.0)?;
    at_least("train.vespo.k_pos", c.vespo.k_pos, 0.0)?;
    at_least("train.vespo.lambda_pos", c.vespo.lambda_pos, 1e-4)?;
    at_least("train.vespo.k_neg", c.vespo.k_neg, 0.0)?;
    at_least("train.vespo.lambda_neg", c.vespo.lambda_neg, 1e-4)?;
    at_least("train.off_policy_mask_threshold", c.off_policy_mask_threshold, 0.0)?;
    if !(c.top_entropy_quantile > 0.0 && c.top_entropy_quantile <= 1.0) {
        let allowed = "greater than 0 and at most 1";
        return Err(Problem::value("train.top_entropy_quantile", c.top_entropy_quantile, allowed));
    }
    clips(c)?;
    ratios(c)?;
    kl(c)?;
    entropy(c)?;
    correction(c)?;
    if c.reward_aggregation == RewardAggregation::Gdpo && c.advantage_scale != AdvantageScale::Group
    {
        let allowed = "\"group\" with train.reward_aggregation \"gdpo\", which divides by the group's deviation";
        return Err(Problem::value("train.advantage_scale", name(&c.advantage_scale), allowed));
    }
    Ok(())
}

/// A value as the file has it.
fn name(value: &impl Serialize) -> String {
    toml::Value::try_from(value).map_or_else(|e| e.to_string(), |v| v.to_string())
}

fn clips(c: &TrainConfig) -> Checked {
    for (key, value) in [("train.delta", c.delta), ("train.dual_clip", c.dual_clip)] {
        if value != 0.0 && !c.loss.clips() {
            let allowed =
                format!("0 with train.loss \"{}\", which has no clipped ratio", c.loss.as_str());
            return Err(Problem::value(key, value, &allowed));
        }
    }
    if c.delta != 0.0 && c.delta <= 1.0 + c.clip_high {
        let allowed = format!("0 or greater than 1 + train.clip_high ({})", 1.0 + c.clip_high);
        return Err(Problem::value("train.delta", c.delta, &allowed));
    }
    if c.dual_clip != 0.0 && c.dual_clip <= 1.0 {
        return Err(Problem::value("train.dual_clip", c.dual_clip, "0 or greater than 1"));
    }
    if c.delta != 0.0 && c.dual_clip != 0.0 {
        let allowed = "0 with train.delta set: both bound the loss of negative advantages";
        return Err(Problem::value("train.dual_clip", c.dual_clip, allowed));
    }
    Ok(())
}

fn ratios(c: &TrainConfig) -> Checked {
    let why = match c.loss {
        LossKind::Reinforce => "which has no importance ratio",
        LossKind::Vespo => "which weighs sequences by itself",
        _ => return Ok(()),
    };
    let with = format!("with train.loss \"{}\"", c.loss.as_str());
    if c.importance_sampling_level == RatioLevel::Sequence {
        let (key, level) = ("train.importance_sampling_level", name(&c.importance_sampling_level));
        return Err(Problem::value(key, level, &format!("\"token\" {with}, {why}")));
    }
    if c.loss == LossKind::Reinforce {
        if c.num_iterations > 1 {
            let allowed = format!("1 {with}, {why}");
            return Err(Problem::value("train.num_iterations", c.num_iterations, &allowed));
        }
        return Ok(());
    }
    let mode = c.sampler_correction.mode;
    if matches!(mode, CorrectionMode::SequenceTruncate | CorrectionMode::SequenceMask) {
        let allowed = format!("\"none\", \"token_truncate\" or \"token_mask\" {with}");
        return Err(Problem::value("train.sampler_correction.mode", name(&mode), &allowed));
    }
    Ok(())
}

fn kl(c: &TrainConfig) -> Checked {
    at_least("train.kl.target", c.kl.target, 0.0)?;
    if !(c.kl.sync_mixup > 0.0 && c.kl.sync_mixup <= 1.0) {
        let allowed = "greater than 0 and at most 1";
        return Err(Problem::value("train.kl.sync_mixup", c.kl.sync_mixup, allowed));
    }
    if c.kl.sync_steps > 0 && c.beta == 0.0 {
        let allowed = "0 with train.beta 0, which asks no reference";
        return Err(Problem::value("train.kl.sync_steps", c.kl.sync_steps, allowed));
    }
    if c.kl.target == 0.0 {
        return above("train.kl.horizon", c.kl.horizon, 0.0);
    }
    if c.beta == 0.0 {
        let allowed = "0 with train.beta 0, which no factor changes";
        return Err(Problem::value("train.kl.target", c.kl.target, allowed));
    }
    if !(c.kl.horizon.is_finite() && c.kl.horizon >= c.samples_per_step as f64) {
        let allowed =
            format!("at least train.samples_per_step ({}) and finite", c.samples_per_step);
        return Err(Problem::value("train.kl.horizon", c.kl.horizon, &allowed));
    }
    Ok(())
}

fn entropy(c: &TrainConfig) -> Checked {
    let e = &c.entropy;
    at_least("train.entropy.coef", e.coef, 0.0)?;
    at_least("train.entropy.coef_min", e.coef_min, 0.0)?;
    finite("train.entropy.coef_max", e.coef_max)?;
    at_least("train.entropy.coef_delta", e.coef_delta, 0.0)?;
    at_least("train.entropy.target", e.target, 0.0)?;
    if e.coef_max < e.coef_min {
        let allowed = format!("at least train.entropy.coef_min ({})", e.coef_min);
        return Err(Problem::value("train.entropy.coef_max", e.coef_max, &allowed));
    }
    if e.adaptive && !(e.coef_min..=e.coef_max).contains(&e.coef) {
        let allowed = format!(
            "from train.entropy.coef_min ({}) to train.entropy.coef_max ({}) with \
             train.entropy.adaptive",
            e.coef_min, e.coef_max
        );
        return Err(Problem::value("train.entropy.coef", e.coef, &allowed));
    }
    Ok(())
}

fn correction(c: &TrainConfig) -> Checked {
    let s = &c.sampler_correction;
    at_least("train.sampler_correction.clip_min", s.clip_min, 0.0)?;
    at_least("train.sampler_correction.clip_max", s.clip_max, 0.0)?;
    if s.clip_max != 0.0 && s.clip_max <= s.clip_min {
        let allowed =
            format!("0 or greater than train.sampler_correction.clip_min ({})", s.clip_min);
        return Err(Problem::value("train.sampler_correction.clip_max", s.clip_max, &allowed));
    }
    let truncates =
        matches!(s.mode, CorrectionMode::TokenTruncate | CorrectionMode::SequenceTruncate);
    if truncates && s.clip_min == 0.0 && s.clip_max == 0.0 {
        let allowed = format!("greater than 0, or clip_min, with mode {}", name(&s.mode));
        return Err(Problem::value("train.sampler_correction.clip_max", s.clip_max, &allowed));
    }
    Ok(())
}
