//! The KV cache: keys and values of running sequences, in pages of 16 positions.
//!
//! All sequences of a prompt share the prompt's pages, which are computed once. A sequence's own
//! positions begin in a new page, so no page is ever copied. A page stores its positions for every
//! layer: `[layer][kv head][keys [dim, PAGE] | values [PAGE, dim]]`. Keys are transposed, so that the
//! scores of 16 positions form one vector.

use std::ops::Range;
use std::sync::Arc;

use hone_core::types::TokenId;

/// Positions of a page.
pub(crate) const PAGE: usize = 16;

/// The dimensions of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Decoder layers.
    pub layers: usize,
    /// Heads of keys and values.
    pub heads: usize,
    /// Values of a head.
    pub dim: usize,
}

/// Keys and values of [`PAGE`] positions.
pub(crate) type Page = Box<[f32]>;

impl CacheShape {
    /// Values of one head in one layer: keys and values.
    fn head_len(self) -> usize {
        2 * self.dim * PAGE
    }

    /// Values of a page.
    pub(crate) fn page_len(self) -> usize {
        self.layers * self.heads * self.head_len()
    }

    /// The range of a head within a page: its keys, then its values.
    pub(crate) fn head(self, layer: usize, head: usize) -> Range<usize> {
        let start = (layer * self.heads + head) * self.head_len();
        start..start + self.head_len()
    }

    /// Writes the key and the value `[dim]` of one position of a head.
    pub(crate) fn write(
        self,
        page: &mut Page,
        (layer, head, slot): (usize, usize, usize),
        key: &[f32],
        value: &[f32],
    ) {
        let (keys, values) = page[self.head(layer, head)].split_at_mut(self.dim * PAGE);
        for (stored, key) in keys[slot..].iter_mut().step_by(PAGE).zip(key) {
            *stored = *key;
        }
        values[slot * self.dim..][..self.dim].copy_from_slice(value);
    }
}

/// The number of pages for a number of positions.
pub(crate) fn pages(positions: usize) -> usize {
    positions.div_ceil(PAGE)
}

/// Allocates pages up to a limit and reuses freed ones.
///
/// Invariant: `used <= reserved <= limit`.
#[derive(Debug)]
pub struct PagePool {
    shape: CacheShape,
    limit: usize,
    /// Pages in use, and pages that running sequences may still take.
    reserved: usize,
    used: usize,
    free: Vec<Page>,
}

impl PagePool {
    /// Creates a pool of at most `limit` pages. A page is allocated when it is first used.
    pub fn new(shape: CacheShape, limit: usize) -> Self {
        Self { shape, limit, reserved: 0, used: 0, free: Vec::with_capacity(limit.min(1 << 16)) }
    }

    /// Pages that can be reserved.
    pub(crate) fn available(&self) -> usize {
        self.limit - self.reserved
    }

    /// Reserves pages. Returns false, without any effect, if too few are available.
    fn reserve(&mut self, pages: usize) -> bool {
        let fits = pages <= self.available();
        if fits {
            self.reserved += pages;
        }
        fits
    }

    /// Takes a reserved page. It still contains the values of its last use.
    fn take(&mut self) -> Page {
        self.used += 1;
        debug_assert!(self.used <= self.reserved, "a page was not reserved");
        let allocate = || vec![0.0; self.shape.page_len()].into_boxed_slice();
        self.free.pop().unwrap_or_else(allocate)
    }

    /// Frees pages, and ends the reservation of `reserved` pages that includes them.
    fn release(&mut self, pages: &mut Vec<Page>, reserved: usize) {
        self.used -= pages.len();
        self.free.append(pages);
        self.reserved -= reserved;
    }
}

/// The keys and values that one token attends to: positions of the prompt, then the sequence's own.
#[derive(Clone, Copy)]
pub(crate) struct KvView<'a> {
    pub prompt: &'a [Page],
    pub prompt_len: usize,
    pub own: &'a [Page],
    pub own_len: usize,
}

/// The cached prefix that all sequences of a prompt share: every token but the last.
///
/// The last token is the first row of each sequence, because each one needs its logits.
#[derive(Debug)]
pub struct PromptPages {
    ids: Vec<TokenId>,
    pub(crate) pages: Vec<Page>,
    /// Positions whose keys and values are computed.
    pub(crate) computed: usize,
}

