//! Training samples, their split into shards, and the layout of a shard for one forward pass, which has the
//! same log-probabilities as one sequence per sample.
//!
//! The turns of a conversation that goes on from recorded tokens are one sequence: a completion is a span of
//! the next turn's prompt, and is computed with it. The ids alone decide this, so that a turn whose tokens
//! were encoded again is a sequence of its own.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

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
    let hosts = hosts_of(samples, active);
    let mut first: HashMap<&[u32], usize> = HashMap::new();
    for index in active {
        first.entry(samples[*index].prompt_ids.as_slice()).or_insert(*index);
    }
    let mut representatives: Vec<usize> = (0..samples.len()).collect();
    for index in active {
        if hosts[*index].len() > samples[*index].prompt_ids.len() {
            representatives[*index] = first.get(hosts[*index]).copied().unwrap_or(*index);
        }
    }
    representatives
}

/// [`host_prompts`] of the `active` samples; the own prompts of the others.
fn hosts_of<'a>(samples: &'a [TrainSample], active: &[usize]) -> Vec<&'a [u32]> {
    let mut hosts: Vec<&[u32]> = samples.iter().map(|s| s.prompt_ids.as_slice()).collect();
    let entry = |index: &usize| {
        let sample = &samples[*index];
        (sample.prompt_ids.as_slice(), sample.ids.as_slice())
    };
    let entries: Vec<_> = active.iter().map(entry).collect();
    for (index, host) in active.iter().zip(host_prompts(&entries)) {
        hosts[*index] = host;
    }
    hosts
}

/// Distinct prompts in order of first appearance, each with the indices of its entries.
type PromptGroups<'a> = Vec<(&'a [u32], Vec<usize>)>;

fn group_by_prompt<'a>(entries: impl Iterator<Item = (usize, &'a [u32])>) -> PromptGroups<'a> {
    let mut groups = PromptGroups::new();
    let mut known: HashMap<&[u32], usize> = HashMap::new();
    for (index, prompt) in entries {
        let place = *known.entry(prompt).or_insert(groups.len());
        match groups.get_mut(place) {
            Some((_, members)) => members.push(index),
            None => groups.push((prompt, vec![index])),
        }
    }
    groups
}

