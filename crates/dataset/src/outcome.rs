//! Running statistics of a prompt's groups: success rate and mean reward.

use serde::{Deserialize, Serialize};

use crate::config::DifficultyConfig;

/// Running statistics of one prompt. A group counts with weight `(1 - 1/window)^age`, because the
/// policy that sampled it changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptOutcome {
    /// Number of groups with at least one scored member.
    pub groups: u64,
    /// Number of groups without a scored member.
    pub unscored: u64,
    /// Number of groups of two or more scored members with equal rewards, from which GRPO learns
    /// nothing.
    pub zero_variance: u64,
    /// Number of the last draw of this prompt, from 0.
    pub last_drawn: Option<u64>,
    /// Weighted number of scored members.
    #[serde(with = "bits")]
    scored: f64,
    /// Weighted number of successes.
    #[serde(with = "bits")]
    successes: f64,
    /// Weighted sum of rewards.
    #[serde(with = "bits")]
    rewards: f64,
}

/// Serializes a number as its bits in hexadecimal. A JSON reader may round a decimal number, and a
/// resumed run would then draw other prompts.
mod bits {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:x}", value.to_bits()))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(f64::from_bits).map_err(D::Error::custom)
    }
}

impl PromptOutcome {
    /// Adds a group. `None` and values that are not finite count as missing, not as 0.
    pub(crate) fn add(&mut self, rewards: &[Option<f64>], config: &DifficultyConfig) {
        let known: Vec<f64> = rewards.iter().flatten().copied().filter(|r| r.is_finite()).collect();
        let Some(first) = known.first() else {
            self.unscored += 1;
            return;
        };
        let keep = 1.0 - 1.0 / config.window.max(1.0);
        let successes = known.iter().filter(|r| **r >= config.success_reward).count();
        self.groups += 1;
        self.zero_variance += u64::from(known.len() > 1 && known.iter().all(|r| r == first));
        self.scored = keep * self.scored + known.len() as f64;
        self.successes = keep * self.successes + successes as f64;
        self.rewards = keep * self.rewards + known.iter().sum::<f64>();
    }

    /// The success rate `p` among scored members, 0 to 1; `None` before the first.
    pub fn success(&self) -> Option<f64> {
        (self.scored > 0.0).then(|| (self.successes / self.scored).clamp(0.0, 1.0))
    }

    /// The mean reward of scored members; `None` before the first.
    pub fn mean_reward(&self) -> Option<f64> {
        (self.scored > 0.0).then(|| self.rewards / self.scored)
    }

    /// `1 - p`; `None` before the first scored member.
    pub fn difficulty(&self) -> Option<f64> {
        self.success().map(|p| 1.0 - p)
    }

    /// The sampling weight `p (1 - p) + epsilon`. `p (1 - p)` is the variance of a success; without
    /// variance within a group all advantages are 0. A prompt without a score has the weight of
    /// `p = 1/2`, so that it is tried.
    pub fn weight(&self, epsilon: f64) -> f64 {
        let p = self.success().unwrap_or(0.5);
        p * (1.0 - p) + epsilon
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(window: f64, groups: &[&[Option<f64>]]) -> PromptOutcome {
        let config = DifficultyConfig { window, ..DifficultyConfig::default() };
        let mut outcome = PromptOutcome::default();
        groups.iter().for_each(|group| outcome.add(group, &config));
        outcome
    }

    #[test]
    fn missing_rewards_are_not_zero() {
        let none = outcome(4.0, &[&[None, None], &[Some(f64::NAN)], &[]]);
        assert_eq!((none.groups, none.unscored, none.success()), (0, 3, None));
        assert_eq!((none.mean_reward(), none.difficulty()), (None, None));
        assert_eq!(none.weight(0.02), 0.27);
        let half = outcome(4.0, &[&[Some(1.5), None, Some(0.5), None]]);
        assert_eq!((half.success(), half.mean_reward()), (Some(0.5), Some(1.0)));
        assert_eq!(half.zero_variance, 0);
    }

    #[test]
    fn the_weight_of_old_groups_decays() {
        let (bad, good): (&[_], &[_]) = (&[Some(0.0); 2], &[Some(1.0); 2]);
        // With a window of 2, the last group has twice the weight. With a window of 1, only it
        // counts.
        let two = outcome(2.0, &[bad, good]);
        assert!((two.success().unwrap() - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!((two.groups, two.zero_variance), (2, 2));
        assert_eq!(outcome(1.0, &[bad, good]).success(), Some(1.0));
        assert!((two.weight(0.1) - (2.0 / 9.0 + 0.1)).abs() < 1e-12);
        assert_eq!(outcome(2.0, &[&[Some(0.0)]]).zero_variance, 0, "one member has no variance");
    }
}
