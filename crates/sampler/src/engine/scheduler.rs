//! Continuous batching: selects the sequences of each decoding step.
//!
//! A request is admitted when a slot and its worst-case number of cache pages are free. Its pages are
//! reserved until it ends, so nothing is evicted. A finished sequence leaves before the next step.
//! While sequences of several versions run, each step computes one version after the other.

use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use hone_core::threads::pause_point;
use hone_core::types::{PolicyVersion, TokenId};
use hone_engine::admission::Lease;
use hone_engine::run::{CancelFlag, CancelReason, GenerationRun};
use hone_engine::sampling::TokenSampler;
use hone_engine::{EngineError, Priority};

use super::shared::{EngineShared, PolicyWeights, QueuedRequest};
use crate::capacity::{PREFILL, SamplerCapacity};
use crate::config::SamplerConfig;
use crate::decoder::{Decoder, Scratch};
use crate::error::{Result, SamplerError};
use crate::kv_cache::{BatchMember, BatchRow, PagePool, PromptPages, SequencePages};
use crate::matmul::COLUMN_BLOCK;

/// How often a pause checks whether clients are still served.
const PAUSE_POLL: Duration = Duration::from_micros(500);

/// The maximum length of a pause.
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// A sequence in the batch.
struct DecodingSequence {
    policy: PolicyWeights,
    row: BatchRow,
    sampler: TokenSampler,
    run: GenerationRun,
    priority: Priority,
    cancel: Arc<CancelFlag>,
    /// Whether it leaves the batch before the next step.
    finished: bool,
}

impl BatchMember for DecodingSequence {
    fn row(&self) -> &BatchRow {
        &self.row
    }
    fn row_mut(&mut self) -> &mut BatchRow {
        &mut self.row
    }
}

impl DecodingSequence {
    /// Samples and reports the next token.
    fn sample(&mut self, logits: &[f32]) {
        if self.run.is_over() {
            self.finished = true;
            return;
        }
        pause_point();
        match self.sampler.draw(logits) {
            Ok(drawn) => {
                self.row.token = drawn.id;
                self.finished = self.run.push(drawn);
            }
            Err(error) => self.fail(error.into()),
        }
    }

    fn fail(&mut self, error: EngineError) {
        self.run.fail(error);
        self.finished = true;
    }
}

/// A computed prompt, kept for later requests with the same prompt and version.
struct CachedPrompt {
    version: PolicyVersion,
    prompt: Arc<PromptPages>,
}

/// The state of the scheduler's thread.
pub(super) struct BatchScheduler {
    shared: Arc<EngineShared>,
    decoder: Decoder,
    pool: PagePool,
    /// The buffers of the whole batch, then those of each other thread.
    scratch: Vec<Scratch>,
    running: Vec<DecodingSequence>,
    /// Least recently used first.
    prompts: Vec<CachedPrompt>,
    /// The first request of the queue, if it waits for pages.
    next: Option<QueuedRequest>,
    /// The duration of the last pass, from which the length of pauses is computed.
    last_pass: Duration,
}

impl BatchScheduler {
    pub fn new(shared: Arc<EngineShared>, decoder: Decoder) -> Self {
        let (capacity, config) = (shared.capacity, &shared.config);
        let spec = decoder.spec();
        let others = if decoder.is_small() { config.threads.max(1) - 1 } else { 0 };
        let first = Scratch::new(spec, capacity.batch_rows, config.slots);
        let other = || Scratch::new(spec, capacity.split_rows, capacity.split_rows);
        let scratch = std::iter::once(first).chain((0..others).map(|_| other())).collect();
        Self {
            pool: PagePool::new(decoder.shape(), capacity.pages),
            running: Vec::with_capacity(config.slots),
            shared,
            decoder,
            scratch,
            prompts: Vec::new(),
            next: None,
            last_pass: Duration::ZERO,
        }
    }

    /// Runs until the engine is closed and all sequences have ended.
    pub fn run(mut self) {
        loop {
            self.admit();
            if self.running.is_empty() {
                if !self.wait_for_request() {
                    break;
                }
                continue;
            }
            let threads = self.throttle();
            let start = Instant::now();
            self.step(threads);
            self.last_pass = start.elapsed();
            self.remove_finished();
        }
    }

