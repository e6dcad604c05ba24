//! Continuous batching: who is in the next step.
//!
//! A request enters when a row and all pages it may come to need are free, so that nothing that runs
//! ever has to be put out; it leaves the moment it ends. Sequences of two versions take turns, a step
//! of each, until the older ones are done.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use hone_core::threads::pause_point;
use hone_core::types::{PolicyVersion, TokenId};
use hone_engine::EngineError;
use hone_engine::admission::Lease;
use hone_engine::run::GenerationRun;
use hone_engine::sampling::TokenSampler;

use super::engine::{Current, Shared, Waiting};
use super::{AdapterWeights, Decoder, SamplerError, SamplerMemory, Scratch};
use crate::kv_cache::{BatchMember, PagePool, PromptPages, SequencePages};
use crate::matmul::LANES;
use crate::memory_plan::PREFILL;

/// How often a pause looks whether clients are still served, and its greatest length.
const LOOK: Duration = Duration::from_micros(500);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A sequence in the batch.
struct Running {
    version: PolicyVersion,
    factors: Option<Arc<AdapterWeights>>,
    sequence: SequencePages,
    token: TokenId,
    sampler: TokenSampler,
    run: GenerationRun,
    over: bool,
}

impl BatchMember for Running {
    fn sequence(&self) -> &SequencePages {
        &self.sequence
    }
    fn sequence_mut(&mut self) -> &mut SequencePages {
        &mut self.sequence
    }
    fn token(&self) -> TokenId {
        self.token
    }
}

impl Running {
    /// Draws the next token.
    fn draw(&mut self, logits: &[f32]) {
        if self.run.is_over() {
            self.over = true;
            return;
        }
        pause_point();
        match self.sampler.draw(logits) {
            Ok(drawn) => {
                self.token = drawn.id;
                self.over = self.run.push(drawn);
            }
            Err(error) => self.fail(error.into()),
        }
    }

    fn fail(&mut self, error: EngineError) {
        self.run.fail(error);
        self.over = true;
    }
}

/// A prompt that may be used again.
struct Cached {
    version: PolicyVersion,
    prompt: Arc<PromptPages>,
}

pub(super) struct Scheduler {
    shared: Arc<Shared>,
    decoder: Decoder,
    pool: PagePool,
    scratch: Vec<Scratch>,
    running: Vec<Running>,
    /// Oldest use first.
    prompts: Vec<Cached>,
    /// A request that found no room.
    next: Option<Waiting>,
    /// How long the last step took.
    last: Duration,
}

/// Whether a request got in.
enum Admitted {
    Yes,
    /// Later.
    No(Box<Waiting>),
}

impl Scheduler {
    pub fn new(shared: Arc<Shared>, decoder: Decoder) -> Self {
        let (plan, config) = (shared.plan, &shared.config);
        let spec = &decoder.weights().spec;
        let others = if decoder.is_small() { config.threads.max(1) - 1 } else { 0 };
        let first = Scratch::new(spec, plan.rows[0], config.slots);
        let other = || Scratch::new(spec, plan.rows[1], plan.rows[1]);
        let scratch = std::iter::once(first).chain((0..others).map(|_| other())).collect();
        Self {
            pool: plan.pool(decoder.shape()),
            running: Vec::with_capacity(config.slots),
            shared,
            decoder,
            scratch,
            prompts: Vec::new(),
            next: None,
            last: Duration::ZERO,
        }
    }

    /// Runs until the engine is closed and nothing runs any more.
    pub fn run(mut self) {
        loop {
            self.admit();
            if self.running.is_empty() {
                if !self.wait() {
                    break;
                }
                continue;
            }
            let threads = self.give_way();
            let began = Instant::now();
            self.step(threads);
            self.last = began.elapsed();
            self.retire();
        }
    }

