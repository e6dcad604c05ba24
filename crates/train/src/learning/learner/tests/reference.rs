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
    let step = |seed| learner.step(&random_samples(4, seed), u64::MAX, 12).unwrap().metrics["kl"];
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