/// Completions laid end to end for one forward pass, after their distinct prompts. A completion within a longer
/// prompt has no tokens of its own.
pub(crate) struct PackedBatch {
    /// Token ids, `[tokens]`. The last token of a completion predicts nothing and is left out.
    pub ids: Tensor,
    /// Prompts and completions within `ids`.
    pub segments: Arc<Segments>,
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
        let entries: Vec<_> = completions.iter().map(|c| (c.0, c.1)).collect();
        let prompts = host_prompts(&entries).into_iter().enumerate();
        Self::with_groups(completions, &group_by_prompt(prompts), device)
    }

    /// As [`Self::new`], but repeats the prompt for every completion.
    #[cfg(test)]
    pub fn unshared(completions: &[PromptCompletion<'_>], device: &Device) -> Result<Self> {
        let groups: Vec<_> = completions.iter().enumerate().map(|(i, c)| (c.0, vec![i])).collect();
        Self::with_groups(completions, &groups, device)
    }

    fn with_groups(
        completions: &[PromptCompletion<'_>],
        groups: &PromptGroups<'_>,
        device: &Device,
    ) -> Result<Self> {
        let (mut ids, mut table) = (Vec::new(), Vec::new());
        // Of each completion: the prompt's last token, which predicts the first sampled one, and
        // the start of the completion's own segment.
        let mut starts = vec![(0, 0); completions.len()];
        for (prompt, members) in groups {
            let (root, first) = (table.len(), ids.len());
            table.push(Segment { start: first, len: prompt.len(), prefix: None });
            ids.extend_from_slice(prompt);
            let last = ids.len() - 1;
            for member in members {
                let own = completions[*member].0.len();
                if own < prompt.len() {
                    starts[*member] = (first + own - 1, first + own);
                    continue;
                }
                starts[*member] = (last, ids.len());
                let fed = completions[*member].1.split_last().map_or(&[][..], |(_, fed)| fed);
                table.push(Segment { start: ids.len(), len: fed.len(), prefix: Some(root) });
                ids.extend_from_slice(fed);
            }
        }
        let (mut rows, mut targets, mut temperatures) = (Vec::new(), Vec::new(), Vec::new());
        for ((_, completion, temperature), (last, start)) in completions.iter().zip(starts) {
            let predicting = std::iter::once(last).chain(start..);
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

/// Splits the `active` samples into micro-batches of at most `micro_batch` samples, and those into shards of at
/// most `max_tokens` computed tokens (a longer sample has its own shard). Samples of one prompt stay together
/// where they fit, in up to `longest` tokens, so that it is computed once. Prompts with most tokens come first.
pub(crate) fn shards(
    samples: &[TrainSample],
    active: &[usize],
    micro_batch: usize,
    max_tokens: usize,
    longest: usize,
) -> Vec<Vec<Vec<usize>>> {
    let hosts = hosts_of(samples, active);
    let prompt = |index: usize| hosts[index];
    let own_tokens = |index: usize| {
        let sample = &samples[index];
        if sample.prompt_ids.len() < hosts[index].len() { 0 } else { sample.ids.len() - 1 }
    };
    let tokens = |members: &[usize]| {
        prompt(members[0]).len() + members.iter().map(|i| own_tokens(*i)).sum::<usize>()
    };
    let mut groups = group_by_prompt(active.iter().map(|index| (*index, prompt(*index))));
    groups.sort_by_key(|(_, members)| (Reverse(tokens(members)), members[0]));
    let order: Vec<usize> = groups.into_iter().flat_map(|(_, members)| members).collect();
    let split = |batch: &[usize]| {
        let (mut shards, mut shard) = (Vec::new(), Vec::new());
        let mut used = 0;
        for group in batch.chunk_by(|a, b| prompt(*a) == prompt(*b)) {
            // A group joins the current shard only as a whole.
            if !shard.is_empty() && used + tokens(group) > max_tokens {
                shards.push(std::mem::take(&mut shard));
                used = 0;
            }
            used += prompt(group[0]).len();
            // Without its own shard, a long prompt would be computed once for a few completions.
            let most =
                if tokens(group) > max_tokens { longest.max(max_tokens) } else { max_tokens };
            for &index in group {
                if !shard.is_empty() && used + own_tokens(index) > most {
                    shards.push(std::mem::take(&mut shard));
                    used = prompt(index).len();
                }
                used += own_tokens(index);
                shard.push(index);
            }
        }
        shards.push(shard);
        shards
    };
    order.chunks(micro_batch.max(1)).map(split).collect()
}

#[cfg(test)]
mod tests {
    use super::{TrainSample, hosts_of, sequences, shards};

    fn sample(prompt: u32, prompt_len: usize, len: usize) -> TrainSample {
        TrainSample {
            prompt_ids: vec![prompt; prompt_len],
            ids: vec![0; len],
            ..TrainSample::default()
        }
    }

    #[test]
    fn shards_are_filled_with_the_largest_prompts_first() {
        // Computed tokens: 4 + 2 + 2, 6 + 4 + 4 + 4, 2 + 1 and 3 + 1.
        let lengths = [(0, 4, 3), (0, 4, 3), (1, 6, 5), (1, 6, 5), (1, 6, 5), (2, 2, 2), (3, 3, 2)];
        let samples = lengths.map(|(prompt, prompt_len, len)| sample(prompt, prompt_len, len));
        let active = [0, 1, 2, 3, 4, 5, 6];
        let split = |micro_batch, max_tokens| {
            shards(&samples, &active, micro_batch, max_tokens, max_tokens)
        };
        assert_eq!(split(64, 14), [vec![vec![2, 3], vec![4], vec![0, 1, 6], vec![5]]]);
        assert_eq!(split(64, 15), [vec![vec![2, 3], vec![4], vec![0, 1, 6, 5]]]);
        assert_eq!(split(64, 18), [vec![vec![2, 3, 4], vec![0, 1, 6, 5]]]);
        assert_eq!(split(64, 1), [[2, 3, 4, 0, 1, 6, 5].map(|index| vec![index])]);
        let batches = [vec![vec![2, 3, 4]], vec![vec![0, 1, 6]], vec![vec![5]]];
        assert_eq!(split(3, 100), batches);
        assert_eq!(split(0, 100).len(), 7, "a micro-batch has at least one sample");
        assert_eq!(shards(&samples, &[4, 6], 64, 100, 100), [[[4, 6]]]);
    }
    #[test]
    fn a_long_prompt_is_shared_up_to_the_longest_shard() {
        // A prompt of 90 tokens with four completions of 10 computed ones, and a short one.
        let mut samples: Vec<_> = (0..4).map(|_| sample(0, 90, 11)).collect();
        samples.push(sample(1, 5, 6));
        let split = |longest| shards(&samples, &[0, 1, 2, 3, 4], 64, 64, longest);
        assert_eq!(split(64), [[vec![0], vec![1], vec![2], vec![3], vec![4]]]);
        assert_eq!(split(110), [[vec![0, 1], vec![2, 3], vec![4]]]);
        assert_eq!(split(130), [[vec![0, 1, 2, 3], vec![4]]]);
        assert_eq!(split(usize::MAX), [[vec![0, 1, 2, 3], vec![4]]]);
    }

    #[test]
    fn a_turn_is_computed_with_the_last_prompt_of_its_conversation() {
        let turn = |prompt: &[u32], ids: &[u32]| TrainSample {
            prompt_ids: prompt.to_vec(),
            ids: ids.to_vec(),
            ..TrainSample::default()
        };
        let samples = [
            turn(&[1, 2], &[3]),
            turn(&[1, 2, 3, 4], &[5, 6]),
            turn(&[1, 2, 3, 4, 5, 6, 7], &[8]),
            turn(&[1, 2, 3, 4, 5, 6, 7], &[9]),
            // Another answer to the first prompt, and a turn whose beginning was encoded again.
            turn(&[1, 2], &[4]),
            turn(&[1, 2, 3, 4, 6, 5], &[1]),
        ];
        let all = [0, 1, 2, 3, 4, 5];
        let last = &samples[2].prompt_ids[..];
        assert_eq!(hosts_of(&samples, &all)[..4], [last; 4]);
        assert_eq!(sequences(&samples, &all), [2, 2, 2, 3, 4, 5]);
        assert_eq!(shards(&samples, &all, 64, 100, 100), [[[0, 1, 2, 3, 5, 4]]]);
        // Without the last turn, the first one goes on in the other prompt that begins with it.
        assert_eq!(sequences(&samples, &[0, 1, 4]), [1, 1, 2, 3, 4, 5]);
        assert_eq!(sequences(&samples, &[0, 4, 5]), [5, 1, 2, 3, 4, 5]);
    }
}
