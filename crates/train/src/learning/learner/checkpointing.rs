//! What of a learner is kept: checkpoints, and the way back to an earlier adapter.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::Tensor;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use hone_model::ModelError;
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{ModuleScale, peft};

use super::Learner;
use crate::error::Result;
use crate::learning::average::Average;
use crate::learning::checkpoint;
use crate::learning::checkpoint::{Checkpoint, LearnerState};
use crate::learning::objective::AdaptiveCoefficients;

impl Learner {
    /// Rolls the policy back to a PEFT directory, or to the base with a fresh adapter, and forgets
    /// the optimiser's moments, the average, a synchronised reference and what adaptive coefficients
    /// have come to. The step count and the schedule go on.
    ///
    /// # Errors
    /// If the adapter cannot be read or has other ranks, scales or modules than `train.lora`; nothing
    /// is changed then.
    pub fn reset_to(&mut self, adapter: Option<&Path>) -> Result<()> {
        let spec = self.model.spec();
        let (dtype, device) = (self.model.dtype(), self.model.device());
        self.lora = match adapter {
            None => {
                let mut rng = ChaCha8Rng::seed_from_u64(self.config.seed);
                LoraWeights::fresh(spec, &self.config.lora, &mut rng, dtype, device)?
            }
            Some(dir) => {
                let (_, lora) = peft::read(dir, spec, dtype, device)?;
                self.same_shape(&lora.module_scales())
                    .map_err(|reason| ModelError::adapter(dir, reason))?;
                lora
            }
        };
        self.optimizer.clear();
        self.adaptive = AdaptiveCoefficients::new(&self.config);
        self.reference.clear();
        if let Some(average) = &mut self.average {
            average.clear();
        }
        Ok(())
    }

    /// Whether an adapter has the ranks, scales and modules of `train.lora`, however they are put.
    fn same_shape(&self, found: &BTreeMap<String, ModuleScale>) -> std::result::Result<(), String> {
        let own = self.lora.module_scales();
        if let Some(module) = own.keys().find(|module| !found.contains_key(*module)) {
            return Err(format!("it has nothing on {module}, which `train.lora` asks for"));
        }
        for (module, theirs) in found {
            let Some(ours) = own.get(module) else {
                return Err(format!("it is on {module} too, which `train.lora` leaves out"));
            };
            let differs = |what: &str, theirs: String, ours: String| {
                Err(format!("its {what} on {module} is {theirs}, but `train.lora` gives {ours}"))
            };
            if theirs.r != ours.r {
                return differs("rank", theirs.r.to_string(), ours.r.to_string());
            }
            if (theirs.scale - ours.scale).abs() > 1e-9 * ours.scale.abs() {
                return differs("scale", theirs.scale.to_string(), ours.scale.to_string());
            }
        }
        Ok(())
    }

    /// Writes everything needed to go on exactly to `dir`, whole or not at all, with `extra` for
    /// what the caller keeps. Floats in `extra` should be written as bits: JSON text may round.
    ///
    /// # Errors
    /// If a file cannot be written; an older checkpoint there is kept then.
    pub fn save(&self, dir: &Path, extra: &Value) -> Result<()> {
        let average = self.average.as_ref();
        let state = LearnerState {
            step: self.steps,
            updates: self.optimizer.updates(),
            rng: self.rng.clone(),
            model: self.model.digest()?,
            lora: self.config.lora.clone(),
            adaptive: Some(self.adaptive),
            tokens: self.tokens,
            factors: self.lora.module_scales(),
            averaged: average.map_or(0, Average::count),
            extra: extra.clone(),
        };
        let average = average.map_or_else(|| Ok(BTreeMap::new()), Average::tensors)?;
        let (adapter, moments) = (self.lora.tensors()?, self.optimizer.tensors()?);
        let reference = self.reference.tensors()?;
        checkpoint::save(dir, &Checkpoint { state, adapter, moments, average, reference })
    }

    /// Goes on from a checkpoint; returns the `extra` it was saved with.
    ///
    /// # Errors
    /// If the checkpoint is torn, of another base model, or of an adapter with other settings than
    /// `train.lora`; nothing is changed then.
    pub fn load(&mut self, dir: &Path) -> Result<Value> {
        let device = self.model.device().clone();
        let loaded = checkpoint::load(dir, &device)?;
        let wrong = |reason: String| checkpoint::wrong(dir, reason);
        if loaded.state.model != self.model.digest()? {
            return Err(wrong("it belongs to another base model".to_owned()));
        }
        let (spec, dtype) = (self.model.spec(), self.model.dtype());
        let saved = loaded.state.factors(spec).map_err(|e| wrong(e.to_string()))?;
        self.same_shape(&saved).map_err(wrong)?;
        let read = |tensors| {
            LoraWeights::from_tensors(spec, &self.config.lora, tensors, dtype, &device)
                .map_err(|e| wrong(e.to_string()))
        };
        let lora = read(loaded.adapter)?;
        let where_saved = |tensors: BTreeMap<String, Tensor>| {
            if tensors.is_empty() { Ok(None) } else { read(tensors).map(Some) }
        };
        let (averaged, reference) = (where_saved(loaded.average)?, where_saved(loaded.reference)?);
        self.optimizer
            .restore(loaded.state.updates, &lora.parameters(), loaded.moments)
            .map_err(|e| wrong(e.to_string()))?;
        if let Some(average) = &mut self.average {
            average.restore(averaged, loaded.state.averaged);
        }
        self.reference.restore(reference);
        self.lora = lora;
        self.rng = loaded.state.rng;
        self.steps = loaded.state.step;
        self.adaptive = loaded.state.adaptive.map_or_else(
            || AdaptiveCoefficients::new(&self.config),
            |adaptive| adaptive.configured(&self.config),
        );
        self.tokens = loaded.state.tokens;
        Ok(loaded.state.extra)
    }
}
