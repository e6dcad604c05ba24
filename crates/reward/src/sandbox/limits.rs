//! The resource limits of one run.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::SandboxError;

/// The resources that one run may use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Time from the interpreter's start to its end, in milliseconds; 10 to 600,000. Processor time
    /// is limited to the same, rounded up to seconds.
    pub wall_ms: u64,
    /// Address space of each process, in MiB; 32 to 65,536. Python itself takes about 20.
    pub memory_mb: u64,
    /// Bytes kept of standard output, and of standard error; 0 to 16 MiB. More ends the run.
    pub output_bytes: usize,
    /// Size of the private scratch directory, in MiB; 0 to 1,024. With 0, or without a mount
    /// namespace to contain it, nothing is writable.
    pub scratch_mb: u64,
    /// Threads and processes that may exist at the same time; 1 to 256.
    pub tasks: u64,
    /// Whether processes may be started. The run is refused without a pid namespace.
    pub processes: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wall_ms: 5_000,
            memory_mb: 256,
            output_bytes: 64 * 1024,
            scratch_mb: 0,
            tasks: 16,
            processes: false,
        }
    }
}

impl Limits {
    /// Checks every range.
    ///
    /// # Errors
    /// The first limit that is out of range.
    pub fn check(&self) -> Result<(), SandboxError> {
        let checks = [
            ("wall_ms", self.wall_ms, 10, 600_000),
            ("memory_mb", self.memory_mb, 32, 65_536),
            ("output_bytes", self.output_bytes as u64, 0, 16 << 20),
            ("scratch_mb", self.scratch_mb, 0, 1_024),
            ("tasks", self.tasks, 1, 256),
        ];
        for (key, value, least, most) in checks {
            if !(least..=most).contains(&value) {
                return Err(SandboxError::Limit { key, value, least, most });
            }
        }
        Ok(())
    }

    /// The wall time as a duration.
    pub fn wall(&self) -> Duration {
        Duration::from_millis(self.wall_ms)
    }

    /// Processor seconds: the wall time rounded up, plus one, so that normally the wall clock ends a
    /// run.
    pub(super) fn cpu_seconds(&self) -> u64 {
        self.wall_ms.div_ceil(1_000) + 1
    }
}
