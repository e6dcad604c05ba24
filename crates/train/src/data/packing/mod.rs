//! Training samples, their split into shards, and the layout of a shard for one forward pass, which has the
//! same log-probabilities and gradients as one sequence per sample.
//!
//! Tokens that sequences of a shard have in common from the beginning on are computed once: a system prompt, a
//! prompt, the first tokens of completions, or a conversation that goes on from recorded tokens, whose
//! completions are spans of the last turn's prompt. The ids alone decide this, so that a turn whose tokens
//! were encoded again is a sequence of its own from there on. What a token is trained to predict, and with
//! which weight, belongs to each sample: samples only share the hidden states that they predict from.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::{iter, mem, slice};

use candle_core::{Device, Tensor};

use hone_model::transformer::{Segment, Segments};

use crate::error::{LearnError, Result};

/// One completion to train on, with the token ids that were sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainSample {
    /// Token ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// Sampled token ids, the stop token included.
    pub ids: Vec<u32>,
    /// Recorded natural-log probability of each of `ids` at `temperature`; empty for a correction.
    pub logprobs: Vec<f32>,
    /// Which of `ids` are left out of loss and statistics, because no policy chose them; empty if none.
    pub masked: Vec<bool>,
    /// Sampling temperature, above 0.
    pub temperature: f32,
    /// Weight of the policy gradient of its tokens.
    pub advantage: f64,
    /// The policy version that sampled it.
    pub version: u64,
    /// Whether the token limit or the client cut the completion.
    pub truncated: bool,
    /// Whether it is older than `train.max_staleness` and has the weight of late feedback.
    pub late: bool,
    /// Whether a client wrote it: its loss is its negative log-likelihood, whatever advantage and version.
    pub correction: bool,
}

impl TrainSample {
    /// Checks that the sample can be trained on with a vocabulary of `vocab` ids.
    ///
    /// # Errors
    /// If a field is empty, has the wrong length or is out of range. The message contains `index`.
    pub fn validate(&self, index: usize, vocab: usize) -> Result<()> {
        let wrong = |reason: String| Err(LearnError::Sample { index, reason });
        if self.prompt_ids.is_empty() {
            return wrong("`prompt_ids` is empty".to_owned());
        }
        if self.ids.is_empty() {
            return wrong("`ids` is empty".to_owned());
        }
        if !self.correction && self.logprobs.len() != self.ids.len() {
            return wrong(format!("{} ids but {} logprobs", self.ids.len(), self.logprobs.len()));
        }
        if !self.masked.is_empty() && self.masked.len() != self.ids.len() {
            return wrong(format!("{} ids but {} masked", self.ids.len(), self.masked.len()));
        }
        if let Some(id) = self.prompt_ids.iter().chain(&self.ids).find(|id| **id as usize >= vocab)
        {
            return wrong(format!("id {id} is outside the vocabulary of {vocab}"));
        }
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            return wrong(format!("`temperature` is {}, but must be above 0", self.temperature));
        }
        if let Some(logprob) = self.logprobs.iter().find(|l| !l.is_finite()) {
            return wrong(format!("a recorded log-probability is {logprob}"));
        }
        if !self.advantage.is_finite() {
            return wrong(format!("`advantage` is {}", self.advantage));
        }
        Ok(())
    }

    /// The number of tokens that are not masked.
    pub fn trained_tokens(&self) -> usize {
        self.ids.len() - self.masked.iter().filter(|masked| **masked).count()
    }

    /// The values of the tokens that are not masked, of one value per token.
    pub fn unmasked<'v, T: Copy>(&self, values: &'v [T]) -> Cow<'v, [T]> {
        if self.masked.is_empty() {
            return Cow::Borrowed(values);
        }
        let kept = values.iter().zip(&self.masked).filter(|(_, masked)| !**masked);
        Cow::Owned(kept.map(|(value, _)| *value).collect())
    }

    /// Inserts gradients of 0 for masked tokens into those from `first` on.
    pub(crate) fn insert_masked(&self, gradients: &mut Vec<[f64; 2]>, first: usize) {
        if self.masked.is_empty() {
            return;
        }
        let mut own = gradients.split_off(first).into_iter();
        let of = |masked: &bool| if *masked { None } else { own.next() };
        gradients.extend(self.masked.iter().map(of).map(Option::unwrap_or_default));
    }
}

/// Prompt, completion and sampling temperature.
pub(crate) type PromptCompletion<'a> = (&'a [u32], &'a [u32], f32);

