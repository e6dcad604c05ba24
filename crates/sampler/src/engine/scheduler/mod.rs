//! Continuous batching: selects what each iteration computes.
//!
//! A request is admitted when a slot and its worst-case number of cache pages are free. Its pages are
//! promised until it ends, so no running sequence is evicted. A sequence first computes its prompt, of
//! which it takes from the prefix cache what that holds, and then decodes. One iteration computes a
//! bounded number of prompt tokens and one step of the decoding sequences ([`plan`]). A sequence that
//! ended or was cancelled leaves before the next iteration. A pass computes sequences of several versions:
//! the base's products once for all of them, and each adapter's for its own.

mod admit;
mod on_device;
mod pass;
mod plan;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hone_core::threads::{Serving, background_was_busy};
use hone_engine::EngineError;

use super::shared::EngineShared;
use crate::config::SamplerConfig;
use crate::decoder::{PassOutcome, Scratch};
use crate::device::PassDecoder;
use crate::error::SamplerError;
use crate::kv_cache::{PAGE, PagePool};

use on_device::compute_on_device;
use pass::{DecodingPass, EngineSequence, LEAST_TOKENS, PromptPart};
use plan::{IterationPlan, oldest_shadow};

/// How often a pause checks whether clients are still served.
const PAUSE_POLL: Duration = Duration::from_micros(500);

const MAX_PAUSE: Duration = Duration::from_millis(200);

/// Pause after a panic, so that one in each iteration does not take a processor.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// The shortest pause for background threads. What they are owed adds up until then.
const LEAST_SHARE: Duration = Duration::from_micros(500);

/// A background thread that has yielded within so long has more to compute.
const BUSY_WITHIN: Duration = Duration::from_millis(200);

pub(super) struct BatchScheduler {
    shared: Arc<EngineShared>,
    decoder: PassDecoder,
    pool: PagePool,
    /// On the processor the buffers of the whole batch, then those of each other thread.
    scratch: Vec<Scratch>,
    /// The sequences that compute their prompts.
    prefilling: Vec<EngineSequence>,
    /// The sequences that decode. Those of the same weights are adjacent.
    running: Vec<EngineSequence>,
    admitted: u64,
    iterations: u64,
    /// Parts of live prompts so far.
    live_parts: u64,
    /// The duration of the last pass, from which the length of pauses is computed.
    last_pass: Duration,
    /// The time that background threads have not got yet.
    owed: Duration,
}

impl BatchScheduler {
    pub fn new(shared: Arc<EngineShared>, decoder: PassDecoder) -> Self {
        let (capacity, config) = (shared.capacity, &shared.config);
        let (spec, slots) = (decoder.spec(), config.slots.max(1));
        let others = if decoder.is_small() { config.threads.max(1) - 1 } else { capacity.sharing };
        let first = || Scratch::new(spec, capacity.batch_rows, slots);
        let other = || Scratch::new(spec, capacity.split_rows, capacity.split_logits);
        let scratch = match &decoder {
            PassDecoder::Processor(_) => {
                std::iter::once(first()).chain((0..others).map(|_| other())).collect()
            }
            PassDecoder::Device(_) => Vec::new(),
        };
        let pool = decoder.pool(capacity.pages);
        shared.metrics.engine_cache_capacity.set(metric_value(capacity.pages));
        Self {
            pool: if config.prefix_cache { pool } else { pool.without_reuse() },
            prefilling: Vec::with_capacity(slots),
            running: Vec::with_capacity(slots),
            shared,
            decoder,
            scratch,
            admitted: 0,
            iterations: 0,
            live_parts: 0,
            last_pass: Duration::ZERO,
            owed: Duration::ZERO,
        }
    }

    /// Runs until the engine is closed and all sequences have ended. A panic fails the sequences, and later
    /// requests find an empty cache.
    pub fn run(mut self) {
        while catch_unwind(AssertUnwindSafe(|| self.run_until_closed())).is_err() {
            tracing::error!("the native engine panicked and restarts");
            self.shared.metrics.engine_restarts.inc();
            thread::sleep(RESTART_PAUSE);
            self = self.restarted();
        }
    }

