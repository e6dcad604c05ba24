//! The state that the scheduler's thread shares with its callers.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use hone_core::metrics::Metrics;
use hone_core::types::PolicyVersion;
use hone_engine::run::CancelFlag;
use hone_engine::sampling::TokenSampler;
use hone_engine::{Codec, GenerateRequest, Generation, Priority};

use crate::capacity::SamplerCapacity;
use crate::config::{LiveTraffic, SamplerConfig};
use crate::weights::AdapterWeights;

/// A request in the queue.
pub(crate) struct QueuedRequest {
    pub request: GenerateRequest,
    /// The weights to sample from. `None` uses the active policy at admission.
    pub policy: Option<PolicyWeights>,
    /// The maximum number of completion tokens.
    pub limit: u32,
    pub sampler: TokenSampler,
    /// Receives the generation at admission.
    pub reply: oneshot::Sender<Generation>,
    /// Occupies a place in the bounded queue until admission.
    pub permit: OwnedSemaphorePermit,
}

/// The weights of one policy version.
#[derive(Clone, Default)]
pub(crate) struct PolicyWeights {
    pub version: PolicyVersion,
    /// `None` is the base model.
    pub adapter: Option<Arc<AdapterWeights>>,
}

#[derive(Default)]
pub(crate) struct EngineState {
    pub queue: VecDeque<QueuedRequest>,
    /// The policy of requests that are admitted from now on.
    pub active: PolicyWeights,
    /// The policy of requests that name its version, beside the active one.
    pub canary: Option<PolicyWeights>,
    /// Whether new requests are refused.
    pub closed: bool,
    /// The running sequences, in the scheduler's order.
    pub running: Vec<(Priority, Arc<CancelFlag>)>,
}

pub(crate) struct EngineShared {
    pub state: Mutex<EngineState>,
    /// Notified when the queue, the active policy or `closed` changes. Only the scheduler waits.
    pub wake: Condvar,
    pub codec: Arc<Codec>,
    pub metrics: Arc<Metrics>,
    pub config: SamplerConfig,
    pub capacity: SamplerCapacity,
    pub live_traffic: LiveTraffic,
}

impl EngineState {
    /// Removes the next request: the first live one, else the first one.
    pub fn next_request(&mut self) -> Option<QueuedRequest> {
        let live = |queued: &QueuedRequest| queued.request.priority == Priority::Live;
        match self.queue.iter().position(live) {
            Some(index) => self.queue.remove(index),
            None => self.queue.pop_front(),
        }
    }

    pub fn has_live_request(&self) -> bool {
        self.queue.iter().any(|queued| queued.request.priority == Priority::Live)
    }
}

impl EngineShared {
    pub fn lock(&self) -> MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses new requests and ends the queued ones.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.queue.clear();
        drop(state);
        self.wake.notify_all();
    }
}
