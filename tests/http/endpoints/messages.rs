//! Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::sync::Arc;

use regex::Regex;
use reqwest::Response;
use serde_json::{Value, json};

use hone::config::KeyScope;
use hone_core::types::{InteractionId, Role, rater_id};
use hone_engine::{Engine, EngineError};

use crate::server::{CALLS, Server, key, merged, named_events, ok, read};

const PATH: &str = "/v1/messages";

/// A request with the fields `more`.
fn body(more: Value) -> Value {
    merged(
        json!({
            "model": "default",
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "What is 2 + 3?"}],
            "seed": 5,
        }),
        more,
    )
}

async fn message(server: &Server, more: Value) -> Value {
    ok(server.post(PATH, &body(more)).await)
}

async fn events(response: Response) -> Vec<Value> {
    assert_eq!(response.status(), 200);
    named_events(&response.text().await.unwrap())
}

/// The message that a client assembles from the events of a stream.
pub fn assembled(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut input = String::new();
    for event in events {
        let at = event["index"].as_u64().unwrap_or(0) as usize;
        let append = |field: &mut Value, more: &Value| {
            *field = json!(field.as_str().unwrap().to_owned() + more.as_str().unwrap());
        };
        let delta = &event["delta"];
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                input.clear();
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(event["index"], content.len());
                content.push(event["content_block"].clone());
            }
            "content_block_delta" => match delta["type"].as_str().unwrap() {
                "text_delta" => append(&mut message["content"][at]["text"], &delta["text"]),
                "thinking_delta" => {
                    append(&mut message["content"][at]["thinking"], &delta["thinking"]);
                }
                "input_json_delta" => input.push_str(delta["partial_json"].as_str().unwrap()),
                other => panic!("{other}"),
            },
            "content_block_stop" if !input.is_empty() => {
                message["content"][at]["input"] = serde_json::from_str(&input).unwrap();
                input.clear();
            }
            "message_delta" => {
                for name in ["stop_reason", "stop_sequence"] {
                    message[name] = delta[name].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    message
}

/// Replaces random ids.
fn masked(value: &Value) -> Value {
    let id = Regex::new("\"(msg|call)_[0-9a-f]{32}\"").unwrap();
    serde_json::from_str(&id.replace_all(&value.to_string(), "\"$1\"")).unwrap()
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_has_anthropics_shape() {
    let server = Server::new().await;
    let response = server.send(PATH, &body(json!({}))).await;
    let headers = response.headers().clone();
    assert_eq!(headers["request-id"], headers["x-request-id"]);
    assert_eq!(headers["x-hone-policy-version"], "0");
    let answer: Value = response.json().await.unwrap();
    let prompt = server.engine.requests()[0].prompt_ids.len();
    assert_eq!(
        masked(&answer),
        json!({
            "id": "msg",
            "type": "message",
            "role": "assistant",
            "model": "default",
            "content": [{"type": "text", "text": "The answer is 5."}],
            "stop_reason": "end_turn",
            "stop_sequence": null,
            "usage": {"input_tokens": prompt, "cache_creation_input_tokens": 0,
                      "cache_read_input_tokens": 0, "output_tokens": 8},
        })
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_the_events_of_anthropic() {
    let server = Server::new().await;
    let response = server.send(PATH, &body(json!({"max_tokens": 2, "stream": true}))).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers()["x-hone-policy-version"], "0");
    assert_eq!(response.headers()["request-id"], response.headers()["x-request-id"]);
    let events = events(response).await;
    assert_eq!(
        names(&events),
        [
            "message_start",
            "content_block_start",
            "ping",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let start = &events[0]["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!(start["usage"]["output_tokens"], 0);
    assert_eq!(events[1]["content_block"], json!({"type": "text", "text": ""}));
    assert_eq!(events[3]["delta"], json!({"type": "text_delta", "text": "Th"}));
    assert_eq!(events[6]["delta"], json!({"stop_reason": "max_tokens", "stop_sequence": null}));
    assert_eq!(events[6]["usage"]["output_tokens"], 2);
    assert_eq!(events[6]["usage"]["input_tokens"], start["usage"]["input_tokens"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reason_of_the_end_is_named_with_its_sequence() {
    let server = Server::new().await;
    for (more, text, reason, sequence) in [
        (json!({}), "The answer is 5.", "end_turn", Value::Null),
        (json!({"stop_sequences": ["never"]}), "The answer is 5.", "end_turn", Value::Null),
        (json!({"max_tokens": 2}), "The", "max_tokens", Value::Null),
        (json!({"max_tokens": 2, "stop_sequences": ["5"]}), "The", "max_tokens", Value::Null),
        (json!({"stop_sequences": [" is"]}), "The answer", "stop_sequence", json!(" is")),
        (json!({"stop_sequences": ["x", "5"]}), "The answer is ", "stop_sequence", json!("5")),
        (json!({"stop_sequences": ["is", "r is"]}), "The answe", "stop_sequence", json!("r is")),
    ] {
        let whole = message(&server, more.clone()).await;
        assert_eq!(whole["content"], json!([{"type": "text", "text": text}]), "{more}");
        let stop = (&whole["stop_reason"], &whole["stop_sequence"]);
        assert_eq!(stop, (&json!(reason), &sequence), "{more}");
        let mut streamed = body(more.clone());
        streamed["stream"] = json!(true);
        let events = events(server.send(PATH, &streamed).await).await;
        assert_eq!(masked(&assembled(&events)), masked(&whole), "{more}");
    }
}

fn tools() -> Value {
    let number = json!({"type": "number"});
    json!([
        {"name": "add", "description": "Adds.", "cache_control": {"type": "ephemeral"},
         "input_schema": {"type": "object", "properties": {"b": number, "a": number}}},
        {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_content_blocks() {
    let server = Server::answering(CALLS, |_| {}).await;
    let whole = message(&server, json!({"tools": tools()})).await;
    let call = |name: &str, input: Value| json!({"type": "tool_use", "id": "call", "name": name, "input": input});
    let text = json!({"type": "text", "text": "Let me see."});
    let expected = json!([text, call("add", json!({"a": 2, "b": "é"})), call("now", json!({}))]);
    assert_eq!(masked(&whole)["content"], expected);
    assert_eq!(whole["stop_reason"], "tool_use");
    let streamed = body(json!({"tools": tools(), "stream": true}));
    let events = events(server.send(PATH, &streamed).await).await;
    assert_eq!(masked(&assembled(&events)), masked(&whole));
    assert!(events.iter().any(|event| event["delta"]["type"] == "input_json_delta"), "{events:?}");

    let choice = json!({"type": "auto", "disable_parallel_tool_use": true});
    let single = message(&server, json!({"tools": tools(), "tool_choice": choice})).await;
    assert_eq!(single["content"].as_array().unwrap().len(), 2, "{single}");
    let none = json!({"tools": tools(), "tool_choice": {"type": "none"}});
    let none = message(&server, none).await;
    assert_eq!(
        (&none["content"][0]["text"], &none["stop_reason"]),
        (&json!(CALLS), &json!("end_turn"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_with_calls_continues() {
    let server = Server::answering("Five.", |_| {}).await;
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I add.", "signature": ""},
            {"type": "tool_use", "id": "call_1", "name": "add", "input": {"b": 3, "a": 2}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "5"}]},
        ]},
    ]);
    let more = json!({"tools": tools(), "system": "Be brief.", "messages": messages});
    let answer = message(&server, more).await;
    assert_eq!(answer["content"], json!([{"type": "text", "text": "Five."}]));
    let prompt = &server.engine.requests()[0].prompt_ids;
    let prompt = server.engine.codec().decode(prompt).unwrap();
    let turns = "assistant\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 3, \"a\": 2}}\n\
                 </tool_call>\nuser\n<tool_response>\n5\n</tool_response>\nassistant\n";
    assert!(prompt.ends_with(turns) && prompt.contains("Be brief."), "{prompt}");
    let (interaction, _) = server.rollout.submitted().remove(0);
    let [system, _, assistant, result] = &interaction.messages[..] else { panic!("four messages") };
    assert_eq!((system.role, system.content.as_str()), (Role::System, "Be brief."));
    assert_eq!(assistant.reasoning.as_deref(), Some("I add."));
    assert_eq!((result.role, result.tool_call_id.as_deref()), (Role::Tool, Some("call_1")));
    assert_eq!(interaction.completion_id(), answer["id"].as_str().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_can_be_forced_into_a_form() {
    let server = Server::answering("free text", |_| {}).await;
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                        "additionalProperties": false});
    let tool = json!({"name": "add", "strict": true, "input_schema": schema});
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "add"})] {
        let more = json!({"tools": [tool], "tool_choice": choice});
        let answer = message(&server, more).await;
        let [call] = &answer["content"].as_array().unwrap()[..] else { panic!("{answer}") };
        assert_eq!(
            (&call["type"], &answer["stop_reason"]),
            (&json!("tool_use"), &json!("tool_use"))
        );
        assert!(jsonschema::is_valid(&schema, &call["input"]), "{answer}");
    }
    let format = json!({"format": {"type": "json_schema", "schema": schema}});
    let answer = message(&server, json!({"output_config": format})).await;
    let value: Value =
        serde_json::from_str(answer["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(jsonschema::is_valid(&schema, &value), "{answer}");

    let unsupported = json!({"type": "object", "properties": {"a": {"not": {}}}});
    let tool = json!({"name": "f", "strict": true, "input_schema": unsupported});
    let more = json!({"tools": [tool], "tool_choice": {"type": "any"}});
    let (status, answer) = server.post(PATH, &body(more)).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 400);
    assert!(
        message.starts_with("tools: input_schema of \"f\": ")
            && message.contains("#/properties/a/not")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn thinking_is_a_block_and_a_switch_of_the_template() {
    let template = "{% for m in messages %}{{ m.content }}\n{% endfor %}\
        {% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }}{% endif %}\
        {{ reasoning_effort }}:\n{% if false %}<think></think>{% endif %}";
    let text = "<think>\nTwo and\nthree.\n</think>\n\nFive.";
    let server =
        Server::with_template(template, |s| s.fake.script = Arc::new(|_, _| text.to_owned())).await;
    let whole = message(&server, json!({})).await;
    let expected = json!([
        {"type": "thinking", "thinking": "Two and\nthree.", "signature": ""},
        {"type": "text", "text": "Five."},
    ]);
    assert_eq!(whole["content"], expected);
    let thought = &whole["usage"]["output_tokens_details"]["thinking_tokens"];
    assert!(thought.as_u64().unwrap() < whole["usage"]["output_tokens"].as_u64().unwrap());
    let events = events(server.send(PATH, &body(json!({"stream": true}))).await).await;
    assert_eq!(masked(&assembled(&events)), masked(&whole));
    for (more, shown) in [
        (json!({"thinking": {"type": "disabled"}}), "off:"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 100}}), "on:"),
        (json!({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}), "onlow:"),
    ] {
        message(&server, more).await;
        let prompt = &server.engine.requests().pop().unwrap().prompt_ids;
        let prompt = server.engine.codec().decode(prompt).unwrap();
        assert_eq!(prompt, format!("What is 2 + 3?\n{shown}\n"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_counted_without_sampling() {
    let server = Server::answering("Five.", |_| {}).await;
    let mut count = body(json!({"system": "Be brief.", "tools": tools(),
                                "thinking": {"type": "disabled"}}));
    let (_, answer) = server.post(PATH, &count).await;
    for name in ["max_tokens", "seed"] {
        count.as_object_mut().unwrap().remove(name);
    }
    let recorded_before = server.stats().await.interactions;
    let (status, counted) = server.post("/v1/messages/count_tokens", &count).await;
    assert_eq!(
        (status, &counted),
        (200, &json!({"input_tokens": answer["usage"]["input_tokens"]}))
    );
    assert_eq!(
        (server.engine.requests().len(), server.stats().await.interactions),
        (1, recorded_before)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_rewarded_like_completions() {
    let server = Server::with(|s| s.server.keys = vec![key("app", &[KeyScope::Chat])]).await;
    let send = async |path: &str, body: &Value| {
        let request = server.client.post(server.url(path)).header("x-api-key", "app");
        read(request.header("anthropic-version", "2023-06-01").json(body).send().await.unwrap())
            .await
    };
    let metadata = json!({"user_id": "ann", "session_id": "s", "answer": "5"});
    let answer = ok(send(PATH, &body(json!({"metadata": metadata}))).await);
    let id = answer["id"].as_str().unwrap();
    let rating = json!({"completion_id": id, "name": "thumbs", "value": 1});
    let (status, rated) = send("/v1/feedback", &rating).await;
    assert_eq!((status, &rated["completion_id"]), (200, &json!(id)), "{rated}");
    let session = json!({"session_id": "s", "name": "thumbs", "value": 0});
    let (status, rated) = send("/v1/feedback", &session).await;
    assert_eq!((status, &rated["turns"]), (200, &json!(1)), "{rated}");
    let id = InteractionId::from_completion_id(id).unwrap();
    let interaction = server.store.interaction(id).unwrap().unwrap();
    assert_eq!(interaction.key_id, rater_id(interaction.api_key(), Some("ann")));
    assert_eq!(interaction.metadata.keys().collect::<Vec<_>>(), ["answer", "session_id"]);

    let (_, unstored) = send(PATH, &body(json!({"store": false}))).await;
    let rating = json!({"completion_id": unstored["id"], "name": "thumbs", "value": 1});
    let (status, refused) = send("/v1/feedback", &rating).await;
    assert_eq!((status, &refused["error"]["code"]), (404, &json!("completion_not_stored")));
    assert_eq!(server.stats().await.interactions, 1);
}

/// The type of an error, whose shape is checked.
fn kind(answer: &Value, id: &str) -> String {
    assert_eq!((&answer["type"], &answer["request_id"]), (&json!("error"), &json!(id)), "{answer}");
    let error = answer["error"].as_object().unwrap();
    assert!(error.len() == 2 && error["message"].is_string(), "{answer}");
    error["type"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_anthropics_shape() {
    let server = Server::with(|s| {
        let limited = key("limited", &[KeyScope::Chat]);
        s.server.keys = vec![
            key("app", &[KeyScope::Chat]),
            key("judge", &[KeyScope::Feedback]),
            hone::config::KeyConfig { requests_per_minute: 1, ..limited },
        ];
        s.server.max_body_bytes = 4096;
    })
    .await;
    let long = "a".repeat(5000);
    for (path, key, more, status, expected) in [
        (PATH, "app", json!({"temperature": 2}), 400, "invalid_request_error"),
        (PATH, "app", json!({"messages": 5}), 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", "app", json!({}), 400, "invalid_request_error"),
        (PATH, "other", json!({}), 401, "authentication_error"),
        (PATH, "judge", json!({}), 403, "permission_error"),
        (PATH, "app", json!({"model": "gpt"}), 404, "not_found_error"),
        ("/v1/messages/batches", "app", json!({}), 404, "not_found_error"),
        (PATH, "app", json!({"system": long}), 413, "request_too_large"),
    ] {
        let request = server.client.post(server.url(path)).header("x-api-key", key);
        let request = request.header("x-request-id", "mine").json(&body(more));
        let response = request.send().await.unwrap();
        assert_eq!(response.headers()["request-id"], "mine", "{path}");
        let (found, answer) = read(response).await;
        assert_eq!((found, kind(&answer, "mine").as_str()), (status, expected), "{answer}");
    }
    let send = || {
        let request = server.client.post(server.url(PATH)).header("x-api-key", "app");
        request.header("x-request-id", "mine")
    };
    for (error, status, expected) in [
        (EngineError::Internal("secret detail".to_owned()), 500, "api_error"),
        (EngineError::ShuttingDown, 503, "overloaded_error"),
    ] {
        server.engine.fail_next_generation(error);
        let (found, answer) = read(send().json(&body(json!({}))).send().await.unwrap()).await;
        assert_eq!((found, kind(&answer, "mine").as_str()), (status, expected), "{answer}");
    }
    let plain = read(send().body("{}").send().await.unwrap()).await;
    assert_eq!((plain.0, kind(&plain.1, "mine").as_str()), (415, "invalid_request_error"));
    let get = server.client.get(server.url(PATH)).header("x-api-key", "app");
    let (status, answer) = read(get.header("x-request-id", "mine").send().await.unwrap()).await;
    assert_eq!((status, kind(&answer, "mine").as_str()), (405, "invalid_request_error"));

    let limited = || send().header("authorization", "Bearer limited").json(&body(json!({})));
    assert_eq!(limited().send().await.unwrap().status(), 200);
    let refused = limited().send().await.unwrap();
    assert!(refused.headers().contains_key("retry-after"));
    let (status, answer) = read(refused).await;
    assert_eq!((status, kind(&answer, "mine").as_str()), (429, "rate_limit_error"));
    let metric = "hone_http_limited_requests_total{reason=\"requests_per_minute\"}";
    assert_eq!(server.metric(metric).await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_after_the_first_byte_is_an_event() {
    let server = Server::new().await;
    server.engine.fail_next_generation(EngineError::Internal("secret detail".to_owned()));
    let request = server.client.post(server.url(PATH)).header("x-request-id", "mine");
    let response = request.json(&body(json!({"stream": true}))).send().await.unwrap();
    let events = events(response).await;
    assert_eq!(names(&events), ["message_start", "error"]);
    assert_eq!(kind(&events[1], "mine"), "api_error");
    assert!(!events[1].to_string().contains("secret detail"));
}
