//! What the simulated users saw: counts, latencies and the reward of what they were served.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::client::ClientError;

/// Answers that the running mean of the served reward remembers.
const MEAN_WINDOW: f64 = 64.0;
/// Failures that are kept in words.
const FAILURES_KEPT: usize = 3;

/// Shared by every user, the evaluation and the progress display.
#[derive(Debug, Default)]
pub struct Board(Mutex<UserTally>);

/// Counts so far.
#[derive(Clone, Debug, Default)]
pub struct UserTally {
    /// Chat completions asked for, failed ones included.
    pub requests: u64,
    /// Chat completions and feedback posts that failed.
    pub failed: u64,
    /// Feedback posts that were acknowledged.
    pub feedback: u64,
    /// Acknowledged thumbs that pointed up.
    pub thumbs_up: u64,
    /// Running mean of the reward of served answers.
    pub reward: Option<f64>,
    /// The first few failures, in words.
    pub failures: Vec<String>,
    answers: u64,
    idle: Vec<f64>,
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

impl Board {
    /// The counts as they stand.
    pub fn read(&self) -> UserTally {
        self.lock().clone()
    }

    /// A chat completion was asked for.
    pub fn asked(&self) {
        self.lock().requests += 1;
    }

    /// A request failed.
    pub fn failed(&self, error: &ClientError) {
        let mut tally = self.lock();
        tally.failed += 1;
        if tally.failures.len() < FAILURES_KEPT {
            tally.failures.push(error.to_string());
        }
    }

    /// A user was served an answer worth `reward`.
    pub fn served(&self, reward: f64, first_token: Duration, trainer_busy: bool) {
        let mut tally = self.lock();
        tally.answers += 1;
        let share = 1.0 / (tally.answers as f64).min(MEAN_WINDOW);
        let mean = tally.reward.unwrap_or(reward);
        tally.reward = Some(mean + share * (reward - mean));
        let ms = first_token.as_secs_f64() * 1e3;
        if trainer_busy { tally.busy.push(ms) } else { tally.idle.push(ms) }
    }

    /// A thumb was acknowledged.
    pub fn thumb(&self, up: bool) {
        let mut tally = self.lock();
        tally.feedback += 1;
        tally.thumbs_up += u64::from(up);
    }

    fn lock(&self) -> MutexGuard<'_, UserTally> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UserTally {
    /// Whether [`Self::reward`] is the mean of as many answers as it remembers.
    pub fn is_settled(&self) -> bool {
        self.answers as f64 >= MEAN_WINDOW
    }

    /// While the trainer was idle.
    pub fn idle(&self) -> Latency {
        Latency::of(self.idle.clone())
    }

    /// While the trainer was computing.
    pub fn busy(&self) -> Latency {
        Latency::of(self.busy.clone())
    }

    /// Over the whole time.
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

/// The nearest-rank percentile of sorted values: the least value that at least the share `q` of
/// them does not exceed; `None` of nothing.
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
    fn latencies_are_kept_apart_by_what_the_trainer_did() {
        let board = Board::default();
        for ms in [1, 2, 3] {
            board.served(1.0, Duration::from_millis(ms), false);
        }
        board.served(1.0, Duration::from_millis(9), true);
        let tally = board.read();
        assert_eq!(tally.idle(), Latency { p50: Some(2.0), p99: Some(3.0) });
        assert_eq!(tally.busy(), Latency { p50: Some(9.0), p99: Some(9.0) });
        assert_eq!(tally.overall(), Latency { p50: Some(2.0), p99: Some(9.0) });
    }

    #[test]
    fn the_mean_reward_is_plain_at_first_and_forgets_later() {
        let board = Board::default();
        for reward in [0.0, 1.5, 1.5, 0.0] {
            board.served(reward, Duration::ZERO, false);
        }
        assert!((board.read().reward.unwrap() - 0.75).abs() < 1e-12);
        for _ in 0..1000 {
            board.served(1.5, Duration::ZERO, false);
        }
        assert!(board.read().reward.unwrap() > 1.499);
    }

    #[test]
    fn failures_are_all_counted_and_a_few_are_kept() {
        let board = Board::default();
        for status in 500..510 {
            let message = "no".to_owned();
            board.failed(&ClientError::Status { what: "feedback", status, message });
        }
        let tally = board.read();
        assert_eq!(tally.failed, 10);
        assert_eq!(tally.failures.len(), FAILURES_KEPT);
        assert_eq!(tally.failures[0], "feedback: HTTP 500: no");
    }
}
