//! Malformed HTTP, and unusual headers.

use rand::Rng as _;
use rand::seq::IndexedRandom as _;
use rand_chacha::ChaCha8Rng;

use super::Valid;
use super::attempt::{Attempt, Pace, any_request, post};

/// A request that is not HTTP, contradicts itself, or has headers that no usual client sends.
pub fn malformed(valid: &Valid, random: &mut ChaCha8Rng) -> Attempt {
    let (path, request) = any_request(valid, random);
    let body = request.to_string();
    let (bytes, pace, must_fail) = match random.random_range(0..8) {
        0 => {
            let (bytes, pace) = wrong_length(path, &body, random);
            (bytes, pace, true)
        }
        1 => (chunks(path, &body, random), Pace::Ends, true),
        2 => (request_line(&body, random), Pace::Normal, true),
        3 => (other_protocol(random), Pace::Ends, true),
        4 => (hosts(path, &body, random), Pace::Normal, true),
        5 => (content_type(path, &body, random), Pace::Normal, true),
        6 => (headers(path, &body, random), Pace::Normal, false),
        _ => {
            let mut bytes = post(path, body.as_bytes());
            bytes.truncate(random.random_range(0..bytes.len()));
            (bytes, Pace::Ends, false)
        }
    };
    Attempt { bytes, pace, must_fail }
}

