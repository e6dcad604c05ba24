//! `hone demo` against a fake daemon with the same HTTP API: the demo's requests, their order, its
//! counts and its report.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use hone::config::Config;
use hone_demo as demo;
use hone_demo::{DaemonHandle, DemoOptions, DemoOutcome, RewardsMode, eval, task};
use hone_train::policy::Promotion;

const QUESTIONS_PER_STEP: u64 = 6;

/// How the fake daemon fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    None,
    /// Answers never improve.
    NoLearning,
    /// Every tenth stream lacks its `[DONE]`.
    BrokenStreams,
    /// The trainer fails at step 2.
    TrainerFails,
}

#[derive(Default)]
struct Inner {
    paused: bool,
    step: u64,
    max_steps: u64,
    asked: u64,
    streams: u64,
    questions: Vec<(String, Value)>,
    completions: HashSet<String>,
    thumbs: Vec<(String, bool)>,
    steps_at_evaluation: Vec<u64>,
}

#[derive(Clone)]
struct Fake {
    failure: Failure,
    inner: Arc<Mutex<Inner>>,
    stopped: Arc<AtomicBool>,
}

impl Fake {
    fn new(failure: Failure) -> Self {
        Self { failure, inner: Arc::default(), stopped: Arc::default() }
    }

    async fn start(self, config: Config) -> anyhow::Result<DaemonHandle> {
        assert_eq!(config.server.bind, SocketAddr::from(([127, 0, 0, 1], 0)));
        assert!(config.data.dir.join("hone.toml").is_file());
        self.inner.lock().unwrap().max_steps = config.train.max_steps;
        let router = Router::new()
            .route("/readyz", get(async || "ok"))
            .route("/metrics", get(metrics))
            .route("/admin/train", get(train))
            .route("/admin/policies", get(policies))
            .route("/admin/train/pause", post(pause))
            .route("/admin/train/resume", post(resume))
            .route("/v1/chat/completions", post(chat))
            .route("/v1/feedback", post(feedback))
            .with_state(self.clone());
        let listener = tokio::net::TcpListener::bind(config.server.bind).await?;
        let addr = listener.local_addr()?;
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        let stopped = self.stopped;
        let shutdown = async move {
            server.abort();
            stopped.store(true, Ordering::Relaxed);
            Ok(())
        };
        Ok(DaemonHandle { url: format!("http://{addr}"), shutdown: Box::pin(shutdown) })
    }
}

async fn metrics(State(fake): State<Fake>) -> String {
    let step = fake.inner.lock().unwrap().step;
    format!(
        "# HELP hone_x x\nhone_policy_published_total {step}\nhone_policy_version {step}\nhone_train_kl 0.125\n"
    )
}

async fn train(State(fake): State<Fake>) -> Json<Value> {
    let inner = fake.inner.lock().unwrap();
    let failed = fake.failure == Failure::TrainerFails && inner.step >= 2;
    let state = match () {
        () if failed => "failed",
        () if inner.step >= inner.max_steps => "finished",
        () if inner.paused => "paused",
        () => "waiting",
    };
    Json(json!({
        "state": state, "step": inner.step, "ready_groups": 0, "policy_version": inner.step,
        "metrics": {}, "last_error": failed.then_some("the loss is not a number"), "restarts": 0,
    }))
}

/// A version per step, all promoted, and one that users rated down once its questions are sabotaged.
async fn policies(State(fake): State<Fake>) -> Json<Value> {
    let inner = fake.inner.lock().unwrap();
    let record = |version: u64, state: &str, reason: Option<&str>| {
        let detail = reason.unwrap_or("not worse");
        json!({
            "version": version, "parent": version.checked_sub(1), "step": version, "adapter": null,
            "sha256": null, "metrics": {}, "state": state, "reason": reason, "created": 0,
            "pinned": false,
            "checks": [{
                "name": "canary/ratings", "passed": reason.is_none(), "value": 0.1, "bound": -0.05,
                "detail": detail,
            }],
        })
    };
    let mut data: Vec<Value> = (0..=inner.step).map(|step| record(step, "retired", None)).collect();
    if inner.questions.iter().any(|(_, metadata)| metadata["task"] == "sabotaged") {
        data.push(record(inner.max_steps + 1, "rolled_back", Some("canary/ratings: worse")));
    }
    Json(json!({"object": "list", "active": inner.step, "data": data}))
}

