//! The number of threads that one operation may use.
//!
//! The trainer runs several shards at the same time on one thread each, or one shard on the whole
//! pool. The results have the same bits in both cases.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ptr;

use rayon::prelude::*;

use hone_core::threads::pause_point;

use crate::float::Real;

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
pub fn map<I: Sync, O: Send>(items: &[I], f: impl Fn(&I) -> O + Sync + Send) -> Vec<O> {
    let f = |item: &I| {
        let output = f(item);
        pause_point();
        output
    };
    if threads() > 1 { items.par_iter().map(f).collect() } else { items.iter().map(f).collect() }
}

/// Calls `f` with every number below `count`.
pub fn each(count: usize, f: impl Fn(usize) + Sync + Send) {
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

/// A new vector of `len` zeros, on whose blocks of rows `f(first row, rows)` is called. Each thread writes the zeros
/// of its own blocks, which are in its cache when `f` needs them.
pub fn zeroed_rows<T: Real>(
    len: usize,
    width: usize,
    f: impl Fn(usize, &mut [T]) + Sync + Send,
) -> Vec<T> {
    new_rows(len, width, |first, block| {
        for x in &mut *block {
            x.write(T::of(0.0));
        }
        // SAFETY: every value has been written, and both types have the same layout.
        f(first, unsafe { &mut *(ptr::from_mut(block) as *mut [T]) });
    })
}

/// A copy of rows of `width` values.
pub fn copied_rows<T: Copy + Send + Sync>(values: &[T], width: usize) -> Vec<T> {
    new_rows(values.len(), width, |first, block| {
        for (to, x) in block.iter_mut().zip(&values[first * width..]) {
            to.write(*x);
        }
    })
}

/// A new vector of `len` values, all of which `write(first row, rows)` writes, in blocks of rows.
fn new_rows<T: Send>(
    len: usize,
    width: usize,
    write: impl Fn(usize, &mut [MaybeUninit<T>]) + Sync + Send,
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    rows(&mut out.spare_capacity_mut()[..len], width, write);
    // SAFETY: the blocks are all of these values, and `write` has written each.
    unsafe { out.set_len(len) };
    out
}

/// Calls `f(first row, rows)` on blocks of rows of `out`.
pub fn rows<T: Send>(out: &mut [T], width: usize, f: impl Fn(usize, &mut [T]) + Sync + Send) {
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

/// A pointer that several threads use.
pub(crate) struct SharedPointer<T>(pub *mut T);

// SAFETY: whoever dereferences the pointer guarantees that no two threads use the same values.
unsafe impl<T: Send> Send for SharedPointer<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedPointer<T> {}

impl<T> Clone for SharedPointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedPointer<T> {}

impl<T> SharedPointer<T> {
    /// The pointer to value `index`.
    ///
    /// # Safety
    /// The memory has that value, or ends before it.
    pub unsafe fn at(self, index: usize) -> *mut T {
        // SAFETY: the caller guarantees that the result is within the memory or at its end.
        unsafe { self.0.add(index) }
    }

    /// Chunk `i` of `len` elements, of which each but the last has `chunk`.
    ///
    /// # Safety
    /// The elements exist for `'a`, and nothing else uses those of this chunk.
    pub unsafe fn chunk<'a>(self, len: usize, chunk: usize, i: usize) -> &'a mut [T] {
        let first = (i * chunk).min(len);
        // SAFETY: the caller's guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.at(first), chunk.min(len - first)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_rows_are_written_by_any_number_of_threads() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let width = 5;
        for (rows, threads) in [(0, 3), (1, 3), (100, 1), (100, 3)] {
            let numbers: Vec<f32> = (0..rows * width).map(|i| i as f32).collect();
            let (counted, copied) = pool.install(|| {
                with_threads(threads, || {
                    let counted = zeroed_rows(numbers.len(), width, |first, out| {
                        assert!(out.iter().all(|x| *x == 0.0));
                        out.iter_mut().zip(first * width..).for_each(|(x, i)| *x = i as f32);
                    });
                    (counted, copied_rows(&numbers, width))
                })
            });
            assert_eq!((counted, copied), (numbers.clone(), numbers), "{rows} rows");
        }
    }
}
