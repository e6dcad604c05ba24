//! The tokens that one forward pass computes.

use hone_core::types::TokenId;

use crate::kv_cache::{BatchMember, KvView, SequencePages};

/// Consecutive tokens of a prompt, which a pass computes without their logits.
pub(crate) struct PromptChunk<'a> {
    pub sequence: &'a mut SequencePages,
    pub tokens: usize,
}

/// The tokens of a forward pass, one in each row: the next token of each member, then parts of different
/// prompts.
pub(crate) struct PassRows<'a, 'c, M> {
    pub members: &'a mut [M],
    pub chunks: &'a mut [PromptChunk<'c>],
}

/// A row's place in its sequence.
struct SequenceRow<'a> {
    sequence: &'a SequencePages,
    /// Tokens between the sequence's next one and the row's.
    offset: usize,
    /// Rows of the sequence from this one on.
    rest: usize,
}

impl<M: BatchMember> PassRows<'_, '_, M> {
    pub fn len(&self) -> usize {
        self.members.len() + self.chunks.iter().map(|chunk| chunk.tokens).sum::<usize>()
    }

    fn find(&self, row: usize) -> Option<SequenceRow<'_>> {
        if let Some(member) = self.members.get(row) {
            return Some(SequenceRow { sequence: member.sequence(), offset: 0, rest: 1 });
        }
        let mut offset = row - self.members.len();
        for PromptChunk { sequence, tokens } in self.chunks.iter() {
            if offset < *tokens {
                return Some(SequenceRow { sequence, offset, rest: tokens - offset });
            }
            offset -= tokens;
        }
        None
    }

    pub fn token(&self, row: usize) -> Option<TokenId> {
        self.find(row).and_then(|row| row.sequence.token(row.offset))
    }

    pub fn position(&self, row: usize) -> usize {
        self.find(row).map_or(0, |row| row.sequence.position(row.offset))
    }

    /// The positions that a row attends to, including its own.
    pub fn view(&self, row: usize) -> KvView<'_> {
        let empty = KvView { pages: &[], len: 0 };
        self.find(row).map_or(empty, |row| row.sequence.view(row.offset))
    }

    /// Rows from `row` on that are consecutive tokens of one sequence.
    pub fn run_len(&self, row: usize) -> usize {
        self.find(row).map_or(1, |row| row.rest)
    }

    /// Marks all rows as computed.
    pub fn advance(self) {
        self.members.iter_mut().for_each(|member| member.sequence_mut().advance(1));
        self.chunks.iter_mut().for_each(|chunk| chunk.sequence.advance(chunk.tokens));
    }
}
