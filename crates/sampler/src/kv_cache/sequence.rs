//! One sequence: its tokens and the pages with their keys and values.

use std::mem::{replace, take};

use hone_core::types::TokenId;

use super::Page;
use super::page::{PAGE, pages};
use super::pool::PagePool;
use super::prefix_cache::{CachePlace, CacheSpace};

/// The keys and values that one token attends to.
#[derive(Clone, Copy)]
pub(crate) struct KvView<'a> {
    /// Page `i` holds positions `PAGE * i` and later.
    pub pages: &'a [Page],
    /// Visible positions, which begin at 0.
    pub len: usize,
}

/// The tokens of one sequence and their cached keys and values.
///
/// All tokens of the prompt but the last are computed by [`Decoder::prefill`](crate::Decoder::prefill),
/// or found in the prefix cache. Each decoding step computes the next token and needs one more:
/// [`Self::push`].
pub struct SequencePages {
    space: CacheSpace,
    /// The prompt, then the decoded tokens.
    ids: Vec<TokenId>,
    /// Positions whose keys and values are computed.
    len: usize,
    /// The pages of all positions so far.
    pages: Vec<Page>,
    /// The first pages, which are also in the prefix cache and never written.
    cached: usize,
    /// The last of the cached pages.
    last_cached: CachePlace,
    promised: usize,
}

impl SequencePages {
    /// Promises the pages of a sequence that decodes up to `limit` tokens after a prompt, and takes what
    /// the prefix cache holds in the space. Returns `None` if too few pages are available.
    pub fn new(
        pool: &mut PagePool,
        space: impl Into<CacheSpace>,
        prompt: &[TokenId],
        limit: usize,
    ) -> Option<Self> {
        let space = space.into();
        let promised = Self::worst_case_pages(prompt.len(), limit);
        let prefix = &prompt[..prompt.len().saturating_sub(1)];
        if !pool.promise(space, prefix, promised) {
            return None;
        }
        let mut ids = Vec::with_capacity(prompt.len() + limit);
        ids.extend_from_slice(prompt);
        let pages = Vec::with_capacity(promised);
        let last_cached = CachePlace::Root(space);
        let mut sequence = Self { space, ids, len: 0, pages, cached: 0, last_cached, promised };
        sequence.take_cached(pool);
        Some(sequence)
    }

    /// The maximum number of pages of a sequence. The last token is never computed.
    pub(crate) fn worst_case_pages(prompt: usize, limit: usize) -> usize {
        pages((prompt + limit).saturating_sub(1))
    }

    /// Tokens before the last one that are not computed yet.
    pub fn remaining(&self) -> usize {
        self.ids.len().saturating_sub(1 + self.len)
    }

    /// Positions whose keys and values are computed.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether the next page to compute of both sequences begins with the same tokens after the same ones. Then
    /// one of them can compute it, and the other take it from the prefix cache.
    pub(crate) fn has_next_page_of(&self, other: &Self) -> bool {
        let page = self.len / PAGE;
        let end = |sequence: &Self| ((page + 1) * PAGE).min(sequence.len + sequence.remaining());
        let both = end(self).min(end(other));
        self.space == other.space
            && page == other.len / PAGE
            && self.len.max(other.len) < both
            && self.ids[..both] == other.ids[..both]
    }

    /// Adds a token, which the next step computes.
    pub fn push(&mut self, token: TokenId) {
        self.ids.push(token);
    }

    /// Takes from the prefix cache what it holds of the remaining tokens: whole pages, then a copy of the
    /// page that agrees longest. A page that the sequence has begun itself, or with an earlier copy, is
    /// replaced as soon as the cache holds more of it. Returns the number of tokens.
    pub(crate) fn take_cached(&mut self, pool: &mut PagePool) -> usize {
        let before = self.len;
        let end = self.len + self.remaining();
        loop {
            let start = self.cached * PAGE;
            let next = start..end.min(start + PAGE);
            let Some(found) = pool.closest(self.last_cached, &self.ids[next]) else { break };
            if start + found.same <= self.len {
                break;
            }
            let is_whole = found.same == PAGE;
            match self.pages.get_mut(self.cached) {
                Some(own) if is_whole => {
                    let own = replace(own, pool.share_cached(found));
                    pool.give_back(own);
                }
                Some(own) => {
                    if !pool.copy_cached(found, own) {
                        break;
                    }
                }
                None => {
                    self.promised -= 1;
                    let take = if is_whole { PagePool::take_cached } else { PagePool::take_copy };
                    self.pages.push(take(pool, found));
                }
            }
            self.len = start + found.same;
            if !is_whole {
                break;
            }
            self.cached += 1;
            self.last_cached = CachePlace::Node(found.node);
        }
        self.len - before
    }

