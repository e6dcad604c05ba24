//! One pass over a step's samples: loss, gradient and statistics, shard by shard.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::batch::{self, Layout, TrainSample};
use super::error::Result;
use super::lora::{Dropout, Lora};
use super::loss::{LossConfig, TokenLoss, token_loss};
use super::memory;
use super::model::parallel::with_threads;
use super::model::{Model, Trace};
use crate::config::TrainConfig;

/// What a pass reads.
pub(super) struct Pass<'a> {
    pub model: &'a Model,
    pub lora: &'a Lora,
    pub config: &'a TrainConfig,
    pub samples: &'a [TrainSample],
    /// The samples that are trained on.
    pub active: &'a [usize],
    /// The weight of each sample's tokens.
    pub weights: Vec<f64>,
    /// Compare recorded and recomputed log-probabilities of this version.
    pub current_version: Option<u64>,
    pub dropout_seed: u64,
    /// Reference log-probabilities by sample, kept from one pass to the next.
    pub references: &'a mut [Option<Vec<f64>>],
}

/// What a pass gives.
pub(super) struct Outcome {
    /// The gradient of the loss by variable.
    pub gradients: BTreeMap<String, Tensor>,
    pub totals: Totals,
    /// `(sample, mean |recorded - recomputed|)` of samples of the current version.
    differences: Vec<(usize, f64)>,
}

impl Outcome {
    /// Samples whose mean difference is above `limit`, where that is above 0.
    pub fn refused(&self, limit: f64) -> Vec<usize> {
        let above = |d: f64| limit > 0.0 && (d > limit || d.is_nan());
        self.differences.iter().filter(|(_, d)| above(*d)).map(|(index, _)| *index).collect()
    }
}

/// What one shard gives.
struct Shard {
    gradients: BTreeMap<String, Tensor>,
    totals: Totals,
    differences: Vec<(usize, f64)>,
    references: Vec<(usize, Vec<f64>)>,
}

