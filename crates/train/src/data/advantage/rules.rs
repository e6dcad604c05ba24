//! The configured choices of how rewards become advantages.

use crate::config::{
    AdvantageBaseline, AdvantageScale, RewardAggregation, TrainConfig, ZeroVariance,
};

/// `train.advantage_scale`, `train.advantage_baseline`, `train.reward_aggregation` and
/// `train.zero_variance_groups`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AdvantageRules {
    /// The divisor of a difference from the baseline.
    pub scale: AdvantageScale,
    /// The mean that a group's values are compared with.
    pub baseline: AdvantageBaseline,
    /// The order of summing and normalizing parts.
    pub aggregation: RewardAggregation,
    /// Whether groups without any difference are trained on.
    pub zero_variance: ZeroVariance,
}

impl From<&TrainConfig> for AdvantageRules {
    fn from(config: &TrainConfig) -> Self {
        Self {
            scale: config.advantage_scale,
            baseline: config.advantage_baseline,
            aggregation: config.reward_aggregation,
            zero_variance: config.zero_variance_groups,
        }
    }
}
