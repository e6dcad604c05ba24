//! The binary under load, killed with SIGKILL at random moments: no acknowledged feedback is lost, the
//! ledger reopens, and serving and training resume from the last state and advance over the kills.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests may fail loudly and print what they measure"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use hone_engine::EngineBackend;
use hone_store::maintain;

#[path = "serve/backend.rs"]
mod backend;
#[path = "serve/daemon.rs"]
#[expect(dead_code, reason = "the tests of `hone serve` use all of it")]
mod daemon;
#[path = "../crates/cuda/tests/kernels/fake.rs"]
#[expect(dead_code, reason = "the kernels' tests use all of it")]
mod fake;
use backend::with_each_backend;
use daemon::Daemon;

/// `HONE_CRASH_KILLS`, or 30.
fn kills() -> u64 {
    std::env::var("HONE_CRASH_KILLS").map_or(30, |kills| kills.parse().unwrap())
}

const CLIENTS: u64 = 3;
/// One run of so many lasts until training advances; the others end at random, most in the middle of
/// a step.
const STEP_EVERY: u64 = 3;
const START_LIMIT: Duration = Duration::from_secs(60);

/// Small steps, so that training advances within the second between two kills.
const CONFIG: &str = r#"
[rollout]
group_size = 4
max_tokens = 24

[policy]
promotion = "direct"
publish_every = 1
[train]
samples_per_step = 8
learning_rate = 1e-5
warmup_steps = 0
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

/// The acknowledgments and the progress that clients observed, over all runs of the daemon.
#[derive(Default)]
struct Observed {
    /// Acknowledged feedback: idempotency key -> (completion, value).
    acknowledged: Mutex<BTreeMap<String, (String, f64)>>,
    version: AtomicU64,
    step: AtomicU64,
    completions: AtomicU64,
}

impl Observed {
    /// Whether the daemon reported this step. Fails if it takes too long after the start.
    fn has_reached(&self, goal: u64, since: Duration) -> bool {
        let step = self.step.load(Ordering::SeqCst);
        assert!(since < START_LIMIT, "training stays at step {step}, before {goal}");
        step >= goal
    }
}

async fn post(client: &reqwest::Client, url: String, body: Value) -> Result<Value, String> {
    let response = client.post(url).json(&body).send().await.map_err(|e| format!("{e:?}"))?;
    let status = response.status();
    let text = response.text().await.map_err(|e| format!("{e:?}"))?;
    if status != 200 {
        return Err(format!("{status}: {text}"));
    }
    serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))
}

fn thumbs(completion: &str, key: &str, value: f64) -> Value {
    json!({"completion_id": completion, "name": "thumbs", "value": value, "idempotency_key": key})
}

/// Requests one addition and sends feedback. Returns the version that answered.
async fn ask_and_reward(
    client: &reqwest::Client,
    url: &str,
    key: &str,
    n: u64,
    seen: &Observed,
) -> Result<u64, String> {
    let (a, b) = (n % 10, n / 10 % 10);
    let chat = json!({
        "model": "default", "max_tokens": 32, "seed": n,
        "messages": [{"role": "user", "content": format!("What is {a} + {b}?")}],
        "metadata": {"answer": (a + b).to_string()},
    });
    let answer = post(client, format!("{url}/v1/chat/completions"), chat).await?;
    let version = version(&answer)?;
    seen.completions.fetch_add(1, Ordering::SeqCst);
    let id = answer["id"].as_str().ok_or("a completion without an id")?.to_owned();
    // Each value is unique, so that a value in the wrong record is detected.
    let value = n as f64 / f64::from(1 << 20);
    post(client, format!("{url}/v1/feedback"), thumbs(&id, key, value)).await?;
    seen.acknowledged.lock().unwrap().insert(key.to_owned(), (id, value));
    Ok(version)
}

fn version(answer: &Value) -> Result<u64, String> {
    let fingerprint = answer["system_fingerprint"].as_str().unwrap_or_default();
    let number = fingerprint.strip_prefix("hone-v").and_then(|n| n.parse().ok());
    number.ok_or_else(|| format!("no version in {answer}"))
}

/// Sends requests until the kill; each must succeed until then.
async fn client(url: String, life: u64, number: u64, seen: Arc<Observed>, killed: Arc<AtomicBool>) {
    let client = reqwest::Client::new();
    for i in 0.. {
        let key = format!("life {life}, client {number}, {i}");
        let n = 1 + seen.completions.load(Ordering::SeqCst);
        let result = ask_and_reward(&client, &url, &key, n, &seen).await;
        match result {
            Ok(version) => drop(seen.version.fetch_max(version, Ordering::SeqCst)),
            Err(_) if killed.load(Ordering::SeqCst) => return,
            Err(error) => panic!("{key} failed before the kill: {error}"),
        }
    }
}