impl Pass<'_> {
    pub fn run(&mut self) -> Result<Outcome> {
        let mut outcome = Outcome {
            gradients: BTreeMap::new(),
            totals: Totals { passes: 1.0, ..Totals::default() },
            differences: Vec::new(),
        };
        let spec = self.model.spec();
        let tokens = memory::shard_tokens(spec);
        let threads = rayon::current_num_threads();
        let mut serial = 0_u64;
        for micro_batch in batch::shards(self.samples, self.active, self.config.micro_batch, tokens)
        {
            let jobs: Vec<(u64, Vec<usize>)> = micro_batch
                .into_iter()
                .map(|shard| {
                    serial += 1;
                    (serial, shard)
                })
                .collect();
            // Shards of a wide model come one by one, so that one shard's gradients are held.
            let parallel = memory::shards_in_parallel(spec);
            for wave in jobs.chunks(if parallel { jobs.len() } else { 1 }) {
                let this: &Self = self;
                let shard = |(serial, shard): &(u64, Vec<usize>)| this.shard(*serial, shard);
                let shards: Vec<Result<Shard>> = if parallel {
                    wave.par_iter().map(shard).collect()
                } else {
                    with_threads(threads, || wave.iter().map(shard).collect())
                };
                for shard in shards {
                    let shard = shard?;
                    add_gradients(&mut outcome.gradients, shard.gradients)?;
                    outcome.totals.add(&shard.totals);
                    outcome.differences.extend(shard.differences);
                    for (index, reference) in shard.references {
                        self.references[index] = Some(reference);
                    }
                }
            }
        }
        Ok(outcome)
    }

    fn shard(&self, serial: u64, indices: &[usize]) -> Result<Shard> {
        let parts: Vec<(&[u32], &[u32], f32)> = indices
            .iter()
            .map(|index| {
                let s = &self.samples[*index];
                (s.prompt_ids.as_slice(), s.ids.as_slice(), s.temperature)
            })
            .collect();
        let layout = Layout::new(&parts, self.model.device())?;
        let mut dropout = self.dropout(serial);
        let keep = memory::kept_layers(self.config, self.model.spec(), layout.segments.tokens());
        let trace = self.trace(&layout, dropout.as_mut(), keep)?;
        let stats = self.stats(&layout, trace.hidden())?;
        let columns = columns(&stats)?;
        let references = self.references(&layout, indices)?;
        let compared = match (self.current_version, &dropout) {
            (None, _) => None,
            (Some(version), None) => Some((version, columns.0.clone())),
            (Some(version), Some(_)) => {
                let plain = self.trace(&layout, None, 0)?;
                Some((version, self::columns(&self.stats(&layout, plain.hidden())?)?.0))
            }
        };
        let mut shard = Shard {
            gradients: BTreeMap::new(),
            totals: Totals::default(),
            differences: Vec::new(),
            references: Vec::new(),
        };
        shard.totals.computed = layout.segments.tokens() as f64;
        let mut slopes = Vec::with_capacity(columns.0.len());
        let mut row = 0;
        for (place, index) in indices.iter().enumerate() {
            let sample = &self.samples[*index];
            let rows = row..row + sample.ids.len();
            row = rows.end;
            let reference = references.as_ref().map(|all| all[place].as_slice());
            let weight = self.weights[*index];
            for (t, at) in rows.clone().enumerate() {
                let behaviour = f64::from(sample.logprobs[t]);
                let loss = token_loss(
                    columns.0[at],
                    behaviour,
                    reference.map(|r| r[t]),
                    sample.advantage,
                    &self.loss_config(),
                );
                slopes.push(weight * loss.slope);
                shard.totals.token(&loss, weight, columns.1[at]);
            }
            shard.totals.samples += 1.0;
            if let Some((version, plain)) = &compared
                && *version == sample.version
            {
                let difference = shard.totals.compare(sample, &plain[rows]);
                shard.differences.push((*index, difference));
            }
        }
        if let Some(references) = references {
            shard.references = indices.iter().copied().zip(references).collect();
        }
        shard.gradients = self.gradients(trace, &stats, slopes)?;
        Ok(shard)
    }

    fn loss_config(&self) -> LossConfig {
        LossConfig {
            clip_low: self.config.clip_low,
            clip_high: self.config.clip_high,
            beta: self.config.beta,
        }
    }

    fn dropout(&self, serial: u64) -> Option<Dropout> {
        let p = self.config.lora.dropout;
        (p > 0.0).then(|| {
            let mut rng = ChaCha8Rng::seed_from_u64(self.dropout_seed);
            rng.set_stream(serial);
            Dropout { p, rng }
        })
    }

    /// The forward pass with the adapter on.
    fn trace(&self, layout: &Layout, dropout: Option<&mut Dropout>, keep: usize) -> Result<Trace> {
        self.model.trace(&layout.ids, &layout.segments, self.lora, dropout, keep)
    }

    /// `[tokens, 2]`: log-probability and entropy of every sampled token.
    fn stats(&self, layout: &Layout, hidden: &Tensor) -> Result<Tensor> {
        self.model.stats(hidden, &layout.rows, &layout.targets, &layout.temperatures)
    }

    /// Log-probabilities under the base, adapters off, by sample; `None` where beta is 0.
    fn references(&self, layout: &Layout, indices: &[usize]) -> Result<Option<Vec<Vec<f64>>>> {
        if self.config.beta == 0.0 {
            return Ok(None);
        }
        let kept: Option<Vec<_>> =
            indices.iter().map(|index| self.references[*index].clone()).collect();
        if kept.is_some() {
            return Ok(kept);
        }
        let hidden = self.model.hidden(&layout.ids, &layout.segments, None, None)?;
        let logprobs = columns(&self.stats(layout, &hidden)?)?.0;
        let mut rest = logprobs.as_slice();
        let mut out = Vec::with_capacity(indices.len());
        for index in indices {
            let (own, others) = rest.split_at(self.samples[*index].ids.len());
            out.push(own.to_vec());
            rest = others;
        }
        Ok(Some(out))
    }

    /// The loss depends on the network through the log-probabilities alone, so its gradient is that
    /// of their sum weighted by the loss's slopes.
    fn gradients(
        &self,
        trace: Trace,
        stats: &Tensor,
        slopes: Vec<f64>,
    ) -> Result<BTreeMap<String, Tensor>> {
        let count = slopes.len();
        let both: Vec<f64> = slopes.into_iter().flat_map(|slope| [slope, 0.0]).collect();
        let grad = Tensor::from_vec(both, (count, 2), self.model.device())?;
        self.model.backward(trace, stats, &grad.to_dtype(stats.dtype())?, self.lora)
    }
}

