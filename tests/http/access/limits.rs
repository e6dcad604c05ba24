//! Limits of a key, and the queue that keys share.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Response, header};
use serde_json::{Value, json};

use hone::config::{KeyConfig, KeyScope};
use hone_engine::Engine;
use hone_engine::testing::FakeConfig;

use crate::server::{Server, ask, eventually, key, read};

const LIMITED: &str = "hone_http_limited_requests_total";

async fn limited(change: impl FnOnce(&mut KeyConfig)) -> Server {
    let mut web = key("web", &[KeyScope::Chat]);
    change(&mut web);
    Server::with(|s| s.server.keys = vec![web, key("free", &[KeyScope::Chat])]).await
}

fn text(response: &Response, name: &str) -> String {
    response.headers().get(name).map_or("-", |value| value.to_str().unwrap()).to_owned()
}

async fn refused(server: &Server, response: Response, code: &str, reason: &str) {
    let retry: u64 = text(&response, "retry-after").parse().unwrap();
    assert!((1..=300).contains(&retry), "{retry}");
    let (status, answer) = read(response).await;
    assert_eq!((status, &answer["error"]["code"]), (429, &json!(code)), "{answer}");
    assert_eq!(answer["error"]["type"], "rate_limit_error");
    let counted = server.metric(&format!("{LIMITED}{{reason=\"{reason}\"}}")).await;
    assert!(counted.is_some_and(|count| count >= 1.0), "{reason}: {counted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_a_minute_are_limited_and_reported() {
    let server = limited(|key| key.requests_per_minute = 2).await;
    let first = server.chat_as("web", &ask(json!({}))).await;
    assert_eq!(first.status(), 200);
    assert_eq!(text(&first, "x-ratelimit-limit-requests"), "2");
    assert_eq!(text(&first, "x-ratelimit-remaining-requests"), "1");
    assert!(!first.headers().contains_key("x-ratelimit-limit-tokens"));
    assert_eq!(server.chat_as("web", &ask(json!({}))).await.status(), 200);
    let third = server.chat_as("web", &ask(json!({}))).await;
    assert_eq!(text(&third, "x-ratelimit-remaining-requests"), "0");
    refused(&server, third, "rate_limit_exceeded", "requests_per_minute").await;
    // Other routes count too, and other keys are not concerned.
    let models = server.client.get(server.url("/v1/models")).bearer_auth("web").send().await;
    assert_eq!(models.unwrap().status(), 429);
    let free = server.chat_as("free", &ask(json!({}))).await;
    assert_eq!(free.status(), 200);
    assert!(!free.headers().contains_key("x-ratelimit-limit-requests"));
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_have_anthropics_headers() {
    let server = limited(|key| {
        key.requests_per_minute = 2;
        key.tokens_per_minute = 500;
    })
    .await;
    let body = json!({"model": "default", "max_tokens": 8,
                      "messages": [{"role": "user", "content": "Hi"}]});
    let ask = async |key: &str| {
        let request = server.client.post(server.url("/v1/messages")).header("x-api-key", key);
        request.json(&body).send().await.unwrap()
    };
    let first = ask("web").await;
    assert_eq!(first.status(), 200);
    for (kind, limit) in [("requests", "2"), ("tokens", "500")] {
        let header = |name: &str| text(&first, &format!("anthropic-ratelimit-{kind}-{name}"));
        assert_eq!(header("limit"), limit);
        let left = text(&first, &format!("x-ratelimit-remaining-{kind}"));
        let (left, own): (u64, u64) = (left.parse().unwrap(), header("remaining").parse().unwrap());
        assert!((left..left + 60).contains(&own), "{kind}: {own} after {left}");
        let reset = chrono::DateTime::parse_from_rfc3339(&header("reset")).unwrap();
        let wait = reset.timestamp() - chrono::Utc::now().timestamp();
        assert!((-60..=60).contains(&wait), "{kind}: {wait} s");
    }
    ask("web").await;
    let refused = ask("web").await;
    assert_eq!(refused.status(), 429);
    assert_eq!(text(&refused, "anthropic-ratelimit-requests-remaining"), "0");
    let free = ask("free").await;
    assert!(!free.headers().keys().any(|name| name.as_str().starts_with("anthropic-ratelimit")));
    let chat = server.chat_as("web", &crate::server::ask(json!({}))).await;
    assert_eq!(text(&chat, "anthropic-ratelimit-requests-limit"), "-");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_a_minute_are_reserved_and_settled() {
    let server = limited(|key| key.tokens_per_minute = 400).await;
    let remaining = async |more: Value| {
        let response = server.chat_as("web", &ask(more)).await;
        let left: u64 = text(&response, "x-ratelimit-remaining-tokens").parse().unwrap();
        let answer = read(response).await.1;
        (left, answer["usage"]["total_tokens"].as_u64().unwrap())
    };
    // The headers are sent after the completion, so what it did not take is there again.
    let (left, used) = remaining(json!({"max_tokens": 350})).await;
    assert!(used < 200 && left >= 400 - used - 1, "{left} left, {used} used");
    let (again, more) = remaining(json!({"max_tokens": 150})).await;
    assert!(again + more <= left + 60, "{again} left after {left}, {more} used");
}

/// Makes completions take half a minute, but end soon after their client has gone.
fn slow(fake: &mut FakeConfig) {
    fake.delay = Duration::from_millis(100);
    fake.script = Arc::new(|_, _| " and".repeat(5_000));
}

/// One slot whose completions take hours.
async fn stuck(keys: &[&str], queue: usize, timeout: Option<Duration>) -> Server {
    let keys: Vec<KeyConfig> = keys.iter().map(|name| key(name, &[KeyScope::Chat])).collect();
    Server::with(|s| {
        s.fake.slots = 1;
        s.fake.queue = queue;
        s.fake.queue_timeout = timeout;
        s.fake.delay = Duration::from_secs(3600);
        s.server.keys = keys;
    })
    .await
}

fn in_background(server: &Server, key: &str) -> tokio::task::JoinHandle<reqwest::Result<Response>> {
    let url = server.url("/v1/chat/completions");
    tokio::spawn(server.client.post(url).bearer_auth(key).json(&ask(json!({}))).send())
}

/// A second request is refused before it is tokenized: the first one reserves its default `max_tokens`, 256,
/// or is the only one at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_beyond_the_tokens_or_the_completions_at_once_is_refused() {
    let web = || key("web", &[KeyScope::Chat]);
    for (limited, reason) in [
        (KeyConfig { tokens_per_minute: 400, ..web() }, "tokens_per_minute"),
        (KeyConfig { concurrency: 1, ..web() }, "concurrency"),
    ] {
        let server = Server::with(|s| {
            slow(&mut s.fake);
            s.server.keys = vec![limited];
        })
        .await;
        let held = in_background(&server, "web");
        eventually("it runs", || server.engine.load().live_running == 1).await;
        let second = server.chat_as("web", &ask(json!({}))).await;
        refused(&server, second, "rate_limit_exceeded", reason).await;
        assert_eq!(server.engine.requests().len(), 1, "{reason}");
        held.abort();
        eventually("it ends", || server.engine.load().live_running == 0).await;
        let third = in_background(&server, "web");
        eventually("the next one runs", || server.engine.load().live_running == 1).await;
        third.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_cannot_fill_the_queue_and_a_full_one_refuses_before_tokenizing() {
    let server = stuck(&["flood", "other", "third"], 4, None).await;
    let mut held = vec![in_background(&server, "flood")];
    eventually("it runs", || server.engine.load().live_running == 1).await;
    for waiting in 1..=2 {
        held.push(in_background(&server, "flood"));
        eventually("it waits", || server.engine.load().live_waiting == waiting).await;
    }
    let requests = server.engine.requests().len();
    let response = server.chat_as("flood", &ask(json!({}))).await;
    refused(&server, response, "rate_limit_exceeded", "queue_share").await;
    held.push(in_background(&server, "other"));
    eventually("another key waits", || server.engine.load().live_waiting == 3).await;
    held.push(in_background(&server, "third"));
    eventually("a third key waits", || server.engine.load().live_waiting == 4).await;
    for stream in [false, true] {
        let response = server.chat_as("other", &ask(json!({"stream": stream}))).await;
        refused(&server, response, "rate_limit_exceeded", "queue_full").await;
    }
    // The refused requests did not reach the engine.
    assert_eq!(server.engine.requests().len(), requests + 2);
    held.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_choices_than_an_idle_engine_admits_are_a_bad_request() {
    let server = stuck(&["web"], 3, None).await;
    let impossible = async |path: &str, body: Value, param: &str, choices: u32| {
        let url = server.url(path);
        let response = server.client.post(url).bearer_auth("web").json(&body).send().await.unwrap();
        assert_eq!(response.status(), 400, "another try would not help");
        let error = response.json::<Value>().await.unwrap()["error"].take();
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("invalid_value")));
        let message = error["message"].as_str().unwrap();
        // One runs, and the key may have half of the places in the queue.
        let expected =
            format!("{param} asks for {choices} choices at once: there can be at most 3");
        assert!(message.starts_with(&expected), "{message}");
    };
    impossible("/v1/chat/completions", ask(json!({"n": 4})), "n", 4).await;
    let texts = |n: u32| json!({"model": "default", "prompt": ["a", "b", "c", "d"], "n": n});
    impossible("/v1/completions", texts(1), "prompt", 4).await;
    impossible("/v1/completions", texts(2), "n", 8).await;
    assert_eq!(server.metrics.engine_rejected.get(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_too_long_is_refused() {
    let server = stuck(&["web"], 4, Some(Duration::from_millis(50))).await;
    let held = in_background(&server, "web");
    eventually("it runs", || server.engine.load().live_running == 1).await;
    let response = server.chat_as("web", &ask(json!({}))).await;
    refused(&server, response, "queue_timeout", "queue_timeout").await;
    let streamed = server.chat_as("web", &ask(json!({"stream": true}))).await;
    refused(&server, streamed, "queue_timeout", "queue_timeout").await;
    eventually("nothing waits", || server.engine.load().live_waiting == 0).await;
    held.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_after_follows_from_the_time_of_completions_and_the_queue() {
    let server = Server::with(|s| {
        s.fake.slots = 1;
        s.fake.queue = 2;
        s.fake.delay = Duration::from_millis(60);
        s.fake.script = Arc::new(|request, _| {
            // The first answer takes 1.2 seconds or more, the others take minutes.
            " and".repeat(if request.params.seed == 1 { 20 } else { 5_000 })
        });
        s.fake.context = 1_000_000;
    })
    .await;
    let more = json!({"seed": 1, "max_tokens": 100_000});
    assert_eq!(server.chat(&ask(more)).await.0, 200);
    let long = || {
        let body = ask(json!({"seed": 2, "max_tokens": 100_000}));
        tokio::spawn(server.client.post(server.url("/v1/chat/completions")).json(&body).send())
    };
    let held = [long(), long(), long()];
    eventually("the queue is full", || server.engine.load().live_waiting == 2).await;
    let response = server.send_chat(&ask(json!({}))).await;
    let seconds: u64 = response.headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
    // Two wait and one is refused, and each takes 1.2 seconds at least.
    assert!((4..=300).contains(&seconds), "{seconds}");
    held.iter().for_each(tokio::task::JoinHandle::abort);
}
