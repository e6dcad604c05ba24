//! Requests that would cost gigabytes or stop the server are refused at small cost.

use std::time::{Duration, Instant};

use futures::future::join_all;
use serde_json::json;
use tokio::net::TcpStream;

use hone_engine::EngineBackend;

use crate::daemon::Daemon;

/// Memory that 16 refused requests of 1 MB may need: their bodies, and few copies of them.
const MOST_BYTES: u64 = 200 << 20;

async fn bytes(daemon: &Daemon, name: &str) -> u64 {
    let metrics = daemon.metrics().await;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap().parse::<f64>().unwrap() as u64
}

/// A daemon without training.
const CONFIG: &str =
    "[rollout]\nenabled = false\n[train]\nenabled = false\n[log]\nlevel = \"error\"\n";

/// Opens connections that send nothing.
async fn silent(daemon: &Daemon, count: usize) -> Vec<TcpStream> {
    let address = daemon.url.trim_start_matches("http://");
    let mut open = Vec::new();
    for _ in 0..count {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    open
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_beyond_the_descriptors_do_not_stop_probes() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start_within(256, dir.path(), CONFIG);
    // The server may close a kept connection at the moment at which the client uses it again.
    let without_kept = reqwest::Client::builder().pool_max_idle_per_host(0);
    daemon.client = without_kept.build().unwrap();
    // The model is loaded, and its files are closed.
    daemon.ask("What is 1 + 1?", 1).await;
    for _ in 0..3 {
        let held = silent(&daemon, 300).await;
        let began = Instant::now();
        assert_eq!(daemon.get("/livez").await["status"], "ok");
        // Without closing idle connections, this takes until their heads are overdue: 10 s.
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        daemon.ask("What is 1 + 1?", 1).await;
        drop(held);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_of_a_megabyte_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(EngineBackend::Native, dir.path(), CONFIG, &[]);
    let before = bytes(&daemon, "hone_memory_resident_bytes").await;
    let text = "lorem ipsum dolor sit amet, ".repeat(35_000);
    let messages = json!([{"role": "user", "content": text}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "default", "messages": messages})),
        ("/v1/completions", json!({"model": "default", "prompt": text})),
        ("/v1/responses", json!({"model": "default", "input": text})),
        ("/v1/messages", json!({"model": "default", "messages": messages, "max_tokens": 9})),
        ("/v1/messages/count_tokens", json!({"model": "default", "messages": messages})),
    ] {
        let answers = join_all((0..16).map(|_| daemon.post(path, &body))).await;
        for (status, answer) in answers {
            assert_eq!(status, 400, "{path}: {answer}");
        }
    }
    let grown = bytes(&daemon, "hone_memory_resident_peak_bytes").await.saturating_sub(before);
    assert!(grown < MOST_BYTES, "{grown} bytes more");
}
