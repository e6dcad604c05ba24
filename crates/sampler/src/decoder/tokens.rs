//! What passes go over.

use hone_core::types::TokenId;

use crate::kv_cache::{BatchMember, Keys, PAGE, Page, PromptPages};

/// The tokens of one pass.
pub(super) trait Tokens: Sync {
    fn len(&self) -> usize;
    fn token(&self, row: usize) -> TokenId;
    fn position(&self, row: usize) -> usize;
    /// Where a row's keys and values go.
    fn place(&mut self, row: usize) -> Option<(&mut Page, usize)>;
    /// What a row sees, itself included.
    fn keys(&self, row: usize) -> Keys<'_>;
}

/// One token of each of some sequences.
pub(super) struct Steps<'a, M>(pub &'a mut [M]);

impl<M: BatchMember> Tokens for Steps<'_, M> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn token(&self, row: usize) -> TokenId {
        self.0[row].token()
    }
    fn position(&self, row: usize) -> usize {
        self.0[row].sequence().position()
    }
    fn place(&mut self, row: usize) -> Option<(&mut Page, usize)> {
        self.0[row].sequence_mut().place()
    }
    fn keys(&self, row: usize) -> Keys<'_> {
        self.0[row].sequence().keys()
    }
}

/// Consecutive tokens of a prompt.
pub(super) struct Stretch<'a> {
    pub prompt: &'a mut PromptPages,
    pub first: usize,
    pub count: usize,
}

impl Tokens for Stretch<'_> {
    fn len(&self) -> usize {
        self.count
    }
    fn token(&self, row: usize) -> TokenId {
        self.prompt.ids()[self.first + row]
    }
    fn position(&self, row: usize) -> usize {
        self.first + row
    }
    fn place(&mut self, row: usize) -> Option<(&mut Page, usize)> {
        let position = self.first + row;
        let page = self.prompt.pages.get_mut(position / PAGE)?;
        Some((page, position % PAGE))
    }
    fn keys(&self, row: usize) -> Keys<'_> {
        Keys { prompt: &self.prompt.pages, prompt_len: self.first + row + 1, own: &[], own_len: 0 }
    }
}
