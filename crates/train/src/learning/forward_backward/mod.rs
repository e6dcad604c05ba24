//! One pass over a step's samples: loss, gradient and statistics, shard by shard.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::{DType, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use hone_model::Model;
use hone_model::adapter::weights::{Dropout, LoraWeights};
use hone_model::kernels::parallel::with_threads;
use hone_model::transformer::SavedActivations;

use super::objective::{LossGradients, Objective, StepPlan, TokenRows, Totals};
use super::step_timing::{StepTiming, timed};
use crate::config::TrainConfig;
use crate::data::packing;
use crate::data::packing::{PackedBatch, TrainSample};
use crate::error::Result;
use crate::memory;

/// What a pass reads.
pub(crate) struct ForwardBackward<'a> {
    pub model: &'a Model,
    pub lora: &'a LoraWeights,
    /// The reference's adapter; the base alone without one.
    pub reference: Option<&'a LoraWeights>,
    pub config: &'a TrainConfig,
    pub samples: &'a [TrainSample],
    /// The samples that are trained on.
    pub active: &'a [usize],
    pub objective: Objective,
    /// The length of each completion; 0 for those that are not trained on.
    pub lengths: Vec<usize>,
    /// The divisor of the `dr_grpo` loss.
    pub max_completion_tokens: usize,
    /// Compare recorded and recomputed log-probabilities of this version.
    pub current_version: Option<u64>,
    pub dropout_seed: u64,
    /// Reference log-probabilities by sample, kept from one pass to the next.
    pub references: &'a mut [Option<Vec<f64>>],
    /// Log-probabilities from before the step's first update by sample, kept likewise; filled where
    /// the objective wants them.
    pub old: &'a mut [Option<Vec<f64>>],
}

/// What a pass gives.
pub(crate) struct PassResult {
    /// The gradient of the loss by variable.
    pub gradients: BTreeMap<String, Tensor>,
    pub totals: Totals,
    /// Where the time went.
    pub split: StepTiming,
    /// `(sample, mean |recorded - recomputed|)` of samples of the current version.
    differences: Vec<(usize, f64)>,
}

impl PassResult {
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
    split: StepTiming,
    differences: Vec<(usize, f64)>,
    references: Vec<(usize, Vec<f64>)>,
    old: Vec<(usize, Vec<f64>)>,
}

/// Samples of one forward pass, numbered for dropout.
type Job = (u64, Vec<usize>);

