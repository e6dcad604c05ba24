//! What benchmarks share: a daemon, processor time, load, and the speed of matrix products. Values that
//! the system does not provide are 0.

use std::fs;
use std::time::Instant;

use serde::Serialize;
use serde_json::Value;

use hone_demo::users::percentile;
use hone_model::kernels::matmul::{Matrix, product};
use hone_model::kernels::parallel::with_threads;

use hone::app::{self, Service};
use hone::logging;
use hone_config::Config;

/// The result of a benchmark.
pub(crate) struct BenchOutcome {
    /// The measurements, which docs/benchmarks.md explains.
    pub report: Value,
    /// The report in words; a table of the values if absent.
    pub text: Option<String>,
    /// The check that failed.
    pub failure: Option<String>,
}

impl BenchOutcome {
    pub fn of(report: Value) -> Self {
        Self { report, text: None, failure: None }
    }
}

/// Starts a daemon in this process, runs `f` with it, and shuts it down.
pub(crate) async fn with_daemon<T>(
    config: Config,
    f: impl AsyncFnOnce(&Service) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    logging::init(&config.log);
    let daemon = app::start(config).await?;
    let done = f(&daemon).await;
    let ended = daemon.shutdown().await;
    let done = done?;
    ended.map(|()| done)
}

/// The number of cores.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The median and the 99th percentile (nearest rank); NaN without values.
pub(crate) fn quantiles(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    [0.5, 0.99].map(|q| percentile(&values, q).unwrap_or(f64::NAN))
}

/// The load average of the last minute: the mean number of runnable processes.
pub(crate) fn machine_load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

/// Durations in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Wall time.
    pub wall: f64,
    /// Processor time of all threads, in hundredths.
    pub processor: f64,
}

/// Runs `f` and measures its duration.
pub(crate) fn timed<R>(f: impl FnOnce() -> R) -> (R, Seconds) {
    let (start, before) = (Instant::now(), processor_seconds());
    let result = f();
    let wall = start.elapsed().as_secs_f64();
    (result, Seconds { wall, processor: processor_seconds() - before })
}

/// Processor time of this process in seconds, in hundredths.
pub(crate) fn processor_seconds() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields 14 and 15 are user and system time in ticks of 1/100 s. The name, field 2, ends in `)`.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// The number of threads that an option chooses; 0 chooses one per core.
pub(crate) fn threads_or_cores(threads: usize) -> usize {
    if threads == 0 { cores() } else { threads }
}

/// The best measured speed of large f32 products in GFLOP/s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Peak {
    /// By wall time.
    pub wall: f64,
    /// By processor time, times threads: the speed of an otherwise idle machine.
    pub processor: f64,
}

/// Side of the square matrices that [`Peak::measure`] multiplies.
const SIDE: usize = 1536;

/// Products per measurement, enough for the resolution of processor time.
const PRODUCTS: usize = 8;

impl Peak {
    /// Measures products on `threads` threads of the current pool and keeps the best speeds.
    pub(crate) fn measure(&mut self, threads: usize) {
        let values: Vec<f32> = (0..SIDE * SIDE).map(|i| (i as f32).sin()).collect();
        let x = Matrix::new(&values, SIDE, SIDE);
        let gflop = 2.0 * (SIDE as f64).powi(3) * PRODUCTS as f64 / 1e9;
        let ((), took) = timed(|| {
            for _ in 0..PRODUCTS {
                drop(with_threads(threads, || std::hint::black_box(product(1.0, x, x.t()))));
            }
        });
        self.wall = self.wall.max(gflop / took.wall);
        if took.processor > 0.0 {
            self.processor = self.processor.max(gflop / took.processor * threads as f64);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The options of a benchmark with these flags.
    pub(crate) fn options<T: clap::Args>(flags: &[&str]) -> T {
        let command = T::augment_args(clap::Command::new("bench"));
        let matches = command.get_matches_from([&["bench"][..], flags].concat());
        T::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn products_have_a_speed() {
        let mut peak = Peak::default();
        peak.measure(1);
        assert!(peak.wall > 0.0);
    }
}
