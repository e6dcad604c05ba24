//! Prompts that wait for a group: bounded, newest first.
//!
//! Newest first, because the newest prompt's served completion comes from the newest version and
//! its user's feedback is still to come in time for the group; the older ones are what spare time
//! is filled with when traffic ebbs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::reward::Route;
use crate::types::{Interaction, Sample, SampleId, UnixMillis, now_ms};

/// Prompts older than this no longer resemble what is asked now.
const MAX_AGE_MS: UnixMillis = 10 * 60 * 1000;

/// A prompt that is to get a group.
pub(super) struct Job {
    pub interaction: Arc<Interaction>,
    pub route: Arc<Route>,
    /// Trainable completions that a client received.
    pub served: Vec<Sample>,
    /// Completions whose feedback waits for the group.
    pub held: Vec<SampleId>,
    /// When the last of the served completions ended.
    pub completed: UnixMillis,
}

impl Job {
    /// A served prompt; completions that may not be trained on are left out.
    pub fn live(interaction: Arc<Interaction>, served: Vec<Sample>, route: Arc<Route>) -> Self {
        let completed =
            served.iter().map(|s| s.created).max().unwrap_or(interaction.created).min(now_ms());
        let served: Vec<Sample> = served.into_iter().filter(|s| s.untrainable.is_none()).collect();
        let held = served.iter().map(|s| s.id).collect();
        Self { interaction, route, served, held, completed }
    }

    /// A prompt that nobody was served.
    pub fn fresh(interaction: Arc<Interaction>, route: Arc<Route>) -> Self {
        let completed = interaction.created;
        Self { interaction, route, served: Vec::new(), held: Vec::new(), completed }
    }
}

/// The queue. Shared between requests, which push, and the scheduler, which takes.
pub(super) struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    limit: usize,
}

impl Queue {
    pub fn new(limit: usize) -> Self {
        Self { jobs: Mutex::default(), limit }
    }

    fn jobs(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job and returns the queue's length; a full queue gives the job back.
    pub fn push(&self, job: Job) -> Result<usize, Box<Job>> {
        let mut jobs = self.jobs();
        if jobs.len() >= self.limit {
            return Err(Box::new(job));
        }
        jobs.push_back(job);
        Ok(jobs.len())
    }

    /// Takes the newest job.
    pub fn pop(&self) -> Option<Job> {
        self.jobs().pop_back()
    }

    /// Takes every job that is too old.
    pub fn expired(&self, now: UnixMillis) -> Vec<Job> {
        let mut jobs = self.jobs();
        let old = |job: &Job| now.saturating_sub(job.completed) > MAX_AGE_MS;
        // Jobs stand in the order of their completion, but for requests that overtake each other.
        let count = jobs.iter().take_while(|job| old(job)).count();
        jobs.drain(..count).collect()
    }

    /// Takes all of them.
    pub fn drain(&self) -> Vec<Job> {
        self.jobs().drain(..).collect()
    }

    pub fn len(&self) -> usize {
        self.jobs().len()
    }
}