impl PromptPages {
    /// Takes the pages of a prompt. Returns `None` if too few are available.
    pub fn new(pool: &mut PagePool, ids: Vec<TokenId>) -> Option<Self> {
        let needed = pages(Self::shared_len(&ids));
        if !pool.reserve(needed) {
            return None;
        }
        let pages = (0..needed).map(|_| pool.take()).collect();
        Some(Self { ids, pages, computed: 0 })
    }

    /// The number of positions that the sequences of a prompt share.
    pub(crate) fn shared_len(ids: &[TokenId]) -> usize {
        ids.len().saturating_sub(1)
    }

    /// All tokens of the prompt.
    pub(crate) fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Positions that [`Decoder::prefill`](crate::Decoder::prefill) has not computed yet.
    pub fn remaining(&self) -> usize {
        Self::shared_len(&self.ids) - self.computed
    }

    /// The last token, which a new sequence decodes first.
    pub fn last_token(&self) -> TokenId {
        self.ids.last().copied().unwrap_or_default()
    }

    /// Returns the pages to the pool.
    pub fn free(mut self, pool: &mut PagePool) {
        let reserved = self.pages.len();
        pool.release(&mut self.pages, reserved);
    }
}

/// The cached positions of one sequence.
#[derive(Debug)]
pub struct SequencePages {
    prompt: Arc<PromptPages>,
    own: Vec<Page>,
    /// Own positions whose keys and values are computed.
    len: usize,
    /// Own pages in use, and pages that the sequence may still take.
    reserved: usize,
}

impl SequencePages {
    /// Reserves the pages of a sequence that decodes up to `limit` tokens, of which the first is the
    /// prompt's last. Returns `None` if too few are available.
    pub fn new(pool: &mut PagePool, prompt: &Arc<PromptPages>, limit: usize) -> Option<Self> {
        let reserved = pages(limit);
        if !pool.reserve(reserved) {
            return None;
        }
        let own = Vec::with_capacity(reserved);
        Some(Self { prompt: Arc::clone(prompt), own, len: 0, reserved })
    }

    /// The next token's position.
    pub(crate) fn position(&self) -> usize {
        PromptPages::shared_len(&self.prompt.ids) + self.len
    }

    /// Makes sure that the next token has a page. Takes one in every sixteenth call. Returns false if
    /// the reservation is used up.
    pub fn ensure_page(&mut self, pool: &mut PagePool) -> bool {
        if self.len < self.own.len() * PAGE {
            return true;
        }
        if self.own.len() == self.reserved {
            return false;
        }
        self.own.push(pool.take());
        true
    }

    /// The next token's page and its slot in the page.
    pub(crate) fn next_slot(&mut self) -> Option<(&mut Page, usize)> {
        Some((self.own.get_mut(self.len / PAGE)?, self.len % PAGE))
    }

    /// Marks the next token's keys and values as computed.
    pub(crate) fn advance(&mut self) {
        self.len += 1;
    }

    /// All positions up to and including the next token, whose keys and values must be written.
    pub(crate) fn view(&self) -> KvView<'_> {
        KvView {
            prompt: &self.prompt.pages,
            prompt_len: self.prompt.computed,
            own: &self.own,
            own_len: self.len + 1,
        }
    }

    /// Returns its own pages to the pool. Returns its prompt.
    pub fn free(mut self, pool: &mut PagePool) -> Arc<PromptPages> {
        pool.release(&mut self.own, self.reserved);
        self.prompt
    }
}

/// A row of a decoding batch.
pub struct BatchRow {
    /// Its cached positions.
    pub sequence: SequencePages,
    /// The token to decode next.
    pub token: TokenId,
}

/// A member of a decoding batch: a [`BatchRow`], or a type that has one.
pub trait BatchMember: Send + Sync {
    /// Its row.
    fn row(&self) -> &BatchRow;
    /// Its row, to add the next position.
    fn row_mut(&mut self) -> &mut BatchRow;
}

impl BatchMember for BatchRow {
    fn row(&self) -> &BatchRow {
        self
    }
    fn row_mut(&mut self) -> &mut BatchRow {
        self
    }
}

#[cfg(test)]
mod tests;
