//! The reference policy: the base model, or `train.lora.init_adapter`, from which the run starts. So
//! the KL is 0 at the start in either case, and a penalty does not undo what the adapter has learned.
//! With `train.kl.sync_steps` it is a mixture that follows the policy.
//!
//! Every `sync_steps` steps `reference <- alpha policy + (1 - alpha) reference` (Gorbatovski et al.
//! 2024, TR-DPO; TRL's `sync_ref_model`), on the adapter's factors. If the first reference is the base,
//! it is taken as the policy's A with a zero B, so its delta becomes alpha times the policy's.

use hone_model::adapter::weights::LoraWeights;

use crate::config::KlConfig;
use crate::error::Result;

/// The reference policy's adapter.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    /// Steps between synchronizations; 0 never synchronizes.
    every: u64,
    /// Weight of the policy in a synchronization.
    alpha: f64,
    /// The reference before the first synchronization; `None` is the base.
    initial: Option<LoraWeights>,
    /// `None` before the first synchronization.
    synced: Option<LoraWeights>,
}

impl Reference {
    /// The adapter that the run starts from; `None` is the base model.
    pub(crate) fn new(config: &KlConfig, initial: Option<LoraWeights>) -> Self {
        Self { every: config.sync_steps, alpha: config.sync_mixup, initial, synced: None }
    }

    /// Forgets the synchronizations.
    pub(crate) fn reset(&mut self) {
        self.synced = None;
    }

    /// Synchronizes with the policy if that is due after step number `steps` (from 1).
    pub(crate) fn observe(&mut self, policy: &LoraWeights, steps: u64) -> Result<()> {
        if self.every == 0 || !steps.is_multiple_of(self.every) {
            return Ok(());
        }
        let reference = match (self.synced.take(), &self.initial) {
            (Some(reference), _) => reference,
            (None, Some(initial)) => initial.copy()?,
            (None, None) => policy.zeroed_copy()?,
        };
        reference.lerp(policy, self.alpha)?;
        self.synced = Some(reference);
        Ok(())
    }

    /// Its adapter; `None` is the base.
    pub(crate) fn lora(&self) -> Option<&LoraWeights> {
        self.synced.as_ref().or(self.initial.as_ref())
    }

    /// The reference before the first synchronization; `None` is the base.
    pub(crate) fn initial(&self) -> Option<&LoraWeights> {
        self.initial.as_ref()
    }

    /// The synchronized reference; `None` before the first synchronization.
    pub(crate) fn synced(&self) -> Option<&LoraWeights> {
        self.synced.as_ref()
    }

    /// Continues from a checkpoint: from its synchronized reference, unless synchronization is off, and
    /// from its initial one, which a checkpoint of an older version lacks.
    pub(crate) fn restore(&mut self, initial: Option<LoraWeights>, synced: Option<LoraWeights>) {
        if initial.is_some() {
            self.initial = initial;
        }
        self.synced = synced.filter(|_| self.every > 0);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::config::{KlConfig, PeakRate, TrainConfig};
    use crate::learning::learner::Learner;
    use crate::testing::{random_samples, tiny_config, tiny_learner};

    fn config(sync_steps: u64, sync_mixup: f64) -> TrainConfig {
        TrainConfig {
            beta: 0.1,
            learning_rate: PeakRate::Fixed(0.05),
            kl: KlConfig { sync_steps, sync_mixup, ..KlConfig::default() },
            ..tiny_config()
        }
    }

    /// The KL that each step reports, which is to the reference before the step.
    fn kls(learner: &mut Learner, steps: u64) -> Vec<f64> {
        let step =
            |seed| learner.step(&random_samples(4, seed), u64::MAX, 12).unwrap().metrics["kl"];
        (0..steps).map(step).collect()
    }

    #[test]
    fn the_kl_is_to_the_base_until_the_first_synchronization() {
        let mut fixed = tiny_learner(&config(0, 0.6));
        let base = kls(&mut fixed, 5);
        assert!(base[0].abs() < 1e-12 && base[4] > 1e-6, "{base:?}");

        // A full synchronization every second step: the third step's KL is to the policy itself.
        let mut full = tiny_learner(&config(2, 1.0));
        let own = kls(&mut full, 5);
        assert_eq!(own[..2], base[..2]);
        assert!(own[2].abs() < 1e-12, "{own:?}");
        assert!(own[3] > 1e-9 && own[4].abs() < 1e-12, "{own:?}");

        // A partial one is between the base and the policy. Both took the same two steps.
        let mut partial = tiny_learner(&config(2, 0.5));
        let own = kls(&mut partial, 3);
        assert!(own[2] > 1e-9 && own[2] < base[2], "{own:?} of {base:?}");
    }

    #[test]
    fn a_checkpoint_keeps_the_reference_and_a_rollback_resets_it_to_the_base() {
        let synced = config(2, 0.6);
        let mut uninterrupted = tiny_learner(&synced);
        kls(&mut uninterrupted, 3);
        let dir = tempfile::tempdir().unwrap();
        let saved = dir.path().join("step-3");
        uninterrupted.save(&saved, &Value::Null).unwrap();
        let mut resumed = tiny_learner(&synced);
        resumed.load(&saved).unwrap();
        assert_eq!(kls(&mut uninterrupted, 3), kls(&mut resumed, 3), "bit for bit");

        uninterrupted.reset_to(None).unwrap();
        assert!(kls(&mut uninterrupted, 1)[0].abs() < 1e-12, "a fresh adapter is the base");
        // Without synchronization the saved reference is ignored.
        let mut fixed = tiny_learner(&config(0, 0.6));
        fixed.load(&saved).unwrap();
        let mut synchronized = tiny_learner(&config(2, 0.6));
        synchronized.load(&saved).unwrap();
        assert_ne!(kls(&mut fixed, 1), kls(&mut synchronized, 1));
    }
}
