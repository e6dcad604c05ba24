//! Completions as server-sent events, compared byte for byte.

use std::time::Duration;

use futures::StreamExt;
use insta::assert_snapshot;
use serde_json::{Value, json};

use hone_core::types::InteractionId;
use hone_engine::EngineError;

use crate::server::{Server, ask};

/// The whole stream, with id and time replaced.
async fn stream(server: &Server, more: Value) -> String {
    let mut body = ask(more);
    body["stream"] = json!(true);
    let response = server.send_chat(&body).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers()["x-hone-policy-version"], "0");
    masked(&response.text().await.unwrap())
}

fn masked(text: &str) -> String {
    let id = regex::Regex::new("chatcmpl-[0-9a-f]{32}").unwrap();
    let created = regex::Regex::new(r#""created":\d+"#).unwrap();
    created.replace_all(&id.replace_all(text, "ID"), r#""created":0"#).into_owned()
}

/// The events of a stream, without `[DONE]`.
pub fn chunks(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_with_usage() {
    let server = Server::new().await;
    let more = json!({"max_tokens": 1, "stream_options": {"include_usage": true}});
    assert_snapshot!(stream(&server, more).await, @r#"
    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"delta":{"content":"Th"},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}

    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[],"usage":{"prompt_tokens":23,"completion_tokens":1,"total_tokens":24,"prompt_tokens_details":{"cached_tokens":0}}}

    data: [DONE]
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_with_log_probabilities() {
    let server = Server::with(|s| {
        s.fake.script = std::sync::Arc::new(|_, _| "é".to_owned());
    })
    .await;
    // The two tokens of one character are reported with the text that the second one completes.
    let more = json!({"logprobs": true, "top_logprobs": 1});
    assert_snapshot!(stream(&server, more).await, @r#"
    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"delta":{"content":"é"},"logprobs":{"content":[{"token":"�","logprob":-0.1,"bytes":[195],"top_logprobs":[{"token":"�","logprob":-0.1,"bytes":[195]}]},{"token":"�","logprob":-0.6,"bytes":[169],"top_logprobs":[{"token":"�","logprob":-0.6,"bytes":[169]}]}],"refusal":null},"finish_reason":null}]}

    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}

    data: [DONE]
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_after_the_first_byte_is_an_event() {
    let server = Server::new().await;
    server.engine.fail_next_generation(EngineError::Internal("secret detail".to_owned()));
    assert_snapshot!(stream(&server, json!({})).await, @r#"
    data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

    data: {"error":{"message":"the server failed internally; the reason is in its log","type":"server_error","param":null,"code":"internal_error"}}
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_an_interval_have_one_event() {
    let [each, together] =
        [0, 1000].map(|ms| Server::with(move |s| s.server.stream_interval_ms = ms));
    let (each, together) = (each.await, together.await);
    for more in [json!({}), json!({"n": 2, "logprobs": true, "top_logprobs": 2})] {
        let of = async |server| {
            let events = chunks(&stream(server, more.clone()).await);
            let own = |index: u64| {
                let choices = events.iter().map(|event| &event["choices"][0]);
                let own: Vec<&Value> = choices.filter(|c| c["index"] == index).collect();
                let texts = own.iter().filter_map(|c| c["delta"]["content"].as_str());
                let texts: Vec<&str> = texts.filter(|text| !text.is_empty()).collect();
                let tokens = own.iter().filter_map(|c| c["logprobs"]["content"].as_array());
                let tokens: Vec<Value> = tokens.flatten().cloned().collect();
                (texts.len(), texts.concat(), tokens, own.last().unwrap()["finish_reason"].clone())
            };
            (0..more["n"].as_u64().unwrap_or(1)).map(own).collect::<Vec<_>>()
        };
        let (each, together) = (of(&each).await, of(&together).await);
        for (each, together) in each.into_iter().zip(together) {
            // The first token is sent at once, and the others at the end.
            assert!(each.0 > 2 && together.0 <= 2, "{} and {}", each.0, together.0);
            assert_eq!((each.1, each.2, each.3), (together.1, together.2, together.3), "{more}");
        }
    }
}

/// A client may send feedback on the finish reason, before `[DONE]`.
#[tokio::test(flavor = "multi_thread")]
async fn a_completion_is_recorded_before_its_finish_reason_is_sent() {
    let server = Server::with(|s| s.fake.delay = Duration::from_millis(5)).await;
    for choices in [1, 2] {
        let body = ask(json!({"stream": true, "n": choices}));
        let mut bytes = server.send_chat(&body).await.bytes_stream();
        let mut finished = 0;
        while let Some(piece) = bytes.next().await {
            let text = String::from_utf8(piece.unwrap().to_vec()).unwrap();
            for chunk in chunks(&text) {
                let choice = &chunk["choices"][0];
                if choice["finish_reason"].is_null() {
                    continue;
                }
                finished += 1;
                let id = chunk["id"].as_str().unwrap();
                assert!(InteractionId::from_completion_id(id).is_some());
                let feedback = json!({"completion_id": id, "choice": choice["index"],
                                      "name": "thumbs", "value": true});
                let (status, answer) = server.post("/v1/feedback", &feedback).await;
                assert_eq!((status, &answer["status"]), (200, &json!("recorded")), "{answer}");
            }
        }
        assert_eq!(finished, choices);
    }
}
