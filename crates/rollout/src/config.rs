//! The keys of `[rollout]`.

use serde::{Deserialize, Serialize};

use hone_core::config::section::Parameters;
use hone_core::config::{Checked, require};

hone_core::parameters! {
    /// Configuration of shadow groups.
    pub struct RolloutConfig {
        /// Whether to sample shadow completions.
        pub enabled: bool = true,
        /// Members of a group. The served completion is one of them if it may be trained on.
        pub group_size: usize = 8 => between(2, 1024),
        /// Sampling temperature of shadows whose prompt does not set a temperature that they can have.
        pub temperature: f32 = 1.0 => between(0.01, 10.0),
        /// Largest token limit of shadows, whatever the client's is.
        pub max_tokens: u32 = 256 => between(1, 1 << 20),
        /// The engine that samples shadows.
        pub sampler: SamplerKind = SamplerKind::Auto,
        /// Capacity of the native sampler's KV cache in tokens, prompts included.
        pub max_batch_tokens: usize = 32_768 => between(32, 1 << 30),
        /// Prompts that may wait for a group. While the queue is full, new prompts are skipped.
        #[serde(skip)]
        pub queue: usize = 256,
        /// Milliseconds that a scored group waits for its client's feedback before it is committed.
        #[serde(skip)]
        pub feedback_wait_ms: u64 = 500,
        /// Route whose rewards score the dataset.
        pub dataset_route: String = "default".to_owned(),
        /// Groups that may wait for the trainer, with those in flight. Sampling pauses at this number, so that
        /// samples are not many policy versions old. 0 is as many as two steps need
        /// ([`Self::for_steps_of`]): one is trained while the next one is sampled.
        pub max_ready_groups: usize = 0 => between(0, 1 << 20),
    }
}

/// The engine that samples shadows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerKind {
    /// The native sampler if the serving engine runs on the CPU, else the serving engine.
    #[default]
    Auto,
    /// The serving engine, in slots that no client needs.
    Engine,
    /// The native sampler: the trainer's model, in batches.
    Native,
}

impl SamplerKind {
    /// Whether this selects the native sampler; `cpu` is whether the engine runs on the CPU.
    pub fn is_native(self, cpu: bool) -> bool {
        match self {
            Self::Auto => cpu,
            Self::Engine => false,
            Self::Native => true,
        }
    }
}

impl RolloutConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        self.check_in("rollout.")?;
        let least = self.max_tokens as usize + 32;
        let fits = self.sampler == SamplerKind::Engine || self.max_batch_tokens >= least;
        let allowed = format!(
            "{least} or more, so that a prompt and rollout.max_tokens {} fit, or \
             rollout.sampler = \"engine\"",
            self.max_tokens
        );
        require(fits, "rollout.max_batch_tokens", self.max_batch_tokens, &allowed)
    }

    /// The configuration for steps of `samples` samples, with the limit that `max_ready_groups = 0` stands for.
    #[must_use]
    pub fn for_steps_of(&self, samples: usize) -> Self {
        let two_steps = 2 * samples.div_ceil(self.group_size.max(1)).max(1);
        let max_ready_groups =
            if self.max_ready_groups == 0 { two_steps } else { self.max_ready_groups };
        Self { max_ready_groups, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_ready_groups_are_those_of_two_steps() {
        let limit = |max_ready_groups, group_size, samples| {
            let config = RolloutConfig { max_ready_groups, group_size, ..Default::default() };
            config.for_steps_of(samples).max_ready_groups
        };
        assert_eq!(
            [limit(0, 8, 64), limit(0, 8, 65), limit(0, 8, 1), limit(0, 3, 7)],
            [16, 18, 2, 6]
        );
        assert_eq!(limit(5, 8, 64), 5);
    }
}
