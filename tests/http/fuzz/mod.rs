//! Fuzz targets: valid inputs with random changes. There is one target for each type of request, one for the
//! streams of each endpoint that has them, and one for each kind of text that clients, models and operators write.
//!
//! `cargo test --release --test http fuzz` runs each target for a second, and with `HONE_FUZZ_SECONDS=600` for
//! ten minutes. A failure shows the smallest input that was found; it becomes a test beside its reader.

use std::cell::Cell;
use std::time::{Duration, Instant};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

mod change;
mod requests;
mod streams;
mod target;
mod texts;

/// Length of a target in seconds, unless `HONE_FUZZ_SECONDS` is set.
const SECONDS: f64 = 1.0;
/// Inputs of a batch. A server serves one batch, so that memory is bounded.
const BATCH: u32 = 1000;

/// The time of a target.
struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        let seconds = std::env::var("HONE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
        Self(Instant::now() + Duration::from_secs_f64(seconds.unwrap_or(SECONDS)))
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }

    /// Checks a batch of inputs, fewer if the time is over, and at least one. Returns their number.
    fn batch<S: Strategy>(&self, inputs: &S, check: impl Fn(S::Value) -> TestCaseResult) -> u64 {
        let (checked, failed) = (Cell::new(0), Cell::new(false));
        let config = Config { cases: BATCH, failure_persistence: None, ..Config::default() };
        let outcome = TestRunner::new(config).run(inputs, |input| {
            // The search for a smaller input may take longer.
            if checked.get() > 0 && self.is_over() && !failed.get() {
                return Ok(());
            }
            checked.set(checked.get() + 1);
            // Stays true if the check panics.
            let before = failed.replace(true);
            let result = check(input);
            if result.is_ok() {
                failed.set(before);
            }
            result
        });
        if let Err(error) = outcome {
            panic!("{error}");
        }
        checked.get()
    }

    /// Checks batches of inputs that need no server until the time is over.
    fn run<S: Strategy>(&self, name: &str, inputs: &S, check: impl Fn(S::Value) -> TestCaseResult) {
        let mut checked = self.batch(inputs, &check);
        while !self.is_over() {
            checked += self.batch(inputs, &check);
        }
        println!("{name}: {checked} inputs");
    }
}