fn add_gradients(
    sum: &mut BTreeMap<String, Tensor>,
    shard: BTreeMap<String, Tensor>,
) -> Result<()> {
    for (name, gradient) in shard {
        let total = match sum.remove(&name) {
            Some(before) => (before + gradient)?,
            None => gradient,
        };
        sum.insert(name, total);
    }
    Ok(())
}

/// The two columns of `[n, 2]`.
fn columns(stats: &Tensor) -> Result<(Vec<f64>, Vec<f64>)> {
    let stats = stats.detach().to_dtype(DType::F64)?;
    let column = |i| stats.narrow(1, i, 1)?.flatten_all()?.to_vec1::<f64>();
    Ok((column(0)?, column(1)?))
}

/// Sums over tokens, samples and passes.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub passes: f64,
    pub samples: f64,
    pub loss: f64,
    tokens: f64,
    /// Tokens of the forward passes.
    computed: f64,
    kl: f64,
    entropy: f64,
    clipped_low: f64,
    clipped_high: f64,
    ratio: f64,
    ratio_range: Option<(f64, f64)>,
    compared: f64,
    difference: f64,
    difference_max: f64,
}

impl Totals {
    fn token(&mut self, token: &TokenLoss, weight: f64, entropy: f64) {
        self.tokens += 1.0;
        self.loss += weight * token.loss;
        self.kl += token.kl;
        self.entropy += entropy;
        self.clipped_low += f64::from(u8::from(token.clipped_low));
        self.clipped_high += f64::from(u8::from(token.clipped_high));
        self.ratio += token.ratio;
        self.widen(token.ratio, token.ratio);
    }

    fn widen(&mut self, low: f64, high: f64) {
        let (a, b) = self.ratio_range.unwrap_or((low, high));
        self.ratio_range = Some((a.min(low), b.max(high)));
    }

    /// Adds one sample's |recorded - recomputed| log-probabilities; returns their mean.
    fn compare(&mut self, sample: &TrainSample, recomputed: &[f64]) -> f64 {
        let mut sum = 0.0;
        for (recorded, recomputed) in sample.logprobs.iter().zip(recomputed) {
            let difference = (f64::from(*recorded) - recomputed).abs();
            sum += difference;
            self.difference_max = self.difference_max.max(difference);
        }
        self.compared += recomputed.len() as f64;
        self.difference += sum;
        sum / recomputed.len() as f64
    }

    /// Adds what another shard or pass counted.
    pub fn add(&mut self, other: &Self) {
        self.passes += other.passes;
        self.samples += other.samples;
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.computed += other.computed;
        self.kl += other.kl;
        self.entropy += other.entropy;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.ratio += other.ratio;
        if let Some((low, high)) = other.ratio_range {
            self.widen(low, high);
        }
        self.compared += other.compared;
        self.difference += other.difference;
        self.difference_max = self.difference_max.max(other.difference_max);
    }

    /// Means under the names that [`super::learner::StepStats`] lists.
    pub fn describe(&self, with_kl: bool, metrics: &mut BTreeMap<String, f64>) {
        let mut put = |name: &str, value: f64| metrics.insert(name.to_owned(), value);
        if self.tokens > 0.0 {
            let (low, high) = self.ratio_range.unwrap_or_default();
            put("loss", self.loss / self.passes);
            put("entropy", self.entropy / self.tokens);
            put("clip_low", self.clipped_low / self.tokens);
            put("clip_high", self.clipped_high / self.tokens);
            put("ratio_min", low);
            put("ratio_mean", self.ratio / self.tokens);
            put("ratio_max", high);
            put("completion_length", self.tokens / self.samples);
            put("loss_token_fraction", self.tokens / self.computed);
            put("tokens", self.tokens / self.passes);
            put("samples", self.samples / self.passes);
            if with_kl {
                put("kl", self.kl / self.tokens);
            }
        }
        if self.compared > 0.0 {
            put("sampler_difference_mean", self.difference / self.compared);
            put("sampler_difference_max", self.difference_max);
        }
    }
}
