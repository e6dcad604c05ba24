//! A circuit breaker (Nygard, *Release It!*): after consecutive failures no request is sent for a
//! while, then one request probes the service; its success closes the circuit.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

enum CircuitState {
    /// Requests are sent; the last `failures` attempts have failed.
    Closed { failures: u32 },
    /// No request is sent before `until`.
    Open { until: Instant },
    /// One request, started at `since`, tests whether the service has recovered.
    Probing { since: Instant },
}

/// The effect of an attempt's result on the circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CircuitChange {
    /// No change.
    None,
    /// The circuit opened, for the first time or after a failed probe.
    Opened,
    /// The service has recovered.
    Closed,
}

/// Decides whether a request may be sent.
pub(super) struct Breaker {
    threshold: u32,
    cooldown: Duration,
    state: Mutex<CircuitState>,
}

impl Breaker {
    /// A breaker that opens for `cooldown` after `threshold` consecutive failures.
    pub(super) fn new(threshold: u32, cooldown: Duration) -> Self {
        Self { threshold, cooldown, state: Mutex::new(CircuitState::Closed { failures: 0 }) }
    }

    fn state(&self) -> MutexGuard<'_, CircuitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A permit for one attempt; `None` while the circuit is open or probing.
    pub(super) fn admit(&self, now: Instant) -> Option<Permit<'_>> {
        let mut state = self.state();
        let probe = match *state {
            CircuitState::Closed { .. } => false,
            CircuitState::Open { until } if now >= until => {
                *state = CircuitState::Probing { since: now };
                true
            }
            CircuitState::Open { .. } | CircuitState::Probing { .. } => return None,
        };
        Some(Permit { breaker: self, probe, settled: false })
    }
}

/// Permission for one attempt. If a probe's permit is dropped without a result (its future was
/// cancelled), the next request probes.
pub(super) struct Permit<'a> {
    breaker: &'a Breaker,
    probe: bool,
    settled: bool,
}

impl Permit<'_> {
    /// The service answered.
    pub(super) fn succeeded(mut self) -> CircuitChange {
        self.settled = true;
        let mut state = self.breaker.state();
        let change = match *state {
            CircuitState::Closed { .. } => CircuitChange::None,
            CircuitState::Probing { .. } if self.probe => CircuitChange::Closed,
            // The attempt started before the circuit opened, so it does not show the current state.
            CircuitState::Open { .. } | CircuitState::Probing { .. } => return CircuitChange::None,
        };
        *state = CircuitState::Closed { failures: 0 };
        change
    }

    /// The service failed.
    pub(super) fn failed(mut self, now: Instant) -> CircuitChange {
        self.settled = true;
        let Breaker { threshold, cooldown, .. } = *self.breaker;
        let mut state = self.breaker.state();
        match *state {
            CircuitState::Closed { failures } if failures + 1 < threshold => {
                *state = CircuitState::Closed { failures: failures + 1 };
                return CircuitChange::None;
            }
            CircuitState::Closed { .. } => {}
            CircuitState::Probing { .. } if self.probe => {}
            CircuitState::Open { .. } | CircuitState::Probing { .. } => return CircuitChange::None,
        }
        *state = CircuitState::Open { until: now + cooldown };
        CircuitChange::Opened
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.settled || !self.probe {
            return;
        }
        let mut state = self.breaker.state();
        if let CircuitState::Probing { since } = *state {
            *state = CircuitState::Open { until: since };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOLDOWN: Duration = Duration::from_secs(10);

    #[test]
    fn opens_after_consecutive_failures_and_closes_after_a_probe() {
        let breaker = Breaker::new(3, COOLDOWN);
        let start = Instant::now();
        let fail = |now| breaker.admit(now).unwrap().failed(now);
        assert_eq!([fail(start), fail(start)], [CircuitChange::None; 2]);
        // A success resets the count.
        assert_eq!(breaker.admit(start).unwrap().succeeded(), CircuitChange::None);
        assert_eq!(
            [fail(start), fail(start), fail(start)],
            [CircuitChange::None, CircuitChange::None, CircuitChange::Opened]
        );
        assert!(breaker.admit(start + COOLDOWN / 2).is_none());
        // One probe at a time; a failed one opens the circuit for another cooldown.
        let later = start + COOLDOWN;
        let probe = breaker.admit(later).unwrap();
        assert!(breaker.admit(later).is_none());
        assert_eq!(probe.failed(later), CircuitChange::Opened);
        assert!(breaker.admit(later + COOLDOWN / 2).is_none());
        let back = later + COOLDOWN;
        assert_eq!(breaker.admit(back).unwrap().succeeded(), CircuitChange::Closed);
        assert_eq!(
            [fail(back), fail(back), fail(back)],
            [CircuitChange::None, CircuitChange::None, CircuitChange::Opened]
        );
    }

    #[test]
    fn after_a_cancelled_probe_the_next_request_probes() {
        let breaker = Breaker::new(1, COOLDOWN);
        let start = Instant::now();
        assert_eq!(breaker.admit(start).unwrap().failed(start), CircuitChange::Opened);
        drop(breaker.admit(start + COOLDOWN).unwrap());
        assert_eq!(breaker.admit(start + COOLDOWN).unwrap().succeeded(), CircuitChange::Closed);
    }

    #[test]
    fn results_of_earlier_attempts_do_not_change_an_open_circuit() {
        let breaker = Breaker::new(1, COOLDOWN);
        let start = Instant::now();
        let (first, second, third) = (
            breaker.admit(start).unwrap(),
            breaker.admit(start).unwrap(),
            breaker.admit(start).unwrap(),
        );
        assert_eq!(first.failed(start), CircuitChange::Opened);
        assert_eq!(second.succeeded(), CircuitChange::None);
        assert!(breaker.admit(start).is_none());
        let probe = breaker.admit(start + COOLDOWN).unwrap();
        assert_eq!(third.failed(start + COOLDOWN), CircuitChange::None);
        assert_eq!(probe.succeeded(), CircuitChange::Closed);
    }
}
