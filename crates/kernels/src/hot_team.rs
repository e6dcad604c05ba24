//! Loops that the threads of a rayon pool share without sleeping in between.
//!
//! A pass has hundreds of parallel loops of a fraction of a millisecond each. To wake a sleeping thread takes
//! about a tenth of such a loop, and rayon's own loops, which split their range and steal the parts, take some
//! microseconds even if no thread sleeps. In [`keep_pool_hot`], the other threads of the pool poll for parts of
//! the caller's next loop, and take one after another from a counter.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use rayon::prelude::*;

use crate::parallel::SharedPointer;

/// How often a thread looks for work, or for the end of others' work, before it lets other threads of the
/// machine run.
const SPINS: usize = 200;

thread_local! {
    /// The team that this thread leads, while it computes no loop.
    static TEAM: Cell<*const HotTeam> = const { Cell::new(ptr::null()) };
}

/// A loop's body: computes a part.
type Body<'a> = &'a (dyn Fn(usize) + Sync);

/// The loop of one leader, which its helpers take parts of.
#[derive(Default)]
struct HotTeam {
    /// The number of the loop, 32 bits; its parts, 16 bits; and the first part that is free, 16 bits.
    state: AtomicU64,
    /// Parts that are not computed yet.
    left: AtomicUsize,
    /// The body of the loop, as long as parts are left.
    body: UnsafeCell<Option<Body<'static>>>,
    /// The first panic in the loop.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Whether there will be no more loops.
    done: AtomicBool,
}

// SAFETY: only the leader writes `body`, and only while no part is left, so that no helper reads it.
unsafe impl Sync for HotTeam {}

impl HotTeam {
    /// Takes a part of the current loop.
    fn take(&self) -> Option<usize> {
        let free = |state: u64| state & 0xffff < state >> 16 & 0xffff;
        let taken = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            free(state).then_some(state + 1)
        });
        taken.ok().map(|state| (state & 0xffff) as usize)
    }

    /// Computes parts until none can be taken. Returns whether there was one.
    fn work(&self) -> bool {
        let mut worked = false;
        while let Some(part) = self.take() {
            // SAFETY: the part that this thread has taken is left, so the leader does not change the body, and
            // what the body borrows lives.
            let body = unsafe { *self.body.get() };
            let compute = || body.into_iter().for_each(|body| body(part));
            if let Err(panic) = catch_unwind(AssertUnwindSafe(compute)) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            self.left.fetch_sub(1, Ordering::Release);
            worked = true;
        }
        worked
    }

    /// Computes a loop of `parts` parts, which the helpers share. Called by the leader only.
    fn share(&self, parts: usize, body: Body<'_>) {
        assert!(parts <= 0xffff && self.left.load(Ordering::Acquire) == 0);
        // SAFETY: this function returns once no part is left, so nothing uses the body after its lifetime. No
        // part of the loop before is left either.
        unsafe { *self.body.get() = Some(std::mem::transmute::<Body<'_>, Body<'static>>(body)) };
        self.left.store(parts, Ordering::Relaxed);
        let number = (self.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        self.state.store(number << 32 | (parts as u64) << 16, Ordering::Release);
        self.work();
        let mut spins = 0;
        while self.left.load(Ordering::Acquire) > 0 {
            pause(&mut spins);
        }
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Helps the leader until it is done, and the pool with everything else.
    fn help(&self) {
        let mut spins = 0;
        while !self.done.load(Ordering::Acquire) {
            if self.work() {
                spins = 0;
            } else if spins < SPINS || rayon::yield_now() != Some(rayon::Yield::Executed) {
                pause(&mut spins);
            }
        }
    }
}

/// Lets the other thread of a core run, and from [`SPINS`] pauses in a row on, others of the machine.
fn pause(spins: &mut usize) {
    if *spins < SPINS {
        *spins += 1;
        spin_loop();
    } else {
        thread::yield_now();
    }
}

/// Runs `f` on the current pool thread while the pool's other threads poll for parts of its loops:
/// [`for_each_chunk`] and [`for_each_pair`]. Outside of a pool, this only calls `f`.
pub fn keep_pool_hot<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    /// Ends the helpers' polling, also when `f` panics.
    struct Leading<'a>(&'a HotTeam, *const HotTeam);
    impl Drop for Leading<'_> {
        fn drop(&mut self) {
            TEAM.set(self.1);
            self.0.done.store(true, Ordering::Release);
        }
    }
    let Some(caller) = rayon::current_thread_index() else { return f() };
    let team = HotTeam::default();
    rayon::scope(|scope| {
        let helped = &team;
        scope.spawn_broadcast(move |_, context| {
            // The caller must not poll: it would wait for itself.
            if context.index() != caller {
                helped.help();
            }
        });
        let _leading = Leading(&team, TEAM.replace(&team));
        f()
    })
}

/// Calls `body` for each part on this thread and its helpers. Returns false, without calling it, if the thread leads
/// no team, or if this is a part of a loop.
fn share(parts: usize, body: Body<'_>) -> bool {
    /// Restores the team after the loop, also when the body panics.
    struct Restore(*const HotTeam);
    impl Drop for Restore {
        fn drop(&mut self) {
            TEAM.set(self.0);
        }
    }
    let team = TEAM.replace(ptr::null());
    if team.is_null() {
        return false;
    }
    let _restore = Restore(team);
    // SAFETY: `keep_pool_hot`, which is running on this thread, owns the team, and resets `TEAM` before it ends.
    unsafe { &*team }.share(parts, body);
    true
}

