//! Every rating is trained on, unused for a counted reason, or still waiting.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use hone_engine::EngineBackend;

use crate::backend::with_each_backend;
use crate::daemon::Daemon;
use crate::teach;

const CONFIG: &str = r#"
[policy]
promotion = "direct"
publish_every = 1
[train]
samples_per_step = 8
learning_rate = 0.01
warmup_steps = 0
max_staleness = 1
feedback_max_staleness = 1
[log]
level = "warn"
"#;

/// The value of a metric without labels, or with the label `outcome`.
fn metric(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0, |value| value.parse().unwrap())
}

fn outcome(text: &str, name: &str) -> u64 {
    metric(text, &format!("hone_feedback_ratings_total{{outcome=\"{name}\"}}"))
}

/// Rates a completion; returns the reason why that is not trained on.
async fn rate(daemon: &Daemon, answer: &Value, name: &str) -> Value {
    let body = json!({"completion_id": answer["id"], "name": name, "value": 1});
    let (status, reply) = daemon.post("/v1/feedback", &body).await;
    assert_eq!((status, &reply["trained"]), (200, &json!(reply["reason"].is_null())), "{reply}");
    reply["reason"].clone()
}

with_each_backend!(received_ratings_are_trained_unused_by_reason_or_waiting);

async fn received_ratings_are_trained_unused_by_reason_or_waiting(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");
    let daemon = Daemon::start(backend, dir.path(), CONFIG, &["--model", model]);
    let old = daemon.ask("What is 5 + 6?", 1).await;
    let first = teach(&daemon, 0).await;
    let second = teach(&daemon, first).await;
    assert_eq!(rate(&daemon, &old, "thumbs").await, json!("stale"));
    // After the rollback below it would no longer be stale.
    let started = Instant::now();
    while outcome(&daemon.metrics().await, "stale") == 0 {
        assert!(started.elapsed() < Duration::from_secs(30), "the stale rating is not counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let undone = daemon.ask("What is 5 + 6?", 2).await;
    assert_eq!(undone["system_fingerprint"], format!("hone-v{second}"));
    let path = format!("/admin/policies/{first}/activate");
    assert_eq!(daemon.post(&path, &json!({})).await.0, 200);
    daemon.until(|status| status["hold"].is_string()).await;
    assert_eq!(rate(&daemon, &undone, "thumbs").await, json!("abandoned"));
    let current = daemon.ask("What is 7 + 8?", 3).await;
    assert_eq!(rate(&daemon, &current, "smiles").await, json!("unknown_part"));
    assert_eq!(rate(&daemon, &current, "thumbs").await, Value::Null);
    let body = json!({
        "model": "default", "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is 9 + 9?"}],
    });
    let (_, greedy) = daemon.post("/v1/chat/completions", &body).await;
    assert_eq!(rate(&daemon, &greedy, "thumbs").await, json!("greedy"));

    let unused = ["stale", "abandoned", "unknown_part", "greedy"];
    // The rating of the current completion is trained on when a step is requested.
    let mut text = String::new();
    for _ in 0..100 {
        let step = daemon.post("/admin/train/step", &json!({})).await;
        assert!(step.0 == 200 || step.0 == 409, "{step:?}");
        text = daemon.metrics().await;
        if metric(&text, "hone_feedback_waiting_ratings") == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(unused.map(|name| outcome(&text, name)), [1; 4], "{text}");
    assert_eq!(outcome(&text, "trained"), 17, "two steps of eight, and one");
    assert_eq!(metric(&text, "hone_feedback_received_total"), 21);
    assert_eq!(metric(&text, "hone_feedback_waiting_ratings"), 0);
    assert_eq!(daemon.terminate(), Some(0));
}
