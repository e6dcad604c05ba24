//! A copy of the policy, to be published while training continues.

use std::path::Path;

use candle_core::DType;

use hone_model::Model;
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{LoraConfig, peft};

use crate::data::packing::{PackedBatch, TrainSample};
use crate::error::Result;

/// A copy of the served adapter that later steps do not change, over the shared base model.
pub struct Snapshot {
    pub(crate) model: Model,
    pub(crate) lora: LoraWeights,
    pub(crate) config: LoraConfig,
}

impl Snapshot {
    /// Natural-log probability of each of `ids` after `prompt`, at `temperature`.
    ///
    /// # Errors
    /// If `prompt` or `ids` is empty, an id is outside the vocabulary, or the temperature is not
    /// above 0.
    pub fn score(&self, prompt: &[u32], ids: &[u32], temperature: f32) -> Result<Vec<f32>> {
        let sample = TrainSample {
            prompt_ids: prompt.to_vec(),
            ids: ids.to_vec(),
            logprobs: vec![0.0; ids.len()],
            masked: Vec::new(),
            temperature,
            advantage: 0.0,
            version: 0,
            truncated: false,
            late: false,
            correction: false,
        };
        sample.validate(0, self.model.spec().vocab_size)?;
        let layout = PackedBatch::new(&[(prompt, ids, temperature)], self.model.device())?;
        let saved =
            self.model.forward_saving(&layout.ids, &layout.segments, &self.lora, None, 0)?;
        let hidden = saved.hidden().detach();
        let PackedBatch { rows, targets, temperatures, .. } = &layout;
        let stats = self.model.stats(&hidden, rows, targets, temperatures)?;
        Ok(stats.narrow(1, 0, 1)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
    }

    /// The base model: the same adapter with a delta of 0.
    ///
    /// # Errors
    /// If a tensor cannot be created.
    pub fn base(&self) -> Result<Self> {
        Ok(Self {
            model: self.model.clone(),
            lora: self.lora.zeroed_copy()?,
            config: self.config.clone(),
        })
    }

    /// The adapter in a PEFT directory, over the same base model.
    ///
    /// # Errors
    /// If the adapter cannot be read or does not fit the model.
    pub fn with_adapter(&self, dir: &Path) -> Result<Self> {
        let (config, lora) = peft::read(dir, self.model.spec(), DType::F32, self.model.device())?;
        Ok(Self { model: self.model.clone(), lora, config })
    }

    /// Writes the adapter as a PEFT directory and syncs it to disk.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, dir: &Path, base_model_name: &str) -> Result<()> {
        Ok(peft::write(dir, &self.lora, &self.config, base_model_name)?)
    }
}
