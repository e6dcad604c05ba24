//! Who may use the server, and how much.

mod connections;
mod limits;
mod load;
mod raters;
mod tls;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::{Method, Response};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use hone::config::{KeyConfig, KeyExpiry, KeyScope, ServerConfig};
use hone_core::metrics::Metrics;
use hone_http::{Startup, serve};

use crate::server::{Server, ask, key, read};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test(flavor = "multi_thread")]
async fn every_response_has_the_id_of_its_request() {
    let server = Server::with(|s| s.server.client_keys = vec!["app".to_owned()]).await;
    let chat = "/v1/chat/completions";
    let mut new = Vec::new();
    for (path, key, body, status) in [
        (chat, "app", json!({}), 200),
        (chat, "app", json!({"stream": true}), 200),
        (chat, "app", json!({"n": 0}), 400),
        (chat, "other", json!({}), 401),
        ("/v1/nowhere", "app", json!({}), 404),
        ("/livez", "app", json!({}), 405),
    ] {
        let send =
            || server.client.post(server.url(path)).bearer_auth(key).json(&ask(body.clone()));
        let named = send().header("x-request-id", "my-id.7").header("traceparent", TRACE);
        let response = named.send().await.unwrap();
        assert_eq!(response.status(), status, "{path}");
        assert_eq!(response.headers()["x-request-id"], "my-id.7", "{path}");
        assert_eq!(response.headers()["traceparent"], TRACE, "{path}");
        let response = send().header("x-request-id", "not an id").send().await.unwrap();
        assert!(!response.headers().contains_key("traceparent"));
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(id.starts_with("req-") && !new.contains(&id), "{path}: {id}");
        new.push(id);
    }
}

async fn preflight(server: &Server, origin: &str) -> Response {
    let request = server.client.request(Method::OPTIONS, server.url("/v1/chat/completions"));
    let request = request.header("origin", origin).header("access-control-request-method", "POST");
    let headers = "authorization, content-type";
    request.header("access-control-request-headers", headers).send().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_listed_origins_may_use_the_server() {
    let page = "https://app.example";
    let server = Server::with(|s| {
        s.server.cors_origins = vec![page.to_owned()];
        s.server.client_keys = vec!["app".to_owned()];
    })
    .await;
    let allowed = preflight(&server, page).await;
    assert_eq!(allowed.status(), 204);
    assert_eq!(allowed.headers()["access-control-allow-origin"], page);
    assert_eq!(allowed.headers()["access-control-allow-methods"], "GET, POST, DELETE");
    assert_eq!(allowed.headers()["access-control-allow-headers"], "authorization, content-type");
    let models = async |origin: &str, key: &str| {
        let request = server.client.get(server.url("/v1/models")).header("origin", origin);
        request.bearer_auth(key).send().await.unwrap()
    };
    let response = models(page, "app").await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["vary"], "origin");
    assert_eq!(response.headers()["access-control-allow-origin"], page);
    // A page can read the error too.
    let response = models(page, "other").await;
    assert_eq!(response.status(), 401);
    assert_eq!(response.headers()["access-control-allow-origin"], page);
    for other in ["https://evil.example", "https://app.example.evil", "null"] {
        let response = preflight(&server, other).await;
        assert_ne!(response.status(), 204);
        assert!(!response.headers().contains_key("access-control-allow-origin"), "{other}");
        let response = models(other, "app").await;
        assert!(!response.headers().contains_key("access-control-allow-origin"), "{other}");
    }
    let any = Server::with(|s| s.server.cors_origins = vec!["*".to_owned()]).await;
    assert_eq!(preflight(&any, page).await.headers()["access-control-allow-origin"], page);
    let none = Server::new().await;
    assert!(!preflight(&none, page).await.headers().contains_key("vary"));
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_are_answered_while_the_model_is_loading() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let metrics = Arc::new(Metrics::new().unwrap());
    let config =
        Arc::new(ServerConfig { admin_keys: vec!["root".to_owned()], ..Default::default() });
    let startup = Startup::new(config, metrics, Arc::new(AtomicBool::new(true)));
    let server = tokio::spawn(serve(listener, startup, std::future::pending()));
    let get = async |path: &str| reqwest::get(format!("{url}{path}")).await.unwrap();
    assert_eq!(read(get("/livez").await).await, (200, json!({"status": "ok"})));
    assert!(get("/metrics").await.text().await.unwrap().contains("hone_build_info"));
    for path in ["/readyz", "/v1/models", "/admin/train", "/nowhere"] {
        let response = get(path).await;
        assert_eq!(response.headers()["retry-after"], "1", "{path}");
        let (status, answer) = read(response).await;
        assert_eq!((status, &answer["error"]["code"]), (503, &json!("unavailable")), "{path}");
        assert_eq!(answer["error"]["message"], "not ready: the model is loading");
    }
    server.abort();
}

