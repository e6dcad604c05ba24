//! `hone demo` on the real daemon: a short demo raises the held-out reward by more than the uncertainty
//! of the measurement, and the ledger shows that no held-out question was trained on.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::collections::{HashMap, HashSet};
use std::process::Command;

use serde_json::Value;

use hone_demo::{eval, task};

fn hone(args: &[&str]) -> Vec<u8> {
    let output = Command::new(env!("CARGO_BIN_EXE_hone")).args(args).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{errors}");
    output.stdout
}

fn operands(question: &str) -> (u32, u32) {
    let digits = question.split(|c: char| !c.is_ascii_digit());
    let numbers: Vec<u32> = digits.filter_map(|part| part.parse().ok()).collect();
    assert_eq!(numbers.len(), 2, "{question}");
    (numbers[0], numbers[1])
}

/// Runs a demo of `steps` steps, which fails unless the reward rises beyond its interval.
fn learns(backend: &str, rewards: &str, steps: u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (data, report) = (path("data"), path("report.json"));
    let args = format!(
        "demo --backend {backend} --rewards {rewards} --steps {steps} --data {data} --report {report}"
    );
    hone(&args.split(' ').collect::<Vec<_>>());
    let report: Value = serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    assert_eq!((&report["failed_requests"], &report["steps"]), (&0.into(), &steps.into()));
    assert_eq!(report["backend"], backend);
    let sampled = report["held_out"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["kind"] == "asked" && row["decoding"] == "sampled")
        .unwrap();
    assert_eq!(sampled["rise"]["n"], eval::QUESTIONS);
    assert!(sampled["rise"]["interval"]["low"].as_f64().unwrap() > 0.0, "{sampled}");

    let export = String::from_utf8(hone(&["db", "export", "--data", &data])).unwrap();
    let (mut questions, mut trained) = (HashMap::new(), HashSet::new());
    for line in export.lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        let row = &record["row"];
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        match record["table"].as_str().unwrap() {
            "interactions" => {
                questions.insert(text(&row["id"]), text(&row["messages"][0]["content"]));
            }
            "groups" if row["state"]["trained"].is_u64() => {
                trained.insert(text(&row["interaction"]));
            }
            _ => {}
        }
    }
    let asked: HashSet<_> = questions.values().map(|question| operands(question)).collect();
    assert!(asked.iter().any(|(a, b)| task::held_out(*a, *b)), "the evaluation is in the ledger");
    assert!(trained.len() as u64 >= steps, "{} groups for {steps} steps", trained.len());
    for interaction in trained {
        let (a, b) = operands(&questions[&interaction]);
        assert!(!task::held_out(a, b), "{a} + {b} was trained on");
        assert!(a.max(b) < task::OPERANDS, "{a} + {b} was trained on");
    }
}

#[test]
fn feedback_alone_raises_the_reward() {
    learns("mistralrs", "feedback", 40);
}

#[test]
fn feedback_and_graders_raise_the_reward() {
    learns("mistralrs", "both", 20);
}

#[test]
fn feedback_alone_raises_the_reward_of_the_native_engine() {
    learns("native", "feedback", 40);
}

#[test]
fn feedback_and_graders_raise_the_reward_of_the_native_engine() {
    learns("native", "both", 20);
}
