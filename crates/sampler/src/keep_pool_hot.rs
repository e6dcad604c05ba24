//! Keeps the threads of a rayon pool awake between the parallel parts of one pass.

use std::sync::atomic::{AtomicBool, Ordering};

/// Runs `f` on the current pool thread while the pool's other threads poll for work.
///
/// A pass has hundreds of parallel parts of a fraction of a millisecond each. Waking a sleeping thread
/// takes about a tenth of such a part. Outside of a pool, this only calls `f`.
pub(crate) fn keep_pool_hot<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    /// Ends the polling, also when `f` panics.
    struct SetOnDrop<'a>(&'a AtomicBool);
    impl Drop for SetOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let Some(caller) = rayon::current_thread_index() else { return f() };
    let done = AtomicBool::new(false);
    rayon::scope(|scope| {
        let polled = &done;
        scope.spawn_broadcast(move |_, context| {
            // The caller must not poll: it would wait for itself.
            while context.index() != caller && !polled.load(Ordering::Acquire) {
                if rayon::yield_now() != Some(rayon::Yield::Executed) {
                    std::thread::yield_now();
                }
            }
        });
        let _done = SetOnDrop(&done);
        f()
    })
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn other_threads_share_the_work_and_a_panic_ends_the_polling() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        pool.install(|| {
            for _ in 0..200 {
                let sum: u64 = keep_pool_hot(|| (0..1000_u64).into_par_iter().map(|i| i * i).sum());
                assert_eq!(sum, 332_833_500);
            }
            let caught = std::panic::catch_unwind(|| keep_pool_hot(|| panic!("within")));
            assert!(caught.is_err());
            assert_eq!(keep_pool_hot(|| 7), 7);
        });
        assert_eq!(keep_pool_hot(|| 8), 8);
    }
}