async fn pause(State(fake): State<Fake>) -> Json<Value> {
    fake.inner.lock().unwrap().paused = true;
    Json(json!({}))
}

async fn resume(State(fake): State<Fake>) -> Json<Value> {
    fake.inner.lock().unwrap().paused = false;
    Json(json!({}))
}

async fn chat(State(fake): State<Fake>, Json(body): Json<Value>) -> Response {
    assert_eq!(body["stream"], true);
    let text = body["messages"][0]["content"].as_str().unwrap().to_owned();
    let mut inner = fake.inner.lock().unwrap();
    inner.streams += 1;
    let evaluation = body["metadata"]["task"] == "held-out";
    assert!(body["temperature"] == 1.0 || evaluation && body["temperature"] == 0.0, "{body}");
    if evaluation {
        let step = inner.step;
        inner.steps_at_evaluation.push(step);
    } else {
        inner.asked += 1;
        if !inner.paused
            && inner.step < inner.max_steps
            && inner.asked.is_multiple_of(QUESTIONS_PER_STEP)
        {
            inner.step += 1;
        }
    }
    let id = format!("chatcmpl-{:032x}", inner.streams);
    inner.completions.insert(id.clone());
    inner.questions.push((text.clone(), body["metadata"].clone()));
    // The answers to about half of the questions are right before step 1, and every answer after it. The
    // question decides, not the order of requests, so that nothing changes without learning.
    let learned = inner.step > 0 && fake.failure != Failure::NoLearning;
    let is_easy = text.bytes().map(u32::from).sum::<u32>().is_multiple_of(2);
    let answer = if learned || is_easy { perfect(&text) } else { "dunno".into() };
    let broken = fake.failure == Failure::BrokenStreams && inner.streams.is_multiple_of(10);
    stream(&id, inner.step, &answer, broken)
}

/// The answer that earns the maximum, from the two numbers in the question.
fn perfect(question: &str) -> String {
    let numbers: Vec<i64> = question
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect();
    let sum: i64 = numbers.iter().sum();
    format!("<reasoning>it is {sum}</reasoning><answer>{sum}</answer>")
}

fn stream(id: &str, version: u64, answer: &str, broken: bool) -> Response {
    let chunk = |delta: Value, finish: Option<&str>| {
        let chunk = json!({
            "id": id, "object": "chat.completion.chunk", "system_fingerprint": format!("hone-v{version}"),
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        });
        format!("data: {chunk}\n\n")
    };
    let (head, tail) = answer.split_at(answer.len() / 2);
    let mut body = chunk(json!({"role": "assistant", "content": ""}), None);
    body += &chunk(json!({"content": head}), None);
    body += &chunk(json!({"content": tail}), None);
    body += &chunk(json!({}), Some("stop"));
    if !broken {
        body += "data: [DONE]\n\n";
    }
    let headers = [
        (header::CONTENT_TYPE.as_str(), "text/event-stream".to_owned()),
        ("x-hone-policy-version", version.to_string()),
    ];
    (headers, body).into_response()
}

async fn feedback(State(fake): State<Fake>, Json(body): Json<Value>) -> Response {
    let mut inner = fake.inner.lock().unwrap();
    let id = body["completion_id"].as_str().unwrap().to_owned();
    assert_eq!(body["name"], "thumbs");
    if !inner.completions.contains(&id) {
        return StatusCode::NOT_FOUND.into_response();
    }
    inner.thumbs.push((id, body["value"].as_bool().unwrap()));
    Json(json!({"status": "recorded"})).into_response()
}

async fn demo(
    failure: Failure,
    options: DemoOptions,
) -> (anyhow::Result<DemoOutcome>, String, Inner) {
    let fake = Fake::new(failure);
    let mut out = Vec::new();
    let outcome =
        demo::run(options, async |config| fake.clone().start(config).await, &mut out).await;
    assert!(fake.stopped.load(Ordering::Relaxed), "the daemon is always shut down");
    let inner = std::mem::take(&mut *fake.inner.lock().unwrap());
    (outcome, String::from_utf8(out).unwrap(), inner)
}

