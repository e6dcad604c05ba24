//! Functions in chat completions.

use regex::Regex;
use serde_json::{Value, json};

use hone_core::types::{Role, ToolChoice};
use hone_engine::Engine;

use crate::server::{CALLS, Server, ask, id_of, merged, ok};

fn tools() -> Value {
    let number = json!({"type": "number"});
    json!([
        {"type": "function", "function": {
            "name": "add", "description": "Adds.", "strict": false,
            "parameters": {"type": "object", "properties": {"b": number, "a": number}}}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

fn with_tools(more: Value) -> Value {
    merged(ask(json!({"tools": tools()})), more)
}

/// The text of the last prompt, without special tokens.
fn prompt(server: &Server) -> String {
    let requests = server.engine.requests();
    server.engine.codec().decode(&requests.last().unwrap().prompt_ids).unwrap()
}

/// Replaces the random ids of calls.
fn masked(value: &Value) -> Value {
    let id = Regex::new("\"call_[0-9a-f]{32}\"").unwrap();
    serde_json::from_str(&id.replace_all(&value.to_string(), "\"ID\"")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_returned_and_recorded() {
    let server = Server::answering(CALLS, |_| {}).await;
    let answer = ok(server.chat(&with_tools(json!({}))).await);
    let choice = &answer["choices"][0];
    assert_eq!(
        masked(&choice["message"]),
        json!({
            "role": "assistant",
            "content": "Let me see.",
            "refusal": null,
            "tool_calls": [
                {"id": "ID", "type": "function",
                 "function": {"name": "add", "arguments": "{\"a\": 2, \"b\": \"é\"}"}},
                {"id": "ID", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        })
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert_eq!(choice["finish_reason"], "tool_calls");

    // The model sees the functions in the client's order of keys, and not `strict`.
    let prompt = prompt(&server);
    let shown = r#"{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}}}}"#;
    assert!(prompt.contains(shown), "{prompt}");
    assert!(prompt.contains(r#"{"type": "function", "function": {"name": "now"}}"#), "{prompt}");

    server.store.commit(Vec::new()).await.unwrap();
    let id = id_of(&answer);
    let interaction = server.store.interaction(id).unwrap().unwrap();
    let chat = &interaction.chat;
    assert_eq!((chat.tools.len(), &chat.tool_choice), (2, &ToolChoice::Auto));
    assert!(chat.parallel_tool_calls && !chat.tools[0].strict);
    let exported = serde_json::to_value(&interaction).unwrap();
    assert_eq!(exported["chat"]["tools"][0]["parameters"]["properties"]["b"]["type"], "number");
    // Graders and the ledger get the text as sampled.
    assert_eq!(server.store.samples_of(id).unwrap()[0].text, CALLS);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_depend_on_the_request() {
    let server = Server::answering(CALLS, |_| {}).await;
    let first = |answer: &Value| answer["choices"][0].clone();
    let (_, plain) = server.chat(&ask(json!({}))).await;
    let plain = first(&plain);
    assert_eq!(
        (&plain["message"]["content"], &plain["finish_reason"]),
        (&json!(CALLS), &json!("stop"))
    );
    assert!(plain["message"].get("tool_calls").is_none());
    assert!(!prompt(&server).contains("<tools>"));

    let (_, none) = server.chat(&with_tools(json!({"tool_choice": "none"}))).await;
    assert_eq!(first(&none), plain);
    assert!(!prompt(&server).contains("<tools>"));

    let (_, single) = server.chat(&with_tools(json!({"parallel_tool_calls": false}))).await;
    assert_eq!(first(&single)["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(first(&single)["finish_reason"], "tool_calls");

    // A function that is not allowed is not shown, and a call of it is text.
    let now = json!({"type": "function", "function": {"name": "now"}});
    let choice =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [now]}});
    let (_, allowed) = server.chat(&with_tools(json!({"tool_choice": choice}))).await;
    let message = first(&allowed)["message"].clone();
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(message["tool_calls"][0]["function"]["name"], "now");
    assert!(message["content"].as_str().unwrap().contains("\"name\": \"add\""));
    assert!(!prompt(&server).contains("Adds."));

    // The token limit cuts off a call, whose markup is no text, also where the answer has nothing else.
    for tokens in 6..60 {
        let (_, cut) = server.chat(&with_tools(json!({"max_tokens": tokens}))).await;
        assert_eq!(first(&cut)["finish_reason"], "length");
        let content = first(&cut)["message"]["content"].clone();
        let content = content.as_str().unwrap_or_default();
        assert!(!content.contains("<tool_call>") && !content.contains('{'), "{tokens}: {content}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transcript_with_calls_continues() {
    let server = Server::answering("Five.", |_| {}).await;
    let call = json!({"id": "call_1", "type": "function",
                      "function": {"name": "add", "arguments": "{\"b\":3,\"a\":2}"}});
    let body = with_tools(json!({"messages": [
        {"role": "user", "content": "What is 2 + 3?", "name": "ann"},
        {"role": "assistant", "content": null, "refusal": null, "annotations": [], "audio": null,
         "function_call": null, "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
    ]}));
    let answer = ok(server.chat(&body).await);
    assert_eq!(answer["choices"][0]["message"]["content"], "Five.");
    let prompt = prompt(&server);
    let turns = "assistant\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 3, \"a\": 2}}\n\
                 </tool_call>\nuser\n<tool_response>\n5\n</tool_response>\nassistant\n";
    assert!(prompt.ends_with(turns), "{prompt}");
    let (interaction, _) = server.rollout.submitted().remove(0);
    let [user, assistant, result] = &interaction.messages[..] else { panic!("three messages") };
    assert_eq!(user.name.as_deref(), Some("ann"));
    assert_eq!(assistant.tool_calls[0].arguments, "{\"b\":3,\"a\":2}");
    assert_eq!((assistant.content.as_str(), assistant.reasoning.as_deref()), ("", Some("I add.")));
    assert_eq!((result.role, result.tool_call_id.as_deref()), (Role::Tool, Some("call_1")));
    assert_eq!(result.content, "5");
}
