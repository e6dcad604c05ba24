//! An average of the adapter over steps, which is served in place of the last values.
//!
//! Exponential (Polyak & Juditsky 1992, as `torch.optim.swa_utils.get_ema_multi_avg_fn`) or uniform
//! from some step on (Izmailov et al. 2018, stochastic weight averaging). The first values are
//! copied, so neither average leans to a start that was never trained. Factors are averaged, not
//! their products.

use std::collections::BTreeMap;

use candle_core::Tensor;

use hone_model::adapter::weights::LoraWeights;

use crate::config::TrainConfig;
use crate::error::Result;

#[derive(Clone, Copy, Debug)]
enum AverageKind {
    /// `avg <- decay avg + (1 - decay) p`
    Exponential(f64),
    /// `avg <- avg + (p - avg) / n`, n counted from this step on.
    Uniform(u64),
}

/// The average, once there is one.
#[derive(Clone, Debug)]
pub(crate) struct Average {
    kind: AverageKind,
    lora: Option<LoraWeights>,
    /// Values averaged.
    count: u64,
}

impl Average {
    /// What the settings ask for: `train.ema_decay` above 0, or `train.swa_start` above 0.
    pub(crate) fn new(config: &TrainConfig) -> Option<Self> {
        let kind = if config.ema_decay > 0.0 {
            AverageKind::Exponential(config.ema_decay)
        } else if config.swa_start > 0 {
            AverageKind::Uniform(config.swa_start)
        } else {
            return None;
        };
        Some(Self { kind, lora: None, count: 0 })
    }

    /// Takes in the values after a step; `steps` counts it.
    pub(crate) fn observe(&mut self, lora: &LoraWeights, steps: u64) -> Result<()> {
        let share = match self.kind {
            AverageKind::Uniform(start) if steps < start => return Ok(()),
            AverageKind::Uniform(_) => 1.0 / (self.count + 1) as f64,
            AverageKind::Exponential(decay) => 1.0 - decay,
        };
        match &self.lora {
            None => self.lora = Some(lora.copy()?),
            Some(average) => average.lerp(lora, share)?,
        }
        self.count += 1;
        Ok(())
    }

    /// The average; `None` before the first values.
    pub(crate) fn lora(&self) -> Option<&LoraWeights> {
        self.lora.as_ref()
    }

    /// Values averaged. The average of one is that one.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Starts over.
    pub(crate) fn clear(&mut self) {
        (self.lora, self.count) = (None, 0);
    }

    /// The average under its PEFT names; empty before the first values.
    pub(crate) fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        Ok(self.lora.as_ref().map_or_else(|| Ok(BTreeMap::new()), LoraWeights::tensors)?)
    }

    /// Goes on from a saved average.
    pub(crate) fn restore(&mut self, lora: Option<LoraWeights>, count: u64) {
        self.count = if lora.is_some() { count } else { 0 };
        self.lora = lora;
    }
}

#[cfg(test)]
mod tests;
