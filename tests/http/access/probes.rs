//! `/livez` and `/readyz`: before the model is loaded, and when a part of the server fails.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};
use tokio::net::TcpListener;

use hone::config::ServerConfig;
use hone_core::metrics::Metrics;
use hone_http::{Startup, serve};

use crate::server::{Server, read};

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
    assert!(server.metric("hone_data_free_bytes").await.is_some_and(|free| free > 0.0));
    server.store.close().await.unwrap();
    assert_eq!(reason(&server).await, "not ready: the ledger's writer has ended");
    let full = Server::with(|s| s.min_free = u64::MAX).await;
    let message = reason(&full).await;
    assert!(message.contains("fewer than 18446744073709551615"), "{message}");
}