async fn train_status(client: &reqwest::Client, url: &str) -> Result<Value, reqwest::Error> {
    client.get(format!("{url}/admin/train")).send().await?.json().await
}

/// Records the highest step that the daemon reports.
async fn watch_training(url: String, seen: Arc<Observed>) {
    let client = reqwest::Client::new();
    while let Ok(status) = train_status(&client, &url).await {
        seen.step.fetch_max(status["step"].as_u64().unwrap_or(0), Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that the daemon resumes: it serves the observed version or a later one, reaches the observed
/// step, and still has the acknowledged feedback.
async fn check_resumed(daemon: &Daemon, seen: &Observed, life: u64) {
    let client = reqwest::Client::new();
    let (version_before, step_before) =
        (seen.version.load(Ordering::SeqCst), seen.step.load(Ordering::SeqCst));
    let chat = json!({
        "model": "default", "max_tokens": 8,
        "messages": [{"role": "user", "content": "What is 1 + 1?"}],
    });
    let answer = post(&client, format!("{}/v1/chat/completions", daemon.url), chat).await.unwrap();
    let version = version(&answer).unwrap();
    assert!(version >= version_before, "life {life} serves {version} after {version_before}");
    // The trainer reads its checkpoint while the first requests are served.
    let deadline = Instant::now() + START_LIMIT;
    loop {
        let status = train_status(&client, &daemon.url).await.unwrap();
        if status["step"].as_u64().unwrap() >= step_before {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "life {life} has not reached step {step_before}: {status}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let last =
        seen.acknowledged.lock().unwrap().iter().next_back().map(|(k, v)| (k.clone(), v.clone()));
    if let Some((key, (completion, value))) = last {
        let body = thumbs(&completion, &key, value);
        let again = post(&client, format!("{}/v1/feedback", daemon.url), body).await.unwrap();
        assert_eq!(again["status"], "duplicate", "life {life}");
    }
}

/// The state in the ledger of a stopped daemon.
#[derive(Default)]
struct Ledger {
    feedback: BTreeMap<String, (String, f64)>,
    steps: u64,
    active: u64,
}

fn read_ledger(path: &Path) -> Ledger {
    let report = maintain::check(path).unwrap();
    assert!(report.is_healthy(), "{report:?}");
    let mut lines = Vec::new();
    maintain::export(path, &mut lines).unwrap();
    let mut completions = BTreeMap::new();
    let (mut served, mut known) = (BTreeSet::new(), BTreeSet::new());
    let (mut ledger, mut step_rows) = (Ledger::default(), 0);
    for line in String::from_utf8(lines).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let row = &line["row"];
        let text = |field: &str| row[field].as_str().unwrap().to_owned();
        match line["table"].as_str().unwrap() {
            "samples" => {
                completions.insert(text("id"), text("interaction"));
                served.insert(row["version"].as_u64().unwrap());
            }
            "feedback" => {
                let completion = completions[&text("sample")].replace('-', "");
                let value = row["value"].as_f64().unwrap();
                let key = text("idempotency_key");
                let twice = ledger.feedback.insert(key, (format!("chatcmpl-{completion}"), value));
                assert_eq!(twice, None, "one key, two rows");
            }
            "steps" => {
                step_rows += 1;
                ledger.steps = ledger.steps.max(row["step"].as_u64().unwrap());
            }
            "policy_versions" => {
                let version = row["version"].as_u64().unwrap();
                known.insert(version);
                if row["state"] == "active" {
                    ledger.active = version;
                }
            }
            _ => {}
        }
    }
    assert!(served.is_subset(&known), "versions {served:?} answered, {known:?} are recorded");
    assert_eq!(step_rows, ledger.steps, "every step up to the last has one row");
    ledger
}

/// Checks that the ledger contains all acknowledged feedback, and that no state regressed.
fn check_ledger(path: &Path, seen: &Observed, before: &Ledger, life: u64) -> Ledger {
    let ledger = read_ledger(path);
    for (key, promised) in seen.acknowledged.lock().unwrap().iter() {
        let kept = ledger.feedback.get(key);
        assert_eq!(kept, Some(promised), "life {life}: {key} was acknowledged");
    }
    assert!(ledger.steps >= before.steps, "life {life}: {} < {}", ledger.steps, before.steps);
    let (step, version) = (seen.step.load(Ordering::SeqCst), seen.version.load(Ordering::SeqCst));
    assert!(ledger.steps >= step, "life {life}: step {step} was reported, {} kept", ledger.steps);
    let active = ledger.active;
    assert!(active >= before.active, "life {life}: version {active} after {}", before.active);
    assert!(active >= version, "life {life}: version {version} answered, {active} is kept");
    ledger
}

fn stats(dir: &Path) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_hone"))
        .args(["db", "stats", "--json", "--data"])
        .arg(dir.join("data"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A pseudo-random number that is the same in every run.
fn pseudo_random(n: u64) -> u64 {
    let z = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 20
}

with_each_backend!(kills_lose_nothing_acknowledged);

async fn kills_lose_nothing_acknowledged(backend: EngineBackend) {
    let kills = kills();
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("data").join("ledger.redb");
    let seen = Arc::new(Observed::default());
    let mut ledger = Ledger::default();
    let mut steps_by_life = vec![0];
    for life in 0..kills {
        let load = Duration::from_millis(200 + pseudo_random(life) % 1300);
        let step = seen.step.load(Ordering::SeqCst);
        let goal = if life % STEP_EVERY == 0 { step + 1 } else { 0 };
        run_and_kill(backend, dir.path(), &[], &seen, life, |seen, since| {
            since > load && seen.has_reached(goal, since)
        })
        .await;
        // Of many kills not each one, because the whole ledger is read.
        if life < 30 || life % 10 == 0 || life + 1 == kills {
            ledger = check_ledger(&path, &seen, &ledger, life);
            let kept = seen.acknowledged.lock().unwrap().len();
            println!("{} kills, {kept} acknowledged, step {}", life + 1, ledger.steps);
        }
        steps_by_life.push(ledger.steps.max(seen.step.load(Ordering::SeqCst)));
    }
    let promised = seen.acknowledged.lock().unwrap().len() as u64;
    println!("{promised} acknowledged over {kills} kills; steps after each: {steps_by_life:?}");
    assert!(promised > 2 * kills, "hardly any load");
    let advanced = steps_by_life.windows(2).filter(|steps| steps[1] > steps[0]).count() as u64;
    assert!(advanced >= kills / STEP_EVERY, "training advanced in {advanced} of {kills} runs");
    assert!(ledger.active > 0, "versions were published");

    // A last run, long enough to observe that training continues.
    let goal = ledger.steps + 2;
    let reached = |seen: &Observed, since| seen.has_reached(goal, since);
    run_and_kill(backend, dir.path(), &[], &seen, kills, reached).await;
    let ledger = check_ledger(&path, &seen, &ledger, kills);
    assert!(ledger.steps >= goal);
    let counts = stats(dir.path());
    assert_eq!(counts["feedback"].as_u64(), Some(ledger.feedback.len() as u64));
    assert!(counts["interactions"].as_u64().unwrap() >= promised);
}

/// The same with the native engine and the trainer on an emulated device, killed as soon as a step is recorded, while its
/// version is published.
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_during_a_publication_on_a_device_loses_nothing() {
    let Some((libraries, _folder)) = fake::command(&fake::ALL) else { return };
    let environment =
        libraries.get_envs().filter_map(|(name, value)| Some((name.to_str()?, value?.to_str()?)));
    let device = [
        ("HONE_MODEL_DEVICE", "cuda:0"),
        ("HONE_ROLLOUT_MAX_BATCH_TOKENS", "1024"),
        ("HONE_ENGINE_SLOTS", "4"),
    ];
    let environment: Vec<_> = environment.chain(device).collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data").join("ledger.redb");
    let (seen, mut ledger) = (Arc::new(Observed::default()), Ledger::default());
    for life in 0..3 {
        let goal = seen.step.load(Ordering::SeqCst) + 1;
        let reached = |seen: &Observed, since| seen.has_reached(goal, since);
        run_and_kill(EngineBackend::Native, dir.path(), &environment, &seen, life, reached).await;
        ledger = check_ledger(&path, &seen, &ledger, life);
    }
    assert!(
        ledger.steps >= 3 && ledger.active > 0,
        "{} steps, version {}",
        ledger.steps,
        ledger.active
    );
}

/// Starts the daemon with variables of the environment, sends requests until `enough` returns true, and kills it.
async fn run_and_kill(
    backend: EngineBackend,
    dir: &Path,
    environment: &[(&str, &str)],
    seen: &Arc<Observed>,
    life: u64,
    enough: impl Fn(&Observed, Duration) -> bool,
) {
    let daemon = Daemon::start_with(backend, dir, CONFIG, environment, Stdio::inherit());
    check_resumed(&daemon, seen, life).await;
    let killed = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(client(daemon.url.clone(), life, number, seen.clone(), killed.clone()));
    }
    let watcher = tokio::spawn(watch_training(daemon.url.clone(), seen.clone()));
    let started = Instant::now();
    while !enough(seen, started.elapsed()) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    killed.store(true, Ordering::SeqCst);
    // SIGKILL.
    drop(daemon);
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    watcher.await.unwrap();
}
