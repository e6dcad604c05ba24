//! The KV cache: keys and values of sequences, in pages of 16 positions.
//!
//! Page `i` of a sequence holds the positions `16 i` to `16 i + 15`. Sequences that begin with the same
//! tokens share their full pages, which the prefix cache keeps after they have ended. A sequence that
//! continues within a page copies that page. A page stores its positions for every layer:
//! `[layer][kv head][keys [dim, PAGE] | values [PAGE, dim]]`. Keys are transposed, so that the scores
//! of 16 positions form one vector.
//!
//! Keys and values are floats of 32 bits, or, for quantized weights, integers of 16 bits: `[keys' scales [PAGE] |
//! keys | values' scales [PAGE] | values]`. The products with quantized weights round their inputs to integers of 16
//! bits too, so that the cache's rounding hardly adds to the difference from the trainer, and attention reads half
//! of the bytes.
//!
//! The keys and values of a position depend only on the weights and on the tokens up to it, bit by bit.
//! So it does not matter which sequence computed a page, in which batch, and whether by prefill or by
//! decoding.

mod page;
mod pool;
mod prefix_cache;
mod sequence;

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use hone_core::memory::prefer_huge_pages;
use hone_kernels::processor::CACHE_LINE;

pub(crate) use page::PAGE;
pub use page::{CacheShape, CacheType};
pub use pool::PagePool;
pub use prefix_cache::{CacheSpace, WeightsId};
pub(crate) use sequence::KvView;
pub use sequence::SequencePages;

// The memory of pages: large blocks, which the system can back with huge pages.

/// Bytes of a slab, unless all pages take less. Allocators map so large a block separately, as zeros that take no
/// memory until they are used.
const SLAB_BYTES: usize = 64 << 20;

/// The values of a page, empty by default. Written only while it has one owner.
#[derive(Clone, Default)]
pub(crate) struct Page(Option<Arc<PageValues>>);

/// A part of a slab that no other page has.
struct PageValues {
    values: NonNull<[f32]>,
    /// Where a device has the values instead.
    number: u32,
    /// Keeps the memory.
    _slab: Arc<Slab>,
}

struct Slab(NonNull<[f32]>);

// SAFETY: a page is the only one with access to its values, which it shares and lends by the rules of
// references. Floats can be used from any thread.
unsafe impl Send for PageValues {}
// SAFETY: as above.
unsafe impl Sync for PageValues {}
// SAFETY: a slab gives access to its memory only through its pages.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Page {
    /// The values, if this is the only owner.
    pub fn values_mut(&mut self) -> Option<&mut [f32]> {
        let values = Arc::get_mut(self.0.as_mut()?)?.values;
        // SAFETY: the memory lives as long as the page, no other page has it, and `self`, which is borrowed
        // mutably, is the only owner of this one.
        Some(unsafe { &mut *values.as_ptr() })
    }

    /// The page's number among those of its allocator, counted from 0.
    pub fn number(&self) -> u32 {
        self.0.as_ref().map_or(0, |page| page.number)
    }

    #[cfg(test)]
    pub fn owners(&self) -> usize {
        self.0.as_ref().map_or(0, Arc::strong_count)
    }
}

impl Deref for Page {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.0 {
            None => &[],
            // SAFETY: the memory lives as long as the page, and is written only through the only owner of the
            // page, which is borrowed mutably meanwhile.
            Some(page) => unsafe { &*page.values.as_ptr() },
        }
    }
}

impl Slab {
    fn new(len: usize) -> Self {
        let memory = vec![0.0_f32; len].into_boxed_slice();
        prefer_huge_pages(&memory);
        Self(NonNull::from(Box::leak(memory)))
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the memory is that of a box, and the last page has been dropped.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Allocates pages of one size from slabs. Memory is taken when a page is first used.
struct PageAllocator {
    page: usize,
    pages: usize,
    /// The last slab, and its pages so far.
    last: Option<(Arc<Slab>, usize)>,
    /// Pages of all slabs so far.
    allocated: u32,
}

impl PageAllocator {
    /// An allocator of up to about `limit` pages of `page` values.
    pub fn new(page: usize, limit: usize) -> Self {
        let fit = SLAB_BYTES / (page * size_of::<f32>()).max(1);
        Self { page, pages: fit.min(limit).max(1), last: None, allocated: 0 }
    }

    pub fn allocate(&mut self) -> Page {
        let (slab, at) = match self.last.take() {
            Some((slab, at)) if at < self.pages => (slab, at),
            _ => (Arc::new(Slab::new(self.pages * self.page + CACHE_LINE)), 0),
        };
        self.last = Some((Arc::clone(&slab), at + 1));
        // Vectors of keys that begin with a cache line are read faster.
        let start = slab.0.cast::<f32>();
        let aligned = start.align_offset(CACHE_LINE * size_of::<f32>());
        let skip = if aligned < CACHE_LINE { aligned } else { 0 };
        // SAFETY: the slab has these values, after fewer than `CACHE_LINE` others.
        let first = unsafe { start.add(skip + at * self.page) };
        let values = NonNull::slice_from_raw_parts(first, self.page);
        let number = self.allocated;
        self.allocated += 1;
        Page(Some(Arc::new(PageValues { values, number, _slab: slab })))
    }
}

#[cfg(test)]
impl From<Vec<f32>> for Page {
    fn from(values: Vec<f32>) -> Self {
        let mut page = PageAllocator::new(values.len(), 1).allocate();
        if let Some(to) = page.values_mut() {
            to.copy_from_slice(&values);
        }
        page
    }
}

#[cfg(test)]
mod tests;
