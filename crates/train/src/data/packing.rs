//! Samples laid out for one forward pass.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use hone_model::transformer::{Segment, Segments};

use crate::error::{LearnError, Result};

/// One completion to train on, exactly as it was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainSample {
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// Sampled ids, the stop token included.
    pub ids: Vec<u32>,
    /// Recorded natural-log probability of each id at `temperature`.
    pub logprobs: Vec<f32>,
    /// The temperature it was sampled at.
    pub temperature: f32,
    /// Its advantage.
    pub advantage: f64,
    /// The policy version that sampled it.
    pub version: u64,
    /// Whether it ended at its token limit rather than by itself.
    pub truncated: bool,
}

impl TrainSample {
    /// Refuses what cannot be trained on.
    ///
    /// # Errors
    /// If a field is empty, of the wrong length or out of range; `index` goes into the message.
    pub fn validate(&self, index: usize, vocab: usize) -> Result<()> {
        let wrong = |reason: String| Err(LearnError::Sample { index, reason });
        if self.prompt_ids.is_empty() {
            return wrong("`prompt_ids` is empty".to_owned());
        }
        if self.ids.is_empty() {
            return wrong("`ids` is empty".to_owned());
        }
        if self.logprobs.len() != self.ids.len() {
            return wrong(format!("{} ids but {} logprobs", self.ids.len(), self.logprobs.len()));
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
}

/// A completion to compute: prompt, completion, temperature.
pub(crate) type Part<'a> = (&'a [u32], &'a [u32], f32);

/// A few completions laid end to end, each distinct prompt once, followed by all that continues it.
pub(crate) struct PackedBatch {
    /// `[tokens]`
    pub ids: Tensor,
    /// Prompts and completions within `ids`.
    pub segments: Arc<Segments>,
    /// Tokens that predict a sampled token, sample by sample.
    pub rows: Tensor,
    /// The token that each row predicts.
    pub targets: Vec<u32>,
    /// The temperature of each row.
    pub temperatures: Vec<f32>,
}

impl PackedBatch {
    /// Lays out completions; rows come in their order.
    pub fn new(parts: &[Part<'_>], device: &Device) -> Result<Self> {
        let mut prompts: Vec<(&[u32], Vec<usize>)> = Vec::new();
        let mut known: HashMap<&[u32], usize> = HashMap::new();
        for (index, (prompt, ..)) in parts.iter().enumerate() {
            let place = *known.entry(prompt).or_insert(prompts.len());
            match prompts.get_mut(place) {
                Some((_, members)) => members.push(index),
                None => prompts.push((prompt, vec![index])),
            }
        }
        Self::with_families(parts, &prompts, device)
    }

    /// As [`Self::new`], with a prompt of its own for every completion.
    #[cfg(test)]
    pub fn unshared(parts: &[Part<'_>], device: &Device) -> Result<Self> {
        let prompts: Vec<_> = parts.iter().enumerate().map(|(i, p)| (p.0, vec![i])).collect();
        Self::with_families(parts, &prompts, device)
    }

    fn with_families(
        parts: &[Part<'_>],
        prompts: &[(&[u32], Vec<usize>)],
        device: &Device,
    ) -> Result<Self> {
        let (mut ids, mut table) = (Vec::new(), Vec::new());
        // Of each part, the token that predicts its first one, and the first of its branch.
        let mut firsts = vec![(0, 0); parts.len()];
        for (prompt, members) in prompts {
            let root = table.len();
            table.push(Segment { start: ids.len(), len: prompt.len(), prefix: None });
            ids.extend_from_slice(prompt);
            let last = ids.len() - 1;
            for member in members {
                firsts[*member] = (last, ids.len());
                // The last sampled token predicts nothing.
                let fed = parts[*member].1.split_last().map_or(&[][..], |(_, fed)| fed);
                table.push(Segment { start: ids.len(), len: fed.len(), prefix: Some(root) });
                ids.extend_from_slice(fed);
            }
        }
        let (mut rows, mut targets, mut temperatures) = (Vec::new(), Vec::new(), Vec::new());
        for ((_, completion, temperature), (last, branch)) in parts.iter().zip(firsts) {
            let predicting = std::iter::once(last).chain(branch..);
            rows.extend(predicting.take(completion.len()).map(|row| row as u32));
            targets.extend_from_slice(completion);
            temperatures.extend(std::iter::repeat_n(*temperature, completion.len()));
        }
        let (tokens, count) = (ids.len(), rows.len());
        Ok(Self {
            ids: Tensor::from_vec(ids, tokens, device)?,
            segments: Arc::new(Segments::new(&table)?),
            rows: Tensor::from_vec(rows, count, device)?,
            targets,
            temperatures,
        })
    }
}

/// Splits `active` samples into micro-batches of at most `micro_batch` samples and those into shards
/// of about `tokens` computed tokens or fewer (a longer sample has a shard of its own). Samples of
/// one prompt stay together where they fit; prompts with the most tokens come first.
pub(crate) fn shards(
    samples: &[TrainSample],
    active: &[usize],
    micro_batch: usize,
    tokens: usize,
) -> Vec<Vec<Vec<usize>>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut known: HashMap<&[u32], usize> = HashMap::new();
    for index in active {
        let place = *known.entry(&samples[*index].prompt_ids).or_insert(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.push(*index),
            None => groups.push(vec![*index]),
        }
    }
    let own = |index: &usize| samples[*index].ids.len() - 1;
    let cost = |members: &[usize]| {
        let prompt = members.first().map_or(0, |first| samples[*first].prompt_ids.len());
        prompt + members.iter().map(own).sum::<usize>()
    };
    groups.sort_by_key(|group| (std::cmp::Reverse(cost(group)), group[0]));
    let order: Vec<usize> = groups.into_iter().flatten().collect();
    let same = |a: &usize, b: &usize| samples[*a].prompt_ids == samples[*b].prompt_ids;
    let split = |batch: &[usize]| {
        let mut shards: Vec<Vec<usize>> = Vec::new();
        let mut used = 0;
        for group in batch.chunk_by(same) {
            let prompt = samples[group[0]].prompt_ids.len();
            // Whole in the shard at hand, or else from a new one on, as full as they get.
            if used == 0 || used + cost(group) > tokens {
                shards.push(Vec::new());
                used = prompt;
            } else {
                used += prompt;
            }
            for index in group {
                let full = used + own(index) > tokens;
                if full && shards.last().is_some_and(|shard| !shard.is_empty()) {
                    shards.push(Vec::new());
                    used = prompt;
                }
                used += own(index);
                if let Some(shard) = shards.last_mut() {
                    shard.push(*index);
                }
            }
        }
        shards
    };
    order.chunks(micro_batch.max(1)).map(split).collect()
}
