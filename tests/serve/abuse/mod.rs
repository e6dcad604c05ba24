//! Malformed requests: they are refused, and nothing of them remains. `tests/http/fuzz` changes their bodies.
//!
//! `HONE_SOAK` sets their number, by default 10,000.

mod attempt;
mod bounds;
mod heads;

use std::fs;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};

use hone_engine::EngineBackend;

use crate::daemon::Daemon;
use attempt::Attempt;

/// Clients only, and short times for slow ones.
const CONFIG: &str = r#"
[server]
max_body_bytes = 1000000
[server.connections]
head_seconds = 1
write_seconds = 1
[engine]
queue = 256
[rollout]
enabled = false
[train]
enabled = false
[log]
level = "warn"
"#;

const ATTEMPTS: u64 = 10_000;
const CONNECTIONS: usize = 48;
/// One attempt of so many is slow, because it takes a second or two.
const SLOW: u64 = 50;
/// Growth of the memory in the last quarter that allocator and caches explain.
const GROWTH: u64 = 16 << 20;

/// Valid requests of each route.
struct Valid(Vec<(String, Vec<Value>)>);

impl Valid {
    fn read() -> Self {
        let text = include_str!("../../fixtures/requests.json");
        let all: Map<String, Value> = serde_json::from_str(text).unwrap();
        let list = |value: Value| value.as_array().unwrap().clone();
        Self(all.into_iter().map(|(path, requests)| (path, list(requests))).collect())
    }
}

fn attempt(valid: &Valid, number: u64) -> Attempt {
    let mut random = ChaCha8Rng::seed_from_u64(number);
    if number.is_multiple_of(SLOW) {
        return attempt::slow(valid, &mut random);
    }
    heads::malformed(valid, &mut random)
}

/// Waits until nothing of the requests remains.
async fn calm(daemon: &Daemon) {
    let open = [
        "hone_http_requests_in_flight",
        "hone_http_connections",
        "hone_engine_sequences",
        "hone_engine_waiting_requests",
    ];
    let mut text = String::new();
    for _ in 0..600 {
        text = daemon.metrics().await;
        let gauges = text.lines().filter(|line| open.iter().any(|name| line.starts_with(name)));
        // The request for the metrics and its connection count too.
        if gauges.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
            <= 2.0
        {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("something remains: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_leave_nothing() {
    let count = std::env::var("HONE_SOAK").ok().and_then(|text| text.parse().ok());
    let count: u64 = count.unwrap_or(ATTEMPTS).max(4);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log.txt");
    let log = Stdio::from(fs::File::create(&path).unwrap());
    let daemon = Daemon::start_with(EngineBackend::Native, dir.path(), CONFIG, &[], log);
    let addr: SocketAddr = daemon.url.strip_prefix("http://").unwrap().parse().unwrap();
    let valid = Arc::new(Valid::read());
    let (mut refused, mut resident) = (0, Vec::new());
    for quarter in 0..4 {
        let numbers = quarter * count / 4..(quarter + 1) * count / 4;
        let sent = stream::iter(numbers).map(|number| {
            let valid = Arc::clone(&valid);
            tokio::spawn(async move {
                let attempt = attempt(&valid, number);
                (number, attempt.must_fail, attempt.send(addr).await)
            })
        });
        let mut answers = sent.buffer_unordered(CONNECTIONS);
        while let Some(answer) = answers.next().await {
            let (number, must_fail, status) = answer.unwrap();
            // The connection may end without a response.
            let Some(status) = status else { continue };
            let allowed = if must_fail { 400..500 } else { 100..500 };
            let shown = || attempt(&valid, number).shown();
            assert!(allowed.contains(&status), "attempt {number}: {status} for {}", shown());
            refused += u64::from(status >= 400);
        }
        calm(&daemon).await;
        resident.push(daemon.resident());
    }
    assert!(refused > count / 3, "{refused} of {count} were refused");
    daemon.ask("What is 2 + 3?", 1).await;
    let metrics = daemon.metrics().await;
    let is_failure = |line: &&str| line.starts_with("hone_http_requests_total{code=\"5");
    let failures: Vec<&str> = metrics.lines().filter(is_failure).collect();
    assert!(failures.is_empty(), "{failures:?}");
    let mib: Vec<u64> = resident.iter().map(|bytes| bytes >> 20).collect();
    println!("{count} attempts, {refused} refusals, {mib:?} MiB resident after each quarter");
    // Until then caches fill.
    let [.., warm, last] = resident[..] else { panic!("no quarters") };
    assert!(last <= warm + warm / 20 + GROWTH, "{resident:?} bytes");
    assert_eq!(daemon.terminate(), Some(0));
    let log = fs::read_to_string(&path).unwrap();
    assert!(!log.contains("panicked") && !log.contains("ERROR"), "{log}");
}
