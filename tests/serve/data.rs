//! Erasure, backup and retention of a daemon that serves and learns meanwhile.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use hone_engine::EngineBackend;
use hone_store::maintain;

use crate::daemon::Daemon;
use crate::hone;

/// Small steps of several groups, so that clients give the trainer groups faster than it takes them.
const LEARNING: &str = r#"
[rollout]
group_size = 4
max_tokens = 24
[policy]
promotion = "direct"
publish_every = 1
[train]
samples_per_step = 32
learning_rate = 1e-4
warmup_steps = 0
max_staleness = 1000
[log]
level = "warn"
[[route]]
name = "default"
reward = [
    { name = "correct", kind = "numeric_match" },
    { name = "format", kind = "format_strict" },
    { name = "thumbs", kind = "feedback" },
]
"#;

/// Clients that ask and rate until the end of the test.
struct Load {
    stop: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
    clients: JoinSet<()>,
    started: Instant,
}

impl Load {
    fn start(daemon: &Arc<Daemon>, clients: u64, user: &'static str, question: &str) -> Self {
        let (stop, requests) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut running = JoinSet::new();
        for client in 0..clients {
            let (daemon, stop, requests) = (daemon.clone(), stop.clone(), requests.clone());
            let question = question.to_owned();
            running.spawn(async move {
                for n in 0.. {
                    if stop.load(Ordering::Acquire) {
                        break;
                    }
                    ask_and_rate(&daemon, user, &question, n * clients + client).await;
                    requests.fetch_add(2, Ordering::AcqRel);
                }
            });
        }
        Self { stop, requests, clients: running, started: Instant::now() }
    }

    /// Ends the clients, of which every request succeeded, and returns the requests per second.
    async fn end(mut self) -> f64 {
        self.stop.store(true, Ordering::Release);
        let rate =
            self.requests.load(Ordering::Acquire) as f64 / self.started.elapsed().as_secs_f64();
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
        rate
    }
}

async fn ask_and_rate(daemon: &Daemon, user: &str, question: &str, n: u64) {
    let (a, b) = (n % 10, n / 10 % 10);
    let chat = json!({
        "model": "default", "max_tokens": 24, "seed": n, "user": user,
        "messages": [{"role": "user", "content": format!("{question} What is {a} + {b}?")}],
        "metadata": {"answer": (a + b).to_string()},
    });
    let (status, answer) = daemon.post("/v1/chat/completions", &chat).await;
    assert_eq!(status, 200, "{answer}");
    let rating = json!({
        "completion_id": answer["id"], "name": "thumbs", "value": n.is_multiple_of(3), "end_user": user,
        "comment": format!("{user} remarks on {n}"),
    });
    let (status, reply) = daemon.post("/v1/feedback", &rating).await;
    assert_eq!(status, 200, "{reply}");
}

async fn step_of(daemon: &Daemon) -> u64 {
    daemon.get("/admin/train").await["step"].as_u64().unwrap()
}

/// The files below `dir` that contain `text`.
fn files_with(dir: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_with(&path, text));
        } else if let Ok(bytes) = std::fs::read(&path)
            && bytes.windows(text.len()).any(|window| window == text.as_bytes())
        {
            found.push(path.display().to_string());
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn erasing_an_end_user_removes_their_texts_while_the_daemon_serves_and_learns() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let daemon = Arc::new(Daemon::start(EngineBackend::Native, dir.path(), LEARNING, &[]));
    let others = Load::start(&daemon, 2, "zebra", "Zebras ask.");
    let erased = Load::start(&daemon, 2, "quagga", "Quaggas ask.");
    daemon.until(|status| status["step"].as_u64() >= Some(3)).await;
    erased.end().await;
    assert!(!files_with(&data, "Quaggas ask.").is_empty());

    let of_user = json!({"end_user": "quagga"});
    let (status, report) = daemon.post("/admin/erase", &of_user).await;
    assert_eq!(status, 200, "{report}");
    for counted in ["completions", "samples", "feedback"] {
        assert!(report[counted].as_u64() > Some(0), "{report}");
    }
    assert!(!report["versions"].as_array().unwrap().is_empty(), "{report}");
    for text in ["Quaggas ask.", "quagga remarks"] {
        assert_eq!(files_with(&data, text), Vec::<String>::new(), "{text}");
    }
    assert!(!files_with(&data, "Zebras ask.").is_empty());
    let (_, again) = daemon.post("/admin/erase", &of_user).await;
    assert_eq!((&again["completions"], &again["feedback"]), (&json!(0), &json!(0)));
    let audit = daemon.get("/admin/audit").await;
    let actions: Vec<_> = audit["data"].as_array().unwrap().iter().map(|r| &r["action"]).collect();
    assert_eq!(actions, ["erase", "erase"], "{audit}");
    assert!(!audit.to_string().contains("quagga"), "{audit}");

    let step = step_of(&daemon).await;
    daemon.until(|status| status["step"].as_u64() > Some(step + 1)).await;
    others.end().await;
    let daemon = Arc::into_inner(daemon).unwrap();
    assert_eq!(daemon.terminate(), Some(0));
    let report = maintain::check(&data.join("ledger.redb")).unwrap();
    assert!(report.is_healthy(), "{report:?}");
}

