//! Samples laid out for one forward pass.

use candle_core::{Device, Tensor};

use super::error::{LearnError, Result};

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

    /// Positions that the forward pass computes: the last sampled token predicts nothing.
    pub(super) fn positions(&self) -> usize {
        self.prompt_ids.len() + self.ids.len() - 1
    }
}

/// A few completions, padded on the right to the longest.
pub(super) struct Layout {
    /// `[batch, len]`
    pub ids: Tensor,
    /// Rows of the flattened hidden states that predict a sampled token, sample by sample.
    pub rows: Tensor,
    /// The token that each row predicts.
    pub targets: Vec<u32>,
    /// The temperature of each row.
    pub temperatures: Vec<f32>,
}

impl Layout {
    /// Lays out `(prompt, completion, temperature)` triples.
    pub fn new(parts: &[(&[u32], &[u32], f32)], device: &Device) -> Result<Self> {
        let positions =
            |(prompt, ids, _): &(&[u32], &[u32], f32)| (prompt.len() + ids.len()).saturating_sub(1);
        let len = parts.iter().map(positions).max().unwrap_or(0);
        let mut ids = Vec::with_capacity(parts.len() * len);
        let (mut rows, mut targets, mut temperatures) = (Vec::new(), Vec::new(), Vec::new());
        for (index, part) in parts.iter().enumerate() {
            let (prompt, completion, temperature) = *part;
            let start = ids.len();
            ids.extend(prompt.iter().chain(completion).take(positions(part)));
            // Padding may be any id: no real position looks at it and it carries no loss.
            ids.resize(start + len, 0);
            let first = index * len + prompt.len() - 1;
            rows.extend((0..completion.len()).map(|t| (first + t) as u32));
            targets.extend_from_slice(completion);
            temperatures.extend(std::iter::repeat_n(temperature, completion.len()));
        }
        let count = rows.len();
        Ok(Self {
            ids: Tensor::from_vec(ids, (parts.len(), len), device)?,
            rows: Tensor::from_vec(rows, count, device)?,
            targets,
            temperatures,
        })
    }
}
