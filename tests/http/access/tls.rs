//! TLS: requests, probes while the model is loading, handshakes that fail, and another certificate.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use reqwest::{Certificate, Client, Response, Version};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use hone::config::{ServerConfig, TlsConfig};
use hone_core::metrics::Metrics;
use hone_http::{Startup, Tls, serve};

use super::connections::{PROBE, connect};
use crate::server::{Server, ask, eventually, read, within_a_minute};

/// The files of one of the two certificates.
fn files(name: &str) -> TlsConfig {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls");
    TlsConfig {
        certificate: dir.join(format!("{name}.pem")),
        key: dir.join(format!("{name}.key.pem")),
    }
}

/// A client that trusts only this certificate.
fn client(name: &str) -> Client {
    let certificate = std::fs::read(files(name).certificate).unwrap();
    let roots = [Certificate::from_pem(&certificate).unwrap()];
    let client = Client::builder().tls_certs_only(roots).no_proxy();
    client.timeout(Duration::from_secs(30)).build().unwrap()
}

async fn get(server: &Server, client: &Client, path: &str) -> reqwest::Result<Response> {
    client.get(format!("https://{}{path}", server.addr)).send().await
}

fn failed_handshakes(server: &Server) -> u64 {
    server.metrics.http_closed_connections.with_label_values(&["handshake"]).get()
}

/// Waits until the server ends the connection.
async fn ended(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    // A connection with unread data may be reset instead.
    let _end = within_a_minute("the end", stream.read_to_end(&mut rest)).await;
    assert!(!rest.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&rest));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_and_streams_are_answered() {
    let server = Server::with(|s| s.server.tls = files("first")).await;
    let client = client("first");
    let models = get(&server, &client, "/v1/models").await.unwrap();
    assert_eq!((models.status().as_u16(), models.version()), (200, Version::HTTP_11));
    let url = format!("https://{}/v1/chat/completions", server.addr);
    let request = client.post(url).json(&ask(json!({"stream": true})));
    let text = request.send().await.unwrap().text().await.unwrap();
    assert!(text.contains("\"The\"") || text.contains("\"Th\""), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(failed_handshakes(&server), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_certificate_is_for_new_connections() {
    let server = Server::with(|s| s.server.tls = files("first")).await;
    let (before, after) = (client("first"), client("second"));
    assert_eq!(get(&server, &before, "/livez").await.unwrap().status(), 200);
    assert!(get(&server, &after, "/livez").await.unwrap_err().is_connect());
    server.tls.replace(server.tls.read_again(&files("second")).unwrap());
    assert_eq!(get(&server, &after, "/livez").await.unwrap().status(), 200);
    // The open connection continues.
    assert_eq!(get(&server, &before, "/livez").await.unwrap().status(), 200);
    assert!(get(&server, &client("first"), "/livez").await.unwrap_err().is_connect());
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_ends_the_connection() {
    let server = Server::with(|s| s.server.tls = files("first")).await;
    let mut plain = connect(&server, PROBE).await;
    ended(&mut plain).await;
    eventually("it is counted", || failed_handshakes(&server) == 1).await;
    assert_eq!(get(&server, &client("first"), "/livez").await.unwrap().status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_handshake_ends_the_connection() {
    let server = Server::with(|s| {
        s.server.tls = files("first");
        s.server.connections.head_seconds = 1;
    })
    .await;
    let mut silent = connect(&server, "").await;
    let mut slow = connect(&server, "").await;
    // The beginning of a record with a handshake.
    slow.write_all(&[22, 3, 1, 1]).await.unwrap();
    ended(&mut silent).await;
    ended(&mut slow).await;
    // A connection is counted after it was closed.
    eventually("both are counted", || failed_handshakes(&server) == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_are_answered_while_the_model_is_loading() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/livez", listener.local_addr().unwrap());
    let (metrics, ready) = (Arc::new(Metrics::new().unwrap()), Arc::new(AtomicBool::new(true)));
    let startup = Startup::new(Arc::new(ServerConfig::default()), metrics, ready)
        .with_tls(Arc::new(Tls::load(&files("first")).unwrap()));
    let server = tokio::spawn(serve(listener, startup, std::future::pending()));
    let answer = read(client("first").get(url).send().await.unwrap()).await;
    assert_eq!(answer, (200, json!({"status": "ok"})));
    server.abort();
}
