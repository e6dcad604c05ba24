//! `hone init`, and the first run from what it writes.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::commands::text;
use crate::lines;

fn hone_in(directory: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hone"))
        .args(args)
        .current_dir(directory)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn ok(directory: &Path, args: &[&str]) -> String {
    let output = hone_in(directory, args);
    assert!(output.status.success(), "{args:?}\n{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn the_first_run_from_the_starter_learns() {
    let dir = tempfile::tempdir().unwrap();
    let shown = ok(dir.path(), &["init", "mine"]);
    let mine = dir.path().join("mine");
    for command in ["validate hone.toml", "train --config hone.toml", "serve --config hone.toml"] {
        assert!(shown.contains(&format!("hone {command}")), "{shown}");
    }
    assert!(ok(&mine, &["validate", "hone.toml"]).contains("540 prompts to train on, 60 held out"));
    ok(&mine, &["train", "--config", "hone.toml", "--steps", "20"]);
    let held_out: Vec<Value> = lines(&mine.join("hone-data/run/evaluations.jsonl"));
    let reward = |record: &Value| record["held_out_reward"].as_f64().unwrap();
    let (first, last) = (reward(&held_out[0]), reward(held_out.last().unwrap()));
    assert!(last > first + 0.3, "from {first} to {last}");
}

#[test]
fn a_starter_is_valid_for_each_teacher_and_model() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");
    let dataset = concat!(env!("CARGO_MANIFEST_DIR"), "/datasets/word-problems.jsonl");
    let dir = tempfile::tempdir().unwrap();
    for (name, flags) in [
        ("feedback", &["--learn-from", "feedback"][..]),
        ("model", &["--model", model]),
        ("dataset", &["--dataset", dataset]),
        ("both", &["--model", model, "--learn-from", "feedback"]),
    ] {
        ok(dir.path(), &[&["init", name][..], flags].concat());
        let written = dir.path().join(name);
        let shown = ok(&written, &["validate", "--config-only", "hone.toml"]);
        assert!(shown.contains("is valid"), "{name}: {shown}");
        assert_eq!(written.join("prompts.jsonl").exists(), name == "model", "{name}");
    }
}

#[test]
fn a_starter_replaces_no_file_and_its_mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("prompts.jsonl"), "mine").unwrap();
    for (args, reason) in [
        (&["init"][..], "./prompts.jsonl exists already"),
        (&["init", "--dataset", "no-such.jsonl"], "--dataset: no-such.jsonl does not exist"),
        (
            &["init", "--learn-from", "feedback", "--dataset", "prompts.jsonl"],
            "feedback needs no dataset",
        ),
    ] {
        let output = hone_in(dir.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
    }
    assert!(!dir.path().join("hone.toml").exists(), "it writes all files or no one of them");
    assert_eq!(std::fs::read_to_string(dir.path().join("prompts.jsonl")).unwrap(), "mine");
}
