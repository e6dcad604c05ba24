//! Functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use insta::assert_snapshot;
use serde_json::{Value, json};

use hone_core::types::{Role, ToolCall};
use hone_engine::Engine;

use super::streams::{events, types};
use super::{PATH, body, messages_of, respond, text_of};
use crate::server::Server;

const CALLS: &str = "Let me see.\n\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

fn tools() -> Value {
    json!([
        {"type": "function", "name": "add", "description": "Adds.", "strict": false,
         "parameters": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0,
                                                                  "maximum": 9}},
                        "required": ["a"], "additionalProperties": false}},
        {"type": "function", "name": "now"},
    ])
}

/// A server that answers its requests with these texts, the last one for all further ones.
async fn answering(texts: &'static [&'static str]) -> Server {
    let asked = AtomicUsize::new(0);
    Server::with(|setup| {
        setup.fake.context = 8192;
        setup.fake.script = Arc::new(move |_, _| {
            let at = asked.fetch_add(1, Ordering::SeqCst);
            texts[at.min(texts.len() - 1)].to_owned()
        });
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_items_and_their_results_are_input() {
    let server = answering(&[CALLS, "It is 5.", "It is 5."]).await;
    let first = respond(&server, json!({"tools": tools()})).await;
    let output = first["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["message", "function_call", "function_call"]);
    assert_eq!(text_of(&first), "Let me see.");
    assert_eq!(
        (&output[1]["name"], &output[1]["arguments"]),
        (&json!("add"), &json!("{\"a\": 2}"))
    );
    assert_ne!(output[1]["call_id"], output[2]["call_id"]);
    assert_eq!(first["tools"][0], tools()[0]);
    assert_eq!(first["tools"][1]["parameters"], json!(null));

    let result = |at: usize, text: &str| json!({"type": "function_call_output", "call_id": output[at]["call_id"], "output": text});
    let results = [result(1, "5"), result(2, "12:00")];
    let chained = json!({"tools": tools(), "previous_response_id": first["id"], "input": results});
    let second = respond(&server, chained).await;
    assert_eq!(text_of(&second), "It is 5.");
    let mut turns = vec![json!({"role": "user", "content": "What is 2 + 3?"})];
    turns.extend(output.clone());
    turns.extend(results);
    let replayed = respond(&server, json!({"tools": tools(), "input": turns})).await;
    // References to the items, as Vercel's SDK sends them.
    let references = output.iter().map(|item| json!({"type": "item_reference", "id": item["id"]}));
    let mut turns = vec![json!({"role": "user", "content": "What is 2 + 3?"})];
    turns.extend(references);
    turns.extend([result(1, "5"), result(2, "12:00")]);
    let referred = respond(&server, json!({"tools": tools(), "input": turns})).await;

    let messages = messages_of(&server, &second).await;
    assert_eq!(messages.len(), 4);
    let call = |at: usize, name: &str, arguments: &str| ToolCall {
        id: output[at]["call_id"].as_str().unwrap().to_owned(),
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    };
    assert_eq!(messages[1].content, "Let me see.");
    assert_eq!(messages[1].tool_calls, [call(1, "add", "{\"a\": 2}"), call(2, "now", "{}")]);
    assert_eq!((messages[2].role, messages[2].content.as_str()), (Role::Tool, "5"));
    for other in [replayed, referred] {
        assert_eq!(messages_of(&server, &other).await, messages);
    }
    // The conversations have one prompt.
    let prompts = server.engine.requests();
    assert_eq!(prompts[1].prompt_ids, prompts[2].prompt_ids);
    assert_eq!(prompts[1].prompt_ids, prompts[3].prompt_ids);
    let text = server.engine.codec().decode(&prompts[1].prompt_ids).unwrap();
    assert!(text.contains("12:00"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_streamed() {
    let server = answering(&[CALLS]).await;
    let events = events(&server, json!({"tools": tools()})).await;
    let call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ];
    let text = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ];
    let expected = [&["created", "in_progress"][..], &text, &call, &call, &["completed"]].concat();
    assert_eq!(types(&events), expected);
    let last = &events.last().unwrap()["response"];
    for index in [1, 2] {
        let own: Vec<&Value> =
            events.iter().filter(|event| event["output_index"] == index).collect();
        let item = &last["output"][index];
        assert_eq!(own.last().unwrap()["item"], *item);
        assert_eq!(own[0]["item"]["arguments"], "");
        assert_eq!(own[0]["item"]["call_id"], item["call_id"]);
        let deltas = own.iter().filter_map(|event| event["delta"].as_str());
        assert_eq!(json!(deltas.collect::<String>()), item["arguments"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_can_be_forced() {
    let server = answering(&[CALLS]).await;
    let choices = [
        (json!("required"), json!("required")),
        (json!({"type": "function", "name": "now"}), json!({"type": "function", "name": "now"})),
        (
            json!({"type": "allowed_tools", "mode": "required",
                   "tools": [{"type": "function", "name": "now"}]}),
            json!("required"),
        ),
    ];
    for (choice, shown) in choices {
        let more = json!({"tools": tools(), "tool_choice": choice, "max_output_tokens": 300});
        let answer = respond(&server, more).await;
        let items = answer["output"].as_array().unwrap();
        assert!(items.iter().all(|item| item["type"] == "function_call"), "{answer}");
        assert_eq!(
            (&answer["tool_choice"], &answer["text"]["format"]["type"]),
            (&shown, &json!("text"))
        );
    }
    let none = json!({"tools": tools(), "tool_choice": "none"});
    assert_eq!(text_of(&respond(&server, none).await), CALLS);
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_tools_are_refused() {
    let server = answering(&[CALLS]).await;
    let strict = json!([{"type": "function", "name": "f", "strict": true,
                         "parameters": {"type": "object", "not": {}}}]);
    let cases = [
        json!({"tools": [{"type": "web_search"}]}),
        json!({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}),
        json!({"tools": [{"type": "function", "function": {"name": "add"}}]}),
        json!({"tools": [{"type": "function"}]}),
        json!({"tools": [{"type": "function", "name": "a"}, {"type": "function", "name": "a"}]}),
        json!({"tools": tools(), "tool_choice": {"type": "function", "name": "x"}}),
        json!({"tools": tools(), "tool_choice": {"type": "web_search"}}),
        json!({"tools": strict, "tool_choice": "required"}),
        json!({"tool_choice": "required"}),
        json!({"tools": tools(), "tool_choice": "required",
               "text": {"format": {"type": "json_object"}}}),
    ];
    assert_snapshot!(server.refusals(PATH, cases.map(body)).await, @r#"
    tools[0].type is "web_search": only "function" is supported | tools[0].type | unsupported_parameter
    tools[0].type is "file_search": only "function" is supported | tools[0].type | unsupported_parameter
    tools[0].function is not a known field | tools[0].function | unsupported_parameter
    tools[0].name is missing: it must be 1 to 64 letters (a to z, A to Z), digits, underscores and hyphens | tools[0].name | invalid_value
    tools[1].name is "a": each function must have its own | tools[1].name | invalid_value
    tool_choice.name is "x": it must be the name of a function in tools | tool_choice.name | invalid_value
    tool_choice.type is "web_search": it must be "function" or "allowed_tools" | tool_choice.type | invalid_value
    tools: parameters of "f": #/not: not is not supported | tools | invalid_value
    tool_choice is "required": it must be absent, "none" or "auto" without tools | tool_choice | invalid_value
    tool_choice is "required": it must be "none" or "auto" beside text.format | tool_choice | invalid_value
    "#);
}
