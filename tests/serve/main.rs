//! `hone serve` as a child process: training from feedback, rollback, restart and errors.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests may fail loudly"
)]

use std::process::Command;

use serde_json::json;

use hone_engine::EngineBackend;

mod abuse;
mod backend;
mod constraints;
mod daemon;
mod data;
mod faults;
mod http;
mod live_and_offline;
mod rollback;
mod snippets;
mod storing;
mod tls;
mod trajectories;
use backend::with_each_backend;
use daemon::{Daemon, text};

const CONFIG: &str = r#"
[engine]
replicas = 2
[policy]
promotion = "direct"
publish_every = 1
[train]
samples_per_step = 8
learning_rate = 0.01
warmup_steps = 0
max_staleness = 100
[log]
level = "warn"
"#;

with_each_backend!(a_directory_from_transformers_is_served_trained_rolled_back_and_resumed);

/// Sends requests and feedback until a version after `from` is served. Texts of even length are
/// rewarded.
async fn teach(daemon: &Daemon, from: u64) -> u64 {
    for seed in 0..8 {
        let answer = daemon.ask("What is 3 + 4?", seed).await;
        let feedback = json!({
            "completion_id": answer["id"], "name": "thumbs", "value": text(&answer).len().is_multiple_of(2),
            "idempotency_key": format!("{from}-{seed}"),
        });
        let (status, reply) = daemon.post("/v1/feedback", &feedback).await;
        assert_eq!(status, 200, "{reply}");
    }
    daemon.version_at_least(from + 1).await
}

async fn a_directory_from_transformers_is_served_trained_rolled_back_and_resumed(
    backend: EngineBackend,
) {
    let dir = tempfile::tempdir().unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");
    let daemon = Daemon::start(backend, dir.path(), CONFIG, &["--model", model]);

    let base = daemon.ask("What is 3 + 4?", 7).await;
    assert_eq!(base["system_fingerprint"], "hone-v0");
    let first = teach(&daemon, 0).await;
    // Few ratings are enough for a step, so further versions may follow.
    teach(&daemon, first).await;
    let second = daemon.settled().await;
    let after = daemon.ask("What is 3 + 4?", 7).await;
    assert_eq!(after["system_fingerprint"], format!("hone-v{second}"));

    // After a rollback to the base, the same seed returns the same text.
    let (status, reply) = daemon.post("/admin/policies/0/activate", &json!({})).await;
    assert_eq!(status, 200, "{reply}");
    let again = daemon.ask("What is 3 + 4?", 7).await;
    assert_eq!(again["system_fingerprint"], "hone-v0");
    assert_eq!(text(&again), text(&base));

    // Training pauses until it is resumed.
    let held = daemon.until(|status| status["hold"].is_string()).await;
    assert!(held["hold"].as_str().unwrap().contains("version 0 was activated"), "{held}");
    let (status, reply) = daemon.post("/admin/train/resume", &json!({})).await;
    assert_eq!(status, 200, "{reply}");
    // Training continues from the base, and the next version has a new number.
    teach(&daemon, second).await;
    let third = daemon.settled().await;
    let policies = daemon.get("/admin/policies").await;
    let mut made = policies["data"].as_array().unwrap().iter();
    let made = made.find(|p| p["version"] == second + 1).unwrap();
    assert_eq!(made["parent"], 0, "{policies}");
    let step = daemon.get("/admin/train").await["step"].clone();

    // After a restart, the same version returns the same text.
    let before = daemon.ask("What is 3 + 4?", 7).await;
    assert_eq!(daemon.terminate(), Some(0));
    let daemon = Daemon::start(backend, dir.path(), CONFIG, &["--model", model]);
    let resumed = daemon.ask("What is 3 + 4?", 7).await;
    assert_eq!(resumed["system_fingerprint"], before["system_fingerprint"]);
    assert_eq!(text(&resumed), text(&before));
    assert_eq!(daemon.get("/admin/train").await["step"], step);
    teach(&daemon, third).await;
    assert_eq!(daemon.terminate(), Some(0));

    // A data directory of another model is refused.
    let data = dir.path().join("data");
    let (code, _, stderr) =
        hone(&["serve", "--bind", "127.0.0.1:0", "--data", data.to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("qwen2-tiny") && stderr.contains("data.dir"), "{stderr}");
}

fn hone(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_hone")).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn wrong_configuration_ends_with_code_2_and_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hone.toml");
    let path = file.to_str().unwrap();
    for (config, names) in [
        ("[train]\nlearning_rate = -1.0\n", ["train.learning_rate", "-1"]),
        ("[train]\nlearning_rte = 1.0\n", ["train.learning_rte", "not a key"]),
        ("[engine]\nreplicas = \"two\"\n", ["engine.replicas", "two"]),
    ] {
        std::fs::write(&file, config).unwrap();
        for command in ["validate", "serve"] {
            let (code, stdout, stderr) = hone(&[command, "--config", path]);
            assert_eq!(code, Some(2), "{stderr}");
            assert_eq!(stdout, "");
            assert_eq!(stderr.lines().count(), 1, "{stderr}");
            for name in names {
                assert!(stderr.contains(name), "{stderr}");
            }
        }
    }
    std::fs::write(&file, "").unwrap();
    assert_eq!(hone(&["validate", "--config", path]).0, Some(0));
}

#[test]
fn a_model_that_cannot_be_served_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::write(model.join("config.json"), r#"{"architectures":["BertModel"]}"#).unwrap();
    let model = model.to_str().unwrap();
    let (code, _, stderr) =
        hone(&["serve", "--bind", "127.0.0.1:0", "--data", data, "--model", model]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("BertModel") && stderr.contains("Qwen2ForCausalLM"), "{stderr}");
}