/// For each prompt and completion the longest prompt that begins with both, found step by step, or the own one.
fn host_prompts<'a>(entries: &[(&'a [u32], &[u32])]) -> Vec<&'a [u32]> {
    let mut prompts: Vec<&[u32]> = entries.iter().map(|(prompt, _)| *prompt).collect();
    prompts.sort_unstable();
    prompts.dedup();
    let host = |(prompt, ids): &(&'a [u32], &[u32])| {
        let whole = prompt.len() + ids.len();
        let own = || prompt.iter().chain(*ids);
        // In this order, the prompts that begin with a sequence follow it directly.
        let after = prompts.partition_point(|other| other.iter().lt(own()));
        let mut host = *prompt;
        for next in &prompts[after..] {
            let goes_on = match host.len() == prompt.len() {
                true => next.len() >= whole && own().eq(&next[..whole]),
                false => next.starts_with(host),
            };
            if !goes_on {
                break;
            }
            host = *next;
        }
        host
    };
    entries.iter().map(host).collect()
}

/// For each sample the index of the one that represents its sequence: itself, or the first `active` sample of
/// the prompt with which an earlier turn is computed.
pub(crate) fn sequences(samples: &[TrainSample], active: &[usize]) -> Vec<usize> {
    let entry = |index: &usize| {
        let sample = &samples[*index];
        (sample.prompt_ids.as_slice(), sample.ids.as_slice())
    };
    let entries: Vec<_> = active.iter().map(entry).collect();
    let mut first: HashMap<&[u32], usize> = HashMap::new();
    for index in active {
        first.entry(samples[*index].prompt_ids.as_slice()).or_insert(*index);
    }
    let mut representatives: Vec<usize> = (0..samples.len()).collect();
    for (index, host) in active.iter().zip(host_prompts(&entries)) {
        if host.len() > samples[*index].prompt_ids.len() {
            representatives[*index] = first.get(host).copied().unwrap_or(*index);
        }
    }
    representatives
}

/// What is computed for a completion.
struct Sequence {
    /// Tokens of the prompt and the completion without the last one, which predicts nothing.
    ids: Vec<u32>,
    /// Number of the prompt's tokens.
    prompt: usize,
}

impl Sequence {
    fn new(prompt: &[u32], completion: &[u32]) -> Self {
        let fed = completion.split_last().map_or(&[][..], |(_, fed)| fed);
        Self { ids: [prompt, fed].concat(), prompt: prompt.len() }
    }

    /// Number of the completion's tokens.
    fn rows(&self) -> usize {
        self.ids.len() + 1 - self.prompt
    }
}

/// Tokens that some sequences have in common.
struct Node {
    /// The sequences: they are equal up to the last of these positions, or end before it.
    members: Vec<usize>,
    /// The tokens' positions in the sequences.
    positions: Range<usize>,
    parent: Option<usize>,
    /// How the sequences go on that do not end here: each child begins with another token.
    children: Vec<usize>,
    /// Number of its tokens and of those of all nodes below it.
    tokens: usize,
}

/// A shard may be longer than its target, up to this many times its common prefix, so that further shards compute
/// the prefix again for at most a fifth more tokens.
const PREFIX_TIMES: usize = 6;

/// Bounds of a shard's tokens.
#[derive(Clone, Copy)]
pub(crate) struct ShardLimits {
    /// For sequences that have little in common.
    pub target: usize,
    /// For those that share a prompt or a long prefix, which would be computed again in every other shard.
    pub longest: usize,
}

/// The common prefixes of some sequences. Every node follows its parent; members and children are in the order
/// in which the sequences were given.
struct PrefixTree<'a> {
    sequences: &'a [Sequence],
    nodes: Vec<Node>,
}

impl<'a> PrefixTree<'a> {
    fn new(sequences: &'a [Sequence], members: Vec<usize>) -> Self {
        let mut nodes: Vec<Node> = Vec::new();
        let mut open = vec![(members, 0, None)];
        while let Some((members, start, parent)) = open.pop() {
            let ids = |member: &usize| sequences[*member].ids.as_slice();
            let longest = members.iter().map(ids).max_by_key(|ids| ids.len()).unwrap_or_default();
            let mut end = longest.len();
            for own in members.iter().map(ids) {
                let pairs = longest[start..end].iter().zip(&own[start..]);
                let common = start + pairs.take_while(|(a, b)| a == b).count();
                // A sequence that ends within another one needs no branch.
                if common < own.len() {
                    end = common;
                }
            }
            let mut children: Vec<Vec<usize>> = Vec::new();
            let mut known: HashMap<u32, usize> = HashMap::new();
            for member in members.iter().filter(|member| ids(member).len() > end) {
                let place = *known.entry(ids(member)[end]).or_insert(children.len());
                match children.get_mut(place) {
                    Some(child) => child.push(*member),
                    None => children.push(vec![*member]),
                }
            }
            let index = nodes.len();
            open.extend(children.into_iter().rev().map(|members| (members, end, Some(index))));
            if let Some(parent) = parent {
                nodes[parent].children.push(index);
            }
            let (positions, tokens) = (start..end, end - start);
            nodes.push(Node { members, positions, parent, children: Vec::new(), tokens });
        }
        for index in (1..nodes.len()).rev() {
            if let Some(parent) = nodes[index].parent {
                nodes[parent].tokens += nodes[index].tokens;
            }
        }
        Self { sequences, nodes }
    }

