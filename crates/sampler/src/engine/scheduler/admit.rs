//! Admission: from the queue to a sequence with pages.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use hone_engine::Priority;
use hone_engine::admission::Lease;
use hone_engine::run::{CancelReason, GenerationRun};

use super::BatchScheduler;
use super::pass::EngineSequence;
use crate::engine::adapters::PolicyWeights;
use crate::engine::shared::{QueuedRequest, RequestWeights, RunningRequest};
use crate::error::Result;
use crate::kv_cache::{CacheSpace, SequencePages};

impl BatchScheduler {
    /// Admits requests, live ones first and their owners in turn, until a request does not fit. A
    /// live request that does not fit preempts shadow sequences, the newest first.
    pub(super) fn admit(&mut self) {
        // Only of weights in memory: of the versions that requests can get, or that can be activated without being
        // read.
        let held = self.shared.lock().held.clone();
        self.pool.keep_only(&held);
        while let Some((queued, policy)) = self.next_request() {
            match self.try_admit(queued, policy) {
                Ok(None) => {}
                Ok(Some(queued)) => {
                    let live = queued.request.priority == Priority::Live;
                    self.shared.lock().put_back(queued);
                    if !(live && self.preempt_newest_shadow()) {
                        break;
                    }
                }
                // The caller gets an error because the request's reply channel is dropped.
                Err(error) => tracing::error!(%error, "a request cannot be admitted"),
            }
        }
    }

    /// Removes the next request from the queue, with the weights that it will get.
    fn next_request(&self) -> Option<(QueuedRequest, PolicyWeights)> {
        let mut state = self.shared.lock();
        self.shared.live_arrived.store(false, Ordering::Release);
        state.forget_abandoned();
        let queued = state.next_request()?;
        let weights = match &queued.weights {
            RequestWeights::Fixed(weights) => weights.clone(),
            // Nothing waits for an answer of a policy that was removed.
            RequestWeights::Active(slot) => state.active(*slot)?.clone(),
        };
        Some((queued, weights))
    }

    /// Admits a request. Returns it if no slot is free, or too few pages.
    fn try_admit(
        &mut self,
        queued: QueuedRequest,
        policy: PolicyWeights,
    ) -> Result<Option<QueuedRequest>> {
        if self.prefilling.len() + self.running.len() >= self.shared.config.slots.max(1) {
            return Ok(Some(queued));
        }
        let (ids, limit) = (&queued.request.prompt_ids, queued.limit as usize);
        self.decoder.reserve_positions(ids.len() + limit)?;
        let owner = queued.request.owner.as_deref().filter(|_| !self.shared.config.share_prefixes);
        let space = CacheSpace::of(policy.id, owner);
        let Some(pages) = SequencePages::new(&mut self.pool, space, ids, limit) else {
            return Ok(Some(queued));
        };
        let cached = ids.len() - 1 - pages.remaining();
        self.count_prompt_tokens("cached", cached);
        let QueuedRequest { request, sampler, reply, is_urgent, permit, .. } = queued;
        let lease = Lease::without_slot(policy.version, request.priority);
        let (priority, cancel) = (request.priority, Arc::clone(&lease.cancel));
        let shared = &self.shared;
        let (mut run, generation) =
            GenerationRun::new(&shared.codec, &request, queued.limit, lease, &shared.metrics);
        run.count_cached(cached);
        let mut state = shared.lock();
        state.running.push(RunningRequest {
            priority,
            owner: request.owner,
            since: Instant::now(),
            cancel: Arc::clone(&cancel),
        });
        shared.report(&state);
        drop(state);
        let order = self.admitted;
        self.admitted += 1;
        let sequence = EngineSequence {
            policy,
            pages,
            sampler,
            run,
            priority: if is_urgent { Priority::Live } else { priority },
            cancel,
            order,
            finished: false,
        };
        if sequence.pages.remaining() == 0 {
            self.begin_decoding(sequence);
        } else {
            self.prefilling.push(sequence);
        }
        drop(permit);
        // If the caller is gone, the next iteration ends the sequence.
        let _ = reply.send(generation);
        Ok(None)
    }

    /// Ends the newest shadow sequence, which loses the least work. Returns false if there is none.
    fn preempt_newest_shadow(&mut self) -> bool {
        let newest = |prefilling: bool, list: &[EngineSequence]| {
            let shadows = list.iter().enumerate().filter(|(_, sequence)| !sequence.is_live());
            shadows.map(|(index, sequence)| (sequence.order, prefilling, index)).max()
        };
        let newest = newest(true, &self.prefilling).max(newest(false, &self.running));
        let Some((_, prefilling, index)) = newest else { return false };
        let list = if prefilling { &mut self.prefilling } else { &mut self.running };
        let sequence = list.remove(index);
        if sequence.cancel.set(CancelReason::Preempted) {
            self.shared.metrics.engine_preempted.inc();
        }
        self.end(sequence);
        true
    }
}
