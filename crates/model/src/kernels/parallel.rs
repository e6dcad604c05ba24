//! The number of threads that one operation may use.
//!
//! The trainer runs several shards at the same time on one thread each, or one shard on the whole
//! pool. The results have the same bits in both cases.

use std::cell::Cell;

use rayon::prelude::*;

use hone_core::threads::pause_point;

thread_local! {
    static THREADS: Cell<usize> = const { Cell::new(1) };
}

/// Rows of one task of a row-wise loop.
const ROWS: usize = 32;

/// Threads that an operation started on this thread may use: 1 outside of [`with_threads`].
pub fn threads() -> usize {
    THREADS.get()
}

/// Runs `f`; its operations use up to `threads` threads of the current rayon pool.
pub fn with_threads<R>(threads: usize, f: impl FnOnce() -> R) -> R {
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            THREADS.set(self.0);
        }
    }
    let _restore = Restore(THREADS.replace(threads.max(1)));
    f()
}

/// `f` of every item, in order.
pub(crate) fn map<I: Sync, O: Send>(items: &[I], f: impl Fn(&I) -> O + Sync + Send) -> Vec<O> {
    let f = |item: &I| {
        let output = f(item);
        pause_point();
        output
    };
    if threads() > 1 { items.par_iter().map(f).collect() } else { items.iter().map(f).collect() }
}

/// Calls `f` with every number below `count`.
pub(crate) fn each(count: usize, f: impl Fn(usize) + Sync + Send) {
    let f = |i| {
        f(i);
        pause_point();
    };
    if threads() > 1 && count > 1 {
        (0..count).into_par_iter().for_each(f);
    } else {
        (0..count).for_each(f);
    }
}

/// Calls `f(first row, rows)` on blocks of rows of `out`.
pub(crate) fn rows<T: Send>(
    out: &mut [T],
    width: usize,
    f: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let block = ROWS * width.max(1);
    let run = |(i, rows): (usize, &mut [T])| {
        f(i * ROWS, rows);
        pause_point();
    };
    if threads() > 1 && out.len() > block {
        out.par_chunks_mut(block).enumerate().for_each(run);
    } else {
        run((0, out));
    }
}
