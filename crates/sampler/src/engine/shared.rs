//! The state that the scheduler's thread shares with its callers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use hone_core::metrics::Metrics;
use hone_core::types::PolicyVersion;
use hone_engine::admission::{FairQueue, Owner, QueueCapacity, ServiceRate};
use hone_engine::run::CancelFlag;
use hone_engine::sampling::TokenSampler;
use hone_engine::{Codec, EngineError, EngineLoad, GenerateRequest, Generation, Priority};

use super::adapters::{KeptAdapters, PolicyWeights};
use crate::capacity::SamplerCapacity;
use crate::config::{LiveTraffic, SamplerConfig};
use crate::kv_cache::WeightsId;

/// One of the policies that an engine serves. The default is the engine's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PolicySlot(u64);

/// What one policy serves.
#[derive(Default)]
pub(crate) struct ServedPolicy {
    /// The weights of requests that are admitted from now on.
    active: PolicyWeights,
    /// The weights of requests that name their version, beside the active ones.
    canary: Option<PolicyWeights>,
}

/// The weights that a request is sampled from.
pub(crate) enum RequestWeights {
    /// Those that are active at admission.
    Active(PolicySlot),
    Fixed(PolicyWeights),
}

pub(crate) struct QueuedRequest {
    pub request: GenerateRequest,
    pub weights: RequestWeights,
    pub limit: u32,
    pub sampler: TokenSampler,
    /// Receives the generation at admission.
    pub reply: oneshot::Sender<Generation>,
    /// Whether it is computed as a live one, although it has no client: a publication waits for it.
    pub is_urgent: bool,
    /// The place of a shadow request in the bounded queue until admission.
    pub permit: Option<OwnedSemaphorePermit>,
}

#[derive(Default)]
pub(crate) struct EngineState {
    /// Waiting requests by priority.
    waiting: [FairQueue<QueuedRequest>; 2],
    /// How long live requests occupy a slot.
    rate: ServiceRate,
    policies: BTreeMap<PolicySlot, ServedPolicy>,
    /// Policies that were added so far.
    added: u64,
    /// The adapters that can be activated without reading them.
    pub kept: KeptAdapters,
    /// The weights in memory, whose cached pages a later request may use: the base, each policy's active ones and
    /// canary, and the kept ones. Ascending.
    pub held: Vec<WeightsId>,
    /// Whether new requests are refused.
    pub closed: bool,
    /// The admitted sequences.
    pub running: Vec<RunningRequest>,
}

/// An admitted sequence, as callers see it.
pub(crate) struct RunningRequest {
    pub priority: Priority,
    pub owner: Owner,
    pub since: Instant,
    pub cancel: Arc<CancelFlag>,
}

pub(crate) struct EngineShared {
    pub state: Mutex<EngineState>,
    /// Notified when the queue, the active weights of a policy or `closed` changes. Only the scheduler waits.
    pub wake: Condvar,
    /// Set when a live request enters the queue, until the scheduler admits requests. Interrupts passes
    /// of shadow sequences.
    pub live_arrived: AtomicBool,
    pub codec: Arc<Codec>,
    pub metrics: Arc<Metrics>,
    pub config: SamplerConfig,
    pub capacity: SamplerCapacity,
    pub live_traffic: LiveTraffic,
}

impl EngineState {
    /// The state of an engine that serves the base model and keeps up to `adapters` adapters.
    pub fn new(adapters: usize) -> Self {
        let mut state = Self { kept: KeptAdapters::new(adapters), ..Self::default() };
        state.policies.insert(PolicySlot::default(), ServedPolicy::default());
        state.list_held();
        state
    }

    /// Adds a policy that serves these weights.
    pub fn add(&mut self, active: PolicyWeights) -> PolicySlot {
        self.added += 1;
        let slot = PolicySlot(self.added);
        self.policies.insert(slot, ServedPolicy { active, canary: None });
        self.list_held();
        slot
    }

    /// Removes a policy, and the kept adapters of its number. Returns what is not used any more, which the caller
    /// drops without the lock.
    #[must_use]
    pub fn remove(
        &mut self,
        slot: PolicySlot,
        number: u32,
    ) -> (Option<ServedPolicy>, Vec<PolicyWeights>) {
        let removed = (self.policies.remove(&slot), self.kept.forget(number));
        self.list_held();
        removed
    }

    /// The weights that a policy serves; `None` if it was removed.
    pub fn active(&self, slot: PolicySlot) -> Option<&PolicyWeights> {
        self.policies.get(&slot).map(|policy| &policy.active)
    }

    /// The weights of a policy's canary, if it is this version.
    pub fn canary(&self, slot: PolicySlot, version: PolicyVersion) -> Option<&PolicyWeights> {
        let canary = self.policies.get(&slot)?.canary.as_ref();
        canary.filter(|canary| canary.version == version)
    }

    /// Changes the active weights of a policy, which ends its canary. Returns what is not used any more, which the
    /// caller drops without the lock.
    #[must_use]
    pub fn activate(&mut self, slot: PolicySlot, active: PolicyWeights) -> Option<ServedPolicy> {
        self.kept.touch(active.id);
        let served = self.policies.get_mut(&slot)?;
        let before = std::mem::replace(served, ServedPolicy { active, canary: None });
        self.list_held();
        Some(before)
    }

    /// Changes the canary of a policy. Returns the one before.
    #[must_use]
    pub fn set_canary(
        &mut self,
        slot: PolicySlot,
        canary: Option<PolicyWeights>,
    ) -> Option<PolicyWeights> {
        if let Some(canary) = &canary {
            self.kept.touch(canary.id);
        }
        let before = std::mem::replace(&mut self.policies.get_mut(&slot)?.canary, canary);
        self.list_held();
        before
    }

