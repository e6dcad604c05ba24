//! A file of schema 3, whose interactions have the second stored form: without tools.

use serde_json::json;

use hone_core::types::{ChatOptions, PolicyCheck, Tool, ToolCall, ToolChoice};

use super::golden::{copy_fixture, write_fixture};
use super::*;

const FILE: &str = "ledger-v3.redb";

/// The operations that made the file.
fn contents() -> Vec<Op> {
    let mut exam = interaction(2);
    exam.stop = vec!["STOP".to_owned(), "é".to_owned()];
    exam.held_out = true;
    let mut truncated = served(10, 1);
    truncated.kept = vec![0.5, 1.0, 0.25];
    let mut checked = policy(1, PolicyState::RolledBack);
    checked.pinned = true;
    checked.checks = vec![PolicyCheck {
        name: "parity/serving".to_owned(),
        passed: true,
        value: Some(1e-6),
        bound: Some(1e-3),
        detail: "2 prompts".to_owned(),
    }];
    let thumb = FeedbackEntry {
        idempotency_key: Some("first".to_owned()),
        key_id: Some("key-1".to_owned()),
        ..thumbs(1, 0.5, 7000)
    };
    vec![
        Op::Interaction(Box::new(interaction(1))),
        Op::Interaction(Box::new(exam)),
        Op::Sample(Box::new(truncated)),
        Op::Sample(Box::new(shadow(11, 1))),
        feedback(thumb),
        Op::Group(Box::new(group(1, 1, &[10, 11], &["exact"]))),
        Op::Policy(Box::new(policy(0, PolicyState::Active))),
        Op::Policy(Box::new(checked)),
    ]
}

/// How the fixture was made, by the last commit with schema 3. It must not be written again.
#[test]
#[ignore = "writes tests/fixtures/ledger-v3.redb"]
fn write_the_fixture() {
    write_fixture(FILE, &contents());
}

#[test]
fn every_record_of_schema_3_is_read() {
    let (_dir, path) = copy_fixture(FILE);
    let store = open(&path);
    for op in contents() {
        match op {
            Op::Interaction(row) => assert_eq!(store.interaction(row.id).unwrap(), Some(*row)),
            Op::Sample(row) => assert_eq!(store.sample(row.id).unwrap(), Some(*row)),
            Op::Policy(row) => assert_eq!(store.policy(row.version).unwrap(), Some(*row)),
            _ => {}
        }
    }
    assert_eq!(store.stats().unwrap().interactions, 2);
}

#[test]
fn a_migrated_file_holds_tools_and_calls() {
    let (_dir, path) = copy_fixture(FILE);
    let store = open(&path);
    let mut row = interaction(3);
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
    let parameters = json!({"type": "object", "properties": {"b": {}, "a": {"minimum": -1.5}}});
    let add = Tool {
        name: "add".to_owned(),
        description: Some("Adds.".to_owned()),
        parameters: Some(parameters.clone()),
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
    store.commit_blocking(vec![Op::Interaction(Box::new(row.clone()))]).unwrap();
    let found = store.interaction(row.id).unwrap().unwrap();
    assert_eq!(found, row);
    // The order of keys is part of the prompt.
    let stored = found.chat.tools[0].parameters.as_ref().unwrap().to_string();
    assert_eq!(stored, parameters.to_string());
}
