//! Counts, latencies and rewards of the simulated users' requests.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::client::ClientError;

/// Answers that the running mean of the reward averages over.
const MEAN_WINDOW: f64 = 64.0;
/// Failures whose messages are kept.
const FAILURES_KEPT: usize = 3;

/// A tally that users, the evaluation and the progress display share.
#[derive(Debug, Default)]
pub struct SharedTally(Mutex<UserTally>);

/// The counts up to now.
#[derive(Clone, Debug, Default)]
pub struct UserTally {
    /// Chat completions requested, including failed ones.
    pub requests: u64,
    /// Chat completions and feedback posts that failed.
    pub failed: u64,
    /// Acknowledged feedback posts.
    pub feedback: u64,
    /// Acknowledged thumbs up.
    pub thumbs_up: u64,
    /// Running mean of the reward of answers to users.
    pub reward: Option<f64>,
    /// The messages of the first few failures.
    pub failures: Vec<String>,
    answers: u64,
    /// Times to the first token in milliseconds while the trainer was idle.
    idle: Vec<f64>,
    /// The same while it was computing.
    busy: Vec<f64>,
}

/// Time to first token in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latency {
    /// Median.
    pub p50: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
}

impl SharedTally {
    /// A copy of the counts.
    pub fn read(&self) -> UserTally {
        self.lock().clone()
    }

    /// Counts a requested chat completion.
    pub fn add_request(&self) {
        self.lock().requests += 1;
    }

    /// Counts a failed request.
    pub fn add_failure(&self, error: &ClientError) {
        let mut tally = self.lock();
        tally.failed += 1;
        if tally.failures.len() < FAILURES_KEPT {
            tally.failures.push(error.to_string());
        }
    }

    /// Counts an answer to a user.
    pub fn add_answer(&self, reward: f64, first_token: Duration, trainer_busy: bool) {
        let mut tally = self.lock();
        tally.answers += 1;
        let share = 1.0 / (tally.answers as f64).min(MEAN_WINDOW);
        let mean = tally.reward.unwrap_or(reward);
        tally.reward = Some(mean + share * (reward - mean));
        let ms = first_token.as_secs_f64() * 1e3;
        if trainer_busy { tally.busy.push(ms) } else { tally.idle.push(ms) }
    }

    /// Counts an acknowledged thumb.
    pub fn add_thumb(&self, up: bool) {
        let mut tally = self.lock();
        tally.feedback += 1;
        tally.thumbs_up += u64::from(up);
    }

    fn lock(&self) -> MutexGuard<'_, UserTally> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UserTally {
    /// Whether [`Self::reward`] averages over its whole window.
    pub fn is_settled(&self) -> bool {
        self.answers as f64 >= MEAN_WINDOW
    }

    /// Latency while the trainer was idle.
    pub fn idle(&self) -> Latency {
        Latency::of(self.idle.clone())
    }

    /// Latency while the trainer was computing.
    pub fn busy(&self) -> Latency {
        Latency::of(self.busy.clone())
    }

    /// Latency of all answers.
    pub fn overall(&self) -> Latency {
        Latency::of([self.idle.as_slice(), self.busy.as_slice()].concat())
    }
}

impl Latency {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { p50: percentile(&values, 0.50), p99: percentile(&values, 0.99) }
    }
}

/// The nearest-rank percentile of sorted values: the least value that is at least as large as the
/// share `q` of them; `None` without values.
pub fn percentile(sorted: &[f64], q: f64) -> Option<f64> {
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 0.50), Some(50.0));
        assert_eq!(percentile(&hundred, 0.99), Some(99.0));
        assert_eq!(percentile(&hundred, 1.0), Some(100.0));
        assert_eq!(percentile(&[7.0], 0.01), Some(7.0));
        assert_eq!(percentile(&[1.0, 2.0], 0.99), Some(2.0));
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn latencies_are_separated_by_the_trainers_activity() {
        let tally = SharedTally::default();
        for ms in [1, 2, 3] {
            tally.add_answer(1.0, Duration::from_millis(ms), false);
        }
        tally.add_answer(1.0, Duration::from_millis(9), true);
        let read = tally.read();
        assert_eq!(read.idle(), Latency { p50: Some(2.0), p99: Some(3.0) });
        assert_eq!(read.busy(), Latency { p50: Some(9.0), p99: Some(9.0) });
        assert_eq!(read.overall(), Latency { p50: Some(2.0), p99: Some(9.0) });
    }

    #[test]
    fn the_mean_reward_is_plain_at_first_and_a_moving_average_later() {
        let tally = SharedTally::default();
        for reward in [0.0, 1.5, 1.5, 0.0] {
            tally.add_answer(reward, Duration::ZERO, false);
        }
        assert!((tally.read().reward.unwrap() - 0.75).abs() < 1e-12);
        for _ in 0..1000 {
            tally.add_answer(1.5, Duration::ZERO, false);
        }
        assert!(tally.read().reward.unwrap() > 1.499);
    }

    #[test]
    fn every_failure_is_counted_and_few_messages_are_kept() {
        let tally = SharedTally::default();
        for status in 500..510 {
            let message = "no".to_owned();
            tally.add_failure(&ClientError::Status { what: "feedback", status, message });
        }
        let read = tally.read();
        assert_eq!(read.failed, 10);
        assert_eq!(read.failures.len(), FAILURES_KEPT);
        assert_eq!(read.failures[0], "feedback: HTTP 500: no");
    }
}
