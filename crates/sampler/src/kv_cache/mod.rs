//! Keys and values of running sequences, in pages of a fixed number of positions.
//!
//! A prompt's pages are computed once and shared by all its sequences; a sequence's own pages begin
//! behind them, so that none is ever copied. A page holds its positions for every layer:
//! `[layer][key head][keys [dim, PAGE] | values [PAGE, dim]]`, keys transposed, so that the scores of
//! sixteen positions are one vector.

use std::sync::Arc;

use hone_core::types::TokenId;

/// Positions of a page.
pub const PAGE: usize = 16;

/// What the size of a page depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Decoder blocks.
    pub layers: usize,
    /// Heads of keys and values.
    pub heads: usize,
    /// Width of a head.
    pub dim: usize,
}

/// Keys and values of `PAGE` positions.
pub type Page = Box<[f32]>;

impl CacheShape {
    /// Values of one head in one layer: keys, then values.
    fn head(self) -> usize {
        2 * self.dim * PAGE
    }

    /// Values of a page.
    pub fn page(self) -> usize {
        self.layers * self.heads * self.head()
    }

    /// Bytes of a page.
    pub fn page_bytes(self) -> usize {
        self.page() * size_of::<f32>()
    }

    /// Where the keys of a head begin; the values follow.
    pub(super) fn keys(self, layer: usize, head: usize) -> std::ops::Range<usize> {
        let start = (layer * self.heads + head) * self.head();
        start..start + self.head()
    }

    /// Writes key and value `[dim]` of one position of a head.
    pub(super) fn write(
        self,
        page: &mut Page,
        (layer, head, slot): (usize, usize, usize),
        key: &[f32],
        value: &[f32],
    ) {
        let (keys, values) = page[self.keys(layer, head)].split_at_mut(self.dim * PAGE);
        for (place, key) in keys[slot..].iter_mut().step_by(PAGE).zip(key) {
            *place = *key;
        }
        values[slot * self.dim..][..self.dim].copy_from_slice(value);
    }
}

/// Pages that so many positions need.
pub fn pages(positions: usize) -> usize {
    positions.div_ceil(PAGE)
}

/// All pages there may be.
///
/// Invariant: pages given out never exceed pages reserved, and these never the limit.
#[derive(Debug)]
pub struct PagePool {
    shape: CacheShape,
    limit: usize,
    reserved: usize,
    /// Pages given out.
    used: usize,
    free: Vec<Page>,
}

impl PagePool {
    /// A pool of at most `limit` pages, none of which exists yet.
    pub fn new(shape: CacheShape, limit: usize) -> Self {
        Self { shape, limit, reserved: 0, used: 0, free: Vec::with_capacity(limit.min(1 << 16)) }
    }

    /// The shape of its pages.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Most pages.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Pages that are neither in use nor promised.
    pub fn available(&self) -> usize {
        self.limit - self.reserved
    }

    /// Pages promised, those in use included.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// Pages in memory, in use or not.
    pub fn made(&self) -> usize {
        self.used + self.free.len()
    }

    /// Promises pages; false, and nothing changes, if there are not as many.
    pub fn reserve(&mut self, pages: usize) -> bool {
        let fits = pages <= self.available();
        if fits {
            self.reserved += pages;
        }
        fits
    }

    /// A promised page. What stands in it is left from its last use.
    fn take(&mut self) -> Page {
        self.used += 1;
        debug_assert!(self.used <= self.reserved, "a page was not reserved");
        let fresh = || vec![0.0; self.shape.page()].into_boxed_slice();
        self.free.pop().unwrap_or_else(fresh)
    }

    /// Takes pages back, and the promise of `reserved` pages with them.
    fn give(&mut self, pages: &mut Vec<Page>, reserved: usize) {
        self.used -= pages.len();
        self.free.append(pages);
        self.reserved -= reserved;
    }
}

/// Where attention finds keys and values: positions of a prompt, then a sequence's own.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub prompt: &'a [Page],
    pub prompt_len: usize,
    pub own: &'a [Page],
    pub own_len: usize,
}

