//! The reference policy: the base with the adapter off, or, where `train.kl.sync_steps` asks for it,
//! a mixture that follows the policy.
//!
//! Every so many steps `reference <- alpha policy + (1 - alpha) reference` (Gorbatovski et al. 2024,
//! TR-DPO; TRL's `sync_ref_model`), on the adapter's factors. The first time the base counts as the
//! policy's A with a zero B, so the reference's delta is then alpha times the policy's.

use std::collections::BTreeMap;

use candle_core::Tensor;

use hone_model::adapter::weights::LoraWeights;

use crate::config::KlConfig;
use crate::error::Result;

/// The reference's adapter, if it has one.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    /// Steps from one synchronisation to the next; 0 never synchronises.
    every: u64,
    /// The policy's share.
    alpha: f64,
    lora: Option<LoraWeights>,
}

impl Reference {
    /// The base.
    pub(crate) fn new(config: &KlConfig) -> Self {
        Self { every: config.sync_steps, alpha: config.sync_mixup, lora: None }
    }

    /// Follows the policy as it is after a step; `steps` counts it.
    pub(crate) fn observe(&mut self, policy: &LoraWeights, steps: u64) -> Result<()> {
        if self.every == 0 || !steps.is_multiple_of(self.every) {
            return Ok(());
        }
        let reference = match self.lora.take() {
            Some(reference) => reference,
            None => policy.zeroed_copy()?,
        };
        reference.lerp(policy, self.alpha)?;
        self.lora = Some(reference);
        Ok(())
    }

    /// Its adapter; `None` is the base alone.
    pub(crate) fn lora(&self) -> Option<&LoraWeights> {
        self.lora.as_ref()
    }

    /// Goes back to the base.
    pub(crate) fn clear(&mut self) {
        self.lora = None;
    }

    /// Its adapter under the PEFT names; empty for the base.
    pub(crate) fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        Ok(self.lora.as_ref().map_or_else(|| Ok(BTreeMap::new()), LoraWeights::tensors)?)
    }

    /// Goes on from a saved one, where it is synchronised at all.
    pub(crate) fn restore(&mut self, lora: Option<LoraWeights>) {
        self.lora = lora.filter(|_| self.every > 0);
    }
}

#[cfg(test)]
mod tests;
