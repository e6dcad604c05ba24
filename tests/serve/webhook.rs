//! Training continues while the example webhook server is down, and uses it again afterwards.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hone_core::testing::{has_program, skip};
use hone_engine::EngineBackend;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::backend::with_each_backend;
use crate::daemon::Daemon;

const SECRET: &str = "a secret of the test";

/// Forwards connections to a server that may end and start again on another port. While there is
/// none, it accepts connections and closes them. So no port is ever freed and bound again.
async fn forward(listener: TcpListener, server: watch::Receiver<Option<SocketAddr>>) {
    loop {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut server = server.clone();
        tokio::spawn(async move {
            let Some(address) = *server.borrow_and_update() else { return };
            let Ok(mut stream) = TcpStream::connect(address).await else { return };
            tokio::select! {
                _ = server.changed() => {}
                _ = tokio::io::copy_bidirectional(&mut client, &mut stream) => {}
            }
        });
    }
}

/// A running `examples/webhook_server.py`, killed when dropped.
struct Webhook(Child);

impl Webhook {
    /// Starts it on a free port. Returns its address.
    fn start() -> (Self, SocketAddr) {
        let mut child = Command::new("python3")
            .args(["examples/webhook_server.py", "0"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("SECRET", SECRET)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("listening on port ").unwrap().parse().unwrap();
        (Self(child), (Ipv4Addr::LOCALHOST, port).into())
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn config(port: u16) -> String {
    format!(
        r#"
[engine]
replicas = 2
[dataset]
path = "{root}/datasets/additions.jsonl"
[rollout]
group_size = 4
max_tokens = 40
dataset_route = "default"
[policy]
promotion = "direct"
publish_every = 1
[train]
samples_per_step = 16
learning_rate = 1e-4
warmup_steps = 0
max_staleness = 100
[log]
level = "error"
[[route]]
name = "default"
[[route.reward]]
name = "asked"
kind = "webhook"
url = "http://127.0.0.1:{port}/"
secret_env = "HONE_TEST_WEBHOOK_SECRET"
retries = 0
breaker_failures = 2
breaker_cooldown_ms = 200
[[route.reward]]
name = "correct"
kind = "numeric_match"
"#,
        root = env!("CARGO_MANIFEST_DIR")
    )
}

async fn metric(daemon: &Daemon, series: &str) -> f64 {
    let text = daemon.metrics().await;
    let lines = text.lines().filter(|line| line.starts_with(series));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Waits until `holds` returns true for the sum of a metric, and returns the sum.
async fn until(daemon: &Daemon, series: &str, holds: impl Fn(f64) -> bool) -> f64 {
    let started = Instant::now();
    loop {
        let value = metric(daemon, series).await;
        if holds(value) {
            return value;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "still waiting: {series} is {value}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

with_each_backend!(a_killed_webhook_leaves_parts_missing_until_it_is_restarted);

async fn a_killed_webhook_leaves_parts_missing_until_it_is_restarted(backend: EngineBackend) {
    if !has_program("python3") {
        return skip("python3 is not on the PATH");
    }
    const OK: &str = "hone_reward_webhook_requests_total{outcome=\"ok\"";
    const OPEN: &str = "hone_reward_webhook_circuit_open";
    const MISSING: &str = "hone_reward_webhook_missing_total";
    const STEPS: &str = "hone_train_steps_total";
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (webhook, address) = Webhook::start();
    let (server, watched) = watch::channel(Some(address));
    tokio::spawn(forward(listener, watched));
    let secret = [("HONE_TEST_WEBHOOK_SECRET", SECRET)];
    let daemon = Daemon::start_with(backend, dir.path(), &config(port), &secret, Stdio::inherit());

    until(&daemon, OK, |n| n > 0.0).await;
    until(&daemon, STEPS, |n| n >= 2.0).await;
    server.send_replace(None);
    drop(webhook);
    until(&daemon, OPEN, |open| open == 1.0).await;
    // More values than may have been in flight when the server was killed.
    let missing = until(&daemon, MISSING, |n| n > 0.0).await;
    until(&daemon, MISSING, |n| n >= missing + 64.0).await;
    let steps = metric(&daemon, STEPS).await;
    until(&daemon, STEPS, |n| n >= steps + 3.0).await;
    daemon.ask("What is 3 + 4?", 1).await;

    let (_webhook, address) = Webhook::start();
    server.send_replace(Some(address));
    let answered = metric(&daemon, OK).await;
    until(&daemon, OPEN, |open| open == 0.0).await;
    until(&daemon, OK, |n| n > answered + 2.0).await;
    let missing = metric(&daemon, MISSING).await;
    let steps = metric(&daemon, STEPS).await;
    until(&daemon, STEPS, |n| n >= steps + 2.0).await;
    assert_eq!(metric(&daemon, MISSING).await, missing, "no value is missing any more");
    assert_eq!(daemon.terminate(), Some(0));
}
