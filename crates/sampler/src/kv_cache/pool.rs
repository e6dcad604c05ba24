//! The pages of all sequences and of the prefix cache, within one limit.

use std::mem::take;

use hone_core::types::TokenId;

use super::page::{CacheShape, CacheType};
use super::prefix_cache::{CacheMatch, CachePlace, CacheSpace, PrefixCache, WeightsId};
use super::{Page, PageAllocator};

/// Values in the smallest page of a system's memory, 4 KiB.
const SYSTEM_PAGE: usize = 1024;

/// Allocates pages up to a limit and reuses freed ones. Holds the prefix cache.
///
/// Invariant: `in_use + promised <= limit`, and `in_use + unused cached pages <= limit`. So a promised
/// page can always be taken, if necessary in place of an unused cached one.
pub struct PagePool {
    limit: usize,
    /// Pages that sequences use. A page that several use counts once.
    in_use: usize,
    /// The maximum of `in_use` so far.
    most_in_use: usize,
    /// Pages that sequences may still take.
    promised: usize,
    allocator: PageAllocator,
    /// Allocated pages that hold nothing.
    free: Vec<Page>,
    cache: PrefixCache,
    reuse: bool,
    /// Copies that a device has to make before it computes, by the numbers of pages; `None` if pages have their values.
    copies: Option<Vec<[u32; 2]>>,
}

impl PagePool {
    /// Creates a pool of at most `limit` pages. A page is allocated when it is first used.
    pub fn new(shape: CacheShape, limit: usize) -> Self {
        Self {
            limit,
            in_use: 0,
            most_in_use: 0,
            promised: 0,
            allocator: PageAllocator::new(shape.page_len(), limit),
            free: Vec::with_capacity(limit.min(1 << 16)),
            cache: PrefixCache::default(),
            reuse: true,
            copies: None,
        }
    }

    /// Creates a pool of at most `limit` pages whose values are on a device, by their numbers from 0 on.
    pub(crate) fn on_device(limit: usize) -> Self {
        let shape = CacheShape { layers: 0, heads: 0, dim: 0, stored: CacheType::F32 };
        Self { copies: Some(Vec::new()), ..Self::new(shape, limit) }
    }

    /// The copies of pages since the last call, `[from, to]`, which the device makes in their order.
    pub(crate) fn take_copies(&mut self) -> Vec<[u32; 2]> {
        self.copies.as_mut().map(take).unwrap_or_default()
    }

    /// The same pool without a prefix cache: every sequence computes its whole prompt.
    pub fn without_reuse(self) -> Self {
        Self { reuse: false, ..self }
    }

    pub(crate) fn reuses(&self) -> bool {
        self.reuse
    }

    /// Pages that can be promised. Cached pages without users are available.
    pub(crate) fn available(&self) -> usize {
        self.limit.saturating_sub(self.in_use + self.promised)
    }

    /// Pages that sequences use, and pages that only the prefix cache holds.
    pub(crate) fn usage(&self) -> [usize; 2] {
        [self.in_use, self.cache.unused()]
    }

    /// Evicts the cached pages of all other weights as soon as no sequence uses them.
    pub(crate) fn keep_only(&mut self, weights: &[WeightsId]) {
        self.cache.keep_only(weights, &mut self.free);
    }

    /// Promises `pages` pages to a new sequence that begins with `tokens`. Returns false, without any
    /// effect, if too few are available. Pages of `tokens` that others use need no place.
    pub(super) fn promise(&mut self, space: CacheSpace, tokens: &[TokenId], pages: usize) -> bool {
        let shared = if self.reuse { self.cache.used_pages(space, tokens) } else { 0 };
        let fits = pages.saturating_sub(shared) <= self.available();
        if fits {
            // The sequence uses the shared pages at once, which ends their part of the promise.
            self.promised += pages;
        }
        fits
    }

    /// Ends the promise of pages that a sequence does not need.
    pub(super) fn end_promise(&mut self, pages: usize) {
        self.promised -= pages;
    }

    /// Takes a promised page. It still contains the values of its last use.
    pub(super) fn take(&mut self) -> Page {
        self.promised -= 1;
        let page = self.spare_page();
        self.in_use += 1;
        self.most_in_use = self.most_in_use.max(self.in_use);
        page.unwrap_or_else(|| self.allocator.allocate())
    }

