//! What one request may cost: texts are measured before any work on them, and nothing unlimited is recorded.

use futures::future::join_all;
use serde_json::{Value, json};

use crate::server::{Server, ask, ok};

/// A request of each endpoint that tokenizes, with a text, and the field that has it.
fn requests(text: &str) -> Vec<(&'static str, &'static str, Value)> {
    let messages = json!([{"role": "user", "content": text}]);
    vec![
        ("/v1/chat/completions", "messages", json!({"model": "default", "messages": messages})),
        ("/v1/completions", "prompt", json!({"model": "default", "prompt": text})),
        ("/v1/completions", "prompt", json!({"model": "default", "prompt": ["a", text]})),
        ("/v1/responses", "input", json!({"model": "default", "input": text})),
        (
            "/v1/messages",
            "messages",
            json!({"model": "default", "messages": messages, "max_tokens": 9}),
        ),
        (
            "/v1/messages/count_tokens",
            "messages",
            json!({"model": "default", "messages": messages}),
        ),
        ("/tokenize", "prompt", json!({"prompt": text})),
        ("/tokenize", "messages", json!({"messages": messages})),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn long_texts_are_refused_before_they_are_tokenized() {
    let server = Server::new().await;
    let text = "lorem ipsum ".repeat(80_000);
    for (path, field, body) in requests(&text) {
        let answers = join_all((0..16).map(|_| server.post(path, &body))).await;
        for (status, answer) in answers {
            assert_eq!(status, 400, "{path}: {answer}");
            let error = &answer["error"];
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(field) && message.ends_with("it may have 65536"), "{message}");
            if !path.starts_with("/v1/messages") {
                assert_eq!(error["code"], "context_length_exceeded", "{path}");
                assert_eq!(error["param"], field, "{path}");
            }
        }
    }
    // A text that the tokenizer may see, and whose prompt does not fit.
    for (path, _, body) in requests(&"a b ".repeat(15_000)).into_iter().take(5) {
        let (status, answer) = server.post(path, &body).await;
        assert_eq!(status, 400, "{path}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("512"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_unlimited_is_recorded_by_one_request() {
    let server = Server::new().await;
    let long = "x".repeat(900_000);
    let tool = json!({"type": "function", "function": {"name": "f", "description": long}});
    let call = json!({"id": long, "function": {"name": "f", "arguments": "{}"}});
    let biases: serde_json::Map<_, _> = (0..2000).map(|id| (id.to_string(), json!(1))).collect();
    let user = json!({"role": "user", "content": "Hi"});
    for (field, more) in [
        ("stop", json!({"stop": [long]})),
        ("stop", json!({"stop": "x".repeat(257)})),
        ("messages", json!({"chat_template_kwargs": {"a": long}})),
        ("messages", json!({"chat_template_kwargs": {long.as_str(): 1}})),
        ("messages", json!({"tools": [tool]})),
        ("messages", json!({"messages": [{"role": "user", "content": "Hi", "name": long}]})),
        (
            "messages",
            json!({"messages": [user, {"role": "assistant", "tool_calls": [call]}, user]}),
        ),
        ("messages", json!({"messages": [{"role": "tool", "content": "a", "tool_call_id": long}]})),
        ("messages", json!({"messages": vec![user.clone(); 9_000]})),
        ("logit_bias", json!({"logit_bias": biases})),
        ("metadata.a", json!({"metadata": {"a": long}})),
    ] {
        let (status, answer) = server.chat(&ask(more)).await;
        let found = (status, answer["error"]["param"].as_str().unwrap());
        assert_eq!(found, (400, field), "{answer}");
    }
    let stop = json!({"model": "default", "max_tokens": 9, "messages": [user],
                      "stop_sequences": ["x".repeat(257)]});
    assert_eq!(server.post("/v1/messages", &stop).await.0, 400);
    assert_eq!(server.chat(&ask(json!({"stop": ["x".repeat(256)]}))).await.0, 200);
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().unwrap().interactions, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correction_beyond_the_context_is_refused() {
    let server = Server::new().await;
    let (_, answer) = server.chat(&ask(json!({}))).await;
    let id = &answer["id"];
    let before = server.store.stats().unwrap();
    for text in ["x".repeat(900_000), "a b ".repeat(300)] {
        let body = json!({"completion_id": id, "correction": text});
        let (status, answer) = server.post("/v1/feedback", &body).await;
        let error = &answer["error"];
        let found = (status, error["param"].as_str().unwrap(), error["code"].as_str().unwrap());
        assert_eq!(found, (422, "correction", "context_length_exceeded"), "{answer}");
    }
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().unwrap().samples, before.samples.max(1));
    // Many short ones do not occupy the workers, and each is recorded.
    let piece =
        |n: usize| json!({"completion_id": id, "correction": format!("{n}{}", "x".repeat(99))});
    let list: Vec<Value> = (0..200).map(piece).collect();
    let answer = ok(server.post("/v1/feedback", &json!(list)).await);
    let answers = answer["data"].as_array().unwrap();
    assert!(answers.iter().all(|one| one["status"] == "recorded"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_turns_that_one_request_judges_are_limited() {
    let server = Server::new().await;
    for seed in 0..10 {
        let more = json!({"metadata": {"session_id": "s"}, "seed": seed});
        assert_eq!(server.chat(&ask(more)).await.0, 200);
    }
    // A turn with such a comment counts nine times.
    let piece = |n: usize| {
        json!({"session_id": "s", "name": "thumbs", "value": 1, "comment": "c".repeat(4096),
               "end_user": format!("user {n}")})
    };
    let list: Vec<Value> = (0..115).map(piece).collect();
    let answer = ok(server.post("/v1/feedback", &json!(list)).await);
    let answers = answer["data"].as_array().unwrap();
    let recorded = answers.iter().filter(|one| one["turns"] == 10).count();
    let refused = answers.iter().filter(|one| {
        let message = one["error"]["message"].as_str().unwrap_or_default();
        one["status_code"] == 400 && message.contains("more than 10000 turns")
    });
    assert_eq!((recorded, refused.count()), (111, 4));
    // The next request has its own limit.
    assert_eq!(server.post("/v1/feedback", &piece(200)).await.0, 200);
}
