//! `hone bench`: speed of Hone's components on this machine, and safety of what they learn. Other
//! processes change the times, so numbers that are compared are measured in turns within one run.

pub mod http;
pub mod interference;
pub mod rewards;
pub mod safety;
pub mod sample;
pub mod train;

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use hone_model::kernels::matmul::{Matrix, product};
use hone_model::kernels::parallel::with_threads;

/// A temporary directory, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn temporary() -> std::io::Result<Self> {
        let dir = std::env::temp_dir().join(format!("hone-bench-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The system cleans its temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

// Processor time, load, and the speed of matrix products. Values that the system does not provide
// are 0.

/// The load average of the last minute: the mean number of runnable processes.
pub fn machine_load() -> f64 {
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
pub fn timed<R>(f: impl FnOnce() -> R) -> (R, Seconds) {
    let (start, before) = (Instant::now(), processor_seconds());
    let result = f();
    let wall = start.elapsed().as_secs_f64();
    (result, Seconds { wall, processor: processor_seconds() - before })
}

/// Processor time of this process in seconds, in hundredths.
pub fn processor_seconds() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields 14 and 15 are user and system time in ticks of 1/100 s. The name, field 2, ends in `)`.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
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
    pub fn measure(&mut self, threads: usize) {
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
mod tests {
    use super::*;

    #[test]
    fn products_have_a_speed() {
        let mut peak = Peak::default();
        peak.measure(1);
        assert!(peak.wall > 0.0);
    }
}
