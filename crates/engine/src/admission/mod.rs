//! Who may run where: two colours of slots, live before shadow, bounded waiting, preemption.
//!
//! Invariants: new leases are of the active colour only; a slot has one lease at a time; a shadow
//! never gets a slot while a client waits; a lease names the version its colour held when it
//! began, and that version stays until the lease ends ([`Admission::drained`]).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use hone_core::metrics::Metrics;
use hone_core::types::PolicyVersion;

use super::{EngineError, EngineLoad, Priority};

/// One of the two sets of engines.
pub type Colour = usize;

/// Why a running sequence should end early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    /// Nobody reads its events any more.
    Gone = 1,
    /// A client needs its slot.
    Preempted = 2,
    /// The daemon stops.
    ShuttingDown = 3,
}

/// Asks a running sequence to end; the first reason stays.
#[derive(Debug, Default)]
pub struct CancelFlag(AtomicU8);

impl CancelFlag {
    /// Asks for the end; false if that was done already.
    pub fn set(&self, reason: Cancel) -> bool {
        self.0.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The reason, if somebody asked.
    pub fn get(&self) -> Option<Cancel> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Cancel::Gone),
            2 => Some(Cancel::Preempted),
            _ => Some(Cancel::ShuttingDown),
        }
    }
}

struct Running {
    priority: Priority,
    cancel: Arc<CancelFlag>,
    /// Grows with every lease: the newest shadow has lost the least when it is preempted.
    order: u64,
}

#[derive(Default)]
struct Slots {
    /// What this colour holds; none while it is being replaced.
    version: Option<PolicyVersion>,
    running: Vec<Option<Running>>,
}

struct State {
    colours: [Slots; 2],
    active: Colour,
    live: VecDeque<oneshot::Sender<Lease>>,
    shadow: VecDeque<oneshot::Sender<Lease>>,
    closed: bool,
    order: u64,
}

/// Gives slots out. Shared behind an [`Arc`].
pub struct Admission {
    state: Mutex<State>,
    /// Live requests that may wait when no slot is about to become free.
    queue: usize,
    metrics: Arc<Metrics>,
    released: Notify,
}

/// The right to run one sequence on one slot. Dropping it gives the slot back.
pub struct Lease {
    admission: Arc<Admission>,
    /// The slot's colour.
    pub colour: Colour,
    /// The slot's index within the colour.
    pub slot: usize,
    /// The version every token will come from.
    pub(super) version: PolicyVersion,
    /// Live or shadow.
    pub(super) priority: Priority,
    /// Asks the sequence to end early.
    pub(super) cancel: Arc<CancelFlag>,
    /// False once the slot is given back.
    held: bool,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.held {
            self.admission.release(self.colour, self.slot);
        }
    }
}

