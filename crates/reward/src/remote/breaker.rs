//! A circuit breaker: after failures in a row a service is left alone for a while, then probed by
//! one request, whose success closes the circuit. The pattern is Nygard's, *Release It!*.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

enum State {
    /// Asked; so many attempts have failed in a row.
    Closed { failures: u32 },
    /// Not asked before `until`.
    Open { until: Instant },
    /// One request is under way to see whether the service is back; it began at `since`.
    Probing { since: Instant },
}

/// What an attempt's end did to the circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing.
    None,
    /// The service is left alone from now on (or again, after a failed probe).
    Opened,
    /// The service is back.
    Closed,
}

/// Decides whether a service is asked.
pub(super) struct Breaker {
    threshold: u32,
    cooldown: Duration,
    state: Mutex<State>,
}

impl Breaker {
    /// Opens for `cooldown` after `threshold` failures in a row.
    pub(super) fn new(threshold: u32, cooldown: Duration) -> Self {
        Self { threshold, cooldown, state: Mutex::new(State::Closed { failures: 0 }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leave for one attempt; `None` while the service is left alone.
    pub(super) fn admit(&self, now: Instant) -> Option<Pass<'_>> {
        let mut state = self.state();
        let probe = match *state {
            State::Closed { .. } => false,
            State::Open { until } if now >= until => {
                *state = State::Probing { since: now };
                true
            }
            State::Open { .. } | State::Probing { .. } => return None,
        };
        Some(Pass { breaker: self, probe, settled: false })
    }
}

/// Leave for one attempt. A probe that is dropped unsettled, its future cancelled, lets the next
/// request probe.
pub(super) struct Pass<'a> {
    breaker: &'a Breaker,
    probe: bool,
    settled: bool,
}

impl Pass<'_> {
    /// The service answered.
    pub(super) fn succeeded(mut self) -> Change {
        self.settled = true;
        let mut state = self.breaker.state();
        match *state {
            State::Probing { .. } if self.probe => {
                *state = State::Closed { failures: 0 };
                Change::Closed
            }
            State::Closed { .. } => {
                *state = State::Closed { failures: 0 };
                Change::None
            }
            // An attempt from before the circuit opened says nothing of now.
            State::Open { .. } | State::Probing { .. } => Change::None,
        }
    }

    /// The service failed.
    pub(super) fn failed(mut self, now: Instant) -> Change {
        self.settled = true;
        let mut state = self.breaker.state();
        match *state {
            State::Closed { failures } if failures + 1 < self.breaker.threshold => {
                *state = State::Closed { failures: failures + 1 };
                Change::None
            }
            State::Probing { .. } if !self.probe => Change::None,
            State::Open { .. } => Change::None,
            State::Closed { .. } | State::Probing { .. } => {
                *state = State::Open { until: now + self.breaker.cooldown };
                Change::Opened
            }
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.settled || !self.probe {
            return;
        }
        let mut state = self.breaker.state();
        if let State::Probing { since } = *state {
            *state = State::Open { until: since };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: Duration = Duration::from_secs(10);

    #[test]
    fn opens_after_failures_in_a_row_and_closes_after_a_probe() {
        let breaker = Breaker::new(3, REST);
        let start = Instant::now();
        let fail = |now| breaker.admit(now).unwrap().failed(now);
        assert_eq!([fail(start), fail(start)], [Change::None; 2]);
        // A success between starts the count again.
        assert_eq!(breaker.admit(start).unwrap().succeeded(), Change::None);
        assert_eq!(
            [fail(start), fail(start), fail(start)],
            [Change::None, Change::None, Change::Opened]
        );
        assert!(breaker.admit(start + REST / 2).is_none());
        // One probe at a time; a failed one opens the circuit for another rest.
        let later = start + REST;
        let probe = breaker.admit(later).unwrap();
        assert!(breaker.admit(later).is_none());
        assert_eq!(probe.failed(later), Change::Opened);
        assert!(breaker.admit(later + REST / 2).is_none());
        let back = later + REST;
        assert_eq!(breaker.admit(back).unwrap().succeeded(), Change::Closed);
        assert_eq!(
            [fail(back), fail(back), fail(back)],
            [Change::None, Change::None, Change::Opened]
        );
    }

    #[test]
    fn a_cancelled_probe_makes_room_for_the_next() {
        let breaker = Breaker::new(1, REST);
        let start = Instant::now();
        assert_eq!(breaker.admit(start).unwrap().failed(start), Change::Opened);
        drop(breaker.admit(start + REST).unwrap());
        assert_eq!(breaker.admit(start + REST).unwrap().succeeded(), Change::Closed);
    }

    #[test]
    fn latecomers_change_nothing() {
        let breaker = Breaker::new(1, REST);
        let start = Instant::now();
        let (first, second, third) = (
            breaker.admit(start).unwrap(),
            breaker.admit(start).unwrap(),
            breaker.admit(start).unwrap(),
        );
        assert_eq!(first.failed(start), Change::Opened);
        assert_eq!(second.succeeded(), Change::None);
        assert!(breaker.admit(start).is_none());
        let probe = breaker.admit(start + REST).unwrap();
        assert_eq!(third.failed(start + REST), Change::None);
        assert_eq!(probe.succeeded(), Change::Closed);
    }
}
