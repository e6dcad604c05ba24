//! Threads that stay awake between the parallel parts of one pass.

use std::sync::atomic::{AtomicBool, Ordering};

/// Runs `f` on this thread of a pool while the pool's other threads look for work without pause: a
/// pass has hundreds of parallel parts of a fraction of a millisecond each, and a thread that fell
/// asleep between two of them would take a tenth of that to wake. Elsewhere than in a pool, `f` is
/// just run.
pub(super) fn awake<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let Some(own) = rayon::current_thread_index() else { return f() };
    let done = AtomicBool::new(false);
    rayon::scope(|scope| {
        let looks = &done;
        scope.spawn_broadcast(move |_, context| {
            // The thread that computes would wait for itself.
            while context.index() != own && !looks.load(Ordering::Acquire) {
                if rayon::yield_now() != Some(rayon::Yield::Executed) {
                    std::thread::yield_now();
                }
            }
        });
        // Also when `f` panics.
        let _done = Done(&done);
        f()
    })
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn work_is_shared_and_panics_end_it() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        pool.install(|| {
            for _ in 0..200 {
                let sum: u64 = awake(|| (0..1000_u64).into_par_iter().map(|i| i * i).sum());
                assert_eq!(sum, 332_833_500);
            }
            let caught = std::panic::catch_unwind(|| awake(|| panic!("within")));
            assert!(caught.is_err());
            assert_eq!(awake(|| 7), 7);
        });
        assert_eq!(awake(|| 8), 8);
    }
}