    pub(super) fn take_copy(&mut self, found: CacheMatch) -> Page {
        let source = self.cache.page(found.node).clone();
        self.cache.touch(found.node);
        let mut page = self.take();
        // Otherwise the source itself had to be evicted, which leaves `source` as its only owner.
        match page.values_mut() {
            Some(values) => {
                values.copy_from_slice(&source);
                note_copy(&mut self.copies, &source, &page);
                page
            }
            None => source,
        }
    }

    /// Copies the values of a cached page to a sequence's own page. Returns false, without any effect, if
    /// the page is shared.
    pub(super) fn copy_cached(&mut self, found: CacheMatch, own: &mut Page) -> bool {
        let Some(values) = own.values_mut() else { return false };
        values.copy_from_slice(self.cache.page(found.node));
        note_copy(&mut self.copies, self.cache.page(found.node), own);
        self.cache.touch(found.node);
        true
    }

    /// Allocates a page ahead of its use, and writes to it, so that the system does not have to find memory and
    /// fill it with zeros while requests wait. Returns false, without any effect, if the limit is reached or as many
    /// pages are free as were in use at once.
    pub(crate) fn prepare_page(&mut self) -> bool {
        let free = self.free.len();
        let all = self.in_use + self.cache.unused() + free;
        if free >= self.most_in_use || all >= self.limit {
            return false;
        }
        let mut page = self.allocator.allocate();
        if let Some(values) = page.values_mut() {
            values.iter_mut().step_by(SYSTEM_PAGE).for_each(|value| *value = 0.0);
        }
        self.free.push(page);
        true
    }

    /// Returns a page that only its sequence used.
    pub(super) fn give_back(&mut self, page: Page) {
        self.in_use -= 1;
        self.free.push(page);
    }

    /// Finds the cached page below `parent` that agrees with most of `tokens`.
    pub(super) fn closest(&self, parent: CachePlace, tokens: &[TokenId]) -> Option<CacheMatch> {
        if self.reuse { self.cache.closest(parent, tokens) } else { None }
    }

    /// Uses a cached page in place of a promised one.
    pub(super) fn take_cached(&mut self, found: CacheMatch) -> Page {
        self.promised -= 1;
        self.share_cached(found)
    }

    pub(super) fn share_cached(&mut self, found: CacheMatch) -> Page {
        if self.cache.acquire(found.node) {
            self.in_use += 1;
        }
        self.cache.page(found.node).clone()
    }

    /// Adds a sequence's own page to the cache. The sequence keeps using it.
    pub(super) fn cache_own(
        &mut self,
        parent: CachePlace,
        space: CacheSpace,
        tokens: &[TokenId],
        page: &Page,
    ) -> CachePlace {
        CachePlace::Node(self.cache.insert(parent, space, tokens, page.clone(), 1))
    }

    /// Adds a copy of a page to the cache, if there is room.
    pub(super) fn cache_copy(
        &mut self,
        parent: CachePlace,
        space: CacheSpace,
        tokens: &[TokenId],
        page: &Page,
    ) {
        if !self.cache.keeps(space) {
            return;
        }
        let full = self.in_use >= self.limit;
        let spare = self.spare_page();
        let new = || (!full).then(|| self.allocator.allocate());
        let Some(mut copy) = spare.or_else(new) else { return };
        if let Some(values) = copy.values_mut() {
            values.copy_from_slice(page);
            note_copy(&mut self.copies, page, &copy);
            self.cache.insert(parent, space, tokens, copy, 0);
        }
    }

    /// Ends a sequence's use of a cached page and of all pages before it. The sequence must have dropped
    /// them.
    pub(super) fn release_cached(&mut self, last: CachePlace) {
        self.in_use -= self.cache.release(last, &mut self.free);
    }

    /// A free page, or an unused cached one if all pages are allocated.
    fn spare_page(&mut self) -> Option<Page> {
        let full = self.in_use + self.cache.unused() >= self.limit;
        self.free.pop().or_else(|| if full { self.cache.evict() } else { None })
    }

    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        self.in_use + self.cache.unused() + self.free.len()
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        let cached = self.cache.check();
        let unused = self.cache.unused();
        assert!(self.in_use + self.promised <= self.limit);
        assert!(self.in_use + unused + self.free.len() <= self.limit);
        assert!(cached - unused <= self.in_use);
        assert!(self.free.iter().all(|page| page.owners() == 1));
    }
}

/// Notes a copy for a device.
fn note_copy(copies: &mut Option<Vec<[u32; 2]>>, from: &Page, to: &Page) {
    if let Some(copies) = copies {
        copies.push([from.number(), to.number()]);
    }
}
