//! Configuration of routes and of their reward parts.

mod preset;
mod reward;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::kinds::{FeedbackParams, RewardKind};

pub use preset::Preset;
pub use reward::RewardConfig;

/// A route: which requests it matches, and the parts of their reward.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// The route's name in metrics and the ledger.
    pub name: String,
    /// The model name that a request must have; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Parts before those in `reward`; a part in `reward` replaces the preset's of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// `metadata` entries that a request must have; `"*"` matches any value.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Whether requests of the route may be recorded and learned from; absent: yes. With `false` nothing
    /// of them is kept, whatever the request says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<bool>,
    /// The parts in the file; [`RouteConfig::parts`] includes the preset's.
    #[serde(default, rename = "reward")]
    pub rewards: Vec<RewardConfig>,
}

impl RouteConfig {
    /// Every part of the reward: the preset's, each replaced by the one in `reward` of the same
    /// name, then the rest of `reward`.
    pub fn parts(&self) -> Vec<RewardConfig> {
        let mut parts = self.preset.map_or_else(Vec::new, Preset::parts);
        let from_preset = parts.len();
        for own in &self.rewards {
            let (preset, _) = parts.split_at_mut(from_preset);
            match preset.iter_mut().find(|part| part.name == own.name) {
                Some(part) => *part = own.clone(),
                None => parts.push(own.clone()),
            }
        }
        parts
    }
}

/// Routes in order. The default is one route that matches every request and learns from the
/// feedback `thumbs`, from 0 to 1. Without bounds it would be no evidence of a canary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RouteList(pub Vec<RouteConfig>);

impl Default for RouteList {
    fn default() -> Self {
        let range = Some([0.0, 1.0]);
        let thumbs = RewardKind::Feedback(FeedbackParams { range, ..FeedbackParams::default() });
        Self(vec![RouteConfig {
            name: "default".to_owned(),
            rewards: vec![RewardConfig::new("thumbs", 1.0, thumbs)],
            ..RouteConfig::default()
        }])
    }
}

#[cfg(test)]
mod tests;
