//! Rollback under load: while versions are staged and long answers are generated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use hone_engine::EngineBackend;

use crate::backend::with_each_backend;
use crate::daemon::Daemon;
use crate::{CONFIG, teach};

/// A long answer: the model's stop token is excluded by a bias.
fn long_question(seed: u64) -> Value {
    json!({
        "model": "default", "seed": seed, "max_tokens": 300, "logit_bias": {"0": -100, "2": -100},
        "messages": [{"role": "user", "content": "Count as far as you can."}],
    })
}

fn version_of(answer: &Value) -> u64 {
    let fingerprint = answer["system_fingerprint"].as_str().unwrap();
    fingerprint.strip_prefix("hone-v").unwrap().parse().unwrap()
}

/// `HONE_SOAK_SECONDS` prolongs the last phase, in which training must not undo the rollback.
fn soak() -> Duration {
    let seconds = std::env::var("HONE_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(3))
}

with_each_backend!(a_rollback_under_load_takes_effect_within_a_second_and_stays);

async fn a_rollback_under_load_takes_effect_within_a_second_and_stays(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");
    // Without the pause after an activation, training continues from the activated version.
    let config = CONFIG.replace("[policy]\n", "[policy]\nhold_seconds = 1\n");
    let daemon = Arc::new(Daemon::start(backend, dir.path(), &config, &["--model", model]));
    let mut newest = 0;
    for _ in 0..3 {
        newest = teach(&daemon, newest).await;
    }

    let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let (daemon, stop, answers) = (daemon.clone(), stop.clone(), answers.clone());
            tokio::spawn(async move {
                for n in 0.. {
                    if stop.load(Ordering::Acquire) {
                        break;
                    }
                    let question = long_question(1000 * client + n);
                    let (status, answer) = daemon.post("/v1/chat/completions", &question).await;
                    assert_eq!(status, 200, "{answer}");
                    answers.fetch_add(1, Ordering::AcqRel);
                }
            })
        })
        .collect();

    let mut last = newest;
    // Each round teaches, so that a version is being trained or staged, and activates another one.
    for (round, wanted) in [0, newest, 1, newest - 1, 0].into_iter().enumerate() {
        let teacher = {
            let daemon = daemon.clone();
            tokio::spawn(async move {
                for seed in 0..8 {
                    let answer = daemon.ask("What is 3 + 4?", seed).await;
                    let feedback = json!({
                        "completion_id": answer["id"], "name": "thumbs", "value": seed % 2,
                        "idempotency_key": format!("round-{round}-{seed}"),
                    });
                    assert_eq!(daemon.post("/v1/feedback", &feedback).await.0, 200);
                }
            })
        };
        tokio::time::sleep(Duration::from_millis(20 * round as u64)).await;
        // A slow machine may publish the next version before the round ends.
        let policies = daemon.get("/admin/policies").await;
        let known =
            policies["data"].as_array().unwrap().iter().filter_map(|p| p["version"].as_u64());
        last = known.max().unwrap();
        let started = Instant::now();
        let (status, reply) =
            daemon.post(&format!("/admin/policies/{wanted}/activate"), &json!({})).await;
        assert_eq!(status, 200, "{reply}");
        let answer = daemon.ask("What is 3 + 4?", 7).await;
        println!("version {wanted} after {:?}", started.elapsed());
        assert_eq!(version_of(&answer), wanted, "the next request gets the version");
        assert_eq!(daemon.get("/admin/policies").await["active"], wanted);
        teacher.await.unwrap();
    }

    // Training continues, and whatever it publishes descends from the last activation.
    let started = Instant::now();
    let mut from = 0;
    while started.elapsed() < soak() {
        for seed in 0..8 {
            let answer = daemon.ask("What is 3 + 4?", from + seed).await;
            let feedback = json!({
                "completion_id": answer["id"], "name": "thumbs", "value": seed % 2,
            });
            assert_eq!(daemon.post("/v1/feedback", &feedback).await.0, 200);
        }
        from += 8;
    }
    stop.store(true, Ordering::Release);
    for client in clients {
        client.await.unwrap();
    }
    assert!(answers.load(Ordering::Acquire) > 0);
    let policies = daemon.get("/admin/policies").await;
    let records = policies["data"].as_array().unwrap();
    let mut version = policies["active"].as_u64().unwrap();
    while version > last {
        let record = records.iter().find(|p| p["version"] == version).unwrap();
        version = record["parent"].as_u64().unwrap();
    }
    assert_eq!(version, 0, "the rollback to the base stays in force: {policies}");
    let metrics = daemon.metrics().await;
    let failed =
        |line: &&str| line.starts_with("hone_http_requests_total") && line.contains("code=\"5");
    assert_eq!(metrics.lines().find(failed), None);
}
