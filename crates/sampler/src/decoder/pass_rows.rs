//! The tokens that one forward pass computes.

use hone_core::types::TokenId;

use crate::kv_cache::{BatchMember, KvView, SequencePages};

/// Consecutive tokens of a prompt, which a pass computes without their logits.
pub(crate) struct PromptChunk<'a> {
    pub sequence: &'a mut SequencePages,
    pub tokens: usize,
}

/// The tokens of a forward pass, one in each row: the next token of each member, then a part of a
/// prompt.
pub(crate) struct PassRows<'a, M> {
    pub members: &'a mut [M],
    pub chunk: Option<PromptChunk<'a>>,
}

impl<M: BatchMember> PassRows<'_, M> {
    pub fn len(&self) -> usize {
        self.members.len() + self.chunk.as_ref().map_or(0, |chunk| chunk.tokens)
    }

    /// The sequence of a row, and the row's offset from the sequence's next token.
    fn find(&self, row: usize) -> Option<(&SequencePages, usize)> {
        match self.members.get(row) {
            Some(member) => Some((member.sequence(), 0)),
            None => Some((&*self.chunk.as_ref()?.sequence, row - self.members.len())),
        }
    }

    pub fn token(&self, row: usize) -> Option<TokenId> {
        self.find(row).and_then(|(sequence, offset)| sequence.token(offset))
    }

    pub fn position(&self, row: usize) -> usize {
        self.find(row).map_or(0, |(sequence, offset)| sequence.position(offset))
    }

    /// The positions that a row attends to, including its own.
    pub fn view(&self, row: usize) -> KvView<'_> {
        let empty = KvView { pages: &[], len: 0 };
        self.find(row).map_or(empty, |(sequence, offset)| sequence.view(offset))
    }

    /// Rows from `row` on that are consecutive tokens of one sequence.
    pub fn run_len(&self, row: usize) -> usize {
        if row < self.members.len() { 1 } else { self.len() - row }
    }

    /// Marks all rows as computed.
    pub fn advance(self) {
        self.members.iter_mut().for_each(|member| member.sequence_mut().advance(1));
        if let Some(chunk) = self.chunk {
            chunk.sequence.advance(chunk.tokens);
        }
    }
}
