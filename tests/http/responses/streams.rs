//! Streams of events.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};

use hone_engine::{Engine, EngineError};

use super::{PATH, body, text_of};
use crate::server::{Server, eventually, id_of, named_events};

/// The events of a whole stream.
pub(super) async fn events(server: &Server, more: Value) -> Vec<Value> {
    let mut body = body(more);
    body["stream"] = json!(true);
    let response = server.send(PATH, &body).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let events = named_events(&response.text().await.unwrap());
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    events
}

pub(super) fn types(events: &[Value]) -> Vec<&str> {
    let types = events.iter().map(|event| event["type"].as_str().unwrap());
    let mut types: Vec<&str> = types.map(|name| name.strip_prefix("response.").unwrap()).collect();
    types.dedup();
    types
}

fn joined(events: &[Value], r#type: &str) -> String {
    let own = events.iter().filter(|event| event["type"] == r#type);
    own.map(|event| event["delta"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_openais_events() {
    let server = Server::new().await;
    let more = json!({"stream_options": {"include_obfuscation": false}});
    let events = events(&server, more).await;
    assert_eq!(
        types(&events),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
    );
    let first = &events[0]["response"];
    assert_eq!((&first["status"], &first["output"]), (&json!("in_progress"), &json!([])));
    assert_eq!(first["usage"], json!(null));
    assert_eq!(events[2]["item"]["content"], json!([]));
    assert_eq!(events[2]["item"]["status"], "in_progress");
    assert_eq!(joined(&events, "response.output_text.delta"), "The answer is 5.");
    let last = &events[events.len() - 1]["response"];
    assert_eq!((&last["id"], &last["status"]), (&first["id"], &json!("completed")));
    assert_eq!(text_of(last), "The answer is 5.");
    let done = &events[events.len() - 2];
    assert_eq!((&done["item"], &done["output_index"]), (&last["output"][0], &json!(0)));
    for event in &events[3..events.len() - 2] {
        let place = (&event["item_id"], &event["output_index"], &event["content_index"]);
        assert_eq!(place, (&last["output"][0]["id"], &json!(0), &json!(0)), "{event}");
    }
    // The whole response is in the ledger.
    let kept = server.get(&format!("{PATH}/{}", last["id"].as_str().unwrap())).await.1;
    assert_eq!((&kept["output"], &kept["usage"]), (&last["output"], &last["usage"]));
    assert_eq!(server.rollout.submitted().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_streamed_as_an_item() {
    let template = "{% for m in messages %}{{ m.content }}\n{% endfor %}\
                    {% if false %}<think></think>{% endif %}";
    let server = Server::with_template(template, |setup| {
        setup.fake.script = Arc::new(|_, _| "<think>\nHm.\n</think>\n\nFive.".to_owned());
    })
    .await;
    let events = events(&server, json!({})).await;
    assert_eq!(
        types(&events)[2..8],
        [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ]
    );
    assert_eq!(joined(&events, "response.reasoning_text.delta"), "Hm.");
    assert_eq!(joined(&events, "response.output_text.delta"), "Five.");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_ends_the_stream() {
    let server = Server::new().await;
    server.engine.fail_next_generation(EngineError::Internal("secret detail".to_owned()));
    let events = events(&server, json!({})).await;
    assert_eq!(types(&events), ["created", "in_progress", "failed"]);
    let response = &events[2]["response"];
    assert_eq!((&response["status"], &response["usage"]), (&json!("failed"), &json!(null)));
    let message = "the server failed internally; the reason is in its log";
    assert_eq!(response["error"], json!({"code": "server_error", "message": message}));
    assert_eq!(response["output"], json!([]));
    // Before the first byte it has its own status.
    server.engine.fail_next_generation(EngineError::Internal("secret detail".to_owned()));
    assert_eq!(server.post(PATH, &body(json!({}))).await.0, 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_records_a_cancelled_response() {
    let server = Server::with(|setup| {
        setup.fake.delay = Duration::from_millis(20);
        setup.fake.script = Arc::new(|_, _| "and so on ".repeat(30));
    })
    .await;
    let mut body = body(json!({"max_output_tokens": 100}));
    body["stream"] = json!(true);
    let mut bytes = server.send(PATH, &body).await.bytes_stream();
    let mut seen = String::new();
    while !seen.contains("output_text.delta") {
        seen.push_str(std::str::from_utf8(&bytes.next().await.unwrap().unwrap()).unwrap());
    }
    drop(bytes);
    eventually("it is counted", || server.metrics.http_disconnects.get() == 1).await;
    eventually("the slot is free", || server.engine.load().live_running == 0).await;
    let id = seen.split('"').find(|text| text.starts_with("resp_")).unwrap();
    let (status, kept) = server.get(&format!("{PATH}/{id}")).await;
    assert_eq!((status, &kept["status"]), (200, &json!("cancelled")), "{kept}");
    assert_eq!(id_of(&kept).response_id(), id);
}