/// A POST request with these further lines of its head.
fn with_lines(path: &str, lines: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("POST {path} HTTP/1.1\r\nconnection: close\r\n{lines}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

const JSON: &str = "content-type: application/json";

fn wrong_length(path: &str, body: &str, random: &mut ChaCha8Rng) -> (Vec<u8>, Pace) {
    let length = body.len();
    let shorter = random.random_range(0..length);
    let lines = [
        format!("content-length: {shorter}"),
        "content-length: -1".to_owned(),
        "content-length: 1e3".to_owned(),
        "content-length: 99999999999999999999999".to_owned(),
        format!("content-length: {length}\r\ncontent-length: {}", length + 1),
        format!("content-length: {length}, {length}, 7"),
        "content-length:".to_owned(),
        "transfer-encoding: gzip".to_owned(),
        "x: y".to_owned(),
    ];
    let longer = [length + random.random_range(1..100_000), usize::MAX];
    let longer = longer.map(|length| format!("content-length: {length}"));
    let (line, pace) = match random.random_range(0..4) {
        // The server waits for the rest.
        0 => (longer.choose(random).unwrap(), Pace::Ends),
        _ => (lines.choose(random).unwrap(), Pace::Normal),
    };
    (with_lines(path, &format!("host: localhost\r\n{JSON}\r\n{line}"), body.as_bytes()), pace)
}

fn chunks(path: &str, body: &str, random: &mut ChaCha8Rng) -> Vec<u8> {
    let length = body.len();
    let bodies = [
        format!("zz\r\n{body}\r\n0\r\n\r\n"),
        format!("{length:x}\r\n{body}"),
        format!("{:x}\r\n{body}\r\n0\r\n\r\n", length + 5),
        format!("{:x}\r\n{body}\r\n0\r\n\r\n", length - 1),
        format!("ffffffffffffffff\r\n{body}"),
        format!("fffffffffffffffffffff\r\n{body}"),
        format!("-1\r\n{body}\r\n0\r\n\r\n"),
        format!("{length:x};{}\r\n{body}\r\n0", "x".repeat(20_000)),
        format!("{length:x}\n{body}\n0\n\n"),
        "0\r\n\r\n".to_owned(),
        String::new(),
    ];
    let body = bodies.choose(random).unwrap();
    let lines = format!("host: localhost\r\n{JSON}\r\ntransfer-encoding: chunked");
    with_lines(path, &lines, body.as_bytes())
}

fn request_line(body: &str, random: &mut ChaCha8Rng) -> Vec<u8> {
    let long = "a".repeat(random.random_range(1000..100_000));
    let lines = [
        "POST".to_owned(),
        "POST /v1/chat/completions".to_owned(),
        "POST /v1/chat/completions HTTP/9.9".to_owned(),
        "POST  /v1/chat/completions  HTTP/1.1".to_owned(),
        "P\0ST / HTTP/1.1".to_owned(),
        "GET /v1/nowhere/\u{e9} HTTP/1.1".to_owned(),
        "BREW /v1/chat/completions HTTP/1.1".to_owned(),
        "PUT /v1/chat/completions HTTP/1.1".to_owned(),
        "CONNECT localhost:80 HTTP/1.1".to_owned(),
        "OPTIONS * HTTP/1.1".to_owned(),
        "GET http://evil.example/v1/models HTTP/1.1".to_owned(),
        "GET /v1/../../etc/passwd HTTP/1.1".to_owned(),
        "GET /v1/chat/completions/%ff%00%2e%2e HTTP/1.1".to_owned(),
        "GET /v1/chat/completions?limit=-1&order=x&after=%00 HTTP/1.1".to_owned(),
        format!("GET /{long} HTTP/1.1"),
        format!("GET /v1/nowhere?{long} HTTP/1.1"),
        format!("{long} / HTTP/1.1"),
    ];
    let line = lines.choose(random).unwrap();
    format!("{line}\r\nhost: localhost\r\nconnection: close\r\n\r\n{body}").into()
}

fn other_protocol(random: &mut ChaCha8Rng) -> Vec<u8> {
    match random.random_range(0..5) {
        0 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec(),
        1 => b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03".to_vec(),
        2 => b"SSH-2.0-OpenSSH_9.9\r\n".to_vec(),
        3 => b"\r\n".repeat(random.random_range(1..5000)),
        _ => (0..random.random_range(1..5000)).map(|_| random.random::<u8>()).collect(),
    }
}

/// Requests that need no key and do not name this machine, or not clearly.
fn hosts(path: &str, body: &str, random: &mut ChaCha8Rng) -> Vec<u8> {
    let hosts = [
        "host: evil.example",
        "host: localhost.evil.example",
        "host: localhost\r\nhost: evil.example",
        "host: localhost, evil.example",
        "host: local\u{e9}host",
        "host: [::1",
        "host:",
        "host : localhost\r\nhost: x y",
    ];
    let host = hosts.choose(random).unwrap();
    let lines = format!("{host}\r\n{JSON}\r\ncontent-length: {}", body.len());
    with_lines(path, &lines, body.as_bytes())
}

fn content_type(path: &str, body: &str, random: &mut ChaCha8Rng) -> Vec<u8> {
    let types = [
        "x: y",
        "content-type:",
        "content-type: text/plain",
        "content-type: application/jsonp",
        "content-type: application\u{e9}/json",
        "content-type: multipart/form-data; boundary=x",
        "content-type: text/plain\r\ncontent-type: application/json",
    ];
    let kind = types.choose(random).unwrap();
    let lines = format!("host: localhost\r\n{kind}\r\ncontent-length: {}", body.len());
    with_lines(path, &lines, body.as_bytes())
}

fn headers(path: &str, body: &str, random: &mut ChaCha8Rng) -> Vec<u8> {
    let long = "a".repeat(random.random_range(1000..500_000));
    let many: Vec<String> =
        (0..random.random_range(20..200)).map(|i| format!("x-{i}: {i}")).collect();
    let more = [
        format!("x-request-id: {long}"),
        format!("authorization: Bearer {long}"),
        "authorization: Basic \u{e9}\r\nauthorization: Bearer x".to_owned(),
        "x-api-key: \u{ff}".to_owned(),
        "traceparent: 00-0-0-00\r\ntracestate: \u{1}".to_owned(),
        "two words: x".to_owned(),
        "no-colon".to_owned(),
        ": no-name".to_owned(),
        " folded: x\r\n  y".to_owned(),
        "x: \0".to_owned(),
        "expect: 100-continue".to_owned(),
        "expect: a-miracle".to_owned(),
        "upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ".to_owned(),
        "upgrade: websocket\r\nsec-websocket-key: x".to_owned(),
        "accept: \u{e9}\r\naccept-encoding: br;q=x".to_owned(),
        "te: trailers, deflate\r\ntrailer: content-length".to_owned(),
        "range: bytes=0-,9-1\r\nif-none-match: *".to_owned(),
        many.join("\r\n"),
    ];
    let more = more.choose(random).unwrap();
    let length = body.len();
    let lines = format!("host: localhost\r\n{JSON}\r\ncontent-length: {length}\r\n{more}");
    with_lines(path, &lines, body.as_bytes())
}
