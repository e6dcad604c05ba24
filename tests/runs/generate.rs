//! `hone generate`, and exports whose completions it compares.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::commands::{hone, ok, text};

const PROMPT: &str = "What is 2 + 3?";

fn generate(args: &[&str]) -> Value {
    let args = [&["generate", PROMPT, "--json"], args].concat();
    serde_json::from_slice(&ok(&args).stdout).unwrap()
}

#[test]
fn every_form_of_a_version_generates_the_same_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (data, peft, merged) = (path("data"), path("peft"), path("merged"));
    let config = "configs/examples/multi-objective.toml";
    let train = ["train", "--config", config, "--data", &data, "--steps", "8"];
    ok(&train);
    let exported = ok(&["adapters", "export", "--best", "--peft", &peft, "--data", &data]).stdout;
    let sentence = text(&exported);
    assert!(sentence.contains(", the best, of step "), "{sentence}");
    ok(&["adapters", "export", "--version", "8", "--merged", &merged, "--f32", "--data", &data]);

    let sampled = ["--data", &data, "--samples", "8", "--seed", "3"];
    let of = |weights: &[&str]| generate(&[&sampled[..], weights].concat());
    let active = of(&[]);
    assert_eq!(active["weights"], "version 8");
    assert_eq!(of(&["--version", "8"]), active);
    let completions = |generated: &Value| generated["completions"].clone();
    assert_eq!(completions(&of(&["--base", "--model", &merged])), completions(&active));
    assert_eq!(completions(&of(&["--best"])), completions(&of(&["--adapter", &peft])));
    let base = of(&["--base"]);
    assert_eq!(base["weights"], "the base model");
    assert_eq!(completions(&of(&["--version", "0"])), completions(&base));
    assert_ne!(completions(&base), completions(&active), "training changed the policy");

    // Each completion has its own seed, which a run of its own repeats.
    let texts: Vec<&Value> = active["completions"].as_array().unwrap().iter().collect();
    assert!(texts.iter().any(|other| *other != texts[0]), "{active}");
    let third = generate(&["--data", &data, "--seed", "5"]);
    assert_eq!(third["completions"][0], *texts[2]);

    // The merged model contains the adapter already.
    let args = ["generate", PROMPT, "--data", &data, "--model", &merged];
    let refused = hone(&args);
    assert_eq!(refused.status.code(), Some(1));
    let error = text(&refused.stderr);
    assert!(error.contains("choose --base for the model alone"), "{error}");
}

#[test]
fn a_prompt_comes_from_an_argument_a_file_or_the_input() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let greedy = ["--temperature", "0", "--data", data];
    let from_argument = ok(&[&["generate", PROMPT], &greedy[..]].concat());
    assert_eq!(text(&from_argument.stderr), "note: weights of the base model\n");
    let shown = text(&from_argument.stdout);
    assert!(shown.len() > 3 && shown.ends_with('\n'), "{shown:?}");

    let mut child = Command::new(env!("CARGO_BIN_EXE_hone"))
        .arg("generate")
        .args(greedy)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(PROMPT.as_bytes()).unwrap();
    assert_eq!(text(&child.wait_with_output().unwrap().stdout), shown);

    let file = dir.path().join("messages.json");
    let messages = json!([{ "role": "user", "content": PROMPT }]);
    std::fs::write(&file, messages.to_string()).unwrap();
    let from_file = [&["generate", "--messages", file.to_str().unwrap()], &greedy[..]].concat();
    assert_eq!(text(&ok(&from_file).stdout), shown);
    let several = ok(&[&["generate", PROMPT, "--samples", "2"], &greedy[..]].concat());
    assert_eq!(text(&several.stdout), format!("--- 1 of 2\n{shown}--- 2 of 2\n{shown}"));
    assert!(!Path::new(data).join("ledger.redb").exists(), "nothing is recorded");
}

#[test]
fn wrong_arguments_have_code_2() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let file = dir.path().join("messages.json");
    std::fs::write(&file, "[]").unwrap();
    let file = file.to_str().unwrap();
    let long = "x".repeat(100_000);
    for (args, part) in [
        (vec![PROMPT, "--top-p", "0"], "top_p is 0; more than 0 and at most 1 was expected"),
        (vec![PROMPT, "--temperature", "-1"], "unexpected argument '-1'"),
        (vec![PROMPT, "--temperature=-1"], "temperature is -1; 0 or more was expected"),
        (vec![PROMPT, "--max-tokens", "0"], "max_tokens is 0; at least 1 was expected"),
        (vec![PROMPT, "--base", "--best"], "cannot be used with"),
        (vec![PROMPT, "--messages", file], "cannot be used with"),
        (vec!["--messages", file], "messages.json has no message"),
        (vec!["--messages", "no.json"], "--messages: no.json: No such file or directory"),
        (vec![long.as_str()], "this model's maximum context length is"),
        (vec![], "PROMPT is missing: standard input is empty"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_hone"))
            .arg("generate")
            .args(&args)
            .args(["--data", data])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let error = text(&output.stderr);
        assert!(error.contains(part), "{part}: {error}");
        assert_eq!(output.status.code(), Some(2), "{error}");
    }
    let missing = hone(&["generate", PROMPT, "--best", "--data", data]);
    assert!(text(&missing.stderr).contains("run/best does not exist"), "{missing:?}");
    assert_eq!(missing.status.code(), Some(1));
}
