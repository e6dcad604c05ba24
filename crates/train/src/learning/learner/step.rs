//! One optimizer step and its result.

use std::collections::BTreeMap;

use rand::Rng;

use super::{Learner, NO_SAMPLE};
use crate::data::packing::{TrainSample, sequences};
use crate::error::Result;
use crate::learning::forward_backward::{ForwardBackward, LogprobCache, PassOutput};
use crate::learning::objective::StepTotals;
use crate::learning::optimizer::clip_global_norm;
use crate::learning::{StepTiming, timed};

/// The result of an optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepStats {
    /// The metrics that `docs/training.md` lists, with the names that TRL gives them.
    ///
    /// Entropy and KL are means over tokens, in nats, at the sample's temperature. `clip_*` are fractions of
    /// ratios (of tokens, or of sequences) whose gradient a bound cut, `clip_low_min` and `clip_high_max`
    /// those of one sequence. `sampler_difference_*` is |recorded - recomputed| before the first update,
    /// dropout off; other metrics of the loss cover all `train.num_iterations` updates. Lengths are of all
    /// samples, trained on or not. `loss_token_fraction` is completion tokens per computed token, above 1 if
    /// many short completions share a prompt.
    ///
    /// Absent is what is not computed: `kl` if `train.beta` is 0, `clip_*` of losses without bounds,
    /// `sampler_ratio_*` without a correction, `sampler_difference_*` without samples of the current version,
    /// `joined_samples` without earlier turns, and `correction/*` without corrections, which count in `loss`,
    /// `num_tokens` and `loss_token_fraction` only.
    pub metrics: BTreeMap<String, f64>,
    /// The reason if the step changed nothing: no sample is left to train on, or a loss, gradient
    /// or updated value is not finite.
    pub skipped: Option<String>,
    /// Indices of samples left out because their mean |recorded - recomputed| log-probability
    /// exceeds 0.05 nats at the same policy version.
    pub refused: Vec<usize>,
    /// Indices of late samples left out because the policy has moved too far away from them.
    pub faded: Vec<usize>,
}

/// Metrics of completions from `(length in tokens, cut by the token limit)`: `completion_length`
/// (mean), `_min`, `_max`; `terminated_length` (of completions that were not cut; 0 without one),
/// `_min`, `_max`; `truncated_ratio`. Empty without completions.
pub(crate) fn completion_metrics(
    completions: impl IntoIterator<Item = (usize, bool)>,
) -> Vec<(String, f64)> {
    let (mut all, mut terminated) = (Vec::new(), Vec::new());
    for (length, truncated) in completions {
        all.push(length);
        if !truncated {
            terminated.push(length);
        }
    }
    if all.is_empty() {
        return Vec::new();
    }
    let truncated_ratio = (all.len() - terminated.len()) as f64 / all.len() as f64;
    let mut metrics = vec![("truncated_ratio".to_owned(), truncated_ratio)];
    for (name, lengths) in [("completion_length", &all), ("terminated_length", &terminated)] {
        let mean = lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64;
        let min = lengths.iter().min().copied().unwrap_or(0) as f64;
        let max = lengths.iter().max().copied().unwrap_or(0) as f64;
        metrics.push((name.to_owned(), mean));
        metrics.push((format!("{name}_min"), min));
        metrics.push((format!("{name}_max"), max));
    }
    metrics
}

impl Learner {
    /// One optimizer step of `train.num_iterations` updates on `samples`.
    ///
    /// `current_version` is the policy version that has the learner's weights, for whose samples recorded and
    /// recomputed log-probabilities must agree; unpublished weights have none, such as `u64::MAX`.
    /// `max_completion_tokens` is the divisor of the `dr_grpo` loss. If a loss, gradient or updated value is not
    /// finite, [`StepStats::skipped`] has the reason, and parameters, moments, average, schedule and random
    /// stream do not change.
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
        let serves_own = self.average.as_ref().is_none_or(|average| average.count < 2);
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
            let config = &self.config;
            let update =
                || self.optimizer.update(config, &parameters, &pass.gradients, learning_rate);
            if !timed(&mut self.timing.optimizer, update)? {
                stats.skipped = Some("an updated value is not finite".to_owned());
                break;
            }
            self.adaptive.update(&pass.totals, &self.config);
        }
        if stats.skipped.is_none() {
            let step = self.steps + 1;
            if let Some(average) = &mut self.average {
                average.observe(&self.lora, step, &self.config)?;
            }
            self.reference.observe(&self.lora, step, &self.config.kl)?;
            self.steps = step;
            self.restart = self.restart.saturating_sub(1);
        }
        totals.insert_metrics(&self.config, &mut stats.metrics);
        self.insert_metrics(samples, learning_rate, &norms, &mut stats);
        Ok(stats)
    }

    /// Runs passes until one leaves out no sample, because the loss's normalizer counts all samples of a
    /// pass; `None` if no sample is left.
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
                device: self.device.as_deref(),
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
        if self.config.entropy.coef > 0.0 || self.config.entropy.is_adaptive() {
            put("entropy_coef", self.adaptive.entropy_coef);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_metrics_cover_all_and_terminated_completions() {
        let metrics: BTreeMap<String, f64> =
            completion_metrics([(4, false), (10, true), (2, false)]).into_iter().collect();
        for (name, value) in [
            ("completion_length", 16.0 / 3.0),
            ("completion_length_min", 2.0),
            ("completion_length_max", 10.0),
            ("terminated_length", 3.0),
            ("terminated_length_min", 2.0),
            ("terminated_length_max", 4.0),
            ("truncated_ratio", 1.0 / 3.0),
        ] {
            assert_eq!(metrics[name], value, "{name}");
        }
        // As in TRL, lengths are 0 if every completion was cut.
        let metrics: BTreeMap<String, f64> = completion_metrics([(4, true)]).into_iter().collect();
        assert_eq!((metrics["terminated_length"], metrics["truncated_ratio"]), (0.0, 1.0));
        assert!(completion_metrics([]).is_empty());
    }
}