impl Admission {
    /// `slots` slots a colour, both holding `version`; colour 0 is active.
    pub fn new(
        slots: usize,
        queue: usize,
        version: PolicyVersion,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let colour =
            || Slots { version: Some(version), running: (0..slots).map(|_| None).collect() };
        Arc::new(Self {
            state: Mutex::new(State {
                colours: [colour(), colour()],
                active: 0,
                live: VecDeque::new(),
                shadow: VecDeque::new(),
                closed: false,
                order: 0,
            }),
            queue,
            metrics,
            released: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a slot of the active colour.
    pub async fn acquire(self: &Arc<Self>, priority: Priority) -> Result<Lease, EngineError> {
        let receiver = {
            let mut state = self.lock();
            if state.closed {
                return Err(EngineError::ShuttingDown);
            }
            state.forget_gone();
            if priority == Priority::Live && state.live.len() >= state.obtainable() + self.queue {
                self.metrics.engine_rejected.inc();
                return Err(EngineError::Overloaded {
                    slots: state.active_slots().running.len(),
                    queued: state.live.len(),
                });
            }
            let (sender, receiver) = oneshot::channel();
            match priority {
                Priority::Live => state.live.push_back(sender),
                Priority::Shadow => state.shadow.push_back(sender),
            }
            self.dispatch(&mut state);
            receiver
        };
        receiver.await.map_err(|_| EngineError::ShuttingDown)
    }

    /// A slot of a given colour at once, for probing what is staged there.
    pub fn acquire_on(self: &Arc<Self>, colour: Colour) -> Option<Lease> {
        let mut state = self.lock();
        let slot = state.colours.get(colour)?.free()?;
        let lease = self.lease(&mut state, colour, slot, Priority::Shadow);
        self.report(&state);
        lease
    }

    /// Makes a lease of a free slot.
    fn lease(
        self: &Arc<Self>,
        state: &mut State,
        colour: Colour,
        slot: usize,
        priority: Priority,
    ) -> Option<Lease> {
        state.order += 1;
        let order = state.order;
        let slots = state.colours.get_mut(colour)?;
        let version = slots.version?;
        let cancel = Arc::new(CancelFlag::default());
        let running = Running { priority, cancel: Arc::clone(&cancel), order };
        *slots.running.get_mut(slot)? = Some(running);
        let admission = Arc::clone(self);
        Some(Lease { admission, colour, slot, version, priority, cancel, held: true })
    }

    fn release(self: &Arc<Self>, colour: Colour, slot: usize) {
        let mut state = self.lock();
        if let Some(place) = state.colours.get_mut(colour).and_then(|c| c.running.get_mut(slot)) {
            *place = None;
        }
        self.dispatch(&mut state);
        drop(state);
        self.released.notify_waiters();
    }

    /// Gives free slots to those who wait, clients first, then asks shadows to make room for
    /// clients that still wait.
    fn dispatch(self: &Arc<Self>, state: &mut State) {
        let colour = state.active;
        while let Some(slot) = state.active_slots().free() {
            let (sender, priority) = match state.live.pop_front() {
                Some(sender) => (sender, Priority::Live),
                None => match state.shadow.pop_front() {
                    Some(sender) => (sender, Priority::Shadow),
                    None => break,
                },
            };
            if sender.is_closed() {
                continue;
            }
            let Some(lease) = self.lease(state, colour, slot, priority) else { break };
            if let Err(mut lease) = sender.send(lease) {
                // Gone in this very moment. The lock is held: give the slot back by hand.
                lease.held = false;
                if let Some(place) =
                    state.colours.get_mut(colour).and_then(|c| c.running.get_mut(slot))
                {
                    *place = None;
                }
            }
        }
        for _ in 0..state.make_room() {
            self.metrics.engine_preempted.inc();
        }
        self.report(state);
    }

    /// Waits until nothing runs on a colour. The caller makes sure that it is not active.
    pub async fn drained(&self, colour: Colour) {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            if self.lock().colours.get(colour).is_none_or(Slots::is_idle) {
                return;
            }
            released.await;
        }
    }

    /// The colour that holds a version, the active one first.
    pub fn holding(&self, version: PolicyVersion) -> Option<Colour> {
        let state = self.lock();
        [state.active, 1 - state.active]
            .into_iter()
            .find(|c| state.colours.get(*c).is_some_and(|s| s.version == Some(version)))
    }

    /// The colour that new leases do not get.
    pub fn idle(&self) -> Colour {
        1 - self.lock().active
    }

    /// Says what a colour holds; `None` while it is being replaced.
    pub fn set_version(&self, colour: Colour, version: Option<PolicyVersion>) {
        if let Some(slots) = self.lock().colours.get_mut(colour) {
            slots.version = version;
        }
    }

    /// Makes a colour the one that new leases get; false if it holds no version.
    pub fn activate(self: &Arc<Self>, colour: Colour) -> bool {
        let mut state = self.lock();
        if state.colours.get(colour).is_none_or(|slots| slots.version.is_none()) {
            return false;
        }
        state.active = colour;
        self.dispatch(&mut state);
        true
    }

    /// The active colour's version.
    pub fn active_version(&self) -> PolicyVersion {
        self.lock().active_slots().version.unwrap_or_default()
    }

    /// How busy both colours are now.
    pub fn load(&self) -> EngineLoad {
        self.lock().load()
    }

    /// Refuses everything new, lets nobody wait any longer, and asks shadows to end. Running live
    /// sequences go on; `cancel_live` asks them to end too.
    pub fn close(&self, cancel_live: bool) {
        let mut state = self.lock();
        state.closed = true;
        state.live.clear();
        state.shadow.clear();
        for running in state.colours.iter().flat_map(|c| c.running.iter().flatten()) {
            if cancel_live || running.priority == Priority::Shadow {
                running.cancel.set(Cancel::ShuttingDown);
            }
        }
        self.report(&state);
    }

    fn report(&self, state: &State) {
        let load = state.load();
        for (gauge, live, shadow) in [
            (&self.metrics.engine_slots, load.live_running, load.shadow_running),
            (&self.metrics.engine_waiting, load.live_waiting, load.shadow_waiting),
        ] {
            gauge.with_label_values(&["live"]).set(i64::try_from(live).unwrap_or(i64::MAX));
            gauge.with_label_values(&["shadow"]).set(i64::try_from(shadow).unwrap_or(i64::MAX));
        }
    }
}

impl Slots {
    fn free(&self) -> Option<usize> {
        self.running.iter().position(Option::is_none)
    }

    fn is_idle(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    fn shadows(&self) -> impl Iterator<Item = &Running> {
        self.running.iter().flatten().filter(|r| r.priority == Priority::Shadow)
    }
}

impl State {
    fn active_slots(&self) -> &Slots {
        let [first, second] = &self.colours;
        if self.active == 0 { first } else { second }
    }

    /// Forgets those who stopped waiting.
    fn forget_gone(&mut self) {
        self.live.retain(|sender| !sender.is_closed());
        self.shadow.retain(|sender| !sender.is_closed());
    }

    /// Slots that clients can have at once or as soon as a shadow gives way.
    fn obtainable(&self) -> usize {
        let slots = self.active_slots();
        slots.running.iter().filter(|r| r.is_none()).count() + slots.shadows().count()
    }

    /// Asks as many shadows to end as clients wait, the newest first; returns how many were asked
    /// now.
    fn make_room(&mut self) -> usize {
        self.live.retain(|sender| !sender.is_closed());
        let mut shadows: Vec<&Running> = self.active_slots().shadows().collect();
        shadows.sort_by_key(|running| std::cmp::Reverse(running.order));
        let leaving = shadows.iter().filter(|r| r.cancel.get().is_some()).count();
        let missing = self.live.len().saturating_sub(leaving);
        let staying = shadows.iter().filter(|r| r.cancel.get().is_none());
        staying.take(missing).filter(|r| r.cancel.set(Cancel::Preempted)).count()
    }

    fn load(&self) -> EngineLoad {
        let running = |priority: Priority| {
            let all = self.colours.iter().flat_map(|c| c.running.iter().flatten());
            all.filter(|r| r.priority == priority).count()
        };
        let waiting = |queue: &VecDeque<oneshot::Sender<Lease>>| {
            queue.iter().filter(|sender| !sender.is_closed()).count()
        };
        EngineLoad {
            live_running: running(Priority::Live),
            shadow_running: running(Priority::Shadow),
            live_waiting: waiting(&self.live),
            shadow_waiting: waiting(&self.shadow),
        }
    }
}

#[cfg(test)]
mod tests;
