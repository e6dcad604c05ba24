//! Saves and restores a learner, and rolls it back to an earlier policy.

use std::collections::BTreeMap;
use std::path::Path;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use serde_json::Value;

use hone_core::files::at;
use hone_model::ModelError;
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{ModuleScale, peft};

use super::Learner;
use crate::error::Result;
use crate::learning::Average;
use crate::learning::checkpoint::{self, CheckpointFiles, LearnerState};
use crate::learning::objective::AdaptiveCoefficients;
use crate::learning::optimizer::AdamW;
use crate::learning::restart_steps;

impl Learner {
    /// Rolls the policy back to the adapter in a PEFT directory, or to the base with a fresh adapter, without
    /// moments, average, adapted coefficients and synchronized reference. Step count and schedule continue,
    /// with a warm-up of the new moments on top unless no step was taken yet.
    ///
    /// # Errors
    /// If the adapter cannot be read or differs from `train.lora`; nothing is changed then.
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
        self.optimizer = AdamW::default();
        self.restart = if self.steps > 0 { restart_steps(&self.config) } else { 0 };
        self.adaptive = AdaptiveCoefficients::new(&self.config);
        // Otherwise the KL would jump from nearly 0 to the whole distance from the first reference.
        let follows = adapter.is_some() && self.config.kl.sync_steps > 0;
        self.reference.synced = follows.then(|| self.lora.copy()).transpose()?;
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

    /// As [`Self::load`], but the step count, the schedule and the random stream continue.
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
    pub fn save(&self, dir: &Path, extra: &impl Serialize) -> Result<()> {
        let average = self.average.as_ref();
        let state = LearnerState {
            step: self.steps,
            updates: self.optimizer.updates,
            rng: self.rng.clone(),
            model: self.model.digest()?,
            lora: self.config.lora.clone(),
            adaptive: self.adaptive,
            tokens: self.tokens,
            restart: self.restart,
            factors: self.lora.module_scales(),
            averaged: average.map_or(0, |average| average.count),
            extra: serde_json::to_value(extra).map_err(|error| at(dir)(error.into()))?,
        };
        let mut files = CheckpointFiles::from([
            ("adapter".to_owned(), self.lora.tensors()?),
            ("moments".to_owned(), self.optimizer.tensors()?),
        ]);
        for (name, lora) in [
            ("average", average.and_then(|average| average.lora.as_ref())),
            ("reference", self.reference.synced.as_ref()),
            ("initial_reference", self.reference.initial.as_ref()),
        ] {
            if let Some(lora) = lora {
                files.insert(name.to_owned(), lora.tensors()?);
            }
        }
        checkpoint::save(dir, &state, &files)
    }

    /// Restores a checkpoint and returns its `extra`. Training continues with the same numbers.
    ///
    /// # Errors
    /// If the checkpoint is damaged, of another base model, or differs from `train.lora`; nothing is changed.
    pub fn load(&mut self, dir: &Path) -> Result<Value> {
        let device = self.model.device().clone();
        let (state, mut files) = checkpoint::load(dir, &device)?;
        let wrong = |reason: String| checkpoint::wrong(dir, reason);
        if state.model != self.model.digest()? {
            return Err(wrong("it belongs to another base model".to_owned()));
        }
        self.check_shape(&state.factors).map_err(wrong)?;
        let (spec, dtype) = (self.model.spec(), self.model.dtype());
        let mut weights = |name: &str| {
            let weights = |tensors| {
                LoraWeights::from_tensors(spec, &self.config.lora, tensors, dtype, &device)
                    .map_err(|e| wrong(e.to_string()))
            };
            files.remove(name).map(weights).transpose()
        };
        let lora = weights("adapter")?.ok_or_else(|| wrong("it has no adapter".to_owned()))?;
        let (average, synced) = (weights("average")?, weights("reference")?);
        let initial = weights("initial_reference")?;
        let moments =
            files.remove("moments").ok_or_else(|| wrong("it has no moments".to_owned()))?;
        self.optimizer
            .restore(state.updates, &lora.parameters(), moments)
            .map_err(|e| wrong(e.to_string()))?;
        if let Some(own) = &mut self.average {
            let count = if average.is_some() { state.averaged } else { 0 };
            *own = Average { lora: average, count };
        }
        self.reference.initial = initial.or(self.reference.initial.take());
        self.reference.synced = synced.filter(|_| self.config.kl.sync_steps > 0);
        self.lora = lora;
        self.rng = state.rng;
        self.steps = state.step;
        self.adaptive = state.adaptive.configured(&self.config);
        self.tokens = state.tokens;
        self.restart = state.restart;
        Ok(state.extra)
    }
}
