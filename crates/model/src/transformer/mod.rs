//! A differentiable decoder-only transformer.
//!
//! One block serves every model family; [`ModelSpec`](crate::ModelSpec) selects its options. Weights
//! are tensors under Hugging Face names. They are constants for a frozen base; tensors of `Var`s are
//! trained.
//!
//! Sequences are packed end to end without padding, and sequences with the same beginning may share
//! it, over any number of levels ([`Segments`]). [`Model::forward_saving`] and [`Model::backward`] go
//! layer by layer, so that a layer's activations can be recomputed instead of kept. A frozen base on the
//! CPU uses fused kernels; otherwise layers and output layer are candle graphs.

mod attention;
mod block;
mod fused_layer;
mod graph_head;
mod head;
mod layers;
mod model;
mod token_stats;

use candle_core::Result;

pub use block::Block;
pub use head::{head_packed_values, head_upcast_values, logits_in_memory};
pub use model::{Model, SavedActivations};

// Sequences packed end to end without padding, as trees of common prefixes.

/// Consecutive tokens of one sequence, or of all sequences that have them in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of its first token.
    pub start: usize,
    /// Tokens; may be 0.
    pub len: usize,
    /// Index of the segment that it continues: its tokens attend to all of that segment and to
    /// everything that one continues, and their positions continue from there.
    pub prefix: Option<usize>,
}

/// A segment with the tokens before it in its sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Branch {
    /// `(start, len)` of the segments that it continues, from the first tokens of its sequences on; none
    /// is empty.
    prefixes: Vec<(usize, usize)>,
    /// Tokens of those segments, which is the position of the first token of this one.
    position: usize,
    start: usize,
    len: usize,
}

/// A segment without a prefix and all that continue it: consecutive tokens that attend to no others.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SegmentTree {
    start: usize,
    len: usize,
    /// In the order of their tokens.
    branches: Vec<Branch>,
}

/// The segments of one forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    tokens: usize,
    trees: Vec<SegmentTree>,
}

impl Segments {
    /// Segments from a table: they are adjacent, and between a segment and its prefix there are only
    /// segments of the same tree.
    ///
    /// # Errors
    /// If the table breaks these rules.
    pub fn new(table: &[Segment]) -> Result<Self> {
        let mut trees: Vec<SegmentTree> = Vec::new();
        // Index of the segment that begins the last tree.
        let (mut tokens, mut root) = (0, 0);
        for (index, &Segment { start, len, prefix }) in table.iter().enumerate() {
            if start != tokens {
                candle_core::bail!("segment {index} starts at {start}, not {tokens}");
            }
            tokens += len;
            let Some(prefix) = prefix else {
                let branch = Branch { prefixes: Vec::new(), position: 0, start, len };
                trees.push(SegmentTree { start, len, branches: vec![branch] });
                root = index;
                continue;
            };
            let before =
                trees.last().and_then(|t| t.branches.get(prefix.checked_sub(root)?)).cloned();
            let (Some(mut branch), Some(tree)) = (before, trees.last_mut()) else {
                candle_core::bail!("segment {index} does not follow its prefix");
            };
            if branch.len > 0 {
                branch.prefixes.push((branch.start, branch.len));
            }
            branch.position += branch.len;
            (branch.start, branch.len) = (start, len);
            tree.branches.push(branch);
            tree.len += len;
        }
        Ok(Self { tokens, trees })
    }

    /// `batch` sequences of `len` tokens each, which share no prefix.
    pub fn batch(batch: usize, len: usize) -> Self {
        let tree = |b| {
            let (start, prefixes) = (b * len, Vec::new());
            let branches = vec![Branch { prefixes, position: 0, start, len }];
            SegmentTree { start, len, branches }
        };
        Self { tokens: batch * len, trees: (0..batch).map(tree).collect() }
    }

    /// Tokens of all segments.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    fn trees(&self) -> &[SegmentTree] {
        &self.trees
    }

    fn branches(&self) -> impl Iterator<Item = &Branch> {
        self.trees.iter().flat_map(|tree| &tree.branches)
    }

    /// The position of every token in its sequence.
    fn positions(&self) -> Vec<usize> {
        self.branches().flat_map(|branch| branch.position..branch.position + branch.len).collect()
    }
}

#[cfg(test)]
mod tests;