/// The groups and the measurements of a step in a stopped daemon's ledger, durations excepted.
fn step_in(data: &Path, step: u64) -> (Value, BTreeMap<String, Value>) {
    let mut lines = Vec::new();
    maintain::export(&data.join("ledger.redb"), &mut lines).unwrap();
    let rows = String::from_utf8(lines).unwrap();
    let rows = rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut found = rows.filter(|line| line["table"] == "steps" && line["row"]["step"] == step);
    let row = found.next_back().unwrap_or_else(|| panic!("no step {step}"))["row"].clone();
    let metrics = row["metrics"].as_object().unwrap().clone().into_iter();
    let is_time = |name: &str| name.contains("second") || name.contains("_ms");
    (row["groups"].clone(), metrics.filter(|(name, _)| !is_time(name)).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_under_load_resumes_with_the_numbers_of_the_original() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let daemon = Arc::new(Daemon::start(EngineBackend::Native, dir.path(), LEARNING, &[]));
    let load = Load::start(&daemon, 8, "zebra", "Zebras ask.");
    daemon.until(|status| status["step"].as_u64() >= Some(2)).await;
    // Groups of several steps wait from now on.
    daemon.post("/admin/train/pause", &json!({})).await;
    daemon.until(|status| status["ready_groups"].as_u64() >= Some(40)).await;
    daemon.post("/admin/train/resume", &json!({})).await;
    let step = step_of(&daemon).await;
    daemon.until(|status| status["step"].as_u64() > Some(step)).await;

    let mut backups = Vec::new();
    for name in ["1", "2", "3", "4"] {
        let (status, backup) = daemon.post("/admin/backup", &json!({"name": name})).await;
        assert_eq!(status, 200, "{backup}");
        let step = backup["step"].as_u64().unwrap();
        daemon.until(|status| status["step"].as_u64() > Some(step)).await;
        backups.push((name, step + 1));
    }
    // Nothing comes after the last one that its next step could take.
    daemon.post("/admin/train/pause", &json!({})).await;
    daemon.until(|status| status["ready_groups"].as_u64() >= Some(40)).await;
    println!("{:.0} requests per second during the backups", load.end().await);
    let (mut before, mut ready) = (Value::Null, json!(0));
    while before != ready {
        tokio::time::sleep(Duration::from_millis(500)).await;
        before = ready;
        ready = daemon.get("/admin/train").await["ready_groups"].clone();
    }
    let (status, backup) = daemon.post("/admin/backup", &json!({"name": "5"})).await;
    assert_eq!(status, 200, "{backup}");
    let step = step_of(&daemon).await;
    daemon.post("/admin/train/resume", &json!({})).await;
    daemon.until(|status| status["step"].as_u64() > Some(step)).await;
    backups.push(("5", step + 1));
    let daemon = Arc::into_inner(daemon).unwrap();
    assert_eq!(daemon.terminate(), Some(0));

    let mut same = 0;
    for (name, next) in backups {
        let (groups, numbers) = step_in(&data, next);
        let again = step_after_restore(&data.join("backups").join(name), next).await;
        // The original's step may contain a group of feedback that came after the backup.
        if groups == again.0 {
            assert!(numbers["grad_norm"].as_f64() > Some(0.0), "{numbers:?}");
            assert_eq!(numbers, again.1);
            same += 1;
        }
    }
    assert!(same > 0, "every backup was followed by late feedback");
}

/// Restores a backup, checks it, and takes its next step, without a client.
async fn step_after_restore(backup: &Path, step: u64) -> (Value, BTreeMap<String, Value>) {
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    let (backup, to) = (backup.to_str().unwrap(), data.to_str().unwrap());
    let (code, _, errors) = hone(&["db", "restore", "--from", backup, "--data", to]);
    assert_eq!(code, Some(0), "{errors}");
    let (code, report, errors) = hone(&["db", "check", "--data", to]);
    assert_eq!(code, Some(0), "{report}{errors}");
    let daemon = Daemon::start(EngineBackend::Native, place.path(), LEARNING, &[]);
    daemon.until(|status| status["step"].as_u64() >= Some(step)).await;
    assert_eq!(daemon.terminate(), Some(0));
    step_in(&data, step)
}

/// A client's long prompts fill the ledger with ten times its bound.
#[tokio::test(flavor = "multi_thread")]
async fn retention_keeps_the_directory_below_its_bound_while_ten_times_as_much_is_written() {
    const BOUND: u64 = 48;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let limits = format!("[store]\nretention = {{ kind = \"limits\", mebibytes = {BOUND} }}\n");
    let config = format!(
        "{limits}[train]\nenabled = false\n[rollout]\nenabled = false\n[log]\nlevel = \"warn\"\n"
    );
    let daemon = Daemon::start(EngineBackend::Native, dir.path(), &config, &[]);
    let text = "0123456789abcdef".repeat(2000);
    let (mut written, mut largest) = (0, 0);
    while written < (10 * BOUND) << 20 {
        // The model reads few tokens; the variables of its template are recorded too.
        let chat = json!({
            "model": "default", "max_tokens": 1,
            "messages": [{"role": "user", "content": "1 + 1?"}],
            "metadata": {"answer": "2"},
            "chat_template_kwargs": {"notes": text},
        });
        let (status, answer) = daemon.post("/v1/chat/completions", &chat).await;
        assert_eq!(status, 200, "{answer}");
        written += text.len() as u64;
        largest = largest.max(hone_core::files::tree_bytes(&data).unwrap());
    }
    let status = daemon.get("/admin/data").await;
    assert!(largest <= BOUND << 20, "{largest}: {status}");
    assert!(status["retention_removed"]["size"].as_u64() > Some(1000), "{status}");
    assert_eq!(status["retention"]["mebibytes"], BOUND);
    assert_eq!(daemon.terminate(), Some(0));
    let report = maintain::check(&data.join("ledger.redb")).unwrap();
    assert!(report.is_healthy(), "{report:?}");
}
