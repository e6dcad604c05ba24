//! One pass over a step's samples: loss, gradient and statistics, shard by shard.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::batch::{Layout, TrainSample};
use super::error::Result;
use super::lora::{Dropout, Lora};
use super::model::{Model, token_stats};
use super::objective::{Objective, Plan, Rows, Slopes, Totals};
use crate::config::TrainConfig;

/// Samples of one forward and backward pass. Fixed, so that results do not depend on the number of
/// threads. From 4 to 32 a step costs the same processor time within noise (see `step_bench`); 8 of
/// the default 64 samples leave enough shards for several cores and hold few activations.
const SHARD: usize = 8;

/// What a pass reads.
pub(super) struct Pass<'a> {
    pub model: &'a Model,
    pub lora: &'a Lora,
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
    old: Vec<(usize, Vec<f64>)>,
}

/// Samples of one forward pass, numbered for dropout.
type Job<'a> = (u64, &'a [usize]);

impl Pass<'_> {
    pub fn run(&mut self) -> Result<Outcome> {
        // Samples of like length share a shard, so that little is computed for padding.
        let mut order = self.active.to_vec();
        order.sort_by_key(|index| (self.samples[*index].positions(), *index));
        let mut outcome = Outcome {
            gradients: BTreeMap::new(),
            totals: Totals::of_a_pass(),
            differences: Vec::new(),
        };
        let mut serial = 0_u64;
        let mut number = |shard| {
            serial += 1;
            (serial, shard)
        };
        let batches: Vec<Vec<Job<'_>>> = order
            .chunks(self.config.micro_batch)
            .map(|micro_batch| micro_batch.chunks(SHARD).map(&mut number).collect())
            .collect();
        let plan = self.plan(&batches)?;
        for jobs in batches {
            let this: &Self = self;
            let shards: Vec<Result<Shard>> = jobs
                .into_par_iter()
                .map(|(serial, shard)| this.shard(serial, shard, &plan))
                .collect();
            for shard in shards {
                let shard = shard?;
                add_gradients(&mut outcome.gradients, shard.gradients)?;
                outcome.totals.add(&shard.totals);
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

    /// What depends on all samples, for which they may have to be run through first.
    fn plan(&self, batches: &[Vec<Job<'_>>]) -> Result<Plan> {
        let mut entropies = Vec::new();
        if self.objective.wants_entropies() {
            for jobs in batches {
                let shards: Vec<Result<Vec<f64>>> =
                    jobs.par_iter().map(|(serial, shard)| self.entropies(*serial, shard)).collect();
                for shard in shards {
                    entropies.extend(shard?);
                }
            }
        }
        Ok(self.objective.plan(&self.lengths, self.max_completion_tokens, &entropies))
    }

    /// The entropies of the tokens that are trained on, as the pass itself will see them.
    fn entropies(&self, serial: u64, indices: &[usize]) -> Result<Vec<f64>> {
        let layout = self.layout(indices)?;
        let stats = self.stats(&layout, Some(self.lora), self.dropout(serial).as_mut())?;
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

    fn layout(&self, indices: &[usize]) -> Result<Layout> {
        let parts: Vec<(&[u32], &[u32], f32)> = indices
            .iter()
            .map(|index| {
                let s = &self.samples[*index];
                (s.prompt_ids.as_slice(), s.ids.as_slice(), s.temperature)
            })
            .collect();
        Layout::new(&parts, self.model.device())
    }

    fn shard(&self, serial: u64, indices: &[usize], plan: &Plan) -> Result<Shard> {
        let layout = self.layout(indices)?;
        let mut dropout = self.dropout(serial);
        let stats = self.stats(&layout, Some(self.lora), dropout.as_mut())?;
        let columns = columns(&stats)?;
        let references = self.references(&layout, indices)?;
        let missing = |index: &usize| self.old[*index].is_none();
        let wants_old = self.objective.wants_old() && indices.iter().any(missing);
        let plain = match &dropout {
            _ if self.current_version.is_none() && !wants_old => None,
            None => Some(columns.0.clone()),
            Some(_) => Some(self::columns(&self.stats(&layout, Some(self.lora), None)?)?.0),
        };
        let mut shard = Shard {
            gradients: BTreeMap::new(),
            totals: Totals::default(),
            differences: Vec::new(),
            references: Vec::new(),
            old: Vec::new(),
        };
        let mut slopes = Slopes::default();
        let mut row = 0;
        for (place, index) in indices.iter().enumerate() {
            let sample = &self.samples[*index];
            let rows = row..row + sample.ids.len();
            row = rows.end;
            let plain = plain.as_ref().map(|plain| &plain[rows.clone()]);
            let old = self.old[*index].as_deref().or(plain).filter(|_| self.objective.wants_old());
            let rows = Rows {
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
        shard.gradients = self.gradients(&stats, &slopes)?;
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

    /// `[tokens, 2]`: log-probability and entropy of every sampled token.
    fn stats(
        &self,
        layout: &Layout,
        lora: Option<&Lora>,
        dropout: Option<&mut Dropout>,
    ) -> Result<Tensor> {
        let hidden = self.model.hidden(&layout.ids, lora, dropout)?;
        let logits = self.model.logits(&hidden.index_select(&layout.rows, 0)?)?;
        Ok(token_stats(&logits, &layout.targets, &layout.temperatures)?)
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
        let logprobs = columns(&self.stats(layout, None, None)?)?.0;
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
    fn gradients(&self, stats: &Tensor, slopes: &Slopes) -> Result<BTreeMap<String, Tensor>> {
        let count = slopes.logprob.len();
        let seeds = slopes.logprob.iter().zip(&slopes.entropy).flat_map(|(l, h)| [*l, *h]);
        let seeds = Tensor::from_vec(seeds.collect::<Vec<f64>>(), (count, 2), self.model.device())?
            .to_dtype(stats.dtype())?;
        let store = (stats * seeds)?.sum_all()?.backward()?;
        let mut gradients = BTreeMap::new();
        for (name, var) in self.lora.parameters() {
            let gradient = match store.get(var.as_tensor()) {
                Some(gradient) => gradient.clone(),
                None => var.zeros_like()?,
            };
            gradients.insert(name, gradient);
        }
        Ok(gradients)
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