    /// Waits for a request; false if there will be none.
    fn wait(&mut self) -> bool {
        let mut state = self.shared.lock();
        while state.waiting.is_empty() && !state.closed {
            state = self.shared.wake.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        !state.closed
    }

    /// Pauses while clients are served, so long that this thread takes no more than its share of the
    /// time; returns how many threads may compute.
    fn give_way(&self) -> usize {
        let config = &self.shared.config;
        if !(self.shared.busy)() {
            return config.threads.max(1);
        }
        let pause = self.last.mul_f64(1.0 / config.busy_share - 1.0).min(LONGEST_PAUSE);
        let began = Instant::now();
        while began.elapsed() < pause {
            std::thread::sleep(LOOK.min(pause));
            if !(self.shared.busy)() {
                return config.threads.max(1);
            }
        }
        config.busy_threads.clamp(1, config.threads.max(1))
    }

    /// Takes in what fits, first come, first served.
    fn admit(&mut self) {
        while self.running.len() < self.shared.config.slots {
            let (waiting, current) = {
                let mut state = self.shared.lock();
                if state.closed {
                    self.next = None;
                }
                let Some(waiting) = self.next.take().or_else(|| state.waiting.pop_front()) else {
                    break;
                };
                let current = waiting.on.clone().unwrap_or_else(|| state.current.clone());
                (waiting, current)
            };
            if waiting.reply.is_closed() {
                continue;
            }
            match self.enter(waiting, current) {
                Ok(Admitted::Yes) => {}
                Ok(Admitted::No(waiting)) => {
                    self.next = Some(*waiting);
                    break;
                }
                // Its reply is gone with it.
                Err(error) => tracing::error!(%error, "a request could not be taken in"),
            }
        }
        self.forget_old();
    }

    fn enter(&mut self, waiting: Waiting, current: Current) -> Result<Admitted, SamplerError> {
        let (ids, limit) = (&waiting.request.prompt_ids, waiting.limit as usize);
        let Current { version, factors } = current;
        self.decoder.reach(ids.len() + limit)?;
        let cached = |c: &Cached| c.version == version && c.prompt.ids() == ids;
        let found = self.prompts.iter().position(cached);
        if let Some(at) = found {
            // The last used is the last to go.
            let cached = self.prompts.remove(at);
            self.prompts.push(cached);
        }
        let keep = usize::from(found.is_some());
        let wanted = match found {
            Some(_) => SamplerMemory::wanted(1, limit),
            None => SamplerMemory::wanted(ids.len(), limit),
        };
        self.make_room(wanted, keep);
        if wanted > self.pool.available() {
            return Ok(Admitted::No(Box::new(waiting)));
        }
        let Waiting { request, sampler, reply, place, .. } = waiting;
        let prompt = match self.prompts.last().filter(|_| found.is_some()) {
            Some(cached) => Arc::clone(&cached.prompt),
            None => self.prefill(request.prompt_ids, version, factors.as_deref())?,
        };
        let none = || SamplerError::Internal("pages were counted wrongly".to_owned());
        let sequence = SequencePages::new(&mut self.pool, &prompt, limit).ok_or_else(none)?;
        let lease = Lease::without_slot(version, request.priority);
        let flag = (request.priority, Arc::clone(&lease.cancel));
        let shared = Arc::clone(&self.shared);
        let (run, generation) =
            GenerationRun::new(&shared.codec, &request.stop, waiting.limit, lease, &shared.metrics);
        let token = prompt.last();
        // In the same order as `running`.
        self.shared.lock().cancel.push(flag);
        self.running.push(Running { version, factors, sequence, token, sampler, run, over: false });
        drop(place);
        // If nobody is there any more, the first step finds out.
        let _ = reply.send(generation);
        Ok(Admitted::Yes)
    }

    /// Computes the shared part of a prompt.
    fn prefill(
        &mut self,
        ids: Vec<TokenId>,
        version: PolicyVersion,
        factors: Option<&AdapterWeights>,
    ) -> Result<Arc<PromptPages>, SamplerError> {
        let none = || SamplerError::Internal("pages were counted wrongly".to_owned());
        let mut prompt = PromptPages::new(&mut self.pool, ids).ok_or_else(none)?;
        while prompt.missing() > 0 {
            let threads = self.give_way();
            let began = Instant::now();
            let Some(scratch) = self.scratch.first_mut() else { break };
            if let Err(error) =
                self.decoder.prefill(&mut prompt, PREFILL, factors, scratch, threads)
            {
                prompt.free(&mut self.pool);
                return Err(error);
            }
            self.last = began.elapsed();
        }
        let prompt = Arc::new(prompt);
        self.prompts.push(Cached { version, prompt: Arc::clone(&prompt) });
        Ok(prompt)
    }

    /// Forgets prompts that nobody uses, the oldest first, but for the last `keep`, until so many
    /// pages are free.
    fn make_room(&mut self, wanted: usize, keep: usize) {
        let mut at = 0;
        while wanted > self.pool.available() && at + keep < self.prompts.len() {
            if !self.forget(at) {
                at += 1;
            }
        }
    }

    /// Forgets prompts of other versions than the current one.
    fn forget_old(&mut self) {
        let current = self.shared.lock().current.version;
        for at in (0..self.prompts.len()).rev() {
            if self.prompts.get(at).is_some_and(|cached| cached.version != current) {
                self.forget(at);
            }
        }
    }

    /// Frees a prompt unless it is in use.
    fn forget(&mut self, at: usize) -> bool {
        if self.prompts.get(at).is_none_or(|cached| Arc::strong_count(&cached.prompt) > 1) {
            return false;
        }
        if let Some(prompt) = Arc::into_inner(self.prompts.remove(at).prompt) {
            prompt.free(&mut self.pool);
        }
        true
    }

    /// One token of every sequence.
    fn step(&mut self, threads: usize) {
        for running in &mut self.running {
            if !running.run.is_over() && !running.sequence.make_room(&mut self.pool) {
                running.fail(EngineError::Internal("a sequence outgrew its pages".to_owned()));
            }
        }
        self.retire();
        let Self { decoder, scratch, running, .. } = self;
        for rows in running.chunk_by_mut(|a, b| a.version == b.version) {
            let blocks = rows.len().div_ceil(LANES);
            let parts = threads.min(blocks).min(scratch.len());
            if parts == 1 {
                if let Some(scratch) = scratch.first_mut() {
                    advance(decoder, rows, scratch, threads);
                }
                continue;
            }
            let part = blocks.div_ceil(parts) * LANES;
            let parts = rows.par_chunks_mut(part).zip(scratch.par_iter_mut());
            parts.for_each(|(rows, scratch)| advance(decoder, rows, scratch, 1));
        }
    }

    /// Lets go of what has ended.
    fn retire(&mut self) {
        let ended = |running: &Running| running.over || running.run.is_over();
        if !self.running.iter().any(ended) {
            return;
        }
        let mut at = 0;
        while let Some(running) = self.running.get(at) {
            if !ended(running) {
                at += 1;
                continue;
            }
            // In order, so that rows of one version stay together.
            let running = self.running.remove(at);
            self.shared.lock().cancel.remove(at);
            drop(running.sequence.free(&mut self.pool));
            running.run.finish();
        }
    }
}

/// One token of sequences of one version.
fn advance(decoder: &Decoder, rows: &mut [Running], scratch: &mut Scratch, threads: usize) {
    let factors = rows.first().and_then(|running| running.factors.clone());
    if let Err(error) = decoder.step(rows, factors.as_deref(), scratch, threads) {
        tracing::error!(%error, "a step failed");
        let error = EngineError::Internal(error.to_string());
        return rows.iter_mut().for_each(|running| running.fail(error.clone()));
    }
    let scratch = &*scratch;
    if threads > 1 {
        let rows = rows.par_iter_mut().enumerate();
        rows.for_each(|(row, running)| running.draw(scratch.logits(row)));
    } else {
        for (row, running) in rows.iter_mut().enumerate() {
            running.draw(scratch.logits(row));
        }
    }
}