    fn run_until_closed(&mut self) {
        while self.iterate() || self.wait_for_request() {}
    }

    /// A scheduler in place of one that panicked.
    fn restarted(mut self) -> Self {
        let mut state = self.shared.lock();
        state.running.clear();
        self.shared.report(&state);
        drop(state);
        for mut sequence in self.prefilling.drain(..).chain(self.running.drain(..)) {
            sequence.fail(EngineError::Internal("the engine restarted after a panic".to_owned()));
            sequence.run.finish();
        }
        Self::new(self.shared, self.decoder)
    }

    /// Removes sequences that have ended, admits requests, and computes an iteration. Returns false if no
    /// sequence was left for it.
    pub fn iterate(&mut self) -> bool {
        self.remove_finished();
        self.admit();
        self.report_pages();
        if self.prefilling.is_empty() && self.running.is_empty() {
            return false;
        }
        let live_waits = self.shared.lock().has_live_request();
        let config = &self.shared.config;
        self.iterations += 1;
        let plan = IterationPlan::new(
            config,
            self.iterations,
            live_waits,
            &self.prefilling,
            &self.running,
        );
        let start = Instant::now();
        let parts = self.prefill(plan);
        self.step(plan, parts);
        if plan.busy {
            self.leave_time_to_background(start.elapsed());
        }
        true
    }