impl ForwardBackward<'_> {
    pub fn run(&mut self) -> Result<PassResult> {
        let mut seconds = 0.0;
        let mut outcome = timed(&mut seconds, || self.all())?;
        outcome.split = outcome.split.scaled(seconds);
        Ok(outcome)
    }

    fn all(&mut self) -> Result<PassResult> {
        let mut outcome = PassResult {
            gradients: BTreeMap::new(),
            totals: Totals::of_a_pass(),
            split: StepTiming::default(),
            differences: Vec::new(),
        };
        let spec = self.model.spec();
        let tokens = memory::shard_tokens(spec);
        let mut serial = 0_u64;
        let mut number = |shard| {
            serial += 1;
            (serial, shard)
        };
        let batches: Vec<Vec<Job>> =
            packing::shards(self.samples, self.active, self.config.micro_batch, tokens)
                .into_iter()
                .map(|micro_batch| micro_batch.into_iter().map(&mut number).collect())
                .collect();
        let plan = self.plan(&batches)?;
        // Shards of a wide model come one by one, so that one shard's gradients are held.
        let parallel = memory::shards_in_parallel(spec);
        let waves = batches.iter().flat_map(|jobs| {
            let together = if parallel { jobs.len() } else { 1 };
            jobs.chunks(together.max(1))
        });
        for wave in waves {
            for shard in self.each(wave, |(serial, shard)| self.shard(*serial, shard, &plan)) {
                let shard = shard?;
                add_gradients(&mut outcome.gradients, shard.gradients)?;
                outcome.totals.add(&shard.totals);
                outcome.split.add(&shard.split);
                outcome.differences.extend(shard.differences);
                for (index, reference) in shard.references {
                    self.references[index] = Some(reference);
                }
                for (index, old) in shard.old {
                    self.old[index] = Some(old);
                }
            }
        }
        Ok(outcome)
    }

    /// Does something with each shard: side by side, one thread each, or, with a wide model, one
    /// after the other on all threads.
    fn each<T: Send>(&self, jobs: &[Job], f: impl Fn(&Job) -> Result<T> + Sync) -> Vec<Result<T>> {
        if memory::shards_in_parallel(self.model.spec()) {
            return jobs.par_iter().map(&f).collect();
        }
        with_threads(rayon::current_num_threads(), || jobs.iter().map(f).collect())
    }

    /// What depends on all samples, for which they may have to be run through first.
    fn plan(&self, batches: &[Vec<Job>]) -> Result<StepPlan> {
        let mut entropies = Vec::new();
        if self.objective.wants_entropies() {
            for jobs in batches {
                for shard in self.each(jobs, |(serial, shard)| self.entropies(*serial, shard)) {
                    entropies.extend(shard?);
                }
            }
        }
        Ok(self.objective.plan(&self.lengths, self.max_completion_tokens, &entropies))
    }

    /// The entropies of the tokens that are trained on, as the pass itself will see them.
    fn entropies(&self, serial: u64, indices: &[usize]) -> Result<Vec<f64>> {
        let layout = self.layout(indices)?;
        let trace = self.trace(&layout, self.dropout(serial).as_mut(), 0)?;
        let stats = self.stats(&layout, &trace.hidden().detach())?;
        let mut rest = columns(&stats)?.1;
        let mut out = Vec::with_capacity(rest.len());
        for index in indices {
            let own = rest.drain(..self.samples[*index].ids.len());
            if self.lengths[*index] > 0 {
                out.extend(own);
            }
        }
        Ok(out)
    }

    fn layout(&self, indices: &[usize]) -> Result<PackedBatch> {
        let parts: Vec<(&[u32], &[u32], f32)> = indices
            .iter()
            .map(|index| {
                let s = &self.samples[*index];
                (s.prompt_ids.as_slice(), s.ids.as_slice(), s.temperature)
            })
            .collect();
        PackedBatch::new(&parts, self.model.device())
    }

    fn shard(&self, serial: u64, indices: &[usize], plan: &StepPlan) -> Result<Shard> {
        let mut split = StepTiming::default();
        let begun = Instant::now();
        let layout = self.layout(indices)?;
        let mut dropout = self.dropout(serial);
        let keep = memory::kept_layers(self.config, self.model.spec(), layout.segments.tokens());
        let trace = self.trace(&layout, dropout.as_mut(), keep)?;
        let stats = self.stats(&layout, trace.hidden())?;
        let columns = columns(&stats)?;
        let references = timed(&mut split.reference, || self.references(&layout, indices))?;
        let missing = |index: &usize| self.old[*index].is_none();
        let wants_old = self.objective.wants_old() && indices.iter().any(missing);
        let plain = match &dropout {
            _ if self.current_version.is_none() && !wants_old => None,
            None => Some(columns.0.clone()),
            Some(_) => {
                let plain = self.trace(&layout, None, 0)?;
                Some(self::columns(&self.stats(&layout, &plain.hidden().detach())?)?.0)
            }
        };
        let mut shard = Shard {
            gradients: BTreeMap::new(),
            totals: Totals::default(),
            split,
            differences: Vec::new(),
            references: Vec::new(),
            old: Vec::new(),
        };
        shard.totals.computed = layout.segments.tokens() as f64;
        let mut slopes = LossGradients::default();
        let mut row = 0;
        for (place, index) in indices.iter().enumerate() {
            let sample = &self.samples[*index];
            let rows = row..row + sample.ids.len();
            row = rows.end;
            let plain = plain.as_ref().map(|plain| &plain[rows.clone()]);
            let old = self.old[*index].as_deref().or(plain).filter(|_| self.objective.wants_old());
            let rows = TokenRows {
                logprobs: &columns.0[rows.clone()],
                entropies: &columns.1[rows],
                old,
                reference: references.as_ref().map(|all| all[place].as_slice()),
            };
            plan.sample(*index, sample, &rows, &mut slopes, &mut shard.totals);
            shard.old.extend(old.map(|old| (*index, old.to_vec())));
            if let Some(plain) = plain
                && self.current_version == Some(sample.version)
            {
                let difference = shard.totals.compare(sample, plain);
                shard.differences.push((*index, difference));
            }
        }
        if let Some(references) = references {
            shard.references = indices.iter().copied().zip(references).collect();
        }
        shard.split.forward = begun.elapsed().as_secs_f64() - split.reference;
        shard.gradients =
            timed(&mut shard.split.backward, || self.gradients(trace, &stats, &slopes))?;
        Ok(shard)
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
    fn trace(
        &self,
        layout: &PackedBatch,
        dropout: Option<&mut Dropout>,
        keep: usize,
    ) -> Result<SavedActivations> {
        Ok(self.model.forward_saving(&layout.ids, &layout.segments, self.lora, dropout, keep)?)
    }

    /// `[tokens, 2]`: log-probability and entropy of every sampled token.
    fn stats(&self, layout: &PackedBatch, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.model.stats(hidden, &layout.rows, &layout.targets, &layout.temperatures)?)
    }

    /// Log-probabilities under the reference by sample; `None` where beta is 0.
    fn references(&self, layout: &PackedBatch, indices: &[usize]) -> Result<Option<Vec<Vec<f64>>>> {
        if self.config.beta == 0.0 {
            return Ok(None);
        }
        let kept: Option<Vec<_>> =
            indices.iter().map(|index| self.references[*index].clone()).collect();
        if kept.is_some() {
            return Ok(kept);
        }
        let hidden = self.model.hidden(&layout.ids, &layout.segments, self.reference, None)?;
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

    /// The loss depends on the network through the log-probabilities and entropies alone, so its
    /// gradient is that of their sum weighted by the loss's slopes.
    fn gradients(
        &self,
        trace: SavedActivations,
        stats: &Tensor,
        slopes: &LossGradients,
    ) -> Result<BTreeMap<String, Tensor>> {
        let count = slopes.logprob.len();
        let both = slopes.logprob.iter().zip(&slopes.entropy).flat_map(|(l, h)| [*l, *h]);
        let grad = Tensor::from_vec(both.collect::<Vec<f64>>(), (count, 2), self.model.device())?;
        Ok(self.model.backward(trace, stats, &grad.to_dtype(stats.dtype())?, self.lora)?)
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

#[cfg(test)]
mod tests;
