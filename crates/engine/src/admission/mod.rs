//! Slot scheduler: blue/green, live before shadow, bounded queue, turns between API keys, preemption.
//!
//! A slot runs one sequence at a time. There are two colors of slots, and each color holds one
//! policy version, so that the idle color can load the next version while the active one serves.
//!
//! Invariants: new leases are of the active color; a slot has at most one lease; a shadow request
//! gets no slot while a live request waits; a lease names the version that its color held when the
//! lease began, and the color keeps that version until the lease ends
//! ([`Admission::wait_until_idle`]).

mod fair_queue;

use std::cmp::Reverse;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use hone_core::metrics::Metrics;
use hone_core::types::PolicyVersion;

use crate::api::{EngineLoad, Priority};
use crate::error::EngineError;

pub use fair_queue::{FairQueue, Owner, QueueCapacity, QueueLimits};

/// One of the two sets of slots. As a number it is an index: `color as usize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    /// The color that is active at start.
    Blue = 0,
    /// The other color.
    Green = 1,
}

impl Color {
    /// Both colors.
    pub const BOTH: [Self; 2] = [Self::Blue, Self::Green];

    fn other(self) -> Self {
        match self {
            Self::Blue => Self::Green,
            Self::Green => Self::Blue,
        }
    }
}

struct RunningSequence {
    priority: Priority,
    owner: Owner,
    /// Preemption takes the newest shadow, which loses the least work.
    since: Instant,
    cancel: Arc<CancelFlag>,
}

struct ColorSlots {
    /// The loaded version; `None` while it is being replaced.
    version: Option<PolicyVersion>,
    running: Vec<Option<RunningSequence>>,
}

struct AdmissionState {
    colors: [ColorSlots; 2],
    active: Color,
    /// Requests by priority.
    waiting: [FairQueue<oneshot::Sender<Lease>>; 2],
    /// How long live requests occupy a slot.
    rate: ServiceRate,
    closed: bool,
}

/// Leases slots to requests.
pub struct Admission {
    state: Mutex<AdmissionState>,
    limits: QueueLimits,
    metrics: Arc<Metrics>,
    released: Notify,
}

/// The right to run one sequence. Dropping it frees the slot.
pub struct Lease {
    /// The version that produces every token.
    pub version: PolicyVersion,
    /// The scheduling class.
    pub priority: Priority,
    /// Asks the sequence to end early.
    pub cancel: Arc<CancelFlag>,
    slot: Option<(Arc<Admission>, Color, usize)>,
}

impl Lease {
    /// A lease for an engine without slots.
    pub fn without_slot(version: PolicyVersion, priority: Priority) -> Self {
        Self { version, priority, cancel: Arc::default(), slot: None }
    }

    /// The slot's color, and its index within the color.
    pub fn slot(&self) -> Option<(Color, usize)> {
        self.slot.as_ref().map(|(_, color, index)| (*color, *index))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some((admission, color, slot)) = self.slot.take() {
            let mut state = admission.state.lock();
            let ended = state.free(color, slot);
            if let Some(ended) = ended.filter(|ended| ended.priority == Priority::Live) {
                state.rate.record(ended.since.elapsed());
            }
            admission.dispatch(&mut state);
            drop(state);
            admission.released.notify_waiters();
        }
    }
}

impl Admission {
    /// `slots` slots per color; both colors hold `version`, and [`Color::Blue`] is active.
    pub fn new(
        slots: usize,
        limits: QueueLimits,
        version: PolicyVersion,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let color =
            |_| ColorSlots { version: Some(version), running: (0..slots).map(|_| None).collect() };
        Arc::new(Self {
            state: Mutex::new(AdmissionState {
                colors: Color::BOTH.map(color),
                active: Color::Blue,
                waiting: Default::default(),
                rate: ServiceRate::default(),
                closed: false,
            }),
            limits,
            metrics,
            released: Notify::new(),
        })
    }

    /// [`Self::acquire_for`] a caller without a key.
    pub async fn acquire(self: &Arc<Self>, priority: Priority) -> Result<Lease, EngineError> {
        self.acquire_for(&None, priority).await
    }

