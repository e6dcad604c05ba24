use super::*;
use crate::body::testing::assert_agreement;

fn body(more: &Value) -> Map<String, Value> {
    let mut body = json!({"model": "default", "max_tokens": 9,
                          "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.as_object().unwrap().clone()
}

#[test]
fn fields_are_translated() {
    let request = from_wire(
        &body(&json!({
            "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stream": true, "store": false,
            "stop_sequences": ["a", "b"], "service_tier": "auto", "cache_control": {"type": "ephemeral"},
            "metadata": {"user_id": "ann", "session_id": "s"},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "null"}}},
        })),
        100,
    );
    let conversation = request.unwrap();
    let (params, stream) = (&conversation.params, conversation.stream);
    assert_eq!((params.temperature, params.top_p, params.top_k), (0.5, 0.9, 5));
    assert_eq!((params.seed, params.max_tokens, stream), (7, 9, true));
    assert_eq!(conversation.stop, ["a", "b"]);
    assert_eq!(conversation.user.as_deref(), Some("ann"));
    let metadata = [("session_id".to_owned(), "s".to_owned())].into();
    assert_eq!((conversation.metadata, conversation.store), (metadata, Some(false)));
    let grammar = conversation.grammar.unwrap();
    assert_eq!(grammar.spec, GrammarSpec::JsonSchema("{\"type\":\"null\"}".to_owned()));
    assert_eq!(grammar.field, "output_config.format.schema");
}

#[test]
fn wrong_fields_are_refused_by_name() {
    let schema = json!({"type": "json_schema", "schema": {}});
    let tool = json!({"name": "a", "input_schema": {}});
    for (more, expected) in [
        (json!({"model": null}), "model is missing"),
        (json!({"max_tokens": null}), "max_tokens is missing"),
        (json!({"max_tokens": 0}), "max_tokens is 0"),
        (json!({"temperature": 1.5}), "temperature is 1.5: it must be a number from 0 to 1"),
        (json!({"top_k": -1}), "top_k is -1"),
        (json!({"stop_sequences": ["a", ""]}), "stop_sequences is a list"),
        (json!({"stop_sequences": "a"}), "stop_sequences is \\\"a\\\""),
        (json!({"stop": "a"}), "stop is not a known field"),
        (json!({"container": "x"}), "container is not a known field"),
        (json!({"metadata": {"user_id": 5}}), "metadata.user_id is 5"),
        (json!({"metadata": {"answer": 5}}), "metadata.answer is 5"),
        (json!({"output_config": {"format": {"type": "text"}}}), "output_config.format.type"),
        (json!({"output_config": {"form": 5}}), "output_config.form is not a known field"),
        (
            json!({"output_config": {"format": schema}, "tools": [tool],
                   "tool_choice": {"type": "any"}}),
            "tool_choice is an object",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "Hi"}]}),
            "the last of messages is of the assistant",
        ),
    ] {
        let error = from_wire(&body(&more), 100).unwrap_err().to_json();
        assert!(error.contains(expected), "{more}: {error}");
    }
    let error = read_prompt(&body(&json!({}))).unwrap_err().to_json();
    assert!(error.contains("max_tokens is not a field: the fields are model"), "{error}");
}

#[test]
fn the_reader_accepts_what_the_schema_does() {
    let tool = json!({"name": "a", "input_schema": {}});
    let base = Value::Object(body(&json!({"tools": [tool]})));
    assert_agreement(FIELDS, &base, &[], |body| from_wire(body, 1000).map(drop));
    let mut base = base;
    base.as_object_mut().unwrap().remove("max_tokens");
    assert_agreement(COUNT_FIELDS, &base, &[], |body| read_prompt(body).map(drop));
}

fn of(body: &Value) -> Result<ChatOptions, ApiError> {
    options(&Fields::of(body.as_object().unwrap(), FIELDS)?)
}

fn add() -> Value {
    json!({"name": "add", "description": "Adds.", "input_schema": {"type": "object"}})
}

