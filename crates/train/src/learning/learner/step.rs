//! One optimizer step.

use rand::Rng;

use super::{Learner, NO_SAMPLE, StepStats};
use crate::data::packing::{TrainSample, sequences};
use crate::error::Result;
use crate::learning::forward_backward::{ForwardBackward, LogprobCache, PassOutput};
use crate::learning::objective::StepTotals;
use crate::learning::optimizer::clip_global_norm;
use crate::learning::step_stats::completion_metrics;
use crate::learning::{StepTiming, timed};

impl Learner {
    /// One optimizer step of `train.num_iterations` updates on `samples`.
    ///
    /// `current_version` is the policy version that has the learner's weights; for samples of it,
    /// recorded and recomputed log-probabilities must agree. Unpublished weights have no version:
    /// pass one that no sample has, such as `u64::MAX`. `max_completion_tokens` is the divisor of
    /// the `dr_grpo` loss.
    ///
    /// If a loss, gradient or updated value of any iteration is not finite, [`StepStats::skipped`]
    /// has the reason, and parameters, moments, average, schedule and random stream are as before
    /// the step.
    ///
    /// # Errors
    /// If a sample is malformed or a tensor operation fails; nothing is changed then either.
    pub fn step(
        &mut self,
        samples: &[TrainSample],
        current_version: u64,
        max_completion_tokens: usize,
    ) -> Result<StepStats> {
        for (index, sample) in samples.iter().enumerate() {
            sample.validate(index, self.spec().vocab_size)?;
        }
        let (rng, adaptive, tokens) = (self.rng.clone(), self.adaptive, self.tokens);
        // A single iteration updates parameters last, so it never has to be undone.
        let parameters = match self.config.num_iterations {
            1 => None,
            _ => Some((self.lora.tensors()?, self.optimizer.clone())),
        };
        let result = self.try_step(samples, current_version, max_completion_tokens);
        if result.as_ref().map_or(true, |stats| stats.skipped.is_some()) {
            (self.rng, self.adaptive, self.tokens) = (rng, adaptive, tokens);
            if let Some((tensors, optimizer)) = parameters {
                self.lora.assign(&tensors)?;
                self.optimizer = optimizer;
            }
        }
        result
    }

    /// As [`Self::step`], but a skipped or failed step may leave changes.
    fn try_step(
        &mut self,
        samples: &[TrainSample],
        current_version: u64,
        max_completion_tokens: usize,
    ) -> Result<StepStats> {
        self.timing = StepTiming::default();
        let mut stats = StepStats::default();
        let masks_truncated = self.config.mask_truncated_completions;
        let without_corrections = self.config.correction_weight == 0.0;
        let trains_on = |index: &usize| {
            let sample = &samples[*index];
            !(masks_truncated && sample.truncated || without_corrections && sample.correction)
                && sample.trained_tokens() > 0
        };
        let mut active: Vec<usize> = (0..samples.len()).filter(trains_on).collect();
        let learning_rate = super::super::learning_rate(&self.config, self.steps)
            * super::super::restart_factor(&self.config, self.restart);
        // Samples come from the served weights. An average of several steps differs from the weights
        // that the first pass computes with.
        let serves_own = self.average.as_ref().is_none_or(|average| average.count() < 2);
        let mut totals = StepTotals::default();
        let mut cache = LogprobCache::default();
        let mut norms = Vec::new();
        for iteration in 0..self.config.num_iterations {
            let version = (iteration == 0 && serves_own).then_some(current_version);
            let pass = self.forward_backward(
                samples,
                &mut active,
                version,
                max_completion_tokens,
                &mut cache,
                &mut stats,
            )?;
            let Some(mut pass) = pass else {
                stats.skipped = Some(NO_SAMPLE.to_owned());
                break;
            };
            totals.add(&pass.totals);
            let clip = || clip_global_norm(&mut pass.gradients, self.config.max_grad_norm);
            let norm = timed(&mut self.timing.optimizer, clip)?;
            if !(pass.totals.loss.is_finite() && norm.is_finite()) {
                stats.skipped = Some(format!("loss {}, gradient norm {norm}", pass.totals.loss));
                break;
            }
            norms.push(norm);
            let parameters = self.lora.parameters();
            let update = || self.optimizer.update(&parameters, &pass.gradients, learning_rate);
            if !timed(&mut self.timing.optimizer, update)? {
                stats.skipped = Some("an updated value is not finite".to_owned());
                break;
            }
            self.adaptive.update(&pass.totals, &self.config);
        }
        if stats.skipped.is_none() {
            let step = self.steps + 1;
            if let Some(average) = &mut self.average {
                average.observe(&self.lora, step)?;
            }
            self.reference.observe(&self.lora, step)?;
            self.steps = step;
            self.restart = self.restart.saturating_sub(1);
        }
        totals.insert_metrics(&self.config, &mut stats.metrics);
        self.insert_metrics(samples, learning_rate, &norms, &mut stats);
        Ok(stats)
    }