/// Calls `f` with the index of each chunk of `values` and the chunk, on the threads of the pool. A single chunk is
/// computed on this thread.
///
/// # Panics
/// If `chunk` is 0, or if `f` panics.
pub fn for_each_chunk<T: Send>(values: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if (1..=chunk).contains(&values.len()) {
        return f(0, values);
    }
    let (len, all) = (values.len(), SharedPointer(values.as_mut_ptr()));
    let body = |i: usize| {
        // SAFETY: the values are borrowed until the end of the loop, and each part is computed once.
        f(i, unsafe { all.chunk(len, chunk, i) });
    };
    if !share(len.div_ceil(chunk), &body) {
        values.par_chunks_mut(chunk).enumerate().for_each(|(i, values)| f(i, values));
    }
}

/// Calls `f` with the index of each chunk of `left`, the chunk, and the chunk of `right` with the same index, on the
/// threads of the pool. `right` has at least as many chunks.
///
/// # Panics
/// If a length of a chunk is 0, if `right` has too few chunks, or if `f` panics.
pub fn for_each_pair<T: Send, U: Send>(
    (left, left_chunk): (&mut [T], usize),
    (right, right_chunk): (&mut [U], usize),
    f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    let parts = left.len().div_ceil(left_chunk);
    assert!(parts <= right.len().div_ceil(right_chunk), "too few chunks");
    let (len, others) = (right.len(), SharedPointer(right.as_mut_ptr()));
    for_each_chunk(left, left_chunk, |i, left| {
        // SAFETY: `right` is borrowed until the end of the loop, and each part is computed once.
        f(i, left, unsafe { others.chunk(len, right_chunk, i) });
    });
}

/// The first error of a loop, whose parts are all computed.
pub struct FirstError<E>(Mutex<Option<E>>);

impl<E> Default for FirstError<E> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<E> FirstError<E> {
    /// Keeps the error of a part, if it has one.
    pub fn keep(&self, result: Result<(), E>) {
        if let Err(error) = result {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// # Errors
    /// The error that was kept.
    pub fn into_result(self) -> Result<(), E> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
    }

    /// Adds its index to each value of a chunk, many times.
    fn add_indices(len: usize, chunk: usize) {
        let (mut values, mut others) = (vec![0_u64; len], vec![0_u64; len]);
        for _ in 0..50 {
            for_each_chunk(&mut values, chunk, |i, values| {
                values.iter_mut().for_each(|value| *value += i as u64);
            });
            for_each_pair((&mut values, chunk), (&mut others, 1), |i, values, others| {
                values.iter_mut().for_each(|value| *value += 1);
                others.iter_mut().for_each(|other| *other += i as u64);
            });
        }
        for (i, (value, other)) in values.iter().zip(&others).enumerate() {
            assert_eq!(*value, 50 * (1 + (i / chunk) as u64), "{i} of {len}, {chunk}");
            let expected = if i < len.div_ceil(chunk) { 50 * i as u64 } else { 0 };
            assert_eq!(*other, expected);
        }
    }

    #[test]
    fn every_part_is_computed_once_on_every_kind_of_thread() {
        let shapes = [(0, 1), (1, 1), (5, 8), (64, 1), (1000, 7)];
        let all = || shapes.into_iter().for_each(|(len, chunk)| add_indices(len, chunk));
        all();
        keep_pool_hot(all);
        for threads in [1, 2, 3] {
            pool(threads).install(|| {
                all();
                keep_pool_hot(all);
                // A loop within a part is computed by rayon.
                keep_pool_hot(|| for_each_chunk(&mut [0; 4], 1, |_, _| add_indices(30, 4)));
            });
        }
    }

    #[test]
    fn the_other_threads_help() {
        let names = Mutex::new(Vec::new());
        pool(2).install(|| {
            keep_pool_hot(|| {
                // Both parts wait for each other.
                let started = AtomicUsize::new(0);
                for_each_chunk(&mut [0; 2], 1, |_, _| {
                    started.fetch_add(1, Ordering::AcqRel);
                    while started.load(Ordering::Acquire) < 2 {
                        thread::yield_now();
                    }
                    names.lock().unwrap().push(thread::current().id());
                });
            });
        });
        let names = names.into_inner().unwrap();
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn rayons_own_loops_and_jobs_are_shared_too() {
        pool(3).install(|| {
            let sum: u64 = keep_pool_hot(|| (0..1000_u64).into_par_iter().map(|i| i * i).sum());
            assert_eq!(sum, 332_833_500);
            assert_eq!(keep_pool_hot(|| keep_pool_hot(|| 7)), 7);
        });
    }

    #[test]
    fn a_panic_reaches_the_leader_and_ends_the_polling() {
        pool(3).install(|| {
            let caught = catch_unwind(|| keep_pool_hot(|| panic!("within")));
            assert!(caught.is_err());
            for bad in 0..4 {
                let caught = catch_unwind(|| {
                    keep_pool_hot(|| {
                        for_each_chunk(&mut [0; 4], 1, |i, _| assert_ne!(i, bad, "within a part"));
                    });
                });
                assert!(caught.is_err());
            }
            keep_pool_hot(|| add_indices(64, 3));
        });
    }
}
