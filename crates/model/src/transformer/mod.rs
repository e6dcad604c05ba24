//! A differentiable decoder-only transformer.
//!
//! One block serves every model family; [`ModelSpec`](crate::ModelSpec) selects its options. Weights
//! are tensors under Hugging Face names. They are constants for a frozen base; tensors of `Var`s are
//! trained.
//!
//! Sequences are packed end to end without padding, and sequences with the same beginning may share
//! it ([`Segments`]). [`Model::forward_saving`] and [`Model::backward`] go layer by layer, so that a
//! layer's activations can be recomputed instead of kept. A frozen base on the CPU uses fused kernels,
//! which this needs; otherwise a forward pass is a candle graph.

mod attention;
mod block;
mod fused_layer;
mod head;
mod layers;
mod model;
mod token_stats;

use candle_core::Result;

pub use block::Block;
pub use head::{head_packed_values, head_upcast_values, logits_in_memory};
pub use model::{Model, SavedActivations};

// Sequences packed end to end without padding, with shared prompts.

/// Consecutive tokens of one sequence, or of one branch of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of its first token.
    pub start: usize,
    /// Tokens; may be 0.
    pub len: usize,
    /// Index of the segment that it continues: its tokens attend to all of that segment, and their
    /// positions continue from there.
    pub prefix: Option<usize>,
}

/// A prefix and the segments that continue it: consecutive tokens that attend to no others.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PrefixGroup {
    pub start: usize,
    pub len: usize,
    /// Tokens of the prefix, the first ones of the group.
    pub prefix: usize,
    /// `(start, len)` of the branches.
    branches: Vec<(usize, usize)>,
}

impl PrefixGroup {
    /// The prefix, then the branches: `(tokens of the prefix before it, start, len)`.
    pub fn segments(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let branches = self.branches.iter().map(|(start, len)| (self.prefix, *start, *len));
        std::iter::once((0, self.start, self.prefix)).chain(branches)
    }
}

/// The segments of one forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    tokens: usize,
    groups: Vec<PrefixGroup>,
}

impl Segments {
    /// Segments from a table: they are adjacent, and every branch follows its prefix or another branch
    /// of it.
    ///
    /// # Errors
    /// If the table breaks these rules.
    pub fn new(table: &[Segment]) -> Result<Self> {
        let mut groups: Vec<(usize, PrefixGroup)> = Vec::new();
        let mut tokens = 0;
        for (index, segment) in table.iter().enumerate() {
            if segment.start != tokens {
                candle_core::bail!("segment {index} starts at {}, not {tokens}", segment.start);
            }
            tokens += segment.len;
            match (segment.prefix, groups.last_mut()) {
                (None, _) => {
                    let (start, len) = (segment.start, segment.len);
                    let group = PrefixGroup { start, len, prefix: len, branches: Vec::new() };
                    groups.push((index, group));
                }
                (Some(prefix), Some((root, group))) if prefix == *root => {
                    group.len += segment.len;
                    group.branches.push((segment.start, segment.len));
                }
                _ => candle_core::bail!("segment {index} does not follow its prefix"),
            }
        }
        Ok(Self { tokens, groups: groups.into_iter().map(|(_, group)| group).collect() })
    }

    /// `batch` sequences of `len` tokens each, which share no prefix.
    pub fn batch(batch: usize, len: usize) -> Self {
        let group = |b| PrefixGroup { start: b * len, len, prefix: len, branches: Vec::new() };
        Self { tokens: batch * len, groups: (0..batch).map(group).collect() }
    }

    /// Tokens of all segments.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    fn groups(&self) -> &[PrefixGroup] {
        &self.groups
    }

    /// The position of every token in its sequence.
    fn positions(&self) -> Vec<usize> {
        let segments = self.groups.iter().flat_map(PrefixGroup::segments);
        segments.flat_map(|(before, _, len)| before..before + len).collect()
    }
}

#[cfg(test)]
mod tests;
