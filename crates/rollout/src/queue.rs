//! Prompts that wait for a group: bounded, newest first.
//!
//! Newest first, because the newest prompt's served completion comes from the newest version and
//! its user's feedback is still to come in time for the group; the older ones are what spare time
//! is filled with when traffic ebbs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hone_core::types::{Interaction, Sample, SampleId, UnixMillis, now_ms};
use hone_dataset::PromptId;
use hone_reward::Route;

/// Prompts older than this no longer resemble what is asked now.
const MAX_AGE_MS: UnixMillis = 10 * 60 * 1000;

/// A prompt that is to get a group.
pub(super) struct PromptJob {
    pub interaction: Arc<Interaction>,
    /// What it is in the dataset; `None` for a live one.
    pub prompt: Option<PromptId>,
    pub route: Arc<Route>,
    /// Trainable completions that a client received.
    pub served: Vec<Sample>,
    /// Completions whose feedback waits for the group.
    pub held: Vec<SampleId>,
    /// When the last of the served completions ended.
    pub completed: UnixMillis,
}

impl PromptJob {
    /// A served prompt; completions that may not be trained on are left out.
    pub fn live(interaction: Arc<Interaction>, served: Vec<Sample>, route: Arc<Route>) -> Self {
        let completed =
            served.iter().map(|s| s.created).max().unwrap_or(interaction.created).min(now_ms());
        let served: Vec<Sample> = served.into_iter().filter(|s| s.untrainable.is_none()).collect();
        let held = served.iter().map(|s| s.id).collect();
        Self { interaction, prompt: None, route, served, held, completed }
    }

    /// A prompt that nobody was served.
    pub fn fresh(interaction: Arc<Interaction>, route: Arc<Route>) -> Self {
        let completed = interaction.created;
        Self { interaction, prompt: None, route, served: Vec::new(), held: Vec::new(), completed }
    }
}

/// The queue. Shared between requests, which push, and the scheduler, which takes.
pub(super) struct PromptQueue {
    jobs: Mutex<VecDeque<PromptJob>>,
    limit: usize,
}

impl PromptQueue {
    pub fn new(limit: usize) -> Self {
        Self { jobs: Mutex::default(), limit }
    }

    fn jobs(&self) -> MutexGuard<'_, VecDeque<PromptJob>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job and returns the queue's length; a full queue gives the job back.
    pub fn push(&self, job: PromptJob) -> Result<usize, Box<PromptJob>> {
        let mut jobs = self.jobs();
        if jobs.len() >= self.limit {
            return Err(Box::new(job));
        }
        jobs.push_back(job);
        Ok(jobs.len())
    }

    /// Takes the newest job.
    pub fn pop(&self) -> Option<PromptJob> {
        self.jobs().pop_back()
    }

    /// Takes every job that is too old.
    pub fn expired(&self, now: UnixMillis) -> Vec<PromptJob> {
        let mut jobs = self.jobs();
        let old = |job: &PromptJob| now.saturating_sub(job.completed) > MAX_AGE_MS;
        // Jobs stand in the order of their completion, but for requests that overtake each other.
        let count = jobs.iter().take_while(|job| old(job)).count();
        jobs.drain(..count).collect()
    }

    /// Takes all of them.
    pub fn drain(&self) -> Vec<PromptJob> {
        self.jobs().drain(..).collect()
    }

    pub fn len(&self) -> usize {
        self.jobs().len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use hone_core::types::{InteractionId, PromptSource, SamplingParams};

    use super::*;

    fn job(created: UnixMillis) -> PromptJob {
        let route = Arc::new(Route { name: "r".to_owned(), parts: Vec::new() });
        let interaction = Interaction {
            id: InteractionId::new(),
            created,
            source: PromptSource::Live,
            route: "r".to_owned(),
            model: String::new(),
            key_id: None,
            messages: Vec::new(),
            metadata: BTreeMap::new(),
            params: SamplingParams::default(),
            prompt_ids: Vec::new(),
            template_hash: String::new(),
        };
        PromptJob::live(Arc::new(interaction), Vec::new(), route)
    }

    #[test]
    fn the_newest_goes_first_and_a_full_queue_refuses() {
        let queue = PromptQueue::new(2);
        assert_eq!(queue.push(job(1)).ok(), Some(1));
        assert_eq!(queue.push(job(2)).ok(), Some(2));
        let refused = queue.push(job(3)).err().unwrap();
        assert_eq!(refused.completed, 3);
        assert_eq!(queue.pop().unwrap().completed, 2);
        assert_eq!(queue.drain().len(), 1);
        assert!(queue.pop().is_none());
    }

    #[test]
    fn old_prompts_expire() {
        let queue = PromptQueue::new(4);
        for created in [0, 1, 1_000_000] {
            assert!(queue.push(job(created)).is_ok());
        }
        assert!(queue.expired(MAX_AGE_MS).is_empty());
        assert_eq!(queue.expired(MAX_AGE_MS + 2).len(), 2);
        assert_eq!(queue.len(), 1);
    }
}
