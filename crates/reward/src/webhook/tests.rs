//! Tests with servers on this machine.

use std::future::IntoFuture;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap as Headers, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use hone_core::testing::{has_program, skip};
use hone_core::types::{Message, Role};

use super::*;
use crate::kinds::Kind;
use crate::kinds::tests::samples::with_answer;

/// HMAC from its definition: `H((K ^ opad) || H((K ^ ipad) || message))`.
fn hmac_by_definition(key: &[u8], message: &[u8]) -> String {
    let mut block = [0_u8; 64];
    if key.len() > 64 {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let pad = |byte: u8| block.map(|b| b ^ byte).to_vec();
    let inner = Sha256::digest([pad(0x36), message.to_vec()].concat());
    let outer = Sha256::digest([pad(0x5c), inner.to_vec()].concat());
    outer.iter().map(|b| format!("{b:02x}")).collect()
}

/// A request that a server received.
#[derive(Clone)]
pub(crate) struct SeenRequest {
    headers: Headers,
    body: Bytes,
}

impl SeenRequest {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers[name].to_str().unwrap()
    }
}

/// A server that answers the n-th request (from 0) by a function and records the requests.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<SeenRequest>>>,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start<F>(path: &str, answer: F) -> Self
    where
        F: Fn(usize, &Value) -> Response + Clone + Send + Sync + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen: Arc<Mutex<Vec<SeenRequest>>> = Arc::default();
        let log = Arc::clone(&seen);
        let handler = move |headers: Headers, body: Bytes| async move {
            let seen = SeenRequest { headers, body };
            let json = seen.json();
            let n = {
                let mut log = log.lock().unwrap();
                log.push(seen);
                log.len() - 1
            };
            answer(n, &json)
        };
        let app = Router::new().route(path, post(handler));
        let task = tokio::spawn(async move {
            axum::serve(listener, app).into_future().await.unwrap();
        });
        Self { address, seen, task }
    }

    fn url(&self) -> String {
        format!("http://{}/score", self.address)
    }

    pub(crate) fn seen(&self) -> Vec<SeenRequest> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The address of a server that runs until the test ends.
async fn serve(handler: MethodRouter) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, Router::new().route("/score", handler)).into_future());
    url
}

fn answer(value: Value) -> Response {
    axum::Json(value).into_response()
}

/// Answers with the length of each completion.
fn lengths(body: &Value) -> Response {
    let samples = body["samples"].as_array().unwrap();
    let lengths = samples.iter().map(|s| s["completion"].as_str().unwrap().len());
    answer(json!({ "rewards": lengths.collect::<Vec<_>>() }))
}

fn input(text: &str, answer: Option<&str>) -> ScoreInput {
    let messages = Arc::new(vec![Message::new(Role::User, "6+1=")]);
    ScoreInput { messages, ids: vec![1; 4], ..with_answer(text, answer) }
}

/// Short delays; a single failure does not open the circuit.
fn quick(url: &str) -> WebhookParams {
    WebhookParams { backoff_ms: 1, max_backoff_ms: 20, ..WebhookParams::new(url) }
}

struct TestWebhook {
    inner: Webhook,
    metrics: Arc<Metrics>,
}

impl TestWebhook {
    fn new(params: &WebhookParams) -> Self {
        let metrics = Arc::new(Metrics::new().unwrap());
        let inner = Webhook::new(params, "math", "remote", &metrics).unwrap();
        Self { inner, metrics }
    }

    async fn score(&self, texts: &[&str]) -> Vec<Option<f64>> {
        let inputs: Vec<ScoreInput> = texts.iter().map(|t| input(t, None)).collect();
        self.inner.score(&inputs).await
    }

    fn requests(&self, outcome: &str) -> u64 {
        let counters = &self.metrics.reward_webhook.requests;
        counters.with_label_values(&["math", "remote", outcome]).get()
    }

