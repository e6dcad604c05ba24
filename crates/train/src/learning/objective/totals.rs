//! Sums over tokens, samples and passes, and the figures that they come to.

use std::collections::BTreeMap;

use crate::config::{LossKind, TrainConfig};
use crate::data::packing::TrainSample;
use crate::learning::loss::{LossSequence, SequenceLoss};

/// Least, sum, greatest and number of a set of values.
#[derive(Clone, Copy, Debug)]
struct Spread {
    least: f64,
    sum: f64,
    greatest: f64,
    count: f64,
}

impl Default for Spread {
    fn default() -> Self {
        Self { least: f64::INFINITY, sum: 0.0, greatest: f64::NEG_INFINITY, count: 0.0 }
    }
}

impl Spread {
    fn add(&mut self, value: f64) {
        self.join(&Self { least: value, sum: value, greatest: value, count: 1.0 });
    }

    fn join(&mut self, other: &Self) {
        self.least = self.least.min(other.least);
        self.sum += other.sum;
        self.greatest = self.greatest.max(other.greatest);
        self.count += other.count;
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}

/// What passes count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub passes: f64,
    pub samples: f64,
    pub loss: f64,
    tokens: f64,
    /// Tokens of the forward passes.
    pub computed: f64,
    kl: Option<f64>,
    entropy: f64,
    open: (f64, f64),
    off_policy: f64,
    /// By sequence: the share of its ratios that a bound cut.
    clipped_low: Spread,
    clipped_high: Spread,
    /// Over all ratios.
    cut_low: f64,
    cut_high: f64,
    ratio: Spread,
    sampler_ratio: Spread,
    /// By sequence: its weight by `vespo`.
    phi: Spread,
    /// |recorded - recomputed| of samples of the current version.
    difference: Spread,
}

impl Totals {
    /// Nothing but a pass.
    pub fn of_a_pass() -> Self {
        Self { passes: 1.0, ..Self::default() }
    }

    /// Counts one sequence.
    pub fn sequence(&mut self, sequence: &LossSequence<'_>, loss: &SequenceLoss) {
        self.samples += 1.0;
        self.tokens += sequence.logprobs.len() as f64;
        self.loss += loss.loss;
        if sequence.reference.is_some() {
            *self.kl.get_or_insert(0.0) += loss.kl;
        }
        self.entropy += sequence.entropies.iter().sum::<f64>();
        self.open.0 += loss.open.0 as f64;
        self.open.1 += loss.open.1;
        self.off_policy += f64::from(u8::from(loss.off_policy));
        self.clipped_low.add(loss.clipped_low);
        self.clipped_high.add(loss.clipped_high);
        let ratios = loss.ratios.len() as f64;
        self.cut_low += loss.clipped_low * ratios;
        self.cut_high += loss.clipped_high * ratios;
        loss.ratios.iter().for_each(|ratio| self.ratio.add(*ratio));
        loss.sampler_weights.iter().for_each(|weight| self.sampler_ratio.add(*weight));
        loss.phi.iter().for_each(|phi| self.phi.add(*phi));
    }

    /// Adds one sample's |recorded - recomputed| log-probabilities; returns their mean.
    pub fn compare(&mut self, sample: &TrainSample, recomputed: &[f64]) -> f64 {
        let mut own = Spread::default();
        for (recorded, recomputed) in sample.logprobs.iter().zip(recomputed) {
            own.add((f64::from(*recorded) - recomputed).abs());
        }
        self.difference.join(&own);
        own.sum / recomputed.len() as f64
    }

    /// Adds what another shard or pass counted.
    pub fn add(&mut self, other: &Self) {
        self.passes += other.passes;
        self.samples += other.samples;
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.computed += other.computed;
        if let Some(kl) = other.kl {
            *self.kl.get_or_insert(0.0) += kl;
        }
        self.entropy += other.entropy;
        self.open.0 += other.open.0;
        self.open.1 += other.open.1;
        self.off_policy += other.off_policy;
        self.cut_low += other.cut_low;
        self.cut_high += other.cut_high;
        for (own, other) in [
            (&mut self.clipped_low, &other.clipped_low),
            (&mut self.clipped_high, &other.clipped_high),
            (&mut self.ratio, &other.ratio),
            (&mut self.sampler_ratio, &other.sampler_ratio),
            (&mut self.phi, &other.phi),
            (&mut self.difference, &other.difference),
        ] {
            own.join(other);
        }
    }

    /// Mean of the KL term over tokens; `None` where it is not computed.
    pub fn kl(&self) -> Option<f64> {
        self.kl.map(|kl| kl / self.tokens.max(1.0))
    }

    /// Mean entropy of the tokens that the bonus acts on.
    pub fn open_entropy(&self) -> Option<f64> {
        (self.open.0 > 0.0).then(|| self.open.1 / self.open.0)
    }

    /// Means under the names that `StepStats` lists.
    pub fn describe(&self, config: &TrainConfig, metrics: &mut BTreeMap<String, f64>) {
        let mut put = |name: &str, value: f64| metrics.insert(name.to_owned(), value);
        if self.tokens > 0.0 {
            put("loss", self.loss / self.passes);
            put("entropy", self.entropy / self.tokens);
            put("tokens", self.tokens / self.passes);
            put("loss_token_fraction", self.tokens / self.computed.max(1.0));
            put("samples", self.samples / self.passes);
            if let Some(kl) = self.kl() {
                put("kl", kl);
            }
            if config.off_policy_mask_threshold > 0.0 {
                put("off_policy_ratio", self.off_policy / self.samples);
            }
        }
        if let Some(mean) = self.ratio.mean() {
            put("ratio_min", self.ratio.least);
            put("ratio_mean", mean);
            put("ratio_max", self.ratio.greatest);
            let clips = config.loss.clips();
            if clips {
                put("clip_low", self.cut_low / self.ratio.count);
                put("clip_low_min", self.clipped_low.least);
                put("clip_region", (self.cut_low + self.cut_high) / self.ratio.count);
            }
            if clips || config.loss == LossKind::Cispo {
                put("clip_high", self.cut_high / self.ratio.count);
                put("clip_high_max", self.clipped_high.greatest);
            }
        }
        if let Some(mean) = self.sampler_ratio.mean() {
            put("sampler_ratio_min", self.sampler_ratio.least);
            put("sampler_ratio_mean", mean);
            put("sampler_ratio_max", self.sampler_ratio.greatest);
        }
        if let Some(mean) = self.phi.mean() {
            put("vespo_phi", mean);
        }
        if let Some(mean) = self.difference.mean() {
            put("sampler_difference_mean", mean);
            put("sampler_difference_max", self.difference.greatest);
        }
    }
}
