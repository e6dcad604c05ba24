//! Shutdown under load.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use tokio::net::TcpStream;

use crate::server::{Server, ask, eventually, within_a_minute};

async fn slow(grace: u64, delay: Duration) -> Server {
    Server::with(|s| {
        s.fake.delay = delay;
        s.fake.script = std::sync::Arc::new(|_, _| "and so on ".repeat(5));
        s.server.shutdown_grace_seconds = grace;
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn running_requests_finish_and_new_ones_are_refused() {
    // With a grace period far beyond the limit of a test.
    let mut server = slow(24 * 3600, Duration::from_millis(20)).await;
    // A connection without a request does not delay the shutdown.
    let silent = TcpStream::connect(server.addr).await.unwrap();
    let response = server.send_chat(&ask(json!({"stream": true}))).await;
    let whole = server.client.post(server.url("/v1/chat/completions")).json(&ask(json!({}))).send();
    let whole = tokio::spawn(whole);
    eventually("both run", || server.metrics.http_in_flight.get() == 2).await;
    server.stop.take().unwrap().send(()).unwrap();
    eventually("the shutdown begins", || !server.ready.load(Ordering::SeqCst)).await;
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(whole.await.unwrap().unwrap().status(), 200);
    within_a_minute("the shutdown", &mut server.task).await.unwrap().unwrap();
    assert!(TcpStream::connect(server.addr).await.is_err());
    drop(silent);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_aborted_after_the_grace_period() {
    // The answer would take hours.
    let mut server = slow(0, Duration::from_secs(3600)).await;
    let response = server.send_chat(&ask(json!({"stream": true}))).await;
    server.stop.take().unwrap().send(()).unwrap();
    within_a_minute("the shutdown", &mut server.task).await.unwrap().unwrap();
    drop(response);
}
