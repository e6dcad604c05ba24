//! Lowers the priority of background threads, such as the trainer's, below that of serving threads.
//!
//! The process chooses a [`BackgroundPriority`] once with [`set_background`]. Each background
//! thread calls [`to_background`] when it starts, and [`pause_point`] inside its long loops. A serving thread
//! that wants to leave them time asks [`background_was_busy`].

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How background threads share the processors with serving threads (Linux only).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackgroundPriority {
    /// They run only while no other thread on the machine is runnable (`SCHED_IDLE`).
    #[default]
    Idle,
    /// They get a smaller share (niceness 10).
    Low,
    /// They compete as equals with serving threads.
    Normal,
}

/// The priority of every background thread of the process.
static BACKGROUND: OnceLock<BackgroundPriority> = OnceLock::new();

/// Time between two yields of a background thread. Each yield costs a context switch while other
/// background threads are runnable.
const YIELD_INTERVAL: Duration = Duration::from_micros(100);

thread_local! {
    /// When this thread last yielded; `None` in threads that never yield.
    static LAST_YIELD: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// When a background thread last yielded, in microseconds since [`start`], or 0.
static LAST_BACKGROUND_YIELD: AtomicU64 = AtomicU64::new(0);

/// The moment from which [`LAST_BACKGROUND_YIELD`] is counted: the first call.
fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Whole microseconds since [`start`], at least 1.
fn now_us() -> u64 {
    u64::try_from(start().elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
}

/// Sets the priority for later calls of [`to_background`]. Only the first call has an effect.
pub fn set_background(priority: BackgroundPriority) {
    let _ = BACKGROUND.set(priority);
}

/// Gives the calling thread the priority of [`set_background`]; threads that it starts inherit it.
/// Does nothing before [`set_background`], and on systems other than Linux.
pub fn to_background() {
    let Some(priority) = BACKGROUND.get() else { return };
    #[cfg(target_os = "linux")]
    {
        const NICENESS: i32 = 10;
        let param = libc::sched_param { sched_priority: 0 };
        // SAFETY: both calls take plain values, except the pointer to `param`, which they only read
        // during the call. On Linux, id 0 is the calling thread in both.
        let failed = unsafe {
            match priority {
                BackgroundPriority::Idle => libc::sched_setscheduler(0, libc::SCHED_IDLE, &param),
                BackgroundPriority::Low => libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS),
                BackgroundPriority::Normal => 0,
            }
        };
        if failed != 0 {
            tracing::warn!(?priority, "train.priority: a thread's priority could not be lowered");
        }
        LAST_YIELD.set((*priority != BackgroundPriority::Normal).then(Instant::now));
    }
    #[cfg(not(target_os = "linux"))]
    let _unsupported = priority;
}

/// Yields the processor if this is a background thread that has not yielded for 100 µs.
///
/// Long loops call this at least that often: kernels that preempt lazily (`PREEMPT_LAZY`,
/// `PREEMPT_NONE`) let a thread of the lowest priority run until the next tick, up to 10 ms, while
/// serving threads wait.
pub fn pause_point() {
    let Some(last) = LAST_YIELD.get() else { return };
    if last.elapsed() >= YIELD_INTERVAL {
        std::thread::yield_now();
        LAST_YIELD.set(Some(Instant::now()));
        LAST_BACKGROUND_YIELD.store(now_us(), Ordering::Relaxed);
    }
}

/// Whether a background thread yielded in a [`pause_point`] within the given time, and so probably has more to
/// compute.
pub fn background_was_busy(within: Duration) -> bool {
    let last = LAST_BACKGROUND_YIELD.load(Ordering::Relaxed);
    last > 0 && u128::from(now_us().saturating_sub(last)) <= within.as_micros()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn yields_of_background_threads_are_noticed() {
        let compute = || {
            let began = Instant::now();
            while began.elapsed() < 3 * YIELD_INTERVAL {
                pause_point();
            }
        };
        compute();
        assert!(!background_was_busy(Duration::MAX), "this is no background thread");
        set_background(BackgroundPriority::Low);
        let background = std::thread::spawn(move || {
            to_background();
            compute();
        });
        background.join().unwrap();
        assert!(background_was_busy(Duration::from_secs(3600)));
        std::thread::sleep(Duration::from_millis(2));
        assert!(!background_was_busy(Duration::from_millis(1)));
    }
}