#[test]
fn choices_and_switches_are_translated() {
    let options = of(&json!({})).unwrap();
    assert!(options.is_default());
    for (choice, expected, parallel) in [
        (json!({"type": "auto"}), ToolChoice::Auto, true),
        (json!({"type": "none"}), ToolChoice::None, true),
        (json!({"type": "any", "disable_parallel_tool_use": true}), ToolChoice::Required, false),
        (json!({"type": "tool", "name": "add"}), ToolChoice::Function("add".to_owned()), true),
    ] {
        let options = of(&json!({"tools": [add()], "tool_choice": choice})).unwrap();
        assert_eq!((options.tool_choice, options.parallel_tool_calls), (expected, parallel));
        assert_eq!(options.tools[0].parameters, Some(json!({"type": "object"})));
    }
    for (kind, enabled) in [("enabled", true), ("adaptive", true), ("disabled", false)] {
        let body = json!({"thinking": {"type": kind, "budget_tokens": 2048},
                          "output_config": {"effort": "low"}});
        let expected = json!({"enable_thinking": enabled, "reasoning_effort": "low"});
        assert_eq!(Value::Object(of(&body).unwrap().template_variables), expected);
    }
}

#[test]
fn wrong_tools_and_choices_are_refused_with_their_place() {
    let tool = |more: Value| {
        let mut tool = add();
        tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"tools": [tool]})
    };
    let choice = |choice: Value| json!({"tools": [add()], "tool_choice": choice});
    for (body, expected) in [
        (json!({"tools": [5]}), "tools[0] is 5"),
        (
            tool(json!({"type": "web_search_20250305"})),
            "tools[0].type is \\\"web_search_20250305\\\": only \\\"custom\\\"",
        ),
        (tool(json!({"name": "a b"})), "tools[0].name is \\\"a b\\\""),
        (tool(json!({"input_schema": null})), "tools[0].input_schema is missing"),
        (tool(json!({"parameters": {}})), "tools[0].parameters is not a known field"),
        (tool(json!({"defer_loading": true})), "tools[0].defer_loading is true"),
        (tool(json!({"allowed_callers": ["code"]})), "tools[0].allowed_callers is a list"),
        (json!({"tools": [add(), add()]}), "tools[1].name is \\\"add\\\""),
        (choice(json!("auto")), "tool_choice is \\\"auto\\\": it must be an object"),
        (choice(json!({})), "tool_choice.type is missing"),
        (choice(json!({"type": "required"})), "tool_choice.type is \\\"required\\\""),
        (choice(json!({"type": "tool"})), "tool_choice.name is missing"),
        (choice(json!({"type": "tool", "name": "b"})), "tool_choice.name is \\\"b\\\""),
        (choice(json!({"type": "any", "name": "add"})), "tool_choice.name is \\\"add\\\""),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice.type is \\\"any\\\""),
        (json!({"thinking": {}}), "thinking.type is missing"),
        (json!({"thinking": {"type": "on"}}), "thinking.type is \\\"on\\\""),
        (
            json!({"thinking": {"type": "enabled", "display": "omitted"}}),
            "thinking.display is \\\"omitted\\\"",
        ),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 0}}),
            "thinking.budget_tokens is 0",
        ),
        (json!({"output_config": {"effort": "most"}}), "output_config.effort"),
    ] {
        let error = of(&body).unwrap_err().to_json();
        assert!(error.contains(expected), "{body}: {error}");
    }
}

fn said(body: Value) -> Result<Vec<Message>, ApiError> {
    turns(&Fields::new(body.as_object().unwrap()))
}

