//! `hone train --from-ledger` on the ratings of a daemon.

use std::process::{Command, Output};

use serde_json::{Value, json};

use hone_engine::EngineBackend;

use crate::backend::with_each_backend;
use crate::daemon::{Daemon, text};

/// Steps of eight ratings each that the daemon takes.
const STEPS: u64 = 4;

with_each_backend!(ratings_of_a_stopped_daemon_are_trained_on);

async fn ratings_of_a_stopped_daemon_are_trained_on(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(backend, dir.path(), crate::CONFIG, &[]);
    for seed in 0..8 * STEPS {
        let answer = daemon.ask(&format!("What is {} + 4?", seed / 2), seed).await;
        let value = text(&answer).len().is_multiple_of(2);
        let feedback = json!({ "completion_id": answer["id"], "name": "thumbs", "value": value });
        let (status, reply) = daemon.post("/v1/feedback", &feedback).await;
        assert_eq!(status, 200, "{reply}");
    }
    daemon.until(|status| status["step"].as_u64().unwrap() >= STEPS - 1).await;
    let config = dir.path().join("hone.toml");
    let source = dir.path().join("data");
    let train = || -> Output {
        Command::new(env!("CARGO_BIN_EXE_hone"))
            .args(["train", "--epochs", "2", "--holdout", "0.3", "--json"])
            .arg("--config")
            .arg(&config)
            .arg("--from-ledger")
            .arg(&source)
            .arg("--data")
            .arg(dir.path().join("offline"))
            .output()
            .unwrap()
    };
    let refused = train();
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("in use by another process; stop its daemon"), "{stderr}");

    assert_eq!(daemon.terminate(), Some(0));
    let ledger = source.join("ledger.redb");
    let before = std::fs::read(&ledger).unwrap();
    let trained = train();
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    assert!(std::fs::read(&ledger).unwrap() == before, "the daemon's ledger has changed");
    let report: Value = serde_json::from_slice(&trained.stdout).unwrap();
    let recorded = &report["recorded"];
    assert!(recorded["records"]["used"].as_u64().unwrap() >= 8 * (STEPS - 1), "{recorded}");
    assert!(recorded["held_out_records"].as_u64().unwrap() > 0, "{recorded}");
    assert!(!report["steps"].as_array().unwrap().is_empty(), "{report}");
    assert!(dir.path().join("offline/adapters/v000001/adapter_model.safetensors").is_file());
}