    fn missing(&self, reason: &str) -> u64 {
        let counters = &self.metrics.reward_webhook.missing;
        counters.with_label_values(&["math", "remote", reason]).get()
    }

    fn is_open(&self) -> bool {
        self.metrics.reward_webhook.circuit_open.with_label_values(&["math", "remote"]).get() == 1
    }
}

#[tokio::test]
async fn posts_batches_and_keeps_their_order() {
    let server = Server::start("/score", |_, body| lengths(body)).await;
    let webhook = TestWebhook::new(&WebhookParams { max_batch: 2, ..quick(&server.url()) });
    let values = webhook.score(&["a", "bb", "ccc", "dddd", "eeeee"]).await;
    assert_eq!(values, [1.0, 2.0, 3.0, 4.0, 5.0].map(Some));
    let seen = server.seen();
    assert_eq!((seen.len(), webhook.requests("ok")), (3, 3));
    let body =
        seen.iter().map(SeenRequest::json).find(|b| b["samples"][0]["completion"] == "a").unwrap();
    assert_eq!((&body["route"], &body["name"]), (&json!("math"), &json!("remote")));
    let expected = json!({
        "index": 1, "messages": [{"role": "user", "content": "6+1="}], "completion": "bb",
        "completion_tokens": 4, "metadata": {},
    });
    assert_eq!(body["samples"][1], expected);
    assert!(seen.iter().all(|s| s.header(IDEMPOTENCY_HEADER) == s.json()["id"].as_str().unwrap()));
    assert!(seen.iter().all(|s| !s.headers.contains_key(HEADER)));
    assert!(webhook.score(&[]).await.is_empty());
}

#[tokio::test]
async fn retries_have_the_same_idempotency_key() {
    let statuses = [503, 429, 408];
    let server = Server::start("/score", move |n, body| match statuses.get(n) {
        Some(status) => {
            (StatusCode::from_u16(*status).unwrap(), [("retry-after", "0")]).into_response()
        }
        None => lengths(body),
    })
    .await;
    let webhook = TestWebhook::new(&WebhookParams { retries: 3, ..quick(&server.url()) });
    assert_eq!(webhook.score(&["abc"]).await, [Some(3.0)]);
    let seen = server.seen();
    assert_eq!(seen.len(), 4);
    assert!(seen.iter().all(|s| s.body == seen[0].body));
    let counted = ["server_error", "rate_limited", "client_error", "ok"];
    assert_eq!(counted.map(|o| webhook.requests(o)), [1; 4]);
    assert_eq!(webhook.missing("server_error"), 0);
}

#[tokio::test]
async fn client_errors_redirects_and_long_waits_are_not_retried() {
    let location = ("location", "/score");
    for (status, header, reason) in [
        (400, location, "client_error"),
        (404, location, "client_error"),
        (302, location, "redirect"),
        // Beyond the maximum.
        (429, ("retry-after", "3600"), "rate_limited"),
    ] {
        let server = Server::start("/score", move |_, _| {
            (StatusCode::from_u16(status).unwrap(), [header]).into_response()
        })
        .await;
        let webhook = TestWebhook::new(&quick(&server.url()));
        assert_eq!(webhook.score(&["a", "b"]).await, [None, None]);
        assert_eq!((server.seen().len(), webhook.missing(reason)), (1, 2), "{status}");
        assert!(!webhook.is_open());
    }
}

#[tokio::test]
async fn a_slow_service_gives_missing_values_without_a_retry() {
    let url = serve(post(|| tokio::time::sleep(Duration::from_secs(60)))).await;
    let webhook = TestWebhook::new(&WebhookParams { timeout_ms: 50, ..quick(&url) });
    assert_eq!(webhook.score(&["a"]).await, [None]);
    assert_eq!((webhook.requests("timeout"), webhook.missing("timeout")), (1, 1));
}

