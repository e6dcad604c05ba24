//! OpenAI's Responses.

mod chains;
mod stored;
mod streams;
mod tools;

use insta::assert_snapshot;
use regex::Regex;
use serde_json::{Value, json};

use hone_core::types::{ClientEndpoint, Message, Role};

use crate::server::{Server, id_of, merged, ok};

const PATH: &str = "/v1/responses";

/// A request with the fields `more`.
fn body(more: Value) -> Value {
    merged(json!({"model": "default", "input": "What is 2 + 3?", "seed": 5}), more)
}

/// A response to a request with the fields `more`.
async fn respond(server: &Server, more: Value) -> Value {
    ok(server.post(PATH, &body(more)).await)
}

/// The text of all messages of the output.
fn text_of(answer: &Value) -> String {
    let items = answer["output"].as_array().unwrap().iter();
    let parts = items.filter_map(|item| item["content"].as_array()).flatten();
    let texts = parts.filter(|part| part["type"] == "output_text");
    texts.map(|part| part["text"].as_str().unwrap()).collect()
}

/// Replaces ids and times.
fn masked(text: &str) -> String {
    let ids = Regex::new("(resp|msg|rs|fco|fc|call)_[0-9a-f]{32,36}(i[0-9a-f]{4})?").unwrap();
    let times = Regex::new(r#""(created_at|completed_at)": ?\d+"#).unwrap();
    let text = ids.replace_all(text, "${1}_ID");
    times.replace_all(&text, r#""$1":0"#).into_owned()
}

/// The messages of the recorded request.
async fn messages_of(server: &Server, answer: &Value) -> Vec<Message> {
    // The response may still be queued for the ledger.
    server.store.commit(Vec::new()).await.unwrap();
    server.store.interaction(id_of(answer)).unwrap().unwrap().messages
}

/// The roles and texts of the recorded messages.
async fn recorded(server: &Server, answer: &Value) -> Vec<(Role, String)> {
    let messages = messages_of(server, answer).await;
    messages.into_iter().map(|message| (message.role, message.content)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_has_openais_shape() {
    let server = Server::new().await;
    let response = server.send(PATH, &body(json!({"metadata": {"answer": "5"}}))).await;
    assert_eq!(response.headers()["x-hone-policy-version"], "0");
    let answer: Value = response.json().await.unwrap();
    let prompt = server.engine.requests()[0].prompt_ids.len();
    let answer: Value = serde_json::from_str(&masked(&answer.to_string())).unwrap();
    let text = json!({"type": "output_text", "text": "The answer is 5.", "annotations": [],
                      "logprobs": []});
    let expected = json!({
        "id": "resp_ID", "object": "response", "created_at": 0, "completed_at": 0,
        "status": "completed", "error": null, "incomplete_details": null, "background": false,
        "instructions": null, "max_output_tokens": 256, "metadata": {"answer": "5"},
        "model": "default",
        "output": [{"type": "message", "id": "msg_ID", "role": "assistant", "status": "completed",
                    "content": [text]}],
        "parallel_tool_calls": true, "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null}, "store": true,
        "system_fingerprint": "hone-v0", "temperature": 1.0, "text": {"format": {"type": "text"}},
        "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + 8,
        },
    });
    assert_eq!(answer, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_recorded_and_learned_from() {
    let server = Server::new().await;
    let more = json!({
        "instructions": "Add.",
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "1 + "},
                                         {"type": "input_text", "text": "1?"}]},
            {"type": "message", "role": "assistant", "content": "2"},
            {"role": "user", "content": "And 2 + 3?"},
        ],
        "user": "ann", "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
        "text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled",
        "background": false, "max_tool_calls": null, "conversation": null,
    });
    let answer = respond(&server, more).await;
    assert_eq!(answer["instructions"], "Add.");
    assert_eq!(answer["reasoning"]["effort"], "low");
    let interaction = server.interaction(id_of(&answer)).await;
    assert!(
        matches!(&interaction.endpoint, ClientEndpoint::Responses(options) if options.instructions)
    );
    let expected = [
        (Role::System, "Add."),
        (Role::Developer, "Be brief."),
        (Role::User, "1 + 1?"),
        (Role::Assistant, "2"),
        (Role::User, "And 2 + 3?"),
    ];
    let messages = recorded(&server, &answer).await;
    assert!(messages.iter().map(|(role, text)| (*role, text.as_str())).eq(expected));
    assert_eq!(server.rollout.submitted()[0].1[0].text, "The answer is 5.");
    let feedback = json!({"completion_id": answer["id"], "name": "thumbs", "value": 1});
    let reply = ok(server.post("/v1/feedback", &feedback).await);
    assert_eq!((&reply["completion_id"], &reply["trained"]), (&answer["id"], &json!(true)));
    // It is no chat completion.
    let list = server.get("/v1/chat/completions").await.1;
    assert_eq!(list["data"], json!([]));
    let chat = id_of(&answer).completion_id();
    for id in [&chat, answer["id"].as_str().unwrap()] {
        assert_eq!(server.get(&format!("/v1/chat/completions/{id}")).await.0, 404);
    }
    assert_eq!(server.get(&format!("{PATH}/{chat}")).await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_token_limit_makes_a_response_incomplete() {
    let server = Server::new().await;
    let answer = respond(&server, json!({"max_output_tokens": 2})).await;
    assert_eq!((&answer["status"], &answer["completed_at"]), (&json!("incomplete"), &json!(null)));
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(answer["output"][0]["status"], "incomplete");
    assert_eq!(answer["max_output_tokens"], 2);
    assert_eq!(text_of(&answer), "The");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_text_has_log_probabilities_and_a_format() {
    let server = Server::new().await;
    let more = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let answer = respond(&server, more).await;
    let tokens = answer["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(joined, text_of(&answer));
    assert!(tokens.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
    assert!(tokens.iter().all(|token| token["logprob"].is_f64() && token["bytes"].is_array()));

    let schema = json!({"type": "object", "properties": {"sum": {"type": "integer", "minimum": 5,
                        "maximum": 5}}, "required": ["sum"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "sum", "schema": schema, "strict": true});
    let more = json!({"text": {"format": format}, "max_output_tokens": 200});
    let answer = respond(&server, more).await;
    assert_eq!(answer["text"]["format"], format);
    let value: Value = serde_json::from_str(&text_of(&answer)).unwrap();
    assert_eq!(value, json!({"sum": 5}));
    let kept = server.get(&format!("{PATH}/{}", answer["id"].as_str().unwrap())).await.1;
    assert_eq!(kept["text"]["format"], format);
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_an_item() {
    let template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ reasoning_effort }}:\n\
                    {# <think></think> #}{% if false %}<think></think>{% endif %}";
    let text = "<think>\nTwo and three.\n</think>\n\nFive.";
    let server = Server::with_template(template, |setup| {
        setup.fake.script = std::sync::Arc::new(move |_, _| text.to_owned());
    })
    .await;
    let answer = respond(&server, json!({"reasoning": {"effort": "high"}})).await;
    assert_snapshot!(masked(&answer["output"].to_string()), @r#"[{"type":"reasoning","id":"rs_ID","summary":[],"content":[{"type":"reasoning_text","text":"Two and three."}],"encrypted_content":null,"status":"completed"},{"type":"message","id":"msg_ID","role":"assistant","status":"completed","content":[{"type":"output_text","text":"Five.","annotations":[],"logprobs":[]}]}]"#);
    let reasoned = &answer["usage"]["output_tokens_details"]["reasoning_tokens"];
    assert!(reasoned.as_u64().unwrap() > 0);
    let kept = server.get(&format!("{PATH}/{}", answer["id"].as_str().unwrap())).await.1;
    assert_eq!((&kept["output"], &kept["usage"]), (&answer["output"], &answer["usage"]));
    // The client returns the items with their fields.
    let mut input = vec![json!({"role": "user", "content": "2 + 3?"})];
    input.extend(answer["output"].as_array().unwrap().clone());
    input.push(json!({"role": "user", "content": "Sure?"}));
    let next = respond(&server, json!({"input": input})).await;
    let messages = messages_of(&server, &next).await;
    assert_eq!(messages.len(), 3);
    assert_eq!(messages[1].reasoning.as_deref(), Some("Two and three."));
    assert_eq!(messages[1].content, "Five.");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_and_unsupported_fields_are_refused() {
    let server = Server::new().await;
    let part = |part: serde_json::Value| json!({"input": [{"role": "user", "content": [part]}]});
    let item = |item: serde_json::Value| json!({"input": [item]});
    let format = |format: serde_json::Value| json!({"text": {"format": format}});
    let cases = [
        json!({"model": null}),
        json!({"input": null}),
        json!({"input": 5}),
        part(json!({"type": "input_image", "image_url": "https://x/y"})),
        part(json!({"type": "input_text"})),
        item(json!({"role": "tool", "content": "5"})),
        item(json!({"role": "user"})),
        item(json!({"content": "5"})),
        item(json!({"type": "computer_call_output", "call_id": "c"})),
        item(json!({"type": "function_call", "call_id": "c", "name": "f"})),
        item(json!({"type": "function_call_output", "output": "5"})),
        item(json!({"type": "reasoning", "summary": [], "encrypted_content": "x"})),
        json!({"background": true}),
        json!({"truncation": "auto"}),
        json!({"max_tool_calls": 3}),
        json!({"context_management": [{"type": "compaction"}]}),
        json!({"max_tokens": 5}),
        json!({"max_output_tokens": 0}),
        json!({"include": ["x"]}),
        json!({"reasoning": {"effort": "huge"}}),
        json!({"reasoning": {"context": "all_turns"}}),
        json!({"stream_options": {"include_obfuscation": true}}),
        json!({"stream": true, "stream_options": {"include_usage": true}}),
        json!({"text": {"verbosity": "huge"}}),
        format(json!({"type": "grammar"})),
        format(json!({"type": "json_schema", "schema": {}})),
        format(json!({"type": "json_schema", "name": "n"})),
        format(json!({"type": "json_schema", "name": "n", "schema": {"uniqueItems": true}})),
        json!({"input": "a ".repeat(600)}),
    ];
    assert_snapshot!(server.refusals(PATH, cases.map(body)).await, @r#"
    model is missing: it must be a model's name | model | invalid_value
    input is missing: it must be a text or a list of at least one item | input | invalid_value
    input is 5: it must be a text or a list of at least one item | input | invalid_value
    input[0].content[0].type is "input_image", which is not supported: it must be one of "input_text", "output_text", "refusal" | input[0].content[0].type | unsupported_parameter
    input[0].content[0].text is missing: it must be a string | input[0].content[0].text | invalid_value
    input[0].role is "tool": it must be "user", "assistant", "system" or "developer" | input[0].role | invalid_value
    input[0].content is missing: it must be a string or a list of text parts | input[0].content | invalid_value
    input[0].role is missing: it must be "user", "assistant", "system" or "developer" | input[0].role | invalid_value
    input[0].type is "computer_call_output": only "message", "function_call", "function_call_output", "reasoning" and "item_reference" are supported | input[0].type | unsupported_parameter
    input[0].arguments is missing: it must be a string | input[0].arguments | invalid_value
    input[0].call_id is missing: it must be a string | input[0].call_id | invalid_value
    input[0].encrypted_content is not supported: send the content, or leave the item out | input[0].encrypted_content | unsupported_parameter
    background is true: only the default is supported | background | unsupported_parameter
    truncation is "auto": only the default is supported | truncation | unsupported_parameter
    max_tool_calls is not supported: leave it out | max_tool_calls | unsupported_parameter
    context_management is not supported: leave it out | context_management | unsupported_parameter
    max_tokens is not a known field | max_tokens | unsupported_parameter
    max_output_tokens is 0: it must be a whole number from 1 to 4294967295 | max_output_tokens | invalid_value
    include[0] is "x": it must be one of "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results", "message.output_text.logprobs" | include[0] | invalid_value
    reasoning.effort is "huge": it must be one of "none", "minimal", "low", "medium", "high", "xhigh", "max" | reasoning.effort | invalid_value
    reasoning.context is not a known field | reasoning.context | unsupported_parameter
    stream_options is an object: it must be absent unless stream is true | stream_options | invalid_value
    stream_options.include_usage is not a known field | stream_options.include_usage | unsupported_parameter
    text.verbosity is "huge": it must be "low", "medium" or "high" | text.verbosity | invalid_value
    text.format.type is "grammar": it must be "text", "json_object" or "json_schema" | text.format.type | invalid_value
    text.format.name is missing: it must be a string | text.format.name | invalid_value
    text.format.schema is missing: it must be a JSON schema | text.format.schema | invalid_value
    text.format.schema: #/uniqueItems: uniqueItems is not supported | text.format.schema | invalid_value
    prompt is too long: this model's maximum context length is 512 tokens, and the prompt has 1216 | input | context_length_exceeded
    "#);
    let (status, answer) = server.post(PATH, &body(json!({"model": "x"}))).await;
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(server.store.stats().unwrap().interactions, 0);
    let limited = Server::with(|setup| setup.server.max_tokens = 300).await;
    let (_, answer) = limited.post(PATH, &body(json!({"max_output_tokens": 301}))).await;
    assert_eq!(answer["error"]["param"], "max_output_tokens");
}