    /// Waits for a slot of the active color.
    ///
    /// # Errors
    /// [`EngineError::Overloaded`] or [`EngineError::ShareExceeded`] if the queue has no place,
    /// [`EngineError::QueueTimeout`] if a live request waited too long, [`EngineError::ShuttingDown`]
    /// after [`Self::close`].
    pub async fn acquire_for(
        self: &Arc<Self>,
        owner: &Owner,
        priority: Priority,
    ) -> Result<Lease, EngineError> {
        let receiver = {
            let mut state = self.state.lock();
            state.forget_abandoned();
            if priority == Priority::Live {
                self.check(&state, owner, 1)?;
            } else if state.closed {
                return Err(EngineError::ShuttingDown);
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting[priority as usize].push_back(owner, sender);
            self.dispatch(&mut state);
            receiver
        };
        if priority == Priority::Shadow {
            return receiver.await.map_err(|_| EngineError::ShuttingDown);
        }
        let began = Instant::now();
        let granted = match self.limits.timeout {
            None => Some(receiver.await),
            Some(limit) => tokio::time::timeout(limit, receiver).await.ok(),
        };
        let waited = began.elapsed();
        self.metrics.engine_queue_wait.observe(waited.as_secs_f64());
        match granted {
            Some(lease) => lease.map_err(|_| EngineError::ShuttingDown),
            None => Err(self.timed_out(waited)),
        }
    }

    /// Whether `choices` live requests of `owner` would get a slot or a place in the queue now.
    ///
    /// # Errors
    /// As [`Self::acquire_for`], without waiting, and [`EngineError::TooManyChoices`] if they never would.
    pub fn admits(&self, owner: &Owner, choices: usize) -> Result<(), EngineError> {
        let mut state = self.state.lock();
        state.forget_abandoned();
        self.check(&state, owner, choices)
    }

    fn check(&self, state: &AdmissionState, owner: &Owner, more: usize) -> Result<(), EngineError> {
        if state.closed {
            return Err(EngineError::ShuttingDown);
        }
        let capacity = QueueCapacity {
            slots: state.slots(state.active).running.len(),
            obtainable: state.obtainable(),
            places: self.limits.places,
            retry_after: state.retry_after(),
        };
        let checked = state.waiting[Priority::Live as usize].check(owner, more, &capacity);
        if checked.as_ref().is_err_and(EngineError::is_retryable) {
            self.metrics.engine_rejected.inc();
        }
        checked
    }

    fn timed_out(&self, waited: Duration) -> EngineError {
        let mut state = self.state.lock();
        state.forget_abandoned();
        self.report(&state);
        EngineError::QueueTimeout { waited, retry_after: state.retry_after() }
    }

    /// Leases a slot of the given color without waiting, to probe the version staged there.
    pub fn acquire_on(self: &Arc<Self>, color: Color) -> Option<Lease> {
        let mut state = self.state.lock();
        let lease = self.lease(&mut state, color, Priority::Shadow, None);
        self.report(&state);
        lease
    }

    /// Leases a free slot; `None` if the color has none or holds no version.
    fn lease(
        self: &Arc<Self>,
        state: &mut AdmissionState,
        color: Color,
        priority: Priority,
        owner: Owner,
    ) -> Option<Lease> {
        let slots = &mut state.colors[color as usize];
        let slot = slots.free_slot()?;
        let mut lease = Lease::without_slot(slots.version?, priority);
        lease.slot = Some((Arc::clone(self), color, slot));
        let (since, cancel) = (Instant::now(), Arc::clone(&lease.cancel));
        slots.running[slot] = Some(RunningSequence { priority, owner, since, cancel });
        Some(lease)
    }

    /// Leases free slots to waiting requests, live ones first. Then preempts shadow sequences for
    /// the live requests that still wait.
    fn dispatch(self: &Arc<Self>, state: &mut AdmissionState) {
        let color = state.active;
        // A request whose client has gone must not cost its owner a turn.
        state.forget_abandoned();
        while state.slots(color).free_slot().is_some() {
            let Some((priority, owner, sender)) = state.next_waiting() else { break };
            if sender.is_closed() {
                continue;
            }
            let Some(lease) = self.lease(state, color, priority, owner) else { break };
            // The receiver may just have gone. Dropping the lease would lock `state` a second time.
            if let Err(mut lease) = sender.send(lease)
                && let Some((_, color, slot)) = lease.slot.take()
            {
                state.free(color, slot);
            }
        }
        self.metrics.engine_preempted.inc_by(state.preempt() as u64);
        self.report(state);
    }

    /// Waits until no sequence runs on a color. The caller ensures that the color is not active.
    pub async fn wait_until_idle(&self, color: Color) {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            if self.state.lock().slots(color).running.iter().all(Option::is_none) {
                return;
            }
            released.await;
        }
    }

