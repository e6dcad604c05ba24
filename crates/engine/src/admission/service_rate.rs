//! How long requests of clients take, to predict how long a full queue takes to become shorter.

use std::time::Duration;

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
mod tests {
    use super::*;

    #[test]
    fn the_wait_follows_from_the_mean_time_and_the_slots() {
        let mut rate = ServiceRate::default();
        assert_eq!(rate.wait(8, 4), UNKNOWN);
        rate.record(Duration::from_secs(2));
        assert_eq!(rate.wait(8, 4), Duration::from_secs(4));
        assert_eq!(rate.wait(3, 0), Duration::from_secs(6));
        rate.record(Duration::from_secs(12));
        assert_eq!(rate.wait(1, 1), Duration::from_secs(3));
        for _ in 0..200 {
            rate.record(Duration::from_secs(5));
        }
        assert!((rate.wait(1, 1).as_secs_f64() - 5.0).abs() < 1e-6);
    }
}