/// The message of `/readyz`, which must not be ready.
async fn reason(server: &Server) -> String {
    let (status, answer) = server.get("/readyz").await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("unavailable")), "{answer}");
    assert_eq!(answer["error"]["type"], "server_error");
    assert_eq!(server.get("/livez").await.0, 200);
    answer["error"]["message"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_not_ready_if_its_engine_disk_or_ledger_fails() {
    let server = Server::new().await;
    let ready: (u16, Value) = (200, json!({"status": "ready"}));
    assert_eq!(server.get("/readyz").await, ready);
    server.engine.set_trouble(Some("1 threads have ended"));
    assert_eq!(reason(&server).await, "not ready: 1 threads have ended");
    server.engine.set_trouble(None);
    assert_eq!(server.get("/readyz").await, ready);
    let response = server.client.get(server.url("/metrics")).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let text = response.text().await.unwrap();
    assert!(text.contains("hone_build_info{version="));
    assert!(text.contains("\nhone_memory_resident_peak_bytes "), "{text}");
    assert!(server.metric("hone_data_free_bytes").await.is_some_and(|free| free > 0.0));
    server.ready.store(false, Ordering::SeqCst);
    reason(&server).await;
    server.ready.store(true, Ordering::SeqCst);
    server.store.close().await.unwrap();
    assert_eq!(reason(&server).await, "not ready: the ledger's writer has ended");
    let full = Server::with(|s| s.min_free = u64::MAX).await;
    let message = reason(&full).await;
    assert!(message.contains("fewer than 18446744073709551615"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_replaces_keys_while_requests_run() {
    let server = Server::with(|s| s.server.keys = vec![key("old", &[KeyScope::Chat])]).await;
    let status = async |key: &str| server.chat_as(key, &ask(json!({}))).await.status().as_u16();
    assert_eq!((status("old").await, status("new").await), (200, 401));
    let stream = server.chat_as("old", &ask(json!({"stream": true}))).await;
    let config =
        ServerConfig { keys: vec![key("new", &[KeyScope::Chat])], ..ServerConfig::default() };
    assert_eq!(server.keys.reload(&config).unwrap(), 1);
    assert_eq!((status("old").await, status("new").await), (401, 200));
    assert!(stream.text().await.unwrap().ends_with("[DONE]\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_listed_with_their_expiry_and_last_use() {
    let key = |name: &str, scopes: &[KeyScope], expires: &str| KeyConfig {
        expires: KeyExpiry::parse(expires),
        ..key(name, scopes)
    };
    let keys = vec![
        key("web", &[KeyScope::Chat], "2100-01-01"),
        key("old", &[KeyScope::Chat], "2000-01-01"),
        key("operator", &[KeyScope::Admin], ""),
    ];
    let server = Server::with(|s| s.server.keys = keys.clone()).await;
    let list = async || {
        let request = server.client.get(server.url("/admin/keys")).bearer_auth("operator");
        let (status, answer) = read(request.send().await.unwrap()).await;
        assert_eq!((status, &answer["object"]), (200, &json!("list")));
        answer["data"].as_array().unwrap().clone()
    };
    let first = list().await;
    assert_eq!(first[0]["name"], "web");
    assert_eq!((&first[0]["last_used"], &first[0]["expired"]), (&json!(null), &json!(false)));
    assert_eq!(first[0]["expires"], 4_102_444_800_000_u64);
    assert_eq!((&first[1]["expired"], &first[2]["expires"]), (&json!(true), &json!(null)));
    assert!(first[2]["last_used"].is_u64() && first[0].get("key").is_none());
    assert_eq!(server.chat_as("old", &ask(json!({}))).await.status(), 401);
    assert_eq!(server.chat_as("web", &ask(json!({}))).await.status(), 200);
    let config = ServerConfig { keys, ..ServerConfig::default() };
    server.keys.reload(&config).unwrap();
    let second = list().await;
    assert!(second[0]["last_used"].is_u64(), "a reload keeps it");
    assert_eq!(second[1]["last_used"], json!(null), "a refused request does not count");
    assert_eq!(
        server.metric("hone_http_key_expiry_timestamp_seconds").await,
        Some(4_102_444_800.0)
    );
    assert_eq!(server.metric("hone_http_expired_keys").await, Some(1.0));
    assert!(server.metric("hone_process_open_files").await.is_some_and(|open| open > 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_with_another_name_cannot_use_an_open_server() {
    let server = Server::with(|s| s.server.hosts = vec!["hone.example".to_owned()]).await;
    let with_host = async |path: &str, host: &str| {
        let request = server.client.get(server.url(path)).header("host", host);
        read(request.send().await.unwrap()).await
    };
    for path in ["/v1/models", "/admin/train"] {
        let (status, answer) = with_host(path, "evil.example").await;
        assert_eq!((status, &answer["error"]["code"]), (403, &json!("host_not_allowed")));
        for host in ["localhost:1", "127.0.0.1", "[::1]:8080", "HONE.example"] {
            assert_eq!(with_host(path, host).await.0, 200, "{path} {host}");
        }
    }
    assert_eq!(with_host("/livez", "evil.example").await.0, 200);
    // Metrics show rewards.
    for (host, expected) in [("evil.example", 403), ("hone.example", 200)] {
        let request = server.client.get(server.url("/metrics")).header("host", host);
        assert_eq!(request.send().await.unwrap().status(), expected, "{host}");
    }
    let closed = Server::with(|s| s.server.keys = vec![key("a", &[KeyScope::Chat])]).await;
    let request = closed.client.get(closed.url("/v1/models")).header("host", "evil.example");
    assert_eq!(request.bearer_auth("a").send().await.unwrap().status(), 200);
}
