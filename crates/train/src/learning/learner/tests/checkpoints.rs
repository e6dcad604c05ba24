//! Checkpoints and rollback.

use std::path::Path;

use candle_core::DType;
use serde_json::json;

use hone_core::files::sibling;
use hone_model::Model;
use hone_model::adapter::peft;
use hone_model::testing::tiny_weights;

use super::{batch, bits};
use crate::config::TrainConfig;
use crate::error::LearnError;
use crate::learning::checkpoint::{list, prune, step_dir};
use crate::learning::learner::Learner;
use crate::testing::{tiny_config, tiny_learner, tiny_spec};

#[test]
fn rollback_restores_the_policy_and_resets_the_moments() {
    let dir = tempfile::tempdir().unwrap();
    let mut learner = tiny_learner(&tiny_config());
    let fresh = bits(&learner);
    learner.step(&batch(1), 9, 16).unwrap();
    let first = bits(&learner);
    learner.snapshot().unwrap().write(dir.path(), "tiny").unwrap();
    learner.step(&batch(2), 9, 16).unwrap();
    let second = bits(&learner);
    assert_ne!(first, second);
    learner.reset_to(Some(dir.path())).unwrap();
    assert_eq!(bits(&learner), first);
    assert_eq!(learner.step_count(), 2);
    // Without the old moments the same batch leads to another update.
    learner.step(&batch(2), 9, 16).unwrap();
    assert_ne!(bits(&learner), second);
    learner.reset_to(None).unwrap();
    assert_eq!(bits(&learner), fresh);
}

#[test]
fn new_moments_are_warmed_up_and_restored_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let config = TrainConfig { warmup_steps: Some(4.0), ..tiny_config() };
    let mut learner = tiny_learner(&config);
    let rates = |learner: &mut Learner, steps: u64| -> Vec<f64> {
        let rate = |seed| learner.step(&batch(seed), 9, 16).unwrap().metrics["learning_rate"];
        (0..steps)
            .map(rate)
            .map(|rate| (rate / config.learning_rate.of(0) * 1e9).round() / 1e9)
            .collect()
    };
    // Before the first step the schedule's warm-up is the only one.
    learner.reset_to(None).unwrap();
    assert_eq!(rates(&mut learner, 5), [0.25, 0.5, 0.75, 1.0, 1.0]);
    let warm = step_dir(dir.path(), 5);
    learner.save(&warm, &json!(null)).unwrap();
    learner.reset_to(None).unwrap();
    assert_eq!(rates(&mut learner, 2), [0.25, 0.5]);
    // A restart continues in the middle.
    let middle = step_dir(dir.path(), 7);
    learner.save(&middle, &json!(null)).unwrap();
    let mut resumed = tiny_learner(&config);
    resumed.load(&middle).unwrap();
    assert_eq!(rates(&mut resumed, 3), [0.75, 1.0, 1.0]);
    learner.return_to(&warm).unwrap();
    assert_eq!(rates(&mut learner, 1), [1.0]);
    // A skipped step does not count.
    learner.reset_to(None).unwrap();
    let mut bad = batch(1);
    bad[0].advantage = f64::MAX;
    assert!(learner.step(&bad, 9, 16).unwrap().skipped.is_some());
    assert_eq!(rates(&mut learner, 1), [0.25]);
}

#[test]
fn adapters_and_checkpoints_that_do_not_fit_are_refused_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut narrow = tiny_config();
    narrow.lora.target_modules = ["q_proj"].into();
    tiny_learner(&narrow).snapshot().unwrap().write(&dir.path().join("narrow"), "tiny").unwrap();
    tiny_learner(&narrow).save(&dir.path().join("step-1"), &json!(null)).unwrap();
    let mut learner = tiny_learner(&tiny_config());
    let before = bits(&learner);
    let narrow = dir.path().join("narrow");
    for (result, expected) in [
        (learner.reset_to(Some(&narrow)), "it has nothing on model.layers.0.mlp.down_proj, which"),
        (
            learner.load(&dir.path().join("step-1")).map(drop),
            "it has nothing on model.layers.0.mlp.down_proj, which",
        ),
        (learner.reset_to(Some(&dir.path().join("nothing"))), "adapter_config.json"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let config = dir.path().join("narrow").join(peft::CONFIG_FILE);
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"use_dora\": false", "\"use_dora\": true")).unwrap();
    let error = learner.reset_to(Some(&dir.path().join("narrow"))).unwrap_err();
    assert!(error.to_string().contains("`use_dora` is true, which is not supported"), "{error}");
    assert_eq!(bits(&learner), before);
}

