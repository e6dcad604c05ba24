//! Lowers the priority of background threads, such as the trainer's, below that of serving threads.
//!
//! The process chooses a [`BackgroundPriority`] once with [`set_background`]. Each background
//! thread calls [`to_background`] when it starts, and [`pause_point`] inside its long loops. A serving thread
//! holds a [`Serving`] in the parts of its work that background threads must not interrupt, and leaves them time
//! in between if [`background_was_busy`]. [`processor_time`] is what a thread has used.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

/// How background threads share the processors with serving threads (Linux only).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackgroundPriority {
    /// They run only while no other thread on the machine is runnable (`SCHED_IDLE`), and no [`Serving`]
    /// exists.
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
    /// What [`pause_point`] does in this thread; `None` in threads that never yield.
    static PAUSES: Cell<Option<Pauses>> = const { Cell::new(None) };
}

#[derive(Clone, Copy)]
struct Pauses {
    last: Instant,
    /// Whether it waits while a [`Serving`] exists.
    waits: bool,
}

/// The values of [`Serving`] that exist.
static SERVING: AtomicUsize = AtomicUsize::new(0);

/// Background threads wait with this lock for the end of the last [`Serving`].
static WAITING: Mutex<()> = Mutex::new(());
static SERVED: Condvar = Condvar::new();

/// The longest wait, after which a background thread computes until its next [`pause_point`].
const MAX_WAIT: Duration = Duration::from_millis(50);

/// While it exists, background threads of the lowest priority wait at their pause points.
///
/// A pass for clients has hundreds of parallel parts. A thread that has no part at the moment yields its
/// processor to other serving threads. A background thread that got it instead would keep it for longer than
/// a part takes.
#[must_use]
pub struct Serving(());

/// When the last [`Serving`] began, in microseconds since [`start`], or 0.
static LAST_SERVING: AtomicU64 = AtomicU64::new(0);

/// Background threads reach a [`pause_point`] soon for so long after a [`Serving`] began.
const SERVED_WITHIN: Duration = Duration::from_secs(1);

impl Serving {
    /// Background threads wait from now on.
    pub fn begin() -> Self {
        SERVING.fetch_add(1, Ordering::Relaxed);
        LAST_SERVING.store(now_us(), Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let is_last = SERVING.fetch_sub(1, Ordering::Release) == 1;
        // A serving thread must not wait for a background thread. One that begins to wait at this moment is
        // not woken, and waits for [`MAX_WAIT`] at most.
        if is_last && let Some(_waiting) = WAITING.try_lock() {
            SERVED.notify_all();
        }
    }
}

/// Waits until no [`Serving`] exists, or for [`MAX_WAIT`].
fn wait_while_serving() {
    let is_serving = |_: &mut ()| SERVING.load(Ordering::Acquire) > 0;
    SERVED.wait_while_for(&mut WAITING.lock(), is_serving, MAX_WAIT);
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

/// Whether an event, of which `last` has the moment as [`now_us`] gives it, or 0 before the first one, happened
/// within the given time.
fn is_within(time: Duration, last: &AtomicU64) -> bool {
    let last = last.load(Ordering::Relaxed);
    last > 0 && u128::from(now_us().saturating_sub(last)) <= time.as_micros()
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
        let waits = *priority == BackgroundPriority::Idle;
        let yields = *priority != BackgroundPriority::Normal;
        PAUSES.set(yields.then(|| Pauses { last: Instant::now(), waits }));
    }
    #[cfg(not(target_os = "linux"))]
    let _unsupported = priority;
}

/// Yields the processor if this is a background thread that has not yielded for 100 µs, or waits while a
/// [`Serving`] exists.
///
/// Long loops call this at least that often: kernels that preempt lazily (`PREEMPT_LAZY`,
/// `PREEMPT_NONE`) let a thread of the lowest priority run until the next tick, up to 10 ms, while
/// serving threads wait.
pub fn pause_point() {
    let Some(Pauses { last, waits }) = PAUSES.get() else { return };
    if waits && SERVING.load(Ordering::Relaxed) > 0 {
        wait_while_serving();
    } else if last.elapsed() >= YIELD_INTERVAL {
        std::thread::yield_now();
    } else {
        return;
    }
    PAUSES.set(Some(Pauses { last: Instant::now(), waits }));
    LAST_BACKGROUND_YIELD.store(now_us(), Ordering::Relaxed);
}

/// Whether the calling thread is one that waits while a [`Serving`] exists, and one began within the last second.
/// Operations that take milliseconds then run in pieces with a [`pause_point`] in between.
pub fn must_pause_often() -> bool {
    let waits = PAUSES.get().is_some_and(|pauses| pauses.waits);
    waits && is_within(SERVED_WITHIN, &LAST_SERVING)
}

/// Whether a background thread yielded or waited in a [`pause_point`] within the given time, and so probably has
/// more to compute.
pub fn background_was_busy(within: Duration) -> bool {
    is_within(within, &LAST_BACKGROUND_YIELD)
}

/// Processor time that the calling thread has used. Other threads and processes do not add to it, unlike to the
/// time between two [`Instant`]s. On systems that do not count it, the time since the first call.
pub fn processor_time() -> Duration {
    #[cfg(unix)]
    {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call only writes to `time`, which outlives it.
        let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        if failed == 0
            && let (Ok(seconds), Ok(nanos)) = (time.tv_sec.try_into(), time.tv_nsec.try_into())
        {
            return Duration::new(seconds, nanos);
        }
    }
    start().elapsed()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn only_the_own_work_of_a_thread_takes_its_processor_time() {
        let (began, before) = (Instant::now(), processor_time());
        while processor_time() < before + Duration::from_millis(2) {}
        let used = processor_time() - before;
        assert!(used <= began.elapsed() + Duration::from_millis(1), "{used:?}");
        let (other, before) = (std::thread::spawn(processor_time), processor_time());
        assert!(other.join().unwrap() < used, "another thread has its own time");
        std::thread::sleep(Duration::from_millis(20));
        assert!(processor_time() - before < Duration::from_millis(20));
    }

    #[test]
    fn background_threads_wait_while_clients_are_served_and_are_noticed() {
        let compute = || {
            let began = Instant::now();
            while began.elapsed() < 3 * YIELD_INTERVAL {
                pause_point();
            }
        };
        {
            let _serving = Serving::begin();
            compute();
        }
        assert!(!background_was_busy(Duration::MAX), "this is no background thread");
        set_background(BackgroundPriority::Idle);
        let serving = [Serving::begin(), Serving::begin()];
        let ended = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ended);
        let background = std::thread::spawn(move || {
            to_background();
            let began = Instant::now();
            assert!(must_pause_often());
            pause_point();
            (end.load(Ordering::Acquire), began.elapsed())
        });
        assert!(!must_pause_often(), "this is no background thread");
        std::thread::sleep(MAX_WAIT / 10);
        let [one, other] = serving;
        drop(one);
        ended.store(true, Ordering::Release);
        drop(other);
        let (saw_end, waited) = background.join().unwrap();
        assert!(saw_end || waited >= MAX_WAIT, "{waited:?}");
        // If it began before the end of serving, it waited, which is noticed.
        assert!(waited < MAX_WAIT / 20 || background_was_busy(Duration::from_secs(3600)));
        // Nothing is served now.
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