#[test]
fn blocks_become_messages_in_their_order() {
    let text = |text: &str| json!({"type": "text", "text": text});
    let messages = said(json!({
        "system": [text("Be "), text("brief.")],
        "messages": [
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me see.", "citations": null},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"b": 3, "a": 2},
                 "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "call_2", "name": "now", "input": {"INVALID_JSON": "{"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "5"},
                {"type": "tool_result", "tool_use_id": "call_2", "is_error": true,
                 "content": [text("no"), text(" clock")]},
                {"type": "text", "text": "So", "cache_control": {"type": "ephemeral"}},
                text("?"),
            ]},
            {"role": "assistant", "content": []},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_3"}]},
            {"role": "system", "content": "Hurry."},
        ],
    }));
    let shown = serde_json::to_value(messages.unwrap()).unwrap();
    let call = |id: &str, name: &str, arguments: &str| {
        json!({"id": id, "type": "function",
               "function": {"name": name, "arguments": arguments}})
    };
    let result =
        |id: &str, content: &str| json!({"role": "tool", "content": content, "tool_call_id": id});
    let expected = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.",
         "tool_calls": [call("call_1", "add", "{\"b\":3,\"a\":2}"), call("call_2", "now", "{")]},
        result("call_1", "5"),
        result("call_2", "Error: no clock"),
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": ""},
        result("call_3", ""),
        {"role": "system", "content": "Hurry."},
    ]);
    assert_eq!(shown, expected);
    let plain = said(json!({"system": "", "messages": [{"role": "user", "content": "Hi"}]}));
    assert_eq!(plain.unwrap(), [Message::new(Role::User, "Hi")]);
}

#[test]
fn wrong_turns_are_refused_with_their_place() {
    let messages = |messages: Value| json!({"messages": messages});
    let turn = |role: &str, content: Value| messages(json!([{"role": role, "content": content}]));
    let block = |role: &str, block: Value| turn(role, json!([block]));
    for (body, expected) in [
        (json!({}), "messages is missing"),
        (messages(json!([])), "messages is a list"),
        (messages(json!([5])), "messages[0] is 5: it must be an object"),
        (messages(json!([{"content": "a"}])), "messages[0].role is missing"),
        (messages(json!([{"role": "user"}])), "messages[0].content is missing"),
        (turn("tool", json!("a")), "messages[0].role is \\\"tool\\\""),
        (turn("user", json!(5)), "messages[0].content is 5"),
        (turn("user", json!([])), "messages[0].content is a list"),
        (
            messages(json!([{"role": "user", "content": "a", "name": "ann"}])),
            "messages[0].name is not a known field",
        ),
        (block("user", json!("a")), "messages[0].content[0] is \\\"a\\\""),
        (block("user", json!({})), "messages[0].content[0].type is missing"),
        (
            block("user", json!({"type": "image"})),
            "messages[0].content[0].type is \\\"image\\\": only \\\"text\\\" or \\\"tool_result\\\"",
        ),
        (block("user", json!({"type": "document"})), "messages[0].content[0].type"),
        (
            block("assistant", json!({"type": "redacted_thinking", "data": "x"})),
            "messages[0].content[0].type",
        ),
        (block("user", json!({"type": "text"})), "messages[0].content[0].text is missing"),
        (
            block("user", json!({"type": "text", "text": "a", "citations": [5]})),
            "messages[0].content[0].citations is not supported",
        ),
        (
            block("user", json!({"type": "tool_result", "content": "a"})),
            "messages[0].content[0].tool_use_id is missing",
        ),
        (
            block(
                "user",
                json!({"type": "tool_result", "tool_use_id": "a",
                                 "content": [{"type": "image"}]}),
            ),
            "messages[0].content[0].content[0].type is \\\"image\\\": only \\\"text\\\" is",
        ),
        (
            block("assistant", json!({"type": "tool_use", "id": "a", "name": "b"})),
            "messages[0].content[0].input is missing",
        ),
        (
            block(
                "assistant",
                json!({"type": "tool_use", "id": "a", "name": "b", "input": {},
                                      "caller": {"type": "code_execution_20250825"}}),
            ),
            "messages[0].content[0].caller is an object",
        ),
        (json!({"system": 5, "messages": []}), "system is 5"),
        (json!({"system": [{"type": "image"}], "messages": []}), "system[0].type"),
    ] {
        let error = said(body.clone()).unwrap_err().to_json();
        assert!(error.contains(expected), "{body}: {error}");
    }
}
