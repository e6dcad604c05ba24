//! Requests of each type, and their headers.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use reqwest::Method;
use reqwest::header::HeaderValue;
use serde_json::json;

use hone::config::KeyScope;

use super::Clock;
use super::change::{Body, bodies};
use super::target::{CHAT, Reply, Target, routes};
use crate::server::{Server, ask, key};

/// Makes a target of each route.
macro_rules! route_targets {
    ($($name:ident: $path:literal),+ $(,)?) => {
        $(#[test]
        fn $name() {
            fuzz($path);
        })+

        #[test]
        fn every_route_with_requests_has_a_target() {
            assert_eq!(routes(), [$($path),+]);
        }
    };
}

route_targets! {
    chat_completions: "/v1/chat/completions",
    text_completions: "/v1/completions",
    responses: "/v1/responses",
    messages: "/v1/messages",
    count_tokens: "/v1/messages/count_tokens",
    feedback: "/v1/feedback",
    run_graders: "/v1/fine_tuning/alpha/graders/run",
    validate_graders: "/v1/fine_tuning/alpha/graders/validate",
    tokenize: "/tokenize",
    detokenize: "/detokenize",
    stored_metadata: "/v1/chat/completions/COMPLETION",
    quarantine: "/admin/feedback/quarantine/2bd806c97f0e",
}

fn fuzz(path: &str) {
    let (clock, mut checked, mut batches) = (Clock::start(), 0, 0);
    while batches == 0 || !clock.is_over() {
        let target = Target::start(batches);
        if !target.has(path) {
            println!("{path}: no such route yet");
            return;
        }
        checked += clock.batch(&bodies(target.valid(path)), |body| target.check(path, &body));
        target.finish();
        batches += 1;
    }
    println!("{path}: {checked} requests");
}

#[test]
fn valid_requests_are_accepted() {
    let target = Target::start(0);
    for path in routes().iter().filter(|path| target.has(path)) {
        for request in target.valid(path) {
            let reply = target.post(path, &Body(request.to_string().into_bytes()));
            assert_eq!(reply.status, 200, "{path} {request}: {}", reply.text);
            reply.check().unwrap();
        }
    }
    target.finish();
}

const NAMES: &str = "accept accept-encoding access-control-request-method authorization content-type \
    cookie expect forwarded host origin range traceparent upgrade via x-api-key x-forwarded-for \
    x-request-id";
const VALUES: [&str; 13] = [
    "",
    "*",
    "100-continue",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "Bearer sesame",
    "Bearer  ",
    "Basic c2VzYW1l",
    "sesame",
    "application/json; charset=utf-16",
    "https://ok.example",
    "localhost:99999",
    "[::1",
    "evil.example",
];

#[test]
fn headers() {
    let clock = Clock::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(Server::with(|setup| {
        setup.server.keys = vec![key("sesame", &[KeyScope::Chat])];
        setup.server.cors_origins = vec!["https://ok.example".to_owned()];
    }));
    let value = prop_oneof![
        4 => select(VALUES.to_vec()).prop_map(|text| text.as_bytes().to_vec()),
        2 => vec(0x20..=0xff_u8, 0..40),
        1 => (1..9000_usize).prop_map(|length| vec![b'a'; length]),
    ];
    let methods = [Method::GET, Method::POST, Method::OPTIONS, Method::DELETE, Method::HEAD];
    let request = (
        select(methods.to_vec()),
        select(vec!["/v1/models", CHAT, "/v1/nowhere", "/%ff", "/v1/models/%00"]),
        vec((select(NAMES.split(' ').collect::<Vec<_>>()), value), 0..6),
    );
    clock.run("headers", &request, |(method, path, headers)| {
        let mut request = server.client.request(method.clone(), server.url(path));
        if method == Method::POST {
            request = request.json(&ask(json!({})));
        }
        let mut has_key = false;
        for (name, value) in headers {
            has_key |= value.windows(6).any(|part| part == b"sesame");
            // Not every byte can be in a header.
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                request = request.header(name, value);
            }
        }
        let again = request.try_clone().unwrap();
        let mut sent = runtime.block_on(async { request.send().await });
        if sent.is_err() && method != Method::POST {
            // The server closes a connection whose last request it refused before the body had
            // arrived. The client may take that connection once more before it notices.
            sent = runtime.block_on(async { again.send().await });
        }
        let response = match sent {
            Ok(response) => response,
            Err(error) => {
                // The server may refuse the head and close while the client still sends the body.
                prop_assert!(method == Method::POST && error.is_request(), "{error:?}");
                return Ok(());
            }
        };
        let id = response.headers().get("x-request-id").map(|id| id.to_str().is_ok());
        prop_assert_eq!(id, Some(true));
        let reply = runtime.block_on(Reply::read(response));
        prop_assert!(reply.status < 500, "{reply:?}");
        // A web page may ask what it may send without a key.
        prop_assert!(reply.status >= 400 || has_key || method == Method::OPTIONS, "{reply:?}");
        Ok(())
    });
}