#[test]
fn a_checkpoint_of_another_base_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = step_dir(dir.path(), 1);
    tiny_learner(&tiny_config()).save(&path, &json!({})).unwrap();
    let mut weights = tiny_weights(DType::F32);
    let norm = weights["model.norm.weight"].clone();
    weights.insert("model.norm.weight".to_owned(), (norm * 1.5).unwrap());
    let model = Model::new(tiny_spec(), weights).unwrap();
    let mut other = Learner::with_model(model, &tiny_config()).unwrap();
    let error = other.load(&path).unwrap_err();
    assert!(error.to_string().contains("belongs to another base model"), "{error}");
}

fn damage(path: &Path, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_checkpoints_are_errors_that_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut learner = tiny_learner(&tiny_config());
    learner.step(&batch(1), 9, 16).unwrap();
    let mut error = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = step_dir(dir.path(), 1);
        learner.save(&path, &json!({})).unwrap();
        damage(&path.join(name), change);
        let before = bits(&learner);
        let error = learner.load(&path).unwrap_err();
        assert_eq!(bits(&learner), before, "{name}");
        assert!(matches!(error, LearnError::Checkpoint { .. }), "{error}");
        error.to_string()
    };
    let half = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2);
    let flip = |bytes: &mut Vec<u8>| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    };
    assert!(error("state.json", &half).contains("state.json"));
    assert!(error("adapter.safetensors", &half).contains("is not the file that was saved"));
    assert!(error("moments.safetensors", &flip).contains("is not the file that was saved"));
    let foreign = |bytes: &mut Vec<u8>| {
        *bytes = String::from_utf8(bytes.clone())
            .unwrap()
            .replace("hone-checkpoint", "something")
            .into_bytes();
    };
    assert!(error("state.json", &foreign).contains("`format` is `something`"));
    let path = step_dir(dir.path(), 1);
    learner.save(&path, &json!({})).unwrap();
    std::fs::remove_file(path.join("moments.safetensors")).unwrap();
    assert!(learner.load(&path).unwrap_err().to_string().contains("moments.safetensors"));
}

#[test]
fn an_interrupted_save_leaves_the_older_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    assert!(list(dir.path()).unwrap().is_empty());
    assert!(list(&dir.path().join("nowhere")).unwrap().is_empty());
    let learner = tiny_learner(&tiny_config());
    for step in [1, 2, 10, 9] {
        learner.save(&step_dir(dir.path(), step), &json!(step)).unwrap();
    }
    // A killed process may leave a temporary and a replaced directory.
    let leftovers = [".tmp", ".old"].map(|suffix| sibling(&step_dir(dir.path(), 11), suffix));
    for leftover in &leftovers {
        std::fs::create_dir(leftover).unwrap();
        std::fs::write(leftover.join("state.json"), "{").unwrap();
    }
    assert_eq!(list(dir.path()).unwrap().pop(), Some(step_dir(dir.path(), 10)));
    prune(dir.path(), 2).unwrap();
    let kept = list(dir.path()).unwrap();
    assert_eq!(kept, vec![step_dir(dir.path(), 9), step_dir(dir.path(), 10)]);
    assert!(leftovers.iter().all(|leftover| !leftover.exists()));
    // Saving to the same directory replaces the checkpoint.
    learner.save(&step_dir(dir.path(), 10), &json!("again")).unwrap();
    let mut other = tiny_learner(&tiny_config());
    assert_eq!(other.load(&step_dir(dir.path(), 10)).unwrap(), json!("again"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}
