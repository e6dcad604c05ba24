//! Tools and calls in the ledger.

use serde_json::{Value, json};

use hone_core::types::{ChatOptions, ClientEndpoint, ResponseOptions, Tool, ToolCall, ToolChoice};

use super::*;

/// Prompt `n` with tools, a call and its result, asked through the responses API.
pub(super) fn with_tools(n: u64) -> Interaction {
    let mut row = interaction(n);
    let call = ToolCall {
        id: "call_1".to_owned(),
        name: "add".to_owned(),
        arguments: "{\"b\": 2, \"a\": 1}".to_owned(),
    };
    row.messages.push(Message {
        reasoning: Some("Adding.".to_owned()),
        tool_calls: vec![call],
        ..Message::new(Role::Assistant, "")
    });
    row.messages.push(Message {
        name: Some("add".to_owned()),
        tool_call_id: Some("call_1".to_owned()),
        ..Message::new(Role::Tool, "3")
    });
    let add = Tool {
        name: "add".to_owned(),
        description: Some("Adds.".to_owned()),
        parameters: Some(parameters()),
        strict: true,
    };
    let now = Tool { name: "now".to_owned(), description: None, parameters: None, strict: false };
    let variables = json!({"enable_thinking": false, "level": "é"});
    row.chat = ChatOptions {
        tools: vec![add, now],
        tool_choice: ToolChoice::Function("add".to_owned()),
        parallel_tool_calls: false,
        template_variables: variables.as_object().unwrap().clone(),
    };
    row.endpoint = ClientEndpoint::Responses(ResponseOptions {
        instructions: true,
        previous: Some(interaction_id(2)),
        schema_name: Some("sum".to_owned()),
    });
    row
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"b": {}, "a": {"minimum": -1.5}}})
}

#[test]
fn a_ledger_holds_tools_and_calls() {
    let store = TestLedger::new();
    let row = with_tools(3);
    store.commit_blocking(vec![Op::Interaction(Box::new(row.clone()))]).unwrap();
    let found = store.interaction(row.id).unwrap().unwrap();
    assert_eq!(found, row);
    // The order of keys is part of the prompt.
    let stored = found.chat.tools[0].parameters.as_ref().unwrap().to_string();
    assert_eq!(stored, parameters().to_string());
}