    /// The color that holds a version, the active one first.
    pub fn color_of(&self, version: PolicyVersion) -> Option<Color> {
        self.state.lock().color_of(version)
    }

    /// The color that is not active.
    pub fn idle_color(&self) -> Color {
        self.state.lock().active.other()
    }

    /// Records the version that a color holds.
    pub fn set_version(&self, color: Color, version: PolicyVersion) {
        self.state.lock().colors[color as usize].version = Some(version);
    }

    /// Makes a color the active one; false if it holds no version.
    pub fn activate(self: &Arc<Self>, color: Color) -> bool {
        let mut state = self.state.lock();
        if state.slots(color).version.is_none() {
            return false;
        }
        state.active = color;
        self.dispatch(&mut state);
        true
    }

    /// Makes the color that holds `version` the active one; false if no color does.
    pub fn activate_version(self: &Arc<Self>, version: PolicyVersion) -> bool {
        let mut state = self.state.lock();
        let Some(color) = state.color_of(version) else { return false };
        state.active = color;
        self.dispatch(&mut state);
        true
    }

    /// Marks a color as being replaced, unless it is active or runs a sequence. Returns whether it was
    /// marked: another version may have been activated since the caller chose the color.
    pub fn begin_replacement(&self, color: Color) -> bool {
        let mut state = self.state.lock();
        let idle = state.active != color && state.slots(color).running.iter().all(Option::is_none);
        if idle {
            state.colors[color as usize].version = None;
        }
        idle
    }

    /// The active color's version.
    pub fn active_version(&self) -> PolicyVersion {
        let state = self.state.lock();
        state.slots(state.active).version.unwrap_or_default()
    }

    /// Running and waiting requests of both colors.
    pub fn load(&self) -> EngineLoad {
        self.state.lock().load()
    }

    /// Refuses new and waiting requests and cancels shadow sequences. `cancel_live` cancels live
    /// sequences too; otherwise they run to their end.
    pub fn close(&self, cancel_live: bool) {
        let mut state = self.state.lock();
        state.closed = true;
        state.waiting = Default::default();
        for running in state.running() {
            if cancel_live || running.priority == Priority::Shadow {
                running.cancel.set(CancelReason::ShuttingDown);
            }
        }
        self.report(&state);
    }

    fn report(&self, state: &AdmissionState) {
        state.load().export(&self.metrics);
    }
}

impl ColorSlots {
    fn free_slot(&self) -> Option<usize> {
        self.running.iter().position(Option::is_none)
    }

    fn shadows(&self) -> impl Iterator<Item = &RunningSequence> {
        self.running.iter().flatten().filter(|r| r.priority == Priority::Shadow)
    }
}

impl AdmissionState {
    fn slots(&self, color: Color) -> &ColorSlots {
        &self.colors[color as usize]
    }

    fn color_of(&self, version: PolicyVersion) -> Option<Color> {
        let colors = [self.active, self.active.other()];
        colors.into_iter().find(|color| self.slots(*color).version == Some(version))
    }

    fn free(&mut self, color: Color, slot: usize) -> Option<RunningSequence> {
        self.colors[color as usize].running[slot].take()
    }

