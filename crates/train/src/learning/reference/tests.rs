//! The reference that follows the policy.

use serde_json::Value;

use crate::config::{KlConfig, TrainConfig};
use crate::learning::learner::Learner;
use crate::testing::{random_samples, tiny_config, tiny_learner};

fn config(sync_steps: u64, sync_mixup: f64) -> TrainConfig {
    TrainConfig {
        beta: 0.1,
        learning_rate: 0.05,
        kl: KlConfig { sync_steps, sync_mixup, ..KlConfig::default() },
        ..tiny_config()
    }
}

/// The KL that each step reports, which is against the reference as it is before the step.
fn kls(learner: &mut Learner, steps: u64) -> Vec<f64> {
    let step = |seed| learner.step(&random_samples(4, seed), u64::MAX, 12).unwrap().metrics["kl"];
    (0..steps).map(step).collect()
}

#[test]
fn the_kl_is_against_the_base_until_the_reference_follows() {
    let mut fixed = tiny_learner(&config(0, 0.6));
    let base = kls(&mut fixed, 5);
    assert!(base[0].abs() < 1e-12 && base[4] > 1e-6, "{base:?}");

    // The whole policy every second step: the third step's KL is against itself.
    let mut whole = tiny_learner(&config(2, 1.0));
    let own = kls(&mut whole, 5);
    assert_eq!(own[..2], base[..2]);
    assert!(own[2].abs() < 1e-12, "{own:?}");
    assert!(own[3] > 1e-9 && own[4].abs() < 1e-12, "{own:?}");

    // A part of it: between the base and the policy. Both took the same two steps.
    let mut part = tiny_learner(&config(2, 0.5));
    let own = kls(&mut part, 3);
    assert!(own[2] > 1e-9 && own[2] < base[2], "{own:?} of {base:?}");
}

#[test]
fn a_checkpoint_keeps_it_and_a_rollback_returns_to_the_base() {
    let config = config(2, 0.6);
    let mut through = tiny_learner(&config);
    kls(&mut through, 3);
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("step-3");
    through.save(&saved, &Value::Null).unwrap();
    let mut resumed = tiny_learner(&config);
    resumed.load(&saved).unwrap();
    assert_eq!(kls(&mut through, 3), kls(&mut resumed, 3), "bit for bit");

    through.reset_to(None).unwrap();
    assert!(kls(&mut through, 1)[0].abs() < 1e-12, "a fresh adapter is the base");
    // Settings that keep the base leave the saved one alone.
    let mut fixed = tiny_learner(&self::config(0, 0.6));
    fixed.load(&saved).unwrap();
    let mut without = tiny_learner(&self::config(2, 0.6));
    without.load(&saved).unwrap();
    assert_ne!(kls(&mut fixed, 1), kls(&mut without, 1));
}
