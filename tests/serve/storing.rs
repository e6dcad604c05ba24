//! With `store: false`, the data directory and the log hold nothing of prompt or answer.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use serde_json::{Value, json};

use hone_core::metrics::Metrics;
use hone_engine::EngineBackend;
use hone_store::{Store, StoreConfig};

use crate::backend::with_each_backend;
use crate::daemon::Daemon;

/// A graded route, whose prompts rollout samples again and exams keep.
const CONFIG: &str = r#"
[log]
level = "debug"
[policy.gate]
holdout_share = 0.5
[[route]]
name = "sums"
[[route.reward]]
name = "answer"
kind = "numeric_match"
[[route.reward]]
name = "thumbs"
kind = "feedback"
"#;

/// Characters of an answer that cannot occur elsewhere by chance.
const LONG: usize = 64;

with_each_backend!(nothing_of_an_unstored_request_is_written);

/// A request whose prompt contains `secret`, and which never stops by itself.
fn body(path: &str, secret: &str, store: bool, more: &Value) -> Value {
    let text = format!("What is 12 + 7, {secret}?");
    let mut body = json!({
        "model": "default", "store": store, "max_tokens": 200, "seed": 3,
        "logit_bias": {"386": -100, "388": -100},
        "metadata": {"answer": secret, "session_id": secret},
    });
    let prompt = if path.ends_with("/chat/completions") {
        json!({"messages": [{"role": "user", "content": text}]})
    } else {
        json!({"prompt": text})
    };
    for fields in [&prompt, more] {
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    body
}

/// The text of a response or of the events so far.
fn answer(response: &str) -> String {
    let objects = response.split('\n').map(|line| line.strip_prefix("data: ").unwrap_or(line));
    let objects = objects.filter_map(|object| serde_json::from_str::<Value>(object).ok());
    let text = |object: Value| {
        let choice = &object["choices"][0];
        let text = [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]];
        text.into_iter().filter_map(Value::as_str).collect::<String>()
    };
    objects.map(text).collect()
}

/// Sends a request. With `cut`, disconnects when the answer is long enough.
async fn ask(daemon: &Daemon, path: &str, body: &Value, cut: bool) -> String {
    let request = reqwest::Client::new().post(format!("{}{path}", daemon.url)).json(body);
    let mut response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    let mut seen = Vec::new();
    while let Some(bytes) = response.chunk().await.unwrap() {
        seen.extend_from_slice(&bytes);
        if cut && answer(&String::from_utf8_lossy(&seen)).chars().count() >= LONG {
            break;
        }
    }
    let answer = answer(std::str::from_utf8(&seen).unwrap());
    assert!(answer.chars().count() >= LONG, "{answer}");
    answer
}

/// The files below `directory` that contain `text`.
fn holding(directory: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(holding(&entry, text));
        } else if fs::read(&entry).unwrap().windows(text.len()).any(|at| at == text.as_bytes()) {
            found.push(entry.display().to_string());
        }
    }
    found
}

async fn nothing_of_an_unstored_request_is_written(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let log = fs::File::create(dir.path().join("log.txt")).unwrap();
    let daemon = Daemon::start_with(backend, dir.path(), CONFIG, &[], Stdio::from(log));
    let mut texts = Vec::new();
    for (number, path) in ["/v1/chat/completions", "/v1/completions"].into_iter().enumerate() {
        for (name, more, cut) in [
            ("whole", json!({}), false),
            ("stream", json!({"stream": true}), false),
            ("cut", json!({"stream": true}), true),
        ] {
            let secret = format!("zebra{number}{name}quagga");
            let answer = ask(&daemon, path, &body(path, &secret, false, &more), cut).await;
            texts.push(answer.chars().take(LONG).collect());
            texts.push(secret);
        }
    }
    // What is kept is found.
    let path = "/v1/chat/completions";
    let kept = ask(&daemon, path, &body(path, "okapi", true, &json!({"seed": 4})), false).await;
    let kept: String = kept.chars().take(LONG).collect();
    assert_eq!(daemon.terminate(), Some(0));

    assert!(dir.path().join("data/ledger.redb").is_file());
    for text in ["okapi", kept.as_str()] {
        let found = holding(dir.path(), text);
        assert!(found.len() == 1 && found[0].ends_with("ledger.redb"), "{found:?}");
    }
    for text in &texts {
        assert_eq!(holding(dir.path(), text), [""; 0], "{text}");
    }
    let metrics = Arc::new(Metrics::new().unwrap());
    let ledger = dir.path().join("data/ledger.redb");
    let store = Store::open(&ledger, &StoreConfig::default(), metrics).unwrap();
    let stats = store.stats().unwrap();
    assert_eq!(stats.interactions, 1);
}