    /// The members that end within a node.
    fn ended(&self, node: &'a Node) -> impl DoubleEndedIterator<Item = usize> {
        let ends = |member: &usize| self.sequences[*member].ids.len() <= node.positions.end;
        node.members.iter().copied().filter(ends)
    }

    /// Whether all children of a node continue completions.
    fn is_prompt(&self, node: &Node) -> bool {
        node.members.iter().all(|member| self.sequences[*member].prompt <= node.positions.end)
    }

    /// All members along the tree, from the children with most tokens; completions of a prompt stay in order.
    fn order(&self) -> Vec<usize> {
        let (mut order, mut open) = (Vec::new(), vec![0]);
        while let Some(index) = open.pop() {
            let node = &self.nodes[index];
            order.extend(self.ended(node));
            let mut children = node.children.clone();
            if !self.is_prompt(node) {
                children.sort_by_key(|child| Reverse(self.nodes[*child].tokens));
            }
            open.extend(children.into_iter().rev());
        }
        order
    }

    /// The most tokens of a shard of children of a node, and the tokens from which on no child joins it. Shards
    /// that are longer than the target have even lengths, because they may run in parallel.
    fn bounds(&self, node: &Node, limits: ShardLimits) -> (usize, usize) {
        let ShardLimits { target, longest } = limits;
        let end = node.positions.end;
        let most = if self.is_prompt(node) { longest } else { PREFIX_TIMES * end };
        let most = most.min(longest).max(target);
        if most == target {
            return (most, most);
        }
        let below = node.tokens - node.positions.len();
        let count = below.div_ceil((most - end.min(most)).max(1)).max(1);
        (most, end + below.div_ceil(count))
    }

    /// The members in shards. A node joins the current shard only as a whole; if it is too long for any, its
    /// children are split.
    fn shards(&self, limits: ShardLimits) -> Vec<Vec<usize>> {
        let (mut shards, mut shard) = (Vec::new(), Vec::new());
        // Of the current shard. It has all tokens before those of the next node, unless it is empty.
        let (mut tokens, mut rows) = (0, 0);
        // Nodes, or members that end within one.
        let mut open = vec![(0, None)];
        while let Some((index, ended)) = open.pop() {
            let node = &self.nodes[index];
            let (members, before, own, place) = match &ended {
                None => (&node.members[..], node.positions.start, node.tokens, node.parent),
                Some(member) => (slice::from_ref(member), node.positions.end, 0, Some(index)),
            };
            let (limit, enough) = place
                .map_or((limits.target, limits.target), |i| self.bounds(&self.nodes[i], limits));
            let own_rows =
                members.iter().map(|member| self.sequences[*member].rows()).sum::<usize>();
            // The memory plan has room for as many rows as tokens.
            let is_full = |tokens, rows| own > 0 && tokens + own > limit || rows + own_rows > limit;
            if !shard.is_empty() && (own > 0 && tokens >= enough || is_full(tokens, rows)) {
                shards.push(mem::take(&mut shard));
            }
            if shard.is_empty() {
                (tokens, rows) = (before, 0);
            }
            if ended.is_none() && is_full(tokens, rows) {
                open.extend(self.ended(node).rev().map(|member| (index, Some(member))));
                open.extend(node.children.iter().rev().map(|child| (*child, None)));
                continue;
            }
            (tokens, rows) = (tokens + own, rows + own_rows);
            shard.extend_from_slice(members);
        }
        shards.push(shard);
        shards
    }
}

/// Splits the `active` samples into micro-batches of at most `micro_batch` samples, and those into shards whose
/// computed tokens the limits bound (a longer sample has its own shard). Samples with a common prefix stay together
/// where they fit, so that it is computed once. Prefixes that are followed by most tokens come first.
pub(crate) fn shards(
    samples: &[TrainSample],
    active: &[usize],
    micro_batch: usize,
    limits: ShardLimits,
) -> Vec<Vec<Vec<usize>>> {
    let sequence = |sample: &TrainSample| Sequence::new(&sample.prompt_ids, &sample.ids);
    let sequences: Vec<Sequence> = samples.iter().map(sequence).collect();
    let order = PrefixTree::new(&sequences, active.to_vec()).order();
    let split = |batch: &[usize]| PrefixTree::new(&sequences, batch.to_vec()).shards(limits);
    order.chunks(micro_batch.max(1)).map(split).collect()
}