/// Forwards connections to a server, or closes them while there is none. So the port of a server
/// that is down is not freed.
async fn forward(listener: TcpListener, server: watch::Receiver<Option<SocketAddr>>) {
    loop {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut server = server.clone();
        tokio::spawn(async move {
            let Some(address) = *server.borrow_and_update() else { return };
            let mut stream = TcpStream::connect(address).await.unwrap();
            tokio::select! {
                _ = server.changed() => {}
                _ = tokio::io::copy_bidirectional(&mut client, &mut stream) => {}
            }
        });
    }
}

#[tokio::test]
async fn a_killed_service_gives_missing_values_until_it_is_back() {
    let server = Server::start("/score", |_, body| lengths(body)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    let (target, watched) = watch::channel(Some(server.address));
    let forward = tokio::spawn(forward(listener, watched));
    let params = WebhookParams { breaker_failures: 2, breaker_cooldown_ms: 50, ..quick(&url) };
    let webhook = TestWebhook::new(&params);
    assert_eq!(webhook.score(&["a"]).await, [Some(1.0)]);
    target.send_replace(None);
    drop(server);
    // Until its open connections are closed.
    while webhook.score(&["a"]).await == [Some(1.0)] {
        tokio::task::yield_now().await;
    }
    while !webhook.is_open() {
        assert_eq!(webhook.score(&["a"]).await, [None]);
    }
    let back = Server::start("/score", |_, body| lengths(body)).await;
    target.send_replace(Some(back.address));
    let mut tries = 0;
    while webhook.score(&["abc"]).await != [Some(3.0)] {
        tries += 1;
        assert!(tries < 200, "it did not recover");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!webhook.is_open());
    forward.abort();
}

#[tokio::test]
async fn bad_answers_are_counted_by_reason() {
    for (body, reason) in [
        ("not json".to_owned(), "bad_answer"),
        (r#"{"rewards":[NaN,NaN]}"#.to_owned(), "non_finite"),
        (json!({"rewards": "x".repeat(5000)}).to_string(), "too_large"),
    ] {
        let server = Server::start("/score", move |_, _| body.clone().into_response()).await;
        let params = WebhookParams { max_response_bytes: 1000, ..quick(&server.url()) };
        let webhook = TestWebhook::new(&params);
        assert_eq!(webhook.score(&["a", "b"]).await, [None, None], "{reason}");
        assert_eq!((webhook.missing(reason), server.seen().len()), (2, 1), "{reason}");
    }
}

#[tokio::test]
async fn concurrent_requests_are_limited() {
    let counts: Arc<Mutex<(usize, usize)>> = Arc::default();
    let watch = Arc::clone(&counts);
    let handler = post(move |body: Bytes| async move {
        {
            let mut counts = watch.lock().unwrap();
            counts.0 += 1;
            counts.1 = counts.1.max(counts.0);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        watch.lock().unwrap().0 -= 1;
        lengths(&serde_json::from_slice(&body).unwrap())
    });
    let url = serve(handler).await;
    let webhook =
        TestWebhook::new(&WebhookParams { max_batch: 1, max_concurrency: 2, ..quick(&url) });
    assert_eq!(webhook.score(&["a"; 12]).await, [Some(1.0); 12]);
    assert_eq!(counts.lock().unwrap().1, 2);
}

#[tokio::test]
async fn requests_are_signed() {
    let server = Server::start("/score", |_, body| lengths(body)).await;
    let mut params = WebhookParams { secret_env: "SECRET".to_owned(), ..quick(&server.url()) };
    let metrics = Arc::new(Metrics::new().unwrap());
    let unresolved = Webhook::new(&params, "math", "remote", &metrics).err().unwrap();
    assert!(unresolved.sentence().starts_with("secret_env = `SECRET` was not looked up"));
    params.resolve(&|_| Some("hunter2".to_owned())).unwrap();
    let webhook = TestWebhook::new(&params);
    assert_eq!(webhook.score(&["a"]).await, [Some(1.0)]);
    let seen = &server.seen()[0];
    let header = seen.header(HEADER);
    let (time, hex) = header.strip_prefix("t=").unwrap().split_once(",v1=").unwrap();
    let message = [time.as_bytes(), b".", &seen.body].concat();
    assert_eq!(hex, hmac_by_definition(b"hunter2", &message));
    assert!(now_ms() / 1000 - time.parse::<u64>().unwrap() < 100);
}

/// The example server as a child process; killed on drop.
struct Example {
    child: Child,
    url: String,
}

impl Example {
    fn start(secret: &str) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/webhook_server.py");
        let mut child = Command::new("python3")
            .arg(script)
            .arg("0")
            .env_clear()
            .env("SECRET", secret)
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().rsplit(' ').next().unwrap().parse().unwrap();
        Self { child, url: format!("http://127.0.0.1:{port}/") }
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn the_example_server_checks_the_signature_and_scores() {
    if !has_program("python3") {
        return skip("python3 is not on the PATH");
    }
    let example = Example::start("hunter2");
    let inputs =
        [input("it is 7", Some("7")), input("it is 8", Some("7")), input("who knows", None)];
    let score = async |secret: &str| {
        let mut params = quick(&example.url);
        params.secret = Some(Secret::new(secret));
        let webhook = TestWebhook::new(&params);
        let values = webhook.inner.score(&inputs).await;
        (values, webhook.missing("client_error"))
    };
    assert_eq!(score("hunter2").await, (vec![Some(1.0), Some(0.0), None], 0));
    assert_eq!(score("wrong").await, (vec![None, None, None], 3));
}

#[test]
fn matches_the_definition_and_the_standard() {
    // RFC 4231, test case 2.
    assert_eq!(
        hmac_by_definition(b"Jefe", b"what do ya want for nothing?"),
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    );
    for secret in ["Jefe", "a", &"long".repeat(40)] {
        let signed = sign(&Secret::new(secret), 1_700_000_000, b"{\"id\":1}");
        let expected = hmac_by_definition(secret.as_bytes(), b"1700000000.{\"id\":1}");
        assert_eq!(signed, format!("t=1700000000,v1={expected}"));
    }
}

fn of(answer: &str, samples: usize) -> (Vec<Option<f64>>, Vec<(&'static str, usize)>) {
    let parsed = ParsedRewards::parse(answer.as_bytes(), samples);
    (parsed.values, parsed.missing.into_iter().collect())
}

#[test]
fn numbers_are_in_sample_order_and_bad_ones_are_left_out() {
    assert_eq!(
        of(r#"{"rewards":[1, -0.5, null]}"#, 3),
        (vec![Some(1.0), Some(-0.5), None], vec![("null", 1)])
    );
    assert_eq!(of(r#"{"rewards":[]}"#, 0), (vec![], vec![]));
    assert_eq!(of(r#"{"rewards":[1]}"#, 2), (vec![None, None], vec![("too_few", 2)]));
    assert_eq!(of(r#"{"rewards":[1,2,3]}"#, 2), (vec![None, None], vec![("too_many", 2)]));
    assert_eq!(of(r#"{"rewards":[true,"2"]}"#, 2), (vec![None, None], vec![("not_a_number", 2)]));
    let given = r#"{"note":"NaN \" NaN, \\","rewards":[NaN,-Infinity, 1e999 ,0.5]}"#;
    assert_eq!(of(given, 4), (vec![None, None, None, Some(0.5)], vec![("non_finite", 3)]));
}

#[test]
fn entries_name_their_sample_and_all_else_is_a_bad_answer() {
    let given =
        r#"{"rewards":[{"index":2,"value":3},{"index":0,"value":null},{"index":9,"value":1}]}"#;
    assert_eq!(of(given, 3), (vec![None, None, Some(3.0)], vec![("null", 1), ("too_few", 1)]));
    let twice = r#"{"rewards":[{"index":0,"value":3},{"index":0,"value":4}]}"#;
    assert_eq!(of(twice, 1), (vec![None], vec![("not_a_number", 1)]));
    for answer in ["", "{}", "[1]", "<html>", "{\"rewards\":1}", "{\"rewards\":[1}"] {
        assert_eq!(of(answer, 1), (vec![None], vec![("bad_answer", 1)]), "{answer}");
    }
}

proptest! {
    #[test]
    fn never_panics_and_always_fits(answer in ".{0,80}", samples in 0_usize..5) {
        let (values, missing) = of(&answer, samples);
        prop_assert_eq!(values.len(), samples);
        let counted: usize = missing.iter().map(|(_, n)| n).sum();
        prop_assert_eq!(counted, values.iter().filter(|v| v.is_none()).count());
    }

    #[test]
    fn finite_numbers_are_unchanged(eighths in prop::collection::vec(-80_000_i32..80_000, 0..9)) {
        let values: Vec<f64> = eighths.iter().map(|n| f64::from(*n) / 8.0).collect();
        let answer = serde_json::json!({ "rewards": values }).to_string();
        let expected: Vec<Option<f64>> = values.iter().copied().map(Some).collect();
        prop_assert_eq!(of(&answer, values.len()), (expected, vec![]));
    }
}

fn refusal(params: &WebhookParams) -> String {
    params.check().unwrap_err().sentence()
}

#[test]
fn keys_are_read_and_the_secret_is_never_written() {
    let read: WebhookParams = toml::from_str("url = \"https://grader.example/score\"").unwrap();
    assert_eq!(read, WebhookParams::new("https://grader.example/score"));
    assert_eq!(read.check(), Ok(()));
    let error = toml::from_str::<WebhookParams>("url = \"x\"\nurls = 1").unwrap_err();
    assert!(error.to_string().contains("urls"), "{error}");
    // The secret itself has no key.
    assert!(toml::from_str::<WebhookParams>("url = \"x\"\nsecret = \"s\"").is_err());
    let mut signed = read;
    signed.secret_env = "GRADER_SECRET".to_owned();
    signed.resolve(&|_| Some("hunter2".to_owned())).unwrap();
    assert!(!toml::to_string(&signed).unwrap().contains("hunter2"));
    assert!(!format!("{signed:?}").contains("hunter2"));
}

#[test]
fn addresses_are_https_or_loopback() {
    for good in
        ["https://a.example/x", "http://localhost:1/x", "http://127.0.0.9/", "http://[::1]:8/"]
    {
        assert_eq!(WebhookParams::new(good).check(), Ok(()), "{good}");
    }
    let far = WebhookParams::new("http://grader:8000/score");
    insta::assert_snapshot!(refusal(&far), @r#"url is "http://grader:8000/score": it must be https, or http to this machine; allow_http = true permits plain http elsewhere, as on a private network"#);
    assert_eq!(WebhookParams { allow_http: true, ..far }.check(), Ok(()));
    insta::assert_snapshot!(refusal(&WebhookParams::new("ftp://x/")), @r#"url is "ftp://x/": it must be an http or https address"#);
    insta::assert_snapshot!(refusal(&WebhookParams::new("grader")), @r#"url is "grader": it must be an address such as "https://grader.example/score""#);
    insta::assert_snapshot!(refusal(&WebhookParams::new("https://me:hunter2@x/")), @"url is a hidden value: it must be an address without a user name or password, which logs could show");
}

#[test]
fn ranges_are_named() {
    let base = WebhookParams::new("https://a.example/");
    insta::assert_snapshot!(refusal(&WebhookParams { max_batch: 0, ..base.clone() }), @"max_batch is 0: it must be from 1 to 4096");
    insta::assert_snapshot!(refusal(&WebhookParams { retries: 11, ..base.clone() }), @"retries is 11: it must be from 0 to 10");
    insta::assert_snapshot!(refusal(&WebhookParams { max_backoff_ms: 5, ..base }), @"max_backoff_ms is 5: it must be from 200 to 300000");
}