    /// Waits for a request, and prepares pages meanwhile. Returns false if the engine is closed.
    fn wait_for_request(&mut self) -> bool {
        while self.shared.lock().is_idle() && self.pool.prepare_page() {}
        let mut state = self.shared.lock();
        while state.is_idle() {
            state = self.shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closed
    }

    /// Pauses while another engine serves clients, so that passes take at most `busy_share` of the time.
    /// Returns the number of threads for the next pass, which may compute parts of prompts.
    fn throttle(&self, parts: &[PromptPart]) -> usize {
        let SamplerConfig { threads, busy_share, serves_clients, .. } = self.shared.config;
        let threads = threads.max(1);
        let parts = parts.iter().map(|part| &part.sequence);
        let mut all = self.running.iter().chain(&self.prefilling).chain(parts);
        if serves_clients || all.any(EngineSequence::is_live) || !(self.shared.live_traffic)() {
            return threads;
        }
        let pause = self.last_pass.mul_f64(1.0 / busy_share - 1.0).min(MAX_PAUSE);
        let start = Instant::now();
        while start.elapsed() < pause {
            thread::sleep(PAUSE_POLL.min(pause));
            let live_arrived = self.shared.live_arrived.load(Ordering::Acquire);
            if live_arrived || !(self.shared.live_traffic)() {
                return threads;
            }
        }
        1
    }

    /// Pauses after an iteration for clients that took `spent`, if background threads have something to compute.
    /// Otherwise they would get only the time that no client needs.
    fn leave_time_to_background(&mut self, spent: Duration) {
        let share = self.shared.config.background_share;
        // Within the iteration they may not have run.
        if self.decoder.is_small() || !background_was_busy(spent + BUSY_WITHIN) {
            self.owed = Duration::ZERO;
            return;
        }
        let owed = spent.mul_f64(share);
        // With a large share, a long iteration alone owes more than the longest pause.
        self.owed = (self.owed + owed).min(MAX_PAUSE.max(owed));
        if self.owed >= LEAST_SHARE {
            thread::sleep(self.owed);
            self.owed = Duration::ZERO;
        }
    }

    /// Lets the sequences that compute their prompts take what the prefix cache holds of them meanwhile. Those
    /// with nothing left to compute decode.
    fn take_cached(&mut self) {
        let mut index = 0;
        while let Some(sequence) = self.prefilling.get_mut(index) {
            if sequence.finished {
                index += 1;
                continue;
            }
            let found = sequence.pages.take_cached(&mut self.pool);
            sequence.run.count_cached(found);
            let is_complete = sequence.pages.remaining() == 0;
            self.count_prompt_tokens("cached", found);
            if is_complete {
                let sequence = self.prefilling.remove(index);
                self.begin_decoding(sequence);
            } else {
                index += 1;
            }
        }
    }

    /// Selects parts of prompts, up to the plan's number of tokens. Returns those for the pass of the step.
    fn prefill(&mut self, plan: IterationPlan) -> Vec<PromptPart> {
        self.take_cached();
        if plan.shadow_page
            && let Some(index) = oldest_shadow(&self.prefilling)
            && let Some(part) = self.take_part(plan, index, PAGE)
        {
            self.compute_part(part);
        }
        let mut parts = Vec::new();
        // The batch of a small model is split between the threads, so its prompts are computed alone.
        let (mut left, least) = if self.decoder.is_small() {
            (plan.tokens, PAGE)
        } else {
            (plan.tokens_with(self.rows_beside_parts(plan)), 1)
        };
        // Each thread gets a part, if there are so many prompts and enough tokens.
        let threads = self.scratch.len().max(1);
        let prompts = self.prefilling.iter().filter(|s| s.is_live() || plan.shadow_prompts).count();
        let shares =
            !self.decoder.is_small() && prompts >= threads && left >= threads * LEAST_TOKENS;
        let most = if shares { left.div_ceil(threads) } else { left };
        while left >= least {
            let taken = if self.pool.reuses() { &parts[..] } else { &[] };
            let next = plan.next_prompt(&self.prefilling, self.live_parts, taken);
            let Some(index) = next else { break };
            let Some(part) = self.take_part(plan, index, left.min(most)) else { continue };
            let restricted = plan.busy && !part.sequence.is_live();
            left = if restricted { 0 } else { left - part.tokens };
            if !self.decoder.is_small() {
                parts.push(part);
            } else if !self.compute_part(part) {
                break;
            }
        }
        if shares && parts.len() < threads {
            // The other prompts wait for pages of these.
            for part in &mut parts {
                let pages = &mut part.sequence.pages;
                let more = left.min(pages.remaining() - part.tokens);
                if pages.ensure_pages(&mut self.pool, part.tokens + more) {
                    part.tokens += more;
                    left -= more;
                }
            }
        }
        parts
    }

    /// Sequences that decode in a pass with parts of prompts.
    fn rows_beside_parts(&self, plan: IterationPlan) -> usize {
        let newest = plan.newest_shadow(&self.running, self.shared.config.busy_rows, true);
        self.running.iter().filter(|sequence| plan.takes_part(sequence, newest)).count()
    }

    /// Removes a sequence from `prefilling` for its next part. Returns `None` if it has no page for it, which
    /// ends the sequence.
    fn take_part(
        &mut self,
        plan: IterationPlan,
        index: usize,
        tokens: usize,
    ) -> Option<PromptPart> {
        let mut sequence = self.prefilling.remove(index);
        if sequence.is_live() {
            self.live_parts += 1;
        }
        let tokens = plan.part(&sequence, tokens);
        if !sequence.pages.ensure_pages(&mut self.pool, tokens) {
            sequence.fail(EngineError::Internal(SamplerError::NoPage.to_string()));
            self.prefilling.push(sequence);
            return None;
        }
        Some(PromptPart { sequence, tokens, outcome: PassOutcome::Interrupted })
    }

    /// Computes a part in a pass of its own. Returns false if the pass was interrupted.
    fn compute_part(&mut self, part: PromptPart) -> bool {
        let is_live = self.shared.config.serves_clients && part.sequence.is_live();
        let mut parts = [part];
        self.compute(|_| false, &mut parts, is_live);
        let [part] = parts;
        let computed = part.outcome == PassOutcome::Computed;
        self.end_part(part);
        self.take_cached();
        computed
    }

    /// Caches what a part has computed. Its sequence decodes if that was the last part.
    fn end_part(&mut self, part: PromptPart) {
        let PromptPart { mut sequence, tokens, outcome } = part;
        if outcome == PassOutcome::Computed {
            self.count_prompt_tokens("computed", tokens);
            sequence.pages.cache_full_pages(&mut self.pool);
        }
        if sequence.pages.remaining() > 0 || sequence.finished {
            self.prefilling.push(sequence);
        } else {
            sequence.pages.cache_last_page(&mut self.pool);
            self.begin_decoding(sequence);
        }
    }

    /// Adds a sequence to the batch, next to those of its weights.
    fn begin_decoding(&mut self, sequence: EngineSequence) {
        // The prompt's last token, of which the first step needs the logits.
        self.count_prompt_tokens("computed", 1);
        let last = self.running.iter().rposition(|other| other.same_weights(&sequence));
        let at = last.map_or(self.running.len(), |last| last + 1);
        self.running.insert(at, sequence);
    }

    /// Decodes one token of the plan's sequences, and computes the parts of prompts.
    fn step(&mut self, plan: IterationPlan, mut parts: Vec<PromptPart>) {
        let busy_rows = self.shared.config.busy_rows;
        let newest = plan.newest_shadow(&self.running, busy_rows, !parts.is_empty());
        let (mut rows, mut failed) = (0, false);
        for sequence in self.running.iter_mut().filter(|s| plan.takes_part(s, newest)) {
            rows += 1;
            if !sequence.pages.ensure_pages(&mut self.pool, 1) {
                sequence.fail(EngineError::Internal(SamplerError::NoPage.to_string()));
                failed = true;
            }
        }
        if failed {
            self.remove_finished();
        }
        if rows > 0 || !parts.is_empty() {
            self.compute(|s| plan.takes_part(s, newest), &mut parts, plan.busy);
        }
        parts.into_iter().for_each(|part| self.end_part(part));
    }

    /// Computes a pass over the decoding sequences that take part, and parts of prompts.
    fn compute(
        &mut self,
        takes_part: impl Fn(&EngineSequence) -> bool,
        parts: &mut [PromptPart],
        is_live: bool,
    ) {
        let threads = self.throttle(parts);
        let start = Instant::now();
        let Self { shared, decoder, scratch, running, pool, .. } = self;
        let rows = running.iter_mut().filter(|sequence| takes_part(sequence)).collect();
        let decoder = match decoder {
            PassDecoder::Processor(decoder) => &**decoder,
            PassDecoder::Device(device) => {
                compute_on_device(device, &pool.take_copies(), rows, parts);
                self.last_pass = start.elapsed();
                let busy = shared.metrics.device_busy.with_label_values(&["sampling"]);
                busy.inc_by(self.last_pass.as_secs_f64());
                return;
            }
        };
        let pass = DecodingPass { decoder, shared, threads };
        // Background threads wait for the end of a pass for clients on several threads, which yield their processors
        // between the pass's parts.
        let _serving = (is_live && threads > 1 && !decoder.is_small).then(Serving::begin);
        decoder.hot(threads, || pass.compute_all(rows, parts, scratch));
        self.last_pass = start.elapsed();
    }

    /// Removes sequences that have ended, and frees their pages.
    fn remove_finished(&mut self) {
        let mut over: Vec<_> = self.prefilling.extract_if(.., |s| s.is_over()).collect();
        over.extend(self.running.extract_if(.., |s| s.is_over()));
        over.into_iter().for_each(|sequence| self.end(sequence));
    }

    /// Frees a sequence's pages, then its slot, and sends its last event.
    fn end(&mut self, sequence: EngineSequence) {
        let EngineSequence { pages, run, cancel, .. } = sequence;
        pages.free(&mut self.pool);
        let mut state = self.shared.lock();
        state.ended(&cancel);
        self.shared.report(&state);
        drop(state);
        run.finish();
    }

    fn count_prompt_tokens(&self, source: &str, tokens: usize) {
        if tokens > 0 {
            let counter = &self.shared.metrics.engine_prompt_tokens;
            counter.with_label_values(&[source]).inc_by(tokens as u64);
        }
    }

    fn report_pages(&self) {
        let pages = &self.shared.metrics.engine_cache_pages;
        for (state, count) in ["used", "cached"].into_iter().zip(self.pool.usage()) {
            pages.with_label_values(&[state]).set(metric_value(count));
        }
    }
}

fn metric_value(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
