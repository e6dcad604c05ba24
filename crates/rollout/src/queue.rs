//! Prompts that wait for a group, bounded, newest first: the newest completion is of the newest policy
//! version, and its user's feedback can still arrive in time. Older prompts fill idle time.

use std::collections::VecDeque;
use std::sync::Arc;

use hone_core::types::{Interaction, Sample, SampleId, UnixMillis, now_ms};
use hone_dataset::PromptId;
use hone_reward::Route;

/// Age at which a prompt is dropped, because it no longer represents current traffic.
const MAX_AGE_MS: UnixMillis = 10 * 60 * 1000;

/// A prompt for which a group is to be sampled.
pub(super) struct PromptJob {
    pub interaction: Arc<Interaction>,
    /// The prompt's id in the dataset; `None` for a live prompt.
    pub prompt: Option<PromptId>,
    pub route: Arc<Route>,
    /// Completions that a client received and that are comparable with shadows.
    pub served: Vec<Sample>,
    /// The served completions whose feedback is reserved for this group.
    pub reserved: Vec<SampleId>,
    /// When the last served completion ended.
    pub completed: UnixMillis,
}

impl PromptJob {
    /// A served prompt with its completions.
    pub fn live(interaction: Arc<Interaction>, served: Vec<Sample>, route: Arc<Route>) -> Self {
        let last = served.iter().map(|sample| sample.created).max();
        let completed = last.unwrap_or(interaction.created).min(now_ms());
        let reserved = served.iter().map(|sample| sample.id).collect();
        Self { interaction, prompt: None, route, served, reserved, completed }
    }

    /// Removes completions from the group and its reservation; returns how many.
    pub fn leave_out(&mut self, condition: impl Fn(&Sample) -> bool) -> usize {
        let all = self.served.len();
        self.served.retain(|sample| !condition(sample));
        self.reserved = self.served.iter().map(|sample| sample.id).collect();
        all - self.served.len()
    }

    /// A prompt of the dataset.
    pub fn dataset(interaction: Interaction, prompt: PromptId, route: Arc<Route>) -> Self {
        Self {
            completed: interaction.created,
            interaction: Arc::new(interaction),
            prompt: Some(prompt),
            route,
            served: Vec::new(),
            reserved: Vec::new(),
        }
    }
}

/// Removes and returns the jobs that are too old.
pub(super) fn expired(jobs: &mut VecDeque<PromptJob>, now: UnixMillis) -> Vec<PromptJob> {
    let old = |job: &PromptJob| now.saturating_sub(job.completed) > MAX_AGE_MS;
    // Nearly in the order of completion: concurrent requests may overtake each other.
    let count = jobs.iter().take_while(|job| old(job)).count();
    jobs.drain(..count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::world::interaction;

    fn job(created: UnixMillis) -> PromptJob {
        let route = Arc::new(Route { name: "r".to_owned(), store: true, parts: Vec::new() });
        let interaction = Interaction { created, ..interaction("r") };
        PromptJob::live(Arc::new(interaction), Vec::new(), route)
    }

    #[test]
    fn old_prompts_expire() {
        let mut jobs: VecDeque<_> = [0, 1, 1_000_000].map(job).into();
        assert!(expired(&mut jobs, MAX_AGE_MS).is_empty());
        assert_eq!(expired(&mut jobs, MAX_AGE_MS + 2).len(), 2);
        assert_eq!(jobs.len(), 1);
    }
}
