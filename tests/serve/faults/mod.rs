//! The daemon on a disk that hangs or is full, and with a clock that jumps.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use hone_engine::EngineBackend;

use crate::daemon::Daemon;

/// Small steps, so that the trainer writes often.
const CONFIG: &str = r#"
[policy]
promotion = "direct"
publish_every = 1
[train]
samples_per_step = 4
learning_rate = 1e-5
warmup_steps = 0
max_staleness = 1000
feedback_max_staleness = 1000
[log]
level = "warn"
"#;

const LIMIT: Duration = Duration::from_secs(90);

/// A daemon whose files and clock [`Faulty::fault`] changes.
struct Faulty {
    daemon: Daemon,
    faults: File,
    dir: TempDir,
}

impl Faulty {
    /// `None`, and the test is skipped, if there is no C compiler.
    fn start(config: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let shim = dir.path().join("shim.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/faults/shim.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&shim).arg(source).arg("-ldl");
        if !compiler.status().is_ok_and(|status| status.success()) {
            hone_core::testing::skip("there is no C compiler");
            return None;
        }
        let file = dir.path().join("faults");
        fs::write(&file, [0; 256]).unwrap();
        fs::write(dir.path().join("faults.log"), "").unwrap();
        let environment =
            [("LD_PRELOAD", shim.to_str().unwrap()), ("HONE_FAULTS", file.to_str().unwrap())];
        let (native, log) = (EngineBackend::Native, Stdio::inherit());
        let daemon = Daemon::start_with(native, dir.path(), config, &environment, log);
        let faults = File::options().write(true).open(file).unwrap();
        Some(Self { daemon, faults, dir })
    }

    /// The layout is that of `struct faults` in `shim.c`.
    fn fault(&self, clock_seconds: i64, hangs: bool, is_full: bool, path: &str) {
        let mut bytes = [0; 256];
        bytes[16..16 + path.len()].copy_from_slice(path.as_bytes());
        self.faults.write_all_at(&bytes[16..], 16).unwrap();
        bytes[..8].copy_from_slice(&clock_seconds.to_ne_bytes());
        bytes[8..12].copy_from_slice(&i32::from(hangs).to_ne_bytes());
        bytes[12..16].copy_from_slice(&i32::from(is_full).to_ne_bytes());
        self.faults.write_all_at(&bytes[..16], 0).unwrap();
    }

    fn heal(&self) {
        self.fault(0, false, false, "");
    }

    /// The id of a completion.
    async fn ask(&self, seed: u64) -> String {
        self.daemon.ask("What is 3 + 4?", seed).await["id"].as_str().unwrap().to_owned()
    }

    /// Posts a rating whose idempotency key is the completion.
    async fn rate(&self, completion: &str) -> (u16, Value) {
        // Equal ratings would have no advantage.
        let value = completion.as_bytes().last().unwrap() % 2;
        let rating = json!({
            "completion_id": completion, "name": "thumbs", "value": value, "idempotency_key": completion,
        });
        self.daemon.post("/v1/feedback", &rating).await
    }

    async fn asked_and_rated(&self, seed: u64) {
        let (status, answer) = self.rate(&self.ask(seed).await).await;
        assert_eq!(status, 200, "{answer}");
    }

    async fn readiness(&self) -> (u16, String) {
        let answer = self.daemon.client.get(format!("{}/readyz", self.daemon.url)).send().await;
        let answer = answer.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn until_ready(&self) {
        let began = Instant::now();
        while self.readiness().await.0 != 200 {
            assert!(began.elapsed() < LIMIT, "{:?}", self.readiness().await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The value of a metric without labels.
    async fn metric(&self, name: &str) -> f64 {
        let metrics = self.daemon.metrics().await;
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap().parse().unwrap()
    }

    /// Asks and rates until the trainer's status fulfills a condition, and returns it.
    async fn train_until(&self, holds: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        for seed in 1_000.. {
            let status = self.daemon.get("/admin/train").await;
            if holds(&status) {
                return status;
            }
            assert!(began.elapsed() < LIMIT, "still waiting: {status}");
            self.asked_and_rated(seed).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Value::Null
    }

    async fn train_beyond(&self, version: u64) -> u64 {
        let of = |status: &Value| status["policy_version"].as_u64().unwrap();
        of(&self.train_until(|status| of(status) > version).await)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_disk_hangs_completions_are_answered_and_feedback_gets_503() {
    let Some(faulty) = Faulty::start(CONFIG) else { return };
    let rated = faulty.ask(1).await;
    assert_eq!(faulty.rate(&rated).await.0, 200);
    let (recorded, refused) = (faulty.ask(2).await, faulty.ask(3).await);
    let flushed = faulty.rate(&rated).await.1;
    assert_eq!(flushed["status"], "duplicate", "{flushed}");

    faulty.fault(0, true, false, "ledger.redb");
    let asked = Instant::now();
    let (status, error) = faulty.rate(&recorded).await;
    assert_eq!(status, 503, "{error}");
    assert!(error.to_string().contains("may still be recorded"), "{error}");
    assert!((9.0..20.0).contains(&asked.elapsed().as_secs_f64()), "{:?}", asked.elapsed());
    let asked = Instant::now();
    let (status, error) = faulty.rate(&refused).await;
    assert_eq!(status, 503, "{error}");
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    let (status, reason) = faulty.readiness().await;
    assert_eq!(status, 503);
    assert!(reason.contains("a write to the ledger has not ended for 10 seconds"), "{reason}");
    let meanwhile = faulty.ask(4).await;
    assert!(faulty.metric("hone_store_late_writes_total").await >= 2.0);
    assert!(faulty.metric("hone_store_queue_bytes").await > 0.0);

    faulty.heal();
    faulty.until_ready().await;
    assert_eq!(faulty.rate(&recorded).await.1["status"], "duplicate");
    for completion in [&refused, &meanwhile] {
        let (status, answer) = faulty.rate(completion).await;
        assert_eq!((status, &answer["status"]), (200, &json!("recorded")), "{answer}");
    }
    faulty.train_beyond(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_full_disk_completions_are_answered_and_learning_goes_on_when_there_is_space() {
    let Some(faulty) = Faulty::start(CONFIG) else { return };
    let mut version = faulty.train_beyond(0).await;

    let rated = faulty.ask(1).await;
    faulty.fault(0, false, true, "ledger.redb");
    let (status, error) = faulty.rate(&rated).await;
    assert_eq!(status, 500, "{error}");
    let (status, reason) = faulty.readiness().await;
    assert_eq!(status, 503);
    assert!(reason.contains("the last write to the ledger failed"), "{reason}");
    let meanwhile = faulty.ask(2).await;
    faulty.heal();
    faulty.until_ready().await;
    for completion in [&rated, &meanwhile] {
        assert_eq!(faulty.rate(completion).await.0, 200);
    }
    version = faulty.train_beyond(version).await;

    for place in ["/adapters/", "/checkpoints/"] {
        faulty.fault(0, false, true, place);
        // Feedback is recorded meanwhile.
        let failed = faulty.train_until(|status| status["state"] == "failed").await;
        let reason = failed["last_error"].as_str().unwrap_or_default();
        assert!(reason.contains("No space left"), "{place}: {failed}");
        assert_eq!(faulty.readiness().await.0, 200);
        faulty.heal();
        version =
            faulty.train_beyond(version.max(failed["policy_version"].as_u64().unwrap())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_jumps_stops_neither_requests_nor_learning() {
    const DAY: i64 = 24 * 60 * 60;
    let keys = r#"
[server]
admin_keys = ["operator-key"]
[[server.keys]]
name = "expiring"
key = "expiring-key"
scopes = ["chat", "feedback", "admin"]
expires = 2999-01-01
[[server.keys]]
name = "limited"
key = "limited-key"
scopes = ["chat"]
requests_per_minute = 2
"#;
    let Some(mut faulty) = Faulty::start(&format!("{CONFIG}{keys}")) else { return };
    let with_key = |key: &str| {
        let value = format!("Bearer {key}").parse().unwrap();
        let headers = [(reqwest::header::AUTHORIZATION, value)].into_iter().collect();
        reqwest::Client::builder().default_headers(headers).build().unwrap()
    };
    faulty.daemon.client = with_key("expiring-key");
    let mut version = faulty.train_beyond(0).await;
    // Before 1970, tomorrow, yesterday, in a hundred years.
    for days in [-80 * 365, 1, -1, 100 * 365] {
        faulty.fault(days * DAY, false, false, "");
        faulty.asked_and_rated(days.unsigned_abs()).await;
        version = faulty.train_beyond(version).await;
        assert_eq!(faulty.readiness().await.0, 200, "{days}");
    }

    let models = format!("{}/v1/models", faulty.daemon.url);
    let status = async |client: &reqwest::Client| {
        client.get(&models).send().await.unwrap().status().as_u16()
    };
    // A key expires with the clock, and is accepted again when the clock is set right.
    faulty.fault(1_000 * 365 * DAY, false, false, "");
    assert_eq!(status(&faulty.daemon.client).await, 401);
    faulty.heal();
    assert_eq!(status(&faulty.daemon.client).await, 200);
    // Limits do not follow the clock.
    let limited = with_key("limited-key");
    assert_eq!([status(&limited).await, status(&limited).await], [200, 200]);
    for days in [1, -1] {
        faulty.fault(days * DAY, false, false, "");
        assert_eq!(status(&limited).await, 429, "{days}");
    }
    faulty.heal();
    faulty.train_beyond(version).await;
}

/// Each file or directory that replaces another one is durable before it gets its name, and then its name is: after a
/// power loss, readers find the old one or the new one. `hone_core::files` has the tests of what a crash leaves.
#[tokio::test(flavor = "multi_thread")]
async fn what_replaces_a_file_is_synced_before_its_rename_and_its_directory_after() {
    let Some(faulty) = Faulty::start(CONFIG) else { return };
    faulty.train_beyond(1).await;
    let Faulty { daemon, dir, .. } = faulty;
    assert_eq!(daemon.terminate(), Some(0));
    let log = fs::read_to_string(dir.path().join("faults.log")).unwrap();
    let lines: Vec<&str> = log.lines().collect();
    let is_synced = |lines: &[&str], path: &Path| {
        lines.iter().any(|line| line.strip_prefix("sync ") == path.to_str())
    };
    let mut replaced = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some((from, to)) = line.strip_prefix("rename ").and_then(|l| l.split_once('\t')) else {
            continue;
        };
        let (from, to) = (Path::new(from), Path::new(to));
        // The old directory, which makes place.
        if to.extension().is_some_and(|suffix| suffix == "old") {
            continue;
        }
        let (before, after) = lines.split_at(at);
        assert!(is_synced(before, from), "{line}: not synced before");
        // Some directories were removed since.
        for file in fs::read_dir(to).into_iter().flatten() {
            let name = file.unwrap().file_name();
            assert!(is_synced(before, &from.join(&name)), "{line}: {name:?} is not synced before");
        }
        assert!(is_synced(after, to.parent().unwrap()), "{line}: the name is not synced after");
        replaced.push(to.strip_prefix(dir.path().join("data")).unwrap_or(to).to_owned());
    }
    for kind in ["adapters", "checkpoints/step", "checkpoints/versions", "model.json"] {
        let has = |path: &std::path::PathBuf| path.to_string_lossy().starts_with(kind);
        assert!(replaced.iter().any(has), "nothing replaced {kind}: {replaced:?}");
    }
}