fn options(rewards: RewardsMode) -> DemoOptions {
    DemoOptions { steps: 5, rewards, ..DemoOptions::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demo_reports_what_it_learned() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.json");
    let options = DemoOptions {
        report: Some(file.clone()),
        data: Some(dir.path().join("data")),
        ..options(RewardsMode::Both)
    };
    let (outcome, text, inner) = demo(Failure::None, options).await;
    let outcome = outcome.unwrap();
    assert!(outcome.improved);
    assert!((outcome.report.reward_after - task::REWARD_MAX).abs() < 1e-9);
    assert!(outcome.report.reward_before < 0.75 * task::REWARD_MAX);
    assert_eq!((outcome.report.steps, outcome.report.swaps), (5, 5));
    assert_eq!(outcome.report.failed_requests, 0);
    assert_eq!(outcome.report.requests, inner.streams);
    assert_eq!(outcome.report.feedback, inner.thumbs.len() as u64);

    // No step is taken before or during the first evaluation, nor during the second.
    let n = eval::QUESTIONS * 2 * 2;
    assert_eq!(inner.steps_at_evaluation.len(), 2 * n);
    assert!(inner.steps_at_evaluation[..n].iter().all(|&step| step == 0));
    assert!(inner.steps_at_evaluation[n..].iter().all(|&step| step == 5));

    // Users never ask a held-out question, and only theirs carry a reference answer.
    let held_out: HashSet<String> =
        eval::held_out(eval::QUESTIONS).iter().map(task::Question::text).collect();
    for (question, metadata) in &inner.questions {
        let evaluation = metadata["task"] == "held-out";
        assert_eq!(held_out.contains(question), evaluation, "{question}");
        assert_eq!(metadata.get("answer").is_some(), !evaluation, "{metadata}");
    }

    let json: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(json["reward_after"], outcome.report.reward_after);
    assert_eq!(json["rewards"], "both");
    for expected in
        ["asked kind", "96 questions of each kind", "✓ <reasoning>", "hone serve --config"]
    {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sabotaged_canary_is_rolled_back() {
    let canary = |sabotage| DemoOptions {
        promotion: Promotion::Canary,
        sabotage,
        ..options(RewardsMode::Both)
    };
    // The fake daemon promotes every step, and the sabotage begins after four.
    let options = DemoOptions { steps: 4, ..canary(true) };
    let (outcome, text, inner) = demo(Failure::None, options).await;
    let outcome = outcome.unwrap();
    let versions = outcome.report.versions.unwrap();
    assert_eq!((versions.promoted, versions.rejected, versions.rolled_back), (4, 0, 1));
    assert_eq!(versions.sabotaged_from, Some(5));
    assert!(outcome.improved && text.contains("version 5 · canary/ratings: worse"), "{text}");
    assert!(inner.questions.iter().any(|(_, metadata)| metadata["task"] == "addition"));

    let (outcome, text, inner) = demo(Failure::None, canary(false)).await;
    let versions = outcome.unwrap().report.versions.unwrap();
    assert_eq!((versions.promoted, versions.rolled_back), (5, 0));
    assert!(text.contains("5 promoted · 0 rejected · 0 rolled back"), "{text}");
    assert!(inner.questions.iter().all(|(_, metadata)| metadata["task"] != "sabotaged"));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_feedback_alone_no_reference_answer_is_sent() {
    let (outcome, _, inner) = demo(Failure::None, options(RewardsMode::Feedback)).await;
    assert!(outcome.unwrap().improved);
    assert!(inner.questions.iter().all(|(_, metadata)| metadata.get("answer").is_none()));
    assert!(inner.thumbs.iter().any(|(_, up)| *up));
    assert_eq!(inner.thumbs.len() as u64, inner.asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_graders_alone_users_post_no_thumbs() {
    let (outcome, text, inner) = demo(Failure::None, options(RewardsMode::Graded)).await;
    assert_eq!(outcome.unwrap().report.feedback, 0);
    assert!(inner.thumbs.is_empty() && !text.contains("thumb"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reward_that_did_not_rise_is_reported() {
    let (outcome, text, _) = demo(Failure::NoLearning, options(RewardsMode::Feedback)).await;
    assert!(!outcome.unwrap().improved);
    assert!(text.contains("the held-out reward did not rise beyond its interval"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_broken_stream_is_counted() {
    let (outcome, text, inner) = demo(Failure::BrokenStreams, options(RewardsMode::Both)).await;
    let report = outcome.unwrap().report;
    assert_eq!(report.failed_requests, inner.streams / 10);
    assert!(text.contains("the stream ended without [DONE]"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_trainer_ends_the_demo_with_its_reason() {
    let (outcome, _, _) = demo(Failure::TrainerFails, options(RewardsMode::Both)).await;
    let error = outcome.unwrap_err();
    assert_eq!(error.to_string(), "the trainer failed: the loss is not a number");
}
