//! One forward/backward pass over a step's samples: loss, gradients and metrics, shard by shard.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use candle_core::{DType, Tensor};
use parking_lot::Mutex;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use hone_cuda::DevicePolicy;
use hone_model::Model;
use hone_model::adapter::weights::{Dropout, LoraWeights};
use hone_model::transformer::SavedActivations;

use super::device::DevicePasses;
use super::loss::{LEAST_WEIGHT, LossSequence, late_weight};
use super::objective::{AdaptiveCoefficients, Objective, StepTotals};
use super::{StepTiming, map_shards, timed};
use crate::config::{CorrectionMode, TrainConfig};
use crate::data::packing::{PackedBatch, ShardLimits, TrainSample, sequences, shards};
use crate::error::Result;
use crate::memory;

pub(crate) struct ForwardBackward<'a> {
    pub model: &'a Model,
    /// What computes in place of the model, one shard or one score at a time.
    pub device: Option<&'a Mutex<DevicePasses>>,
    pub lora: &'a LoraWeights,
    /// Adapter of the reference policy; `None` is the base model.
    pub reference: Option<&'a LoraWeights>,
    pub config: &'a TrainConfig,
    pub samples: &'a [TrainSample],
    pub active: &'a [usize],
    pub adaptive: AdaptiveCoefficients,
    /// Number of each sample's trained tokens; 0 for corrections and for samples that are left out.
    pub lengths: Vec<usize>,
    pub max_completion_tokens: usize,
    /// Tokens of the longest shard that the memory permits.
    pub longest_shard: usize,
    /// The version of the weights, for whose samples recorded and recomputed log-probabilities are compared.
    pub current_version: Option<u64>,
    pub dropout_seed: u64,
    /// Log-probabilities from earlier passes of the step.
    pub cache: &'a LogprobCache,
}

/// Log-probabilities, by sample, that are the same in all passes of a step.
#[derive(Default)]
pub(crate) struct LogprobCache {
    reference: BTreeMap<usize, Vec<f64>>,
    /// Under the policy before the step's first update.
    old: BTreeMap<usize, Vec<f64>>,
}

impl LogprobCache {
    pub fn extend(&mut self, other: Self) {
        self.reference.extend(other.reference);
        self.old.extend(other.old);
    }
}

#[derive(Default)]
pub(crate) struct PassOutput {
    /// Gradient of the loss by the adapter's tensor.
    pub gradients: BTreeMap<String, Tensor>,
    pub totals: StepTotals,
    pub timing: StepTiming,
    pub logprobs: LogprobCache,
    /// `(sample, mean |recorded - recomputed|)` of samples of the current version.
    differences: Vec<(usize, f64)>,
    /// `(sample, weight)` of late samples.
    late_weights: Vec<(usize, f64)>,
}

impl PassOutput {
    /// Samples whose mean difference exceeds `limit` or is NaN; none for a limit of 0.
    pub fn refused(&self, limit: f64) -> Vec<usize> {
        let exceeds = |d: f64| limit > 0.0 && (d > limit || d.is_nan());
        self.differences.iter().filter(|(_, d)| exceeds(*d)).map(|(index, _)| *index).collect()
    }

    /// Late samples whose weight is too small to learn from.
    pub fn faded(&self) -> Vec<usize> {
        let faded = self.late_weights.iter().filter(|(_, weight)| *weight < LEAST_WEIGHT);
        faded.map(|(index, _)| *index).collect()
    }

    fn add(&mut self, shard: Self) -> Result<()> {
        for (name, gradient) in shard.gradients {
            let sum = match self.gradients.remove(&name) {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            };
            self.gradients.insert(name, sum);
        }
        self.totals.add(&shard.totals);
        self.timing.add(&shard.timing);
        self.logprobs.extend(shard.logprobs);
        self.differences.extend(shard.differences);
        self.late_weights.extend(shard.late_weights);
        Ok(())
    }
}

/// The indices of a shard's samples, and the random stream of its dropout.
type Shard = (Vec<usize>, u64);

/// Log-probabilities and entropies of sampled tokens, in nats.
type Stats = [Vec<f64>; 2];