    /// Removes the next request: a live one of the owner with the fewest running requests, in turn; else a
    /// shadow.
    fn next_waiting(&mut self) -> Option<(Priority, Owner, oneshot::Sender<Lease>)> {
        let Self { waiting: [live, shadow], colors, .. } = self;
        let running = |owner: &Owner| {
            let all = colors.iter().flat_map(|slots| slots.running.iter().flatten());
            all.filter(|r| r.priority == Priority::Live && r.owner == *owner).count()
        };
        let next = live.pop_fairest(running).map(|(owner, sender)| (Priority::Live, owner, sender));
        next.or_else(|| {
            let (owner, sender) = shadow.pop_fairest(|_| 0)?;
            Some((Priority::Shadow, owner, sender))
        })
    }

    /// When the queue of live requests will probably have been served, and one more.
    fn retry_after(&self) -> Duration {
        let slots = self.slots(self.active).running.len();
        self.rate.wait(self.waiting[Priority::Live as usize].len() + 1, slots)
    }

    fn forget_abandoned(&mut self) {
        self.waiting.iter_mut().for_each(|queue| queue.retain(|sender| !sender.is_closed()));
    }

    fn running(&self) -> impl Iterator<Item = &RunningSequence> {
        self.colors.iter().flat_map(|slots| slots.running.iter().flatten())
    }

    /// Active slots that live requests can have now or by preemption.
    fn obtainable(&self) -> usize {
        let slots = self.slots(self.active);
        slots.running.iter().filter(|slot| slot.is_none()).count() + slots.shadows().count()
    }

    /// Cancels the newest shadow sequences until as many end as live requests wait. Returns how
    /// many it cancelled.
    fn preempt(&mut self) -> usize {
        self.forget_abandoned();
        let mut shadows: Vec<_> = self.slots(self.active).shadows().collect();
        shadows.sort_by_key(|running| Reverse(running.since));
        let ending = shadows.iter().filter(|r| r.cancel.get().is_some()).count();
        let missing = self.waiting[Priority::Live as usize].len().saturating_sub(ending);
        let others = shadows.iter().filter(|r| r.cancel.get().is_none());
        others.take(missing).filter(|r| r.cancel.set(CancelReason::Preempted)).count()
    }

    fn load(&self) -> EngineLoad {
        let running = |priority| self.running().filter(|r| r.priority == priority).count();
        let waiting = |priority| {
            self.waiting[priority as usize].iter().filter(|sender| !sender.is_closed()).count()
        };
        EngineLoad {
            live_running: running(Priority::Live),
            shadow_running: running(Priority::Shadow),
            live_waiting: waiting(Priority::Live),
            shadow_waiting: waiting(Priority::Shadow),
        }
    }
}

// The end of a running sequence before its last token.

/// Why a running sequence must end early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// The reader dropped the generation.
    ReaderGone,
    /// A live request needs the slot.
    Preempted,
    /// The daemon is shutting down.
    ShuttingDown,
}

/// Asks the thread that runs a sequence to end it. The first reason wins.
#[derive(Debug, Default)]
pub struct CancelFlag(OnceLock<CancelReason>);

impl CancelFlag {
    /// Sets the reason; false if one is set already.
    pub fn set(&self, reason: CancelReason) -> bool {
        self.0.set(reason).is_ok()
    }

    /// The reason, if one is set.
    pub fn get(&self) -> Option<CancelReason> {
        self.0.get().copied()
    }
}

// How long requests of clients take, to predict how long a full queue takes to become shorter.

/// Weight of the newest request in the mean.
const WEIGHT: f64 = 0.1;
/// The prediction before any request has ended.
const UNKNOWN: Duration = Duration::from_secs(1);

/// An exponentially weighted mean of the time that a request occupies its slot.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServiceRate {
    /// Seconds; `None` before the first request has ended.
    mean: Option<f64>,
}

impl ServiceRate {
    /// Adds the time that one request occupied its slot.
    pub fn record(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.mean = Some(self.mean.map_or(seconds, |mean| mean + WEIGHT * (seconds - mean)));
    }

    /// The time until `waiting` requests have begun, if `slots` slots serve them and nothing else.
    pub fn wait(&self, waiting: usize, slots: usize) -> Duration {
        let Some(mean) = self.mean else { return UNKNOWN };
        Duration::try_from_secs_f64(mean * waiting as f64 / slots.max(1) as f64).unwrap_or(UNKNOWN)
    }
}

#[cfg(test)]
mod tests;
