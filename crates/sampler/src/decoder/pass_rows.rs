//! The tokens that one forward pass computes.

use hone_core::types::TokenId;

use crate::kv_cache::{BatchMember, KvView, PAGE, Page, PromptPages};

/// The tokens of a forward pass, one in each row.
pub(crate) trait PassRows: Sync {
    fn len(&self) -> usize;
    fn token(&self, row: usize) -> TokenId;
    fn position(&self, row: usize) -> usize;
    /// The page and the slot for a row's keys and values.
    fn slot(&mut self, row: usize) -> Option<(&mut Page, usize)>;
    /// The positions that a row attends to, including its own.
    fn view(&self, row: usize) -> KvView<'_>;
}

/// A decoding step: one token of each sequence.
pub(crate) struct StepRows<'a, M>(pub &'a mut [M]);

impl<M: BatchMember> PassRows for StepRows<'_, M> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn token(&self, row: usize) -> TokenId {
        self.0[row].row().token
    }
    fn position(&self, row: usize) -> usize {
        self.0[row].row().sequence.position()
    }
    fn slot(&mut self, row: usize) -> Option<(&mut Page, usize)> {
        self.0[row].row_mut().sequence.next_slot()
    }
    fn view(&self, row: usize) -> KvView<'_> {
        self.0[row].row().sequence.view()
    }
}

/// A part of a prefill: consecutive tokens of a prompt.
pub(crate) struct PrefillRows<'a> {
    pub prompt: &'a mut PromptPages,
    pub first: usize,
    pub count: usize,
}

impl PassRows for PrefillRows<'_> {
    fn len(&self) -> usize {
        self.count
    }
    fn token(&self, row: usize) -> TokenId {
        self.prompt.ids()[self.first + row]
    }
    fn position(&self, row: usize) -> usize {
        self.first + row
    }
    fn slot(&mut self, row: usize) -> Option<(&mut Page, usize)> {
        let position = self.first + row;
        let page = self.prompt.pages.get_mut(position / PAGE)?;
        Some((page, position % PAGE))
    }
    fn view(&self, row: usize) -> KvView<'_> {
        let prompt_len = self.first + row + 1;
        KvView { prompt: &self.prompt.pages, prompt_len, own: &[], own_len: 0 }
    }
}