/// Whether a step on prompts and completions, or on some of them, may have a shard of more than `target` tokens.
pub(crate) fn may_exceed<'a>(
    target: usize,
    completions: impl IntoIterator<Item = (&'a [u32], &'a [u32])>,
) -> bool {
    let sequence = |(prompt, completion)| Sequence::new(prompt, completion);
    let sequences: Vec<Sequence> = completions.into_iter().map(sequence).collect();
    let tree = PrefixTree::new(&sequences, (0..sequences.len()).collect());
    let limits = ShardLimits { target, longest: usize::MAX };
    tree.nodes.iter().any(|node| {
        let is_long = node.positions.start + node.tokens > target;
        is_long && (node.children.is_empty() || tree.bounds(node, limits).0 > target)
    })
}

/// Completions laid end to end for one forward pass. Tokens that sequences have in common from the beginning on
/// are there once.
pub(crate) struct PackedBatch {
    /// Token ids, `[tokens]`. The last token of a completion predicts nothing and is left out.
    pub ids: Tensor,
    /// The tree of common prefixes within `ids`.
    pub segments: Arc<Segments>,
    /// What the tree was made of, for a device.
    pub table: Vec<Segment>,
    /// Index into `ids` of the token that predicts each sampled token, `[rows]`.
    pub rows: Tensor,
    /// The sampled token that each row predicts.
    pub targets: Vec<u32>,
    /// Sampling temperature of each row.
    pub temperatures: Vec<f32>,
}

impl PackedBatch {
    /// Lays out completions; no prompt may be empty.
    pub fn new(completions: &[PromptCompletion<'_>], device: &Device) -> Result<Self> {
        Self::of_trees(completions, [(0..completions.len()).collect()], device)
    }

    /// As [`Self::new`], but repeats common prefixes for every completion.
    #[cfg(test)]
    pub fn unshared(completions: &[PromptCompletion<'_>], device: &Device) -> Result<Self> {
        Self::of_trees(completions, (0..completions.len()).map(|i| vec![i]), device)
    }

    /// Lays out completions that share tokens within each of some sets.
    fn of_trees(
        completions: &[PromptCompletion<'_>],
        sets: impl IntoIterator<Item = Vec<usize>>,
        device: &Device,
    ) -> Result<Self> {
        let sequences: Vec<_> = completions.iter().map(|c| Sequence::new(c.0, c.1)).collect();
        let (mut ids, mut table) = (Vec::new(), Vec::new());
        // Of each completion, the indices into `ids` of its sequence's tokens.
        let mut places: Vec<Vec<u32>> = vec![Vec::new(); completions.len()];
        for set in sets {
            let tree = PrefixTree::new(&sequences, set);
            // Without a common first token the root is empty.
            let root = tree.nodes.iter().position(|node| !node.positions.is_empty());
            let (root, first) = (root.unwrap_or_default(), table.len());
            for Node { members, positions, parent, .. } in &tree.nodes[root..] {
                let prefix = parent.and_then(|parent| parent.checked_sub(root));
                let prefix = prefix.map(|parent| first + parent);
                let (start, len) = (ids.len(), positions.len());
                table.push(Segment { start, len, prefix });
                let own = members.iter().find_map(|m| sequences[*m].ids.get(positions.clone()));
                ids.extend_from_slice(own.unwrap_or_default());
                for member in members {
                    places[*member].extend((start..start + len).map(|place| place as u32));
                }
            }
        }
        let (mut rows, mut targets, mut temperatures) = (Vec::new(), Vec::new(), Vec::new());
        for ((prompt, completion, temperature), places) in completions.iter().zip(places) {
            let predicting = places.into_iter().skip(prompt.len().saturating_sub(1));
            rows.extend(predicting.take(completion.len()));
            targets.extend_from_slice(completion);
            temperatures.extend(iter::repeat_n(*temperature, completion.len()));
        }
        let (tokens, count) = (ids.len(), rows.len());
        Ok(Self {
            ids: Tensor::from_vec(ids, tokens, device)?,
            segments: Arc::new(Segments::new(&table)?),
            table,
            rows: Tensor::from_vec(rows, count, device)?,
            targets,
            temperatures,
        })
    }
}

#[cfg(test)]
mod tests;
