//! What the system tells of this process, and which of its threads give way to others. Figures that
//! it does not tell are 0.

use std::cell::Cell;
use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How threads that no client waits for share the processors with those that serve (Linux).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackgroundPriority {
    /// They compute only while nothing else on the machine wants the processor (`SCHED_IDLE`).
    #[default]
    Idle,
    /// They have a smaller share (niceness 10).
    Low,
    /// They are the serving threads' equals.
    Normal,
}

/// How background threads give way, the same in the whole process.
static BACKGROUND: OnceLock<BackgroundPriority> = OnceLock::new();

/// How long a background thread computes before it lets others run.
const PAUSE_EVERY: Duration = Duration::from_micros(100);

thread_local! {
    /// When this thread gave way last; `None` where it does not.
    static GAVE_WAY: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Decides what [`to_background`] does from now on. The first call counts.
pub fn set_background(priority: BackgroundPriority) {
    let _ = BACKGROUND.set(priority);
}

/// Lets the kernel prefer the serving threads over this one and those that it starts, as
/// [`set_background`] has it; without that, and on other systems than Linux, nothing changes.
pub fn to_background() {
    let Some(priority) = BACKGROUND.get() else { return };
    #[cfg(target_os = "linux")]
    {
        /// Behind the serving threads, but not behind everything else on the machine.
        const NICE: i32 = 10;
        let param = libc::sched_param { sched_priority: 0 };
        // SAFETY: both calls take plain values and touch no memory of ours but `param`, which is
        // read during the call; on Linux, id 0 concerns the calling thread alone in both.
        let failed = unsafe {
            match priority {
                BackgroundPriority::Idle => libc::sched_setscheduler(0, libc::SCHED_IDLE, &param),
                BackgroundPriority::Low => libc::setpriority(libc::PRIO_PROCESS, 0, NICE),
                BackgroundPriority::Normal => 0,
            }
        };
        if failed != 0 {
            tracing::warn!(?priority, "train.priority: a thread's priority could not be lowered");
        }
        GAVE_WAY.set((*priority != BackgroundPriority::Normal).then(Instant::now));
    }
    #[cfg(not(target_os = "linux"))]
    let _unsupported = priority;
}

/// Lets a thread run that waits for this processor, if this one is in the background and has not done
/// so for a tenth of a millisecond. To be called at least as often: kernels that preempt lazily
/// (`PREEMPT_LAZY`, `PREEMPT_NONE`) let even the lowest thread compute on until their next tick, up
/// to 10 ms, while others wait.
pub fn pause_point() {
    let Some(last) = GAVE_WAY.get() else { return };
    // Not at every call: each one costs a switch where other background threads wait.
    if last.elapsed() >= PAUSE_EVERY {
        std::thread::yield_now();
        GAVE_WAY.set(Some(Instant::now()));
    }
}

/// A line of `/proc/self/status` that is in kB, in bytes.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()).unwrap_or_default() << 10
}

/// Bytes of memory that are resident now.
pub fn resident() -> u64 {
    status("VmRSS:")
}

/// The most bytes that have been resident since the start, or since [`reset_peak`].
pub fn peak_resident() -> u64 {
    status("VmHWM:")
}

/// Starts [`peak_resident`] anew from what is resident now; whether the system allowed it (see
/// `/proc/pid/clear_refs` in proc(5)).
pub fn reset_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_is_touched_shows() {
        // Other tests take and give memory meanwhile, so only what this one holds is sure.
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(resident() >= 64 << 20, "{}", resident());
        assert!(peak_resident() >= 64 << 20, "{}", peak_resident());
        drop(block);
    }
}
