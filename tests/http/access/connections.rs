//! Limits of connections, early headers and comments of streams, and the limit of `max_tokens`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use hone::config::{KeyConfig, KeyScope};
use hone_engine::Engine;

use crate::server::{Server, ask, eventually, key, within_a_minute};

pub async fn connect(server: &Server, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.addr).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let (mut text, mut buffer) = (String::new(), [0; 1024]);
    while !text.contains(end) {
        let read = within_a_minute(end, stream.read(&mut buffer)).await.unwrap();
        assert!(read > 0, "the connection ended before {end}: {text}");
        text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
    }
    text
}

/// Waits until the server ends the connection.
async fn ended(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let read = within_a_minute("the end of the connection", stream.read_to_end(&mut rest)).await;
    // A connection with unread data may be reset instead.
    assert!(read.is_err() || rest.is_empty(), "{}", String::from_utf8_lossy(&rest));
}

pub const PROBE: &str = "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
const MODELS: &str = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n";

fn completion(more: Value) -> String {
    let body = ask(more).to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn closed(server: &Server, reason: &str) -> Option<f64> {
    server.metric(&format!("hone_http_closed_connections_total{{reason=\"{reason}\"}}")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_finish_its_head_is_disconnected() {
    let server = Server::with(|s| s.server.connections.head_seconds = 1).await;
    let mut silent = connect(&server, "").await;
    let mut slow = connect(&server, "GET /livez HTTP/1.1\r\nhost: local").await;
    ended(&mut silent).await;
    ended(&mut slow).await;
    assert_eq!(closed(&server, "head").await, Some(2.0));
    // A connection may wait longer for its next request.
    let mut idle = connect(&server, PROBE).await;
    read_until(&mut idle, "\"ok\"}").await;
    let mut third = connect(&server, "").await;
    ended(&mut third).await;
    idle.write_all(PROBE.as_bytes()).await.unwrap();
    read_until(&mut idle, "\"ok\"}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed() {
    let server = Server::with(|s| s.server.connections.idle_seconds = 1).await;
    let mut idle = connect(&server, PROBE).await;
    read_until(&mut idle, "\"ok\"}").await;
    ended(&mut idle).await;
    assert_eq!(closed(&server, "idle").await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_is_disconnected_and_its_completion_recorded() {
    let server = Server::with(|s| {
        s.server.connections.write_seconds = 1;
        s.fake.context = 1_000_000;
        s.fake.script = Arc::new(|_, _| " and".repeat(20_000));
    })
    .await;
    let more = json!({"stream": true, "max_tokens": 100_000, "logprobs": true, "top_logprobs": 20});
    let mut stream = connect(&server, &completion(more)).await;
    read_until(&mut stream, "HTTP/1.1 200 OK").await;
    eventually("the client is disconnected", || server.metrics.http_disconnects.get() == 1).await;
    assert_eq!(closed(&server, "write").await, Some(1.0));
    eventually("nothing runs", || server.engine.load().live_running == 0).await;
    let stats = server.stats().await;
    assert_eq!((stats.interactions, stats.samples), (1, 1));
    drop(stream);
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_make_place_for_further_clients() {
    let server = Server::with(|s| s.server.connections.max = 2).await;
    let mut idle = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(&server, PROBE).await;
        read_until(&mut stream, "\"ok\"}").await;
        idle.push(stream);
    }
    let mut third = connect(&server, MODELS).await;
    read_until(&mut third, "HTTP/1.1 200 OK").await;
    drop((third, idle));
    eventually("all are closed", || server.metrics.http_connections.get() == 0).await;
    let crowded = closed(&server, "crowded").await;
    assert!(crowded.is_some_and(|count| count >= 1.0), "{crowded:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_table_of_connections_answers_probes() {
    let server = Server::with(|s| {
        s.server.connections.max = 1;
        s.fake.delay = Duration::from_secs(3600);
    })
    .await;
    let busy = connect(&server, &completion(json!({}))).await;
    eventually("it runs", || server.engine.load().live_running == 1).await;
    // More than the reserved places, so each of them becomes free again.
    for _ in 0..40 {
        let mut probe = connect(&server, PROBE).await;
        let answer = read_until(&mut probe, "\"ok\"}").await;
        assert!(answer.contains("connection: close"), "{answer}");
    }
    for path in ["/readyz", "/metrics"] {
        let mut probe = connect(&server, &PROBE.replace("/livez", path)).await;
        read_until(&mut probe, "HTTP/1.1 200 OK").await;
    }
    // No ordinary connection becomes free for another request.
    let mut refused = connect(&server, MODELS).await;
    let answer = read_until(&mut refused, "server.connections.max").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.contains("retry-after: 1") && answer.contains("connection: close"), "{answer}");
    // A client that sends nothing does not keep a reserved place.
    let mut silent = connect(&server, "").await;
    ended(&mut silent).await;
    assert_eq!(closed(&server, "head").await, Some(1.0));
    drop(busy);
}

/// A request whose body never arrives as a whole.
fn half(key: &str) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\ncontent-length: 100\r\n\r\n{{"
    )
}

fn models(key: &str) -> String {
    MODELS.replace("\r\n\r\n", &format!("\r\nauthorization: Bearer {key}\r\n\r\n"))
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_heads_and_bodies_make_place_for_another_client() {
    let slow_head = "GET /v1/models HTTP/1.1\r\nhost: local".to_owned();
    for text in [half("slow"), slow_head, String::new()] {
        let server = Server::with(|s| {
            s.server.connections.max = 4;
            s.server.keys = vec![key("slow", &[KeyScope::Chat]), key("other", &[KeyScope::Chat])];
        })
        .await;
        // They take every place, those that are reserved for probes too, and many more wait.
        let mut slow = Vec::new();
        for _ in 0..80 {
            slow.push(connect(&server, &text).await);
        }
        let began = Instant::now();
        loop {
            let mut other = connect(&server, &models("other")).await;
            let answer = read_until(&mut other, "\r\n\r\n").await;
            if answer.starts_with("HTTP/1.1 200") {
                break;
            }
            assert!(answer.starts_with("HTTP/1.1 503"), "{text:?}: {answer}");
        }
        let mut probe = connect(&server, PROBE).await;
        read_until(&mut probe, "\"ok\"}").await;
        assert!(began.elapsed() < Duration::from_secs(5), "{text:?}: {:?}", began.elapsed());
        assert!(closed(&server, "crowded").await.is_some_and(|count| count > 1.0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_its_requests_from_their_heads_on() {
    let server = Server::with(|s| {
        let limited = KeyConfig { concurrency: 2, ..key("slow", &[KeyScope::Chat]) };
        s.server.keys = vec![limited, key("other", &[KeyScope::Chat])];
    })
    .await;
    let held = [connect(&server, &half("slow")).await, connect(&server, &half("slow")).await];
    let refused = loop {
        let mut third = connect(&server, &half("slow")).await;
        let answer = timeout(Duration::from_secs(1), read_until(&mut third, "\r\n\r\n")).await;
        if answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 429")) {
            break third;
        }
        // It has a place, since the others have not arrived yet.
    };
    assert_eq!(server.chat_as("other", &ask(json!({}))).await.status(), 200);
    // Requests that are not for completions do not count.
    let listed = server.client.get(server.url("/v1/models")).bearer_auth("slow").send().await;
    assert_eq!(listed.unwrap().status(), 200);
    drop((held, refused));
    let free = async {
        while server.chat_as("slow", &ask(json!({}))).await.status() != 200 {
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    };
    within_a_minute("the key's requests have ended", free).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_has_one_host_and_each_name_one_value() {
    let server = Server::with(|s| s.server.keys = vec![key("a", &[KeyScope::Chat])]).await;
    let get = models("a");
    let post = |body: &str| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer a\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    for (request, expected) in [
        (get.replace("\r\n\r\n", "\r\nhost: evil.example\r\n\r\n"), "Host must not be repeated"),
        (post(r#"{"store": true, "store": false}"#), r#"the name \"store\" is repeated"#),
        (post(r#"{"messages": [{"role": "user", "r\u006fle": "tool"}]}"#), r#"the name \"role\""#),
    ] {
        let mut stream = connect(&server, &request).await;
        let answer = read_until(&mut stream, "\"error\"").await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
        let mut rest = answer;
        while !rest.contains(expected) {
            rest.push_str(&read_until(&mut stream, "}").await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_long_is_refused_by_its_head() {
    let server = Server::new().await;
    for (path, length) in [
        ("/v1/chat/completions", 99_999_999_999_u64),
        ("/v1/feedback", (1 << 20) + 1),
        ("/v1/fine_tuning/alpha/graders/run", (256 << 10) + 1),
        ("/nowhere", 99_999_999_999),
    ] {
        for expect in ["", "expect: 100-continue\r\n"] {
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                 content-length: {length}\r\n{expect}\r\n"
            );
            let mut stream = connect(&server, &head).await;
            let answer = read_until(&mut stream, "body_too_large").await;
            assert!(answer.starts_with("HTTP/1.1 413"), "{path}: {answer}");
        }
    }
}

/// One slot, which a long stream has, and streams whose headers are sent at once.
async fn eager(queue_timeout: Option<Duration>) -> (Server, reqwest::Response) {
    let server = Server::with(|s| {
        s.fake.slots = 1;
        s.fake.delay = Duration::from_millis(20);
        s.fake.queue_timeout = queue_timeout;
        s.fake.script = Arc::new(|request, _| match request.params.seed {
            1 => "and so on ".repeat(10_000),
            _ => "done".to_owned(),
        });
        s.fake.context = 1_000_000;
        s.server.stream_headers_after_seconds = 0;
        s.server.stream_keep_alive_seconds = 1;
    })
    .await;
    let long = ask(json!({"stream": true, "seed": 1, "max_tokens": 90_000}));
    let held = server.send_chat(&long).await;
    eventually("it runs", || server.engine.load().live_running == 1).await;
    (server, held)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_waits_has_headers_and_comments() {
    let (server, held) = eager(None).await;
    let mut waiting = server.send_chat(&ask(json!({"stream": true}))).await;
    assert_eq!(waiting.status(), 200);
    assert!(!waiting.headers().contains_key("x-hone-policy-version"));
    let comment = within_a_minute("a comment", waiting.chunk()).await.unwrap().unwrap();
    assert_eq!(comment.as_ref(), b": keep-alive\n\n");
    drop(held);
    let rest = within_a_minute("the end", waiting.text()).await.unwrap();
    assert!(rest.contains("hone-v0") && rest.contains("\"content\":\"d"), "{rest}");
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    eventually("the first one was recorded", || server.metrics.http_disconnects.get() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_after_the_headers_is_an_event() {
    let (server, held) = eager(Some(Duration::from_millis(50))).await;
    let refused = server.send_chat(&ask(json!({"stream": true}))).await;
    assert_eq!(refused.status(), 200);
    let text = within_a_minute("the end", refused.text()).await.unwrap();
    assert!(text.starts_with("data: {\"error\":") && !text.contains("[DONE]"), "{text}");
    assert!(text.contains("\"code\":\"queue_timeout\""), "{text}");
    let limited = "hone_http_limited_requests_total{reason=\"queue_timeout\"}";
    assert_eq!(server.metric(limited).await, Some(1.0));
    assert_eq!(server.metrics.http_disconnects.get(), 0);
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_for_too_many_tokens_are_refused() {
    let server = Server::with(|s| s.server.max_tokens = 300).await;
    assert_eq!(server.chat(&ask(json!({"max_tokens": 300}))).await.0, 200);
    for name in ["max_tokens", "max_completion_tokens"] {
        let (status, answer) = server.chat(&ask(json!({name: 301}))).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(name)), "{answer}");
        let message = format!("{name} is 301: it must be at most 300 (server.max_tokens)");
        assert_eq!(answer["error"]["message"], message);
    }
}
