//! A data directory that release 0.1.0 wrote opens, passes its checks and continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::lines;

/// Largest difference of a metric, relative to values above 1: processors round differently.
const TOLERANCE: f64 = 1e-4;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/data-0.1.0")
}

/// Runs `hone` on the data directory, and returns what it printed to the standard output.
fn hone(data: &Path, args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_hone"))
        .args(args)
        .arg("--data")
        .arg(data)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn a_run_of_the_first_release_continues_with_the_same_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    copy(&fixture().join("data"), &data);
    let state = data.join("run/state.json");
    let text = fs::read_to_string(&state).unwrap().replace("DATA", data.to_str().unwrap());
    fs::write(&state, text).unwrap();

    let config = fixture().join("config.toml");
    hone(&data, &["train", "--config", config.to_str().unwrap(), "--steps", "5"]);
    let health: Value = serde_json::from_str(&hone(&data, &["db", "check"])).unwrap();
    assert_eq!(
        (&health["intact"], &health["problem_count"]),
        (&true.into(), &0.into()),
        "{health}"
    );
    let versions: Value =
        serde_json::from_str(&hone(&data, &["adapters", "list", "--json"])).unwrap();
    let numbers: Vec<u64> =
        versions.as_array().unwrap().iter().map(|v| v["version"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5], "{versions}");
    let continued = lines(&data.join("run/steps.jsonl"));
    let steps: Vec<u64> = continued.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5]);
    for (found, expected) in continued[3..].iter().zip(lines(&fixture().join("continued.jsonl"))) {
        for (name, expected) in expected.as_object().unwrap() {
            let (found, expected) = (found[name].as_f64().unwrap(), expected.as_f64().unwrap());
            // Later versions compute what completions have in common once.
            if name == "loss_token_fraction" && found > expected {
                continue;
            }
            let difference = (found - expected).abs() / expected.abs().max(1.0);
            assert!(difference < TOLERANCE, "{name}: {found}, not {expected}");
        }
    }
    assert!(data.join("adapters/v000005/adapter_model.safetensors").is_file());
    assert!(data.join("checkpoints/step-000000000005/state.json").is_file());
}