/// The beginning that sequences share: all of a prompt but its last token, which is the first row of
/// each of its sequences, as its logits are needed by each.
#[derive(Debug)]
pub struct PromptPages {
    ids: Vec<TokenId>,
    pub(super) pages: Vec<Page>,
    /// Positions whose keys and values are there.
    len: usize,
}

impl PromptPages {
    /// An empty cache for a prompt, or nothing if the pool has too few pages.
    pub fn new(pool: &mut PagePool, ids: Vec<TokenId>) -> Option<Self> {
        let wanted = pages(Self::shared(&ids));
        if !pool.reserve(wanted) {
            return None;
        }
        let pages = (0..wanted).map(|_| pool.take()).collect();
        Some(Self { ids, pages, len: 0 })
    }

    /// Positions that the sequences of a prompt share.
    pub fn shared(ids: &[TokenId]) -> usize {
        ids.len().saturating_sub(1)
    }

    /// The whole prompt.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Positions that are computed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is computed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that are still to be computed.
    pub fn missing(&self) -> usize {
        Self::shared(&self.ids) - self.len
    }

    /// Says that further positions are computed.
    pub(super) fn advance(&mut self, count: usize) {
        self.len += count;
    }

    /// The last token.
    pub fn last(&self) -> TokenId {
        self.ids.last().copied().unwrap_or_default()
    }

    /// Gives the pages back.
    pub fn free(mut self, pool: &mut PagePool) {
        let reserved = self.pages.len();
        pool.give(&mut self.pages, reserved);
    }
}

/// The cache of one sequence.
#[derive(Debug)]
pub struct SequencePages {
    prompt: Arc<PromptPages>,
    pub(super) own: Vec<Page>,
    len: usize,
    reserved: usize,
}

impl SequencePages {
    /// A sequence of up to `limit` tokens behind a prompt, or nothing if the pool has too few pages.
    pub fn new(pool: &mut PagePool, prompt: &Arc<PromptPages>, limit: usize) -> Option<Self> {
        let reserved = pages(limit);
        if !pool.reserve(reserved) {
            return None;
        }
        let own = Vec::with_capacity(reserved);
        Some(Self { prompt: Arc::clone(prompt), own, len: 0, reserved })
    }

    /// The prompt it continues.
    pub fn prompt(&self) -> &Arc<PromptPages> {
        &self.prompt
    }

    /// The next token's position.
    pub fn position(&self) -> usize {
        PromptPages::shared(self.prompt.ids()) + self.len
    }

    /// Makes room for the next token: a page in every sixteenth call, else nothing. False if it has
    /// had as many tokens as it was made for.
    pub fn make_room(&mut self, pool: &mut PagePool) -> bool {
        if self.len < self.own.len() * PAGE {
            return true;
        }
        if self.own.len() == self.reserved {
            return false;
        }
        self.own.push(pool.take());
        true
    }

    /// The page and the place in it of the next token.
    pub(super) fn place(&mut self) -> Option<(&mut Page, usize)> {
        Some((self.own.get_mut(self.len / PAGE)?, self.len % PAGE))
    }

    /// Says that the next token's keys and values are there.
    pub(super) fn advance(&mut self) {
        self.len += 1;
    }

    /// Everything up to the next token, which is thought to be written.
    pub(super) fn keys(&self) -> Keys<'_> {
        Keys {
            prompt: &self.prompt.pages,
            prompt_len: self.prompt.len,
            own: &self.own,
            own_len: self.len + 1,
        }
    }

    /// Gives its own pages back and returns its prompt.
    pub fn free(mut self, pool: &mut PagePool) -> Arc<PromptPages> {
        pool.give(&mut self.own, self.reserved);
        self.prompt
    }
}

/// Something that runs a sequence: a row of a step.
pub trait BatchMember: Send + Sync {
    /// Its cache.
    fn sequence(&self) -> &SequencePages;
    /// Its cache.
    fn sequence_mut(&mut self) -> &mut SequencePages;
    /// The token that comes next in.
    fn token(&self) -> TokenId;
}

#[cfg(test)]
mod tests;