/// What the backward pass needs of a forward pass with the adapter, and its statistics `[rows, 2]`; `None` if a device
/// keeps it.
type Pass = Option<(SavedActivations, Tensor)>;

impl ForwardBackward<'_> {
    pub fn run(&self) -> Result<PassOutput> {
        let start = Instant::now();
        let spec = self.model.spec();
        let limits = match self.device {
            None => {
                let target = memory::shard_tokens(spec);
                ShardLimits { target, longest: self.longest_shard }
            }
            Some(device) => {
                let mut device = device.lock();
                let reference = self.reference.filter(|_| self.config.beta != 0.0);
                device.begin(self.lora, reference)?;
                let target = device.longest_shard();
                ShardLimits { target, longest: target }
            }
        };
        let mut streams = 1_u64..;
        let batches: Vec<Vec<Shard>> =
            shards(self.samples, self.active, self.config.micro_batch, limits)
                .into_iter()
                .map(|micro_batch| micro_batch.into_iter().zip(streams.by_ref()).collect())
                .collect();
        let objective = self.objective(&batches)?;
        let mut output = PassOutput { totals: StepTotals::of_one_pass(), ..PassOutput::default() };
        let parallel = self.device.is_none() && memory::shards_in_parallel(spec);
        for batch in &batches {
            // The gradients of a wide model are large, so only one shard's are held at a time.
            for shards in batch.chunks(if parallel { batch.len() } else { 1 }) {
                for shard in map_shards(spec, shards, |shard| self.shard(shard, &objective)) {
                    output.add(shard?)?;
                }
            }
        }
        if let Some(device) = self.device {
            let gradients = || device.lock().gradients(self.lora);
            output.gradients = timed(&mut output.timing.backward, gradients)?;
        }
        output.timing = output.timing.scaled(start.elapsed().as_secs_f64());
        Ok(output)
    }

    /// The objective of the whole step, which may need the entropies of all trained tokens first.
    fn objective(&self, batches: &[Vec<Shard>]) -> Result<Objective<'_>> {
        let mut entropies = Vec::new();
        if self.config.top_entropy_quantile < 1.0 {
            for shards in batches {
                let spec = self.model.spec();
                for shard in map_shards(spec, shards, |shard| self.entropies(shard)) {
                    entropies.extend(shard?);
                }
            }
        }
        let (lengths, max_tokens) = (&self.lengths, self.max_completion_tokens);
        let tokens = |index: &usize| self.samples[*index].ids.len();
        let corrections = self.active.iter().filter(|index| self.samples[**index].correction);
        let corrected = corrections.map(tokens).sum();
        let sequences = sequences(self.samples, self.active);
        Ok(Objective::new(
            self.config,
            &self.adaptive,
            lengths,
            &sequences,
            max_tokens,
            &entropies,
            corrected,
        ))
    }

    /// The entropies of a shard's trained tokens, with the dropout that the pass will use.
    fn entropies(&self, (indices, stream): &Shard) -> Result<Vec<f64>> {
        let layout = self.layout(indices)?;
        let mut device = self.device.map(Mutex::lock);
        let mut dropout = self.dropout(*stream);
        let (_, [_, entropies]) =
            self.forward(device.as_deref_mut(), &layout, dropout.as_mut(), 0)?;
        drop(device);
        let trained = self.rows(indices).filter(|(index, _)| self.lengths[*index] > 0);
        let own = |(index, rows): (usize, Range<usize>)| {
            self.samples[index].unmasked(&entropies[rows]).into_owned()
        };
        Ok(trained.flat_map(own).collect())
    }

    fn layout(&self, indices: &[usize]) -> Result<PackedBatch> {
        let completion = |index: &usize| {
            let sample = &self.samples[*index];
            (sample.prompt_ids.as_slice(), sample.ids.as_slice(), sample.temperature)
        };
        let completions: Vec<_> = indices.iter().map(completion).collect();
        PackedBatch::new(&completions, self.model.device())
    }

    fn rows(&self, indices: &[usize]) -> impl Iterator<Item = (usize, Range<usize>)> {
        indices.iter().scan(0, |end, index| {
            let start = *end;
            *end += self.samples[*index].ids.len();
            Some((*index, start..*end))
        })
    }

    fn shard(&self, (indices, stream): &Shard, objective: &Objective<'_>) -> Result<PassOutput> {
        let start = Instant::now();
        let mut output = PassOutput::default();
        let layout = self.layout(indices)?;
        let mut dropout = self.dropout(*stream);
        let tokens = layout.segments.tokens();
        let kept_layers = memory::kept_layers(self.config, self.model.spec(), tokens);
        // A score of another policy must not come between the forward and the backward pass, whose activations are on the
        // device.
        let mut device = self.device.map(Mutex::lock);
        // Before the forward pass with the adapter, whose activations then take the memory.
        let reference = || self.reference(device.as_deref_mut(), &layout, indices);
        let reference = timed(&mut output.timing.reference, reference)?;
        let (pass, [logprobs, entropies]) =
            self.forward(device.as_deref_mut(), &layout, dropout.as_mut(), kept_layers)?;
        let without_dropout = self.without_dropout(&layout, indices, &logprobs)?;
        output.totals.computed_tokens = tokens as f64;
        let mut gradients = Vec::with_capacity(logprobs.len());
        for (index, rows) in self.rows(indices) {
            let sample = &self.samples[index];
            let reference = reference.as_ref().map(|all| &all[rows.clone()]);
            output.logprobs.reference.extend(reference.map(|all| (index, all.to_vec())));
            if sample.correction {
                objective.add_correction(&logprobs[rows], &mut gradients, &mut output.totals);
                continue;
            }
            let without_dropout = without_dropout.as_ref().map(|all| &all[rows.clone()]);
            let cached = self.cache.old.get(&index).map(Vec::as_slice);
            let old = cached.or(without_dropout).filter(|_| self.needs_old(index));
            output.logprobs.old.extend(old.map(|old| (index, old.to_vec())));
            // From here on without masked tokens.
            let recorded: Vec<f64> = sample.logprobs.iter().map(|l| f64::from(*l)).collect();
            let recorded = sample.unmasked(&recorded);
            let old = old.map(|all| sample.unmasked(all));
            let old = old.as_deref();
            let reference = reference.map(|all| sample.unmasked(all));
            // The weight of a late sample is a constant factor of its surrogate, as is the advantage.
            // It replaces the sampler correction.
            let late = old.filter(|_| sample.late);
            let weight = late.map_or(1.0, |old| late_weight(old, &recorded, sample.advantage));
            output.late_weights.extend(late.map(|_| (index, weight)));
            let own_logprobs = sample.unmasked(&logprobs[rows.clone()]);
            let own_entropies = sample.unmasked(&entropies[rows]);
            let sequence = LossSequence {
                logprobs: &own_logprobs,
                entropies: &own_entropies,
                recorded: late.unwrap_or(&recorded),
                old,
                reference: reference.as_deref(),
                advantage: weight * sample.advantage,
            };
            let first = gradients.len();
            objective.add_sequence(index, &sequence, &mut gradients, &mut output.totals);
            sample.insert_masked(&mut gradients, first);
            if let Some(recomputed) = without_dropout
                && self.current_version == Some(sample.version)
            {
                let recomputed = sample.unmasked(recomputed);
                let difference = output.totals.add_difference(&recorded, &recomputed);
                output.differences.push((index, difference));
            }
        }
        output.timing.forward = start.elapsed().as_secs_f64() - output.timing.reference;
        let backward = || self.backward(device.as_deref_mut(), pass, gradients);
        output.gradients = timed(&mut output.timing.backward, backward)?;
        Ok(output)
    }

    /// Whether a sample's loss needs log-probabilities from before the step's first update.
    fn needs_old(&self, index: usize) -> bool {
        let sample = &self.samples[index];
        let is_corrected = self.config.sampler_correction.kind != CorrectionMode::None;
        !sample.correction && (is_corrected || sample.late)
    }

    /// A shard's log-probabilities without dropout, to compare with the recorded ones or to cache as the old
    /// ones.
    fn without_dropout(
        &self,
        layout: &PackedBatch,
        indices: &[usize],
        logprobs: &[f64],
    ) -> Result<Option<Vec<f64>>> {
        let is_missing =
            |index: &usize| self.needs_old(*index) && !self.cache.old.contains_key(index);
        let computes_old = indices.iter().any(is_missing);
        if self.current_version.is_none() && !computes_old {
            return Ok(None);
        }
        if self.config.lora.dropout == 0.0 {
            return Ok(Some(logprobs.to_vec()));
        }
        // Adapters on a device have no dropout.
        let (_, [logprobs, _]) = self.forward(None, layout, None, 0)?;
        Ok(Some(logprobs))
    }

    fn dropout(&self, stream: u64) -> Option<Dropout> {
        let p = self.config.lora.dropout;
        (p > 0.0).then(|| {
            let mut rng = ChaCha8Rng::seed_from_u64(self.dropout_seed);
            rng.set_stream(stream);
            Dropout { p, rng }
        })
    }

    /// The forward pass with the adapter. On the host it keeps the activations of `kept_layers` layers.
    fn forward(
        &self,
        device: Option<&mut DevicePasses>,
        layout: &PackedBatch,
        dropout: Option<&mut Dropout>,
        kept_layers: usize,
    ) -> Result<(Pass, Stats)> {
        if let Some(device) = device {
            return Ok((None, device.forward(layout, DevicePolicy::Adapter)?));
        }
        let PackedBatch { ids, segments, .. } = layout;
        let saved = self.model.forward_saving(ids, segments, self.lora, dropout, kept_layers)?;
        let stats = self.stats(layout, saved.hidden())?;
        let columns = columns(&stats)?;
        Ok((Some((saved, stats)), columns))
    }

    /// The adapter's gradients, from the derivatives of the loss by a pass's results. A device adds up those of all shards.
    fn backward(
        &self,
        device: Option<&mut DevicePasses>,
        pass: Pass,
        seeds: Vec<[f64; 2]>,
    ) -> Result<BTreeMap<String, Tensor>> {
        if let Some(device) = device {
            device.backward(&seeds)?;
        }
        let Some((saved, stats)) = pass else { return Ok(BTreeMap::new()) };
        let shape = (seeds.len(), 2);
        let seed = Tensor::from_vec(seeds.into_flattened(), shape, self.model.device())?;
        Ok(self.model.backward(saved, &stats, &seed.to_dtype(stats.dtype())?, self.lora)?)
    }

    /// Log-probability and entropy of every sampled token, `[rows, 2]`.
    fn stats(&self, layout: &PackedBatch, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.model.stats(hidden, &layout.rows, &layout.targets, &layout.temperatures)?)
    }

    /// Log-probabilities under the reference policy, row by row; `None` if beta is 0.
    fn reference(
        &self,
        device: Option<&mut DevicePasses>,
        layout: &PackedBatch,
        indices: &[usize],
    ) -> Result<Option<Vec<f64>>> {
        if self.config.beta == 0.0 {
            return Ok(None);
        }
        let cached = indices.iter().map(|index| self.cache.reference.get(index).map(Vec::as_slice));
        if let Some(cached) = cached.collect::<Option<Vec<&[f64]>>>() {
            return Ok(Some(cached.concat()));
        }
        let [logprobs, _] = match device {
            Some(device) => {
                let adapter = self.reference.map(|_| DevicePolicy::Reference);
                device.forward(layout, adapter.unwrap_or(DevicePolicy::Base))?
            }
            None => {
                let PackedBatch { ids, segments, .. } = layout;
                let hidden = self.model.hidden(ids, segments, self.reference, None)?;
                columns(&self.stats(layout, &hidden.detach())?)?
            }
        };
        Ok(Some(logprobs))
    }
}

fn columns(stats: &Tensor) -> Result<Stats> {
    let stats = stats.detach().to_dtype(DType::F64)?;
    let column = |i| stats.narrow(1, i, 1)?.flatten_all()?.to_vec1::<f64>();
    Ok([column(0)?, column(1)?])
}

#[cfg(test)]
mod tests;
