//! Prompts that wait for a group, bounded, newest first: the newest completion is of the newest policy
//! version, and its user's feedback can still arrive in time. Older prompts fill idle time.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

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

/// The queue between requests, which push, and the scheduler, which pops.
pub(super) struct PromptQueue {
    jobs: Mutex<VecDeque<PromptJob>>,
    capacity: usize,
}

impl PromptQueue {
    pub fn new(capacity: usize) -> Self {
        Self { jobs: Mutex::default(), capacity }
    }

    /// Adds a job and returns the queue's length; a full queue returns the job.
    pub fn push(&self, job: PromptJob) -> Result<usize, Box<PromptJob>> {
        let mut jobs = self.jobs.lock();
        if jobs.len() >= self.capacity {
            return Err(Box::new(job));
        }
        jobs.push_back(job);
        Ok(jobs.len())
    }

    /// Removes and returns the newest job.
    pub fn pop(&self) -> Option<PromptJob> {
        self.jobs.lock().pop_back()
    }

    /// Removes and returns the jobs that are too old.
    pub fn expired(&self, now: UnixMillis) -> Vec<PromptJob> {
        let mut jobs = self.jobs.lock();
        let old = |job: &PromptJob| now.saturating_sub(job.completed) > MAX_AGE_MS;
        // Nearly in the order of completion: concurrent requests may overtake each other.
        let count = jobs.iter().take_while(|job| old(job)).count();
        jobs.drain(..count).collect()
    }

    /// Removes and returns all jobs.
    pub fn drain(&self) -> Vec<PromptJob> {
        self.jobs.lock().drain(..).collect()
    }

    pub fn len(&self) -> usize {
        self.jobs.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use hone_core::types::{InteractionId, PromptSource, SamplingParams};

    use super::*;

    fn job(created: UnixMillis) -> PromptJob {
        let route = Arc::new(Route { name: "r".to_owned(), store: true, parts: Vec::new() });
        let interaction = Interaction {
            id: InteractionId::new(),
            created,
            source: PromptSource::Live,
            route: "r".to_owned(),
            model: String::new(),
            endpoint: Default::default(),
            key_id: None,
            messages: Vec::new(),
            metadata: BTreeMap::new(),
            params: SamplingParams::default(),
            prompt_ids: Vec::new(),
            template_hash: String::new(),
            stop: Vec::new(),
            held_out: false,
            chat: Default::default(),
            grammar: None,
            continues: None,
        };
        PromptJob::live(Arc::new(interaction), Vec::new(), route)
    }

    #[test]
    fn the_newest_job_goes_first_and_a_full_queue_returns_the_job() {
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