    /// Updates [`Self::held`] after a change of the policies or the kept adapters.
    pub fn list_held(&mut self) {
        self.held.clear();
        let served = self.policies.values();
        let weights = served.flat_map(|policy| [Some(&policy.active), policy.canary.as_ref()]);
        let ids = weights.flatten().map(|weights| weights.id).chain(self.kept.ids());
        self.held.extend(ids.chain([WeightsId::default()]));
        self.held.sort_unstable();
        self.held.dedup();
    }

    /// Removes the next request: a live one of the owner with the fewest running requests, in turn; else a
    /// shadow.
    pub fn next_request(&mut self) -> Option<QueuedRequest> {
        let Self { waiting: [live, shadow], running, .. } = self;
        let of = |owner: &Owner| {
            running.iter().filter(|r| r.priority == Priority::Live && r.owner == *owner).count()
        };
        let next = live.pop_fairest(of).or_else(|| shadow.pop_fairest(|_| 0));
        next.map(|(_, queued)| queued)
    }

    /// Puts back what [`Self::next_request`] removed.
    pub fn put_back(&mut self, queued: QueuedRequest) {
        // `close` may have ended the queue in between.
        if !self.closed {
            let owner = queued.request.owner.clone();
            self.waiting[queued.request.priority as usize].push_front(&owner, queued);
        }
    }

    /// Removes requests whose callers are gone.
    pub fn forget_abandoned(&mut self) {
        self.waiting.iter_mut().for_each(|queue| queue.retain(|queued| !queued.reply.is_closed()));
    }

    pub fn ended(&mut self, cancel: &Arc<CancelFlag>) {
        let at = self.running.iter().position(|r| Arc::ptr_eq(&r.cancel, cancel));
        let Some(ended) = at.map(|at| self.running.remove(at)) else { return };
        if ended.priority == Priority::Live {
            self.rate.record(ended.since.elapsed());
        }
    }

    /// When `slots` slots will probably have served the queue of live requests, and one more.
    fn retry_after(&self, slots: usize) -> Duration {
        self.rate.wait(self.waiting[Priority::Live as usize].len() + 1, slots)
    }

    pub fn has_request(&self) -> bool {
        self.waiting.iter().any(|queue| !queue.is_empty())
    }

    /// Whether the engine is open and no request waits.
    pub fn is_idle(&self) -> bool {
        !self.has_request() && !self.closed
    }

    pub fn has_live_request(&self) -> bool {
        !self.waiting[Priority::Live as usize].is_empty()
    }

    pub fn load(&self) -> EngineLoad {
        let running = |priority| self.running.iter().filter(|r| r.priority == priority).count();
        let waiting = |priority| {
            let queue = &self.waiting[priority as usize];
            queue.iter().filter(|queued| !queued.reply.is_closed()).count()
        };
        EngineLoad {
            live_running: running(Priority::Live),
            shadow_running: running(Priority::Shadow),
            live_waiting: waiting(Priority::Live),
            shadow_waiting: waiting(Priority::Shadow),
        }
    }
}

impl EngineShared {
    pub fn lock(&self) -> MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request to the queue and wakes the scheduler.
    pub fn enqueue(&self, queued: QueuedRequest) -> Result<(), EngineError> {
        let mut state = self.lock();
        let (priority, owner) = (queued.request.priority, queued.request.owner.clone());
        if priority == Priority::Live {
            self.check(&mut state, &owner, 1)?;
        } else if state.closed {
            return Err(EngineError::ShuttingDown);
        }
        state.waiting[priority as usize].push_back(&owner, queued);
        if priority == Priority::Live {
            self.live_arrived.store(true, Ordering::Release);
        }
        self.report(&state);
        drop(state);
        self.wake.notify_all();
        Ok(())
    }

    /// Whether `choices` live requests of `owner` may wait.
    ///
    /// # Errors
    /// [`EngineError::Overloaded`] or [`EngineError::ShareExceeded`] if more live requests wait than the
    /// queue holds, in all or of this owner. Those for which slots are free, or become free by preemption,
    /// do not count. [`EngineError::TooManyChoices`] if `choices` never may, [`EngineError::ShuttingDown`]
    /// after [`Self::close`].
    pub fn admits(&self, owner: &Owner, choices: usize) -> Result<(), EngineError> {
        self.check(&mut self.lock(), owner, choices)
    }

    fn check(
        &self,
        state: &mut EngineState,
        owner: &Owner,
        more: usize,
    ) -> Result<(), EngineError> {
        if state.closed {
            return Err(EngineError::ShuttingDown);
        }
        state.forget_abandoned();
        let slots = self.config.slots.max(1);
        let capacity = QueueCapacity {
            slots,
            obtainable: slots.saturating_sub(state.load().live_running),
            places: self.config.queue,
            retry_after: state.retry_after(slots),
        };
        let checked = state.waiting[Priority::Live as usize].check(owner, more, &capacity);
        if self.config.serves_clients && checked.as_ref().is_err_and(EngineError::is_retryable) {
            self.metrics.engine_rejected.inc();
        }
        checked
    }

    /// The error of a live request that waited too long.
    pub fn timed_out(&self, waited: Duration) -> EngineError {
        let mut state = self.lock();
        state.forget_abandoned();
        self.report(&state);
        let retry_after = state.retry_after(self.config.slots.max(1));
        EngineError::QueueTimeout { waited, retry_after }
    }

    /// Reports the load, if no other engine reports its own.
    pub fn report(&self, state: &EngineState) {
        if self.config.serves_clients {
            state.load().export(&self.metrics);
        }
    }

    /// Refuses new requests and ends the queued ones.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting = Default::default();
        self.report(&state);
        drop(state);
        self.wake.notify_all();
    }
}
