//! The layout of packed factors, and their memory.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::bf16;

use crate::parallel::SharedPointer;

/// Rows and columns of a panel, and inner values of a tile. Also the rows of memory of the two tiles of
/// a panel that have the same inner values.
pub(super) const EDGE: usize = 32;

/// A row of a tile: 32 values of bf16, which are a line of the processor's cache.
///
/// In a tile of the left factor, row `i` has the inner values of row `i` of the factor. In a tile of the
/// right factor, row `k` has the inner values `2 k` and `2 k + 1` of each of 16 columns.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct TileRow(pub [u16; EDGE]);

/// Rows of a matrix as they are stored, without gaps.
#[derive(Clone, Copy)]
pub enum UnpackedRows<'a> {
    /// In f32.
    F32(&'a [f32]),
    /// In bf16.
    Bf16(&'a [bf16]),
}

/// Buffers that are not in use. A product takes its buffers from here, because the first use of new
/// memory takes as long as packing into it. As many stay allocated as were in use at the same time.
static UNUSED: Mutex<Vec<Vec<TileRow>>> = Mutex::new(Vec::new());

fn unused() -> MutexGuard<'static, Vec<Vec<TileRow>>> {
    UNUSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tiles of a packed factor.
pub(super) struct TileBuffer(Vec<TileRow>);

impl TileBuffer {
    /// A buffer of `len` rows, all of which `write` writes.
    pub fn written(len: usize, write: impl FnOnce(SharedPointer<TileRow>)) -> Self {
        let mut rows = take(len);
        write(SharedPointer(rows.as_mut_ptr()));
        // SAFETY: the capacity is `len` or more, and `write` has written that many rows.
        unsafe { rows.set_len(len) };
        Self(rows)
    }
}

impl Deref for TileBuffer {
    type Target = [TileRow];

    fn deref(&self) -> &[TileRow] {
        &self.0
    }
}

impl Drop for TileBuffer {
    fn drop(&mut self) {
        unused().push(std::mem::take(&mut self.0));
    }
}

/// An empty vector with a capacity of `len` or more: the smallest unused one that has it, or a new one
/// instead of the largest.
fn take(len: usize) -> Vec<TileRow> {
    let found = {
        let mut unused = unused();
        unused.sort_by_key(Vec::capacity);
        let fits = unused.iter().position(|rows| rows.capacity() >= len);
        fits.map(|i| unused.remove(i)).or_else(|| unused.pop())
    };
    match found {
        Some(mut rows) if rows.capacity() >= len => {
            rows.clear();
            rows
        }
        // The smaller buffer is freed first.
        found => {
            drop(found);
            Vec::with_capacity(len)
        }
    }
}
