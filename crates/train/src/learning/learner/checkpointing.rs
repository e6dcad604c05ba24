//! Saves and restores a learner, and rolls it back to an earlier policy.

use std::collections::BTreeMap;
use std::path::Path;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use hone_model::ModelError;
use hone_model::adapter::weights::{LoraWeights, named_plan};
use hone_model::adapter::{ModuleScale, peft};

use super::Learner;
use crate::error::Result;
use crate::learning::Average;
use crate::learning::checkpoint::{self, Checkpoint, LearnerState};
use crate::learning::objective::AdaptiveCoefficients;
use crate::learning::restart_steps;

impl Learner {
    /// Rolls the policy back to the adapter in a PEFT directory, or to the base with a fresh
    /// adapter. This resets the optimizer's moments, the average, the adaptive coefficients and a
    /// synchronized reference, which becomes the initial one. The step count and the schedule continue,
    /// with a warm-up of the new moments on top of it unless no step was taken yet.
    ///
    /// # Errors
    /// If the adapter cannot be read or differs from `train.lora` in ranks, scales or modules;
    /// nothing is changed then.
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
                self.check_shape(&lora.module_scales())
                    .map_err(|reason| ModelError::adapter(dir, reason))?;
                lora
            }
        };
        self.optimizer.clear();
        self.restart = if self.steps > 0 { restart_steps(&self.config) } else { 0 };
        self.adaptive = AdaptiveCoefficients::new(&self.config);
        self.reference.reset();
        self.average = Average::new(&self.config);
        Ok(())
    }

    /// Checks that an adapter's modules have the ranks and scales of the trained one.
    fn check_shape(
        &self,
        found: &BTreeMap<String, ModuleScale>,
    ) -> std::result::Result<(), String> {
        let own = self.lora.module_scales();
        if let Some(module) = own.keys().find(|module| !found.contains_key(*module)) {
            return Err(format!("it has nothing on {module}, which `train.lora` includes"));
        }
        for (module, found) in found {
            let Some(own) = own.get(module) else {
                return Err(format!("it is on {module} too, which `train.lora` leaves out"));
            };
            if found.r != own.r || (found.scale - own.scale).abs() > 1e-9 * own.scale.abs() {
                return Err(format!(
                    "on {module} its rank is {} and its scale {}, but `train.lora` sets {} and {}",
                    found.r, found.scale, own.r, own.scale
                ));
            }
        }
        Ok(())
    }

    /// Returns to the policy of a checkpoint, with its moments and their warm-up, average, reference and
    /// coefficients. The step count, the schedule and the random stream continue. Returns the
    /// checkpoint's `extra`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn return_to(&mut self, dir: &Path) -> Result<Value> {
        let (steps, rng, tokens) = (self.steps, self.rng.clone(), self.tokens);
        let extra = self.load(dir)?;
        (self.steps, self.rng, self.tokens) = (steps, rng, tokens);
        Ok(extra)
    }

    /// Saves the complete state to the directory `dir`, atomically. `extra` is state of the caller;
    /// its floats should be stored as bits, since JSON text may round them.
    ///
    /// # Errors
    /// If a file cannot be written; an older checkpoint in `dir` is kept then.
    pub fn save(&self, dir: &Path, extra: &Value) -> Result<()> {
        let average = self.average.as_ref();
        let tensors = |lora: Option<&LoraWeights>| lora.map(LoraWeights::tensors).transpose();
        let state = LearnerState {
            step: self.steps,
            updates: self.optimizer.updates(),
            rng: self.rng.clone(),
            model: self.model.digest()?,
            lora: self.config.lora.clone(),
            adaptive: Some(self.adaptive),
            tokens: self.tokens,
            restart: self.restart,
            factors: self.lora.module_scales(),
            averaged: average.map_or(0, Average::count),
            extra: extra.clone(),
        };
        let checkpoint = Checkpoint {
            state,
            adapter: self.lora.tensors()?,
            moments: self.optimizer.tensors()?,
            average: tensors(average.and_then(Average::lora))?,
            reference: tensors(self.reference.synced())?,
            initial_reference: tensors(self.reference.initial())?,
        };
        checkpoint::save(dir, &checkpoint)
    }

    /// Restores a checkpoint, so that training continues with the same numbers; returns the `extra`
    /// it was saved with.
    ///
    /// # Errors
    /// If the checkpoint is incomplete or damaged, belongs to another base model, or its adapter
    /// differs from `train.lora`; nothing is changed then.
    pub fn load(&mut self, dir: &Path) -> Result<Value> {
        let device = self.model.device().clone();
        let loaded = checkpoint::load(dir, &device)?;
        let state = loaded.state;
        let wrong = |reason: String| checkpoint::wrong(dir, reason);
        if state.model != self.model.digest()? {
            return Err(wrong("it belongs to another base model".to_owned()));
        }
        let (spec, dtype) = (self.model.spec(), self.model.dtype());
        let factors = if state.factors.is_empty() {
            named_plan(spec, &state.lora).map_err(|e| wrong(e.to_string()))?
        } else {
            state.factors
        };
        self.check_shape(&factors).map_err(wrong)?;
        let weights = |tensors| {
            LoraWeights::from_tensors(spec, &self.config.lora, tensors, dtype, &device)
                .map_err(|e| wrong(e.to_string()))
        };
        let lora = weights(loaded.adapter)?;
        let average = loaded.average.map(weights).transpose()?;
        let synced = loaded.reference.map(weights).transpose()?;
        let initial = loaded.initial_reference.map(weights).transpose()?;
        self.optimizer
            .restore(state.updates, &lora.parameters(), loaded.moments)
            .map_err(|e| wrong(e.to_string()))?;
        if let Some(own) = &mut self.average {
            own.restore(average, state.averaged);
        }
        self.reference.restore(initial, synced);
        self.lora = lora;
        self.rng = state.rng;
        self.steps = state.step;
        let adaptive = state.adaptive.unwrap_or_else(|| AdaptiveCoefficients::new(&self.config));
        self.adaptive = adaptive.configured(&self.config);
        self.tokens = state.tokens;
        self.restart = state.restart;
        Ok(state.extra)
    }
}