    /// Runs passes until one refuses no sample and finds none faded; `None` if no sample is left. The
    /// loss's normalizer counts all samples of a pass, so a pass that left out samples is repeated
    /// without them.
    fn forward_backward(
        &mut self,
        samples: &[TrainSample],
        active: &mut Vec<usize>,
        current_version: Option<u64>,
        max_completion_tokens: usize,
        cache: &mut LogprobCache,
        stats: &mut StepStats,
    ) -> Result<Option<PassOutput>> {
        let dropout_seed = self.rng.random();
        while !active.is_empty() {
            let mut lengths = vec![0; samples.len()];
            for index in active.iter().filter(|index| !samples[**index].correction) {
                lengths[*index] = samples[*index].trained_tokens();
            }
            let mut pass = ForwardBackward {
                model: &self.model,
                lora: &self.lora,
                reference: self.reference.lora(),
                config: &self.config,
                samples,
                active,
                adaptive: self.adaptive,
                lengths,
                max_completion_tokens,
                longest_shard: self.longest_shard,
                current_version,
                dropout_seed,
                cache,
            }
            .run()?;
            self.timing.add(&pass.timing);
            cache.extend(std::mem::take(&mut pass.logprobs));
            let rejected = pass.refused(self.config.max_sampler_difference);
            let faded = pass.faded();
            if rejected.is_empty() && faded.is_empty() {
                return Ok(Some(pass));
            }
            active.retain(|index| !rejected.contains(index) && !faded.contains(index));
            stats.refused.extend(rejected);
            stats.faded.extend(faded);
        }
        Ok(None)
    }

    /// Inserts the metrics that need no pass. `norms` are the gradient norms of the updates.
    fn insert_metrics(
        &mut self,
        samples: &[TrainSample],
        learning_rate: f64,
        norms: &[f64],
        stats: &mut StepStats,
    ) {
        let tokens: usize = samples.iter().map(|s| s.prompt_ids.len() + s.ids.len()).sum();
        self.tokens += tokens as u64;
        let sampled = samples.iter().filter(|s| !s.correction);
        let lengths = sampled.map(|s| (s.ids.len(), s.truncated));
        stats.metrics.extend(completion_metrics(lengths));
        let mut put = |name: &str, value| stats.metrics.insert(name.to_owned(), value);
        put("num_tokens", self.tokens as f64);
        put("learning_rate", learning_rate);
        let all: Vec<usize> = (0..samples.len()).collect();
        let joined =
            sequences(samples, &all).into_iter().zip(all).filter(|(own, index)| own != index);
        let joined = joined.count();
        if joined > 0 {
            put("joined_samples", joined as f64);
        }
        if !norms.is_empty() {
            put("grad_norm", norms.iter().sum::<f64>() / norms.len() as f64);
        }
        if self.config.kl.target > 0.0 {
            put("beta", self.adaptive.beta);
        }
        if self.config.entropy.coef > 0.0 || self.config.entropy.adaptive {
            put("entropy_coef", self.adaptive.entropy_coef);
        }
    }
}
