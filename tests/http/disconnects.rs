//! Clients that disconnect, and servers that stop.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use hone_core::types::{FinishReason, InteractionId};
use hone_engine::Engine;

use crate::server::{Server, ask, eventually, within_a_minute};

async fn slow(queue: usize) -> Server {
    Server::with(|s| {
        s.fake.slots = 1;
        s.fake.queue = queue;
        s.fake.delay = Duration::from_millis(30);
        s.fake.script = std::sync::Arc::new(|_, _| "and so on ".repeat(30));
    })
    .await
}

/// Starts a stream and reads until it contains text. Returns the completion's id and the connection.
async fn begin(server: &Server) -> (InteractionId, reqwest::Response) {
    let mut response = server.send_chat(&ask(json!({"stream": true}))).await;
    assert_eq!(response.status(), 200);
    let mut stream = String::new();
    loop {
        let bytes = response.chunk().await.unwrap().unwrap();
        stream.push_str(std::str::from_utf8(&bytes).unwrap());
        let (complete, _) = stream.rsplit_once("\n\n").unwrap_or_default();
        for event in complete.split("\n\n").filter_map(|event| event.strip_prefix("data: ")) {
            let chunk: Value = serde_json::from_str(event).unwrap();
            let text = chunk["choices"][0]["delta"]["content"].as_str();
            if text.is_some_and(|text| !text.is_empty()) {
                let id = InteractionId::from_completion_id(chunk["id"].as_str().unwrap());
                return (id.unwrap(), response);
            }
        }
    }
}

/// Sends a request in a task, whose abortion closes the connection.
fn request(server: &Server) -> JoinHandle<reqwest::Result<reqwest::Response>> {
    let url = server.url("/v1/chat/completions");
    tokio::spawn(server.client.post(url).json(&ask(json!({}))).send())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_during_a_stream_frees_the_slot() {
    let server = slow(0).await;
    let (id, response) = begin(&server).await;
    assert_eq!(server.engine.load().live_running, 1);
    drop(response);
    eventually("the slot is free", || server.engine.load().live_running == 0).await;
    eventually("it is counted", || server.metrics.http_disconnects.get() == 1).await;
    eventually("nothing is in flight", || server.metrics.http_in_flight.get() == 0).await;
    server.store.commit(Vec::new()).await.unwrap();
    let [sample] = &server.store.samples_of(id).unwrap()[..] else { panic!("no sample") };
    assert_eq!(sample.finish, FinishReason::Cancelled);
    assert_eq!(sample.untrainable, None);
    assert!(!sample.ids.is_empty() && sample.ids.len() < 100, "{}", sample.ids.len());
    assert_eq!(sample.ids.len(), sample.logprobs.len());
    assert!(server.store.interaction(id).unwrap().is_some());
    assert!(server.rollout.submitted().is_empty());
    // A rating of what the client saw waits for the trainer.
    let body = json!({"completion_id": id.completion_id(), "name": "thumbs", "value": 0});
    let (status, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!((status, &answer["status"]), (200, &json!("recorded")), "{answer}");
    let waiting = server.store.ungrouped_feedback(u64::MAX, 9).unwrap();
    assert_eq!(waiting, [(sample.id, "thumbs".to_owned())]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_before_the_response_frees_the_slot() {
    let server = slow(0).await;
    let request = request(&server);
    eventually("it runs", || server.engine.load().live_running == 1).await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled(), "the answer was too fast");
    eventually("the slot is free", || server.engine.load().live_running == 0).await;
    eventually("it is counted", || server.metrics.http_disconnects.get() == 1).await;
    let stats = server.stats().await;
    assert_eq!((stats.interactions, stats.samples), (1, 1));
    let gone = "hone_http_requests_total{code=\"499\",route=\"/v1/chat/completions\"}";
    assert_eq!(server.metric(gone).await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_while_waiting_frees_the_queue() {
    let server = slow(1).await;
    let (_, running) = begin(&server).await;
    let waiting = request(&server);
    eventually("it waits", || server.engine.load().live_waiting == 1).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    eventually("the queue is empty", || server.engine.load().live_waiting == 0).await;
    eventually("it is counted", || server.metrics.http_disconnects.get() == 1).await;
    // It has no sample, so nothing is recorded.
    server.store.commit(Vec::new()).await.unwrap();
    assert_eq!(server.store.stats().unwrap().interactions, 0);
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_after_the_end_is_not_counted() {
    let server = Server::new().await;
    let mut bytes = server.send_chat(&ask(json!({"stream": true}))).await.bytes_stream();
    while let Some(piece) = bytes.next().await {
        if piece.unwrap().ends_with(b"[DONE]\n\n") {
            break;
        }
    }
    drop(bytes);
    eventually("nothing is in flight", || server.metrics.http_in_flight.get() == 0).await;
    assert_eq!(server.metrics.http_disconnects.get(), 0);
}

async fn stopping(grace: u64, delay: Duration) -> Server {
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
    let mut server = stopping(24 * 3600, Duration::from_millis(20)).await;
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
    let mut server = stopping(0, Duration::from_secs(3600)).await;
    let response = server.send_chat(&ask(json!({"stream": true}))).await;
    server.stop.take().unwrap().send(()).unwrap();
    within_a_minute("the shutdown", &mut server.task).await.unwrap().unwrap();
    drop(response);
}