    /// Makes sure that the next `count` tokens have pages. Returns false if that exceeds the pages that
    /// were promised.
    pub fn ensure_pages(&mut self, pool: &mut PagePool, count: usize) -> bool {
        while self.pages.len() < pages(self.len + count) {
            if self.promised == 0 {
                return false;
            }
            self.promised -= 1;
            self.pages.push(pool.take());
        }
        true
    }

    /// The `offset`-th token that is not computed yet.
    pub(crate) fn token(&self, offset: usize) -> Option<TokenId> {
        self.ids.get(self.len + offset).copied()
    }

    pub(crate) fn position(&self, offset: usize) -> usize {
        self.len + offset
    }

    /// The pages of the next `count` tokens, if they have pages.
    pub(crate) fn next_pages(&mut self, count: usize) -> Option<&mut [Page]> {
        self.pages.get_mut(self.len / PAGE..pages(self.len + count))
    }

    /// The numbers of the pages of all positions up to the next `count` tokens.
    pub(crate) fn page_numbers(&self, count: usize) -> Vec<u32> {
        self.pages.iter().take(pages(self.len + count)).map(Page::number).collect()
    }

    /// The next `count` tokens that are not computed yet, if there are as many.
    pub(crate) fn next_tokens(&self, count: usize) -> Option<&[TokenId]> {
        self.ids.get(self.len..self.len + count)
    }

    /// All positions up to and including its own, whose keys and values must be written.
    pub(crate) fn view(&self, offset: usize) -> KvView<'_> {
        KvView { pages: &self.pages, len: self.len + offset + 1 }
    }

    /// Marks the keys and values of the next `count` tokens as computed.
    pub(crate) fn advance(&mut self, count: usize) {
        self.len += count;
    }

    /// Puts its full pages into the prefix cache. Takes those that others have put there before, which
    /// have the same values.
    pub fn cache_full_pages(&mut self, pool: &mut PagePool) {
        while pool.reuses() && (self.cached + 1) * PAGE <= self.len {
            let tokens = &self.ids[self.cached * PAGE..][..PAGE];
            let own = &mut self.pages[self.cached];
            let found = pool.closest(self.last_cached, tokens);
            self.last_cached = match found.filter(|found| found.same == PAGE) {
                Some(found) => {
                    let own = replace(own, pool.share_cached(found));
                    pool.give_back(own);
                    CachePlace::Node(found.node)
                }
                None => pool.cache_own(self.last_cached, self.space, tokens, own),
            };
            self.cached += 1;
        }
    }

    /// Puts a copy of its last page, which is partly filled, into the prefix cache for others with the
    /// same prompt, if there is room.
    pub fn cache_last_page(&mut self, pool: &mut PagePool) {
        self.cache_full_pages(pool);
        let tokens = &self.ids[self.cached * PAGE..self.len];
        let known = pool.closest(self.last_cached, tokens).map_or(0, |found| found.same);
        if pool.reuses()
            && known < tokens.len()
            && let Some(page) = self.pages.get(self.cached)
        {
            pool.cache_copy(self.last_cached, self.space, tokens, page);
        }
    }

    /// Returns its pages to the pool, where the full ones remain in the prefix cache.
    pub fn free(mut self, pool: &mut PagePool) {
        self.cache_full_pages(pool);
        pool.end_promise(self.promised);
        for page in self.pages.drain(self.cached..) {
            pool.give_back(page);
        }
        drop(take(&mut self.pages));
        pool.release_cached(self.last_cached);
    }

    #[cfg(test)]
    pub(crate) fn pages(&self) -> &[Page] {
        &self.pages
    }
}