    /// Waits for a request. Returns false if the engine is closed.
    fn wait_for_request(&mut self) -> bool {
        let mut state = self.shared.lock();
        while state.queue.is_empty() && !state.closed {
            state = self.shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closed
    }

    /// Pauses while clients are served, so that passes take at most `busy_share` of the time. Returns
    /// the number of threads for the next pass.
    fn throttle(&self) -> usize {
        let SamplerConfig { threads, busy_threads, busy_share, .. } = self.shared.config;
        let threads = threads.max(1);
        let is_live = |running: &DecodingSequence| running.priority == Priority::Live;
        if self.running.iter().any(is_live) || !(self.shared.live_traffic)() {
            return threads;
        }
        let pause = self.last_pass.mul_f64(1.0 / busy_share - 1.0).min(MAX_PAUSE);
        let start = Instant::now();
        while start.elapsed() < pause {
            thread::sleep(PAUSE_POLL.min(pause));
            if !(self.shared.live_traffic)() {
                return threads;
            }
        }
        busy_threads.clamp(1, threads)
    }

    /// Admits requests, live ones first and each class in its order, until a request does not fit. A
    /// live request that does not fit preempts the newest shadow sequence.
    fn admit(&mut self) {
        self.admit_fitting();
        let waits = |queued: &QueuedRequest| queued.request.priority == Priority::Live;
        let live_waits =
            self.next.as_ref().is_some_and(waits) || self.shared.lock().has_live_request();
        if live_waits {
            let shadow = |running: &&DecodingSequence| running.priority == Priority::Shadow;
            if let Some(newest) = self.running.iter().rev().find(shadow) {
                newest.cancel.set(CancelReason::Preempted);
            }
        }
        self.evict_old_versions();
    }

    fn admit_fitting(&mut self) {
        while self.running.len() < self.shared.config.slots {
            let (queued, policy) = {
                let mut state = self.shared.lock();
                if state.closed {
                    self.next = None;
                }
                if let Some(waiting) = self.next.take_if(|next| {
                    next.request.priority == Priority::Shadow && state.has_live_request()
                }) {
                    state.queue.push_front(waiting);
                }
                let Some(queued) = self.next.take().or_else(|| state.next_request()) else {
                    break;
                };
                let policy = queued.policy.clone().unwrap_or_else(|| state.active.clone());
                (queued, policy)
            };
            if queued.reply.is_closed() {
                continue;
            }
            match self.try_admit(queued, policy) {
                Ok(None) => {}
                Ok(waiting) => {
                    self.next = waiting;
                    break;
                }
                // The caller gets an error because the request's reply channel is dropped.
                Err(error) => tracing::error!(%error, "a request cannot be admitted"),
            }
        }
    }

    /// Adds a request to the batch. Returns the request if too few pages are free.
    fn try_admit(
        &mut self,
        queued: QueuedRequest,
        policy: PolicyWeights,
    ) -> Result<Option<QueuedRequest>> {
        let (ids, limit) = (&queued.request.prompt_ids, queued.limit as usize);
        self.decoder.reserve_positions(ids.len() + limit)?;
        let cached = |c: &CachedPrompt| c.version == policy.version && c.prompt.ids() == ids;
        let cached = self.prompts.iter().position(cached).map(|index| {
            let cached = self.prompts.remove(index);
            let prompt = Arc::clone(&cached.prompt);
            self.prompts.push(cached);
            prompt
        });
        // A clone of the prompt protects it from eviction.
        let needed =
            SamplerCapacity::worst_case_pages(if cached.is_some() { 1 } else { ids.len() }, limit);
        self.evict_prompts(needed);
        if needed > self.pool.available() {
            return Ok(Some(queued));
        }
        let QueuedRequest { request, sampler, reply, permit, .. } = queued;
        let prompt = match cached {
            Some(prompt) => prompt,
            None => self.prefill(request.prompt_ids, &policy)?,
        };
        let sequence =
            SequencePages::new(&mut self.pool, &prompt, limit).ok_or(SamplerError::NoPage)?;
        let lease = Lease::without_slot(policy.version, request.priority);
        let cancel = Arc::clone(&lease.cancel);
        let (priority, running_cancel) = (request.priority, Arc::clone(&cancel));
        let shared = &self.shared;
        let (run, generation) =
            GenerationRun::new(&shared.codec, &request.stop, queued.limit, lease, &shared.metrics);
        shared.lock().running.push((priority, cancel));
        let row = BatchRow { sequence, token: prompt.last_token() };
        let finished = false;
        let cancel = running_cancel;
        self.running.push(DecodingSequence {
            policy,
            row,
            sampler,
            run,
            priority,
            cancel,
            finished,
        });
        drop(permit);
        // If the caller is gone, the first step ends the sequence.
        let _ = reply.send(generation);
        Ok(None)
    }

    /// Computes the shared part of a prompt, and caches it.
    fn prefill(&mut self, ids: Vec<TokenId>, policy: &PolicyWeights) -> Result<Arc<PromptPages>> {
        let mut prompt = PromptPages::new(&mut self.pool, ids).ok_or(SamplerError::NoPage)?;
        while prompt.remaining() > 0 {
            let threads = self.throttle();
            let start = Instant::now();
            let Some(scratch) = self.scratch.first_mut() else { break };
            let adapter = policy.adapter.as_deref();
            let result = self.decoder.prefill(&mut prompt, PREFILL, adapter, scratch, threads);
            if let Err(error) = result {
                prompt.free(&mut self.pool);
                return Err(error);
            }
            self.last_pass = start.elapsed();
        }
        let prompt = Arc::new(prompt);
        let cached = CachedPrompt { version: policy.version, prompt: Arc::clone(&prompt) };
        self.prompts.push(cached);
        Ok(prompt)
    }

    /// Evicts unused prompts, the least recently used first, until `needed` pages are available.
    fn evict_prompts(&mut self, needed: usize) {
        let mut index = 0;
        while needed > self.pool.available() && index < self.prompts.len() {
            if !self.evict(index) {
                index += 1;
            }
        }
    }

    /// Evicts unused prompts of versions that are neither active nor a canary.
    fn evict_old_versions(&mut self) {
        let (active, canary) = {
            let state = self.shared.lock();
            (state.active.version, state.canary.as_ref().map(|canary| canary.version))
        };
        let is_old =
            |cached: &CachedPrompt| cached.version != active && Some(cached.version) != canary;
        for index in (0..self.prompts.len()).rev() {
            if self.prompts.get(index).is_some_and(is_old) {
                self.evict(index);
            }
        }
    }

    /// Evicts a prompt. Returns false if it is in use.
    fn evict(&mut self, index: usize) -> bool {
        if self.prompts.get(index).is_none_or(|cached| Arc::strong_count(&cached.prompt) > 1) {
            return false;
        }
        if let Some(prompt) = Arc::into_inner(self.prompts.remove(index).prompt) {
            prompt.free(&mut self.pool);
        }
        true
    }

    /// Decodes one token of every sequence.
    fn step(&mut self, threads: usize) {
        for running in &mut self.running {
            if !running.run.is_over() && !running.row.sequence.ensure_page(&mut self.pool) {
                running.fail(EngineError::Internal(SamplerError::NoPage.to_string()));
            }
        }
        self.remove_finished();
        let Self { decoder, scratch, running, .. } = self;
        for rows in running.chunk_by_mut(|a, b| a.policy.version == b.policy.version) {
            let blocks = rows.len().div_ceil(COLUMN_BLOCK);
            let parts = threads.min(blocks).min(scratch.len());
            if parts == 1 {
                if let Some(scratch) = scratch.first_mut() {
                    decode(decoder, rows, scratch, threads);
                }
                continue;
            }
            let part = blocks.div_ceil(parts) * COLUMN_BLOCK;
            let parts = rows.par_chunks_mut(part).zip(scratch.par_iter_mut());
            parts.for_each(|(rows, scratch)| decode(decoder, rows, scratch, 1));
        }
    }

    /// Removes finished sequences from the batch and frees their pages.
    fn remove_finished(&mut self) {
        let mut index = 0;
        while let Some(running) = self.running.get(index) {
            if !(running.finished || running.run.is_over()) {
                index += 1;
                continue;
            }
            // Keeps the order, so that sequences of one version stay adjacent.
            let running = self.running.remove(index);
            self.shared.lock().running.remove(index);
            drop(running.row.sequence.free(&mut self.pool));
            running.run.finish();
        }
    }
}

/// Decodes and samples one token of sequences of one version.
fn decode(decoder: &Decoder, rows: &mut [DecodingSequence], scratch: &mut Scratch, threads: usize) {
    let adapter = rows.first().and_then(|running| running.policy.adapter.clone());
    if let Err(error) = decoder.step(rows, adapter.as_deref(), scratch, threads) {
        tracing::error!(%error, "a decoding step failed");
        let error = EngineError::Internal(error.to_string());
        return rows.iter_mut().for_each(|running| running.fail(error.clone()));
    }
    let scratch = &*scratch;
    if threads > 1 {
        let rows = rows.par_iter_mut().enumerate();
        rows.for_each(|(row, running)| running.sample(scratch.logits(row)));
    } else {
        for (row, running) in rows.iter_mut().enumerate() {
            running.sample(scratch.logits(row));
        }
    }
}
