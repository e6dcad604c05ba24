//! How many threads one operation may use.
//!
//! Several shards run at the same time, one thread each, or one shard runs on the whole pool. What
//! comes out is the same, bit for bit.

use std::cell::Cell;

use rayon::prelude::*;

use hone_core::threads::pause_point;

thread_local! {
    static THREADS: Cell<usize> = const { Cell::new(1) };
}

/// Rows that one task of a row-wise loop takes.
const ROWS: usize = 32;

/// Threads that an operation started from here may use.
pub(crate) fn threads() -> usize {
    THREADS.get()
}

/// Runs `f` with operations that spread over `threads` threads of the current pool.
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
        let made = f(item);
        pause_point();
        made
    };
    if threads() > 1 { items.par_iter().map(f).collect() } else { items.iter().map(f).collect() }
}

/// Calls `f(first row, rows)` on blocks of rows of `out`.
pub(crate) fn rows<T: Send>(
    out: &mut [T],
    width: usize,
    f: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let width = width.max(1);
    if threads() > 1 && out.len() > ROWS * width {
        let blocks = out.par_chunks_mut(ROWS * width).enumerate();
        blocks.for_each(|(i, block)| {
            f(i * ROWS, block);
            pause_point();
        });
    } else {
        f(0, out);
        pause_point();
    }
}

/// [`rows`] of two outputs of the same shape.
pub(crate) fn rows_of_two<T: Send>(
    a: &mut [T],
    b: &mut [T],
    width: usize,
    f: impl Fn(usize, &mut [T], &mut [T]) + Sync + Send,
) {
    let width = width.max(1);
    if threads() > 1 && a.len() > ROWS * width {
        let blocks = a.par_chunks_mut(ROWS * width).zip(b.par_chunks_mut(ROWS * width));
        blocks.enumerate().for_each(|(i, (a, b))| {
            f(i * ROWS, a, b);
            pause_point();
        });
    } else {
        f(0, a, b);
        pause_point();
    }
}
