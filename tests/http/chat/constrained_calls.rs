//! Answers whose calls follow a grammar: forced ones, and those of strict functions.

use std::sync::Arc;

use serde_json::{Value, json};

use hone_core::types::{GrammarSpec, Interaction, Sample, TokenSpan};
use hone_engine::ToolFormat;
use hone_engine::grammar::CallGrammar;

use crate::server::{Server, ask, id_of, merged, ok};

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}\n{% endfor %}\
    {% if open is defined %}<think>\n{% endif %}{% if false %}</think>{% endif %}";

/// A function of a digit and a truth value.
fn tool(name: &str, strict: bool) -> Value {
    function(name, strict, parameters())
}

fn function(name: &str, strict: bool, parameters: Value) -> Value {
    let function = json!({"name": name, "strict": strict, "parameters": parameters});
    json!({"type": "function", "function": function})
}

fn parameters() -> Value {
    json!({"$defs": {"digit": {"enum": [1, 2, 3]}}, "type": ["object", "null"],
        "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"type": "boolean"}},
        "required": ["a", "b"], "additionalProperties": false})
}

/// The first choice of the answer.
async fn choice(server: &Server, more: Value) -> Value {
    let answer = ok(server.chat(&ask(more)).await);
    let mut choice = answer["choices"][0].clone();
    choice["id"] = answer["id"].clone();
    choice
}

fn calls(choice: &Value) -> Vec<(String, Value)> {
    let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let call = |call: &Value| {
        let function = &call["function"];
        let arguments = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        (function["name"].as_str().unwrap().to_owned(), arguments)
    };
    calls.iter().map(call).collect()
}

async fn recorded(server: &Server, choice: &Value) -> (Interaction, Sample) {
    server.store.commit(Vec::new()).await.unwrap();
    let id = id_of(choice);
    let interaction = server.store.interaction(id).unwrap().unwrap();
    (interaction, server.store.samples_of(id).unwrap().remove(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_call_has_the_arguments_that_its_schema_describes() {
    let formats = [ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::Mistral, ToolFormat::Phi];
    let tools = json!([tool("add", true), tool("sub", true)]);
    for format in formats {
        let server =
            Server::answering("free text", |setup| setup.server.tool_format = format).await;
        let named = json!({"type": "function", "function": {"name": "sub"}});
        for (seed, forced) in
            (0..8).flat_map(|seed| [(seed, json!("required")), (seed, named.clone())])
        {
            let is_named = forced != "required";
            let fields =
                json!({"tools": tools, "tool_choice": forced, "seed": seed, "max_tokens": 400});
            let choice = choice(&server, fields).await;
            assert_eq!(choice["finish_reason"], "tool_calls", "{format:?}: {choice}");
            assert_eq!(choice["message"]["content"], Value::Null);
            for (name, arguments) in calls(&choice) {
                assert!(name == "sub" || (!is_named && name == "add"));
                assert!(arguments.is_object(), "null is permitted by the schema alone");
                assert!(jsonschema::is_valid(&parameters(), &arguments), "{arguments}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_calls_may_be_forced() {
    let call = |name: &str, key: &str| {
        format!("{{\"name\": \"{name}\", \"{key}\": {{\"a\": 1, \"b\": true}}}}")
    };
    let (add, sub) = (call("add", "arguments"), call("sub", "arguments"));
    let llama = [call("add", "parameters"), call("sub", "parameters")].join("; ");
    let hermes = format!("<tool_call>\n{add}\n</tool_call>\n<tool_call>\n{sub}\n</tool_call>");
    let formats = [
        (ToolFormat::Hermes, hermes),
        (ToolFormat::Llama3, llama),
        (ToolFormat::Mistral, format!("[TOOL_CALLS][{add}, {sub}]")),
        (ToolFormat::Phi, format!("<|tool_call|>[{add}, {sub}]<|/tool_call|>")),
    ];
    for (format, text) in formats {
        let server = Server::answering(&text, |setup| setup.server.tool_format = format).await;
        let names = async |more: Value| {
            let tools = json!({"tools": [tool("add", false), tool("sub", false)]});
            let choice = choice(&server, merged(tools, more)).await;
            assert_eq!(choice["finish_reason"], "tool_calls", "{format:?}: {choice}");
            calls(&choice).into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        let forced = json!({"tool_choice": "required", "max_tokens": 400});
        assert_eq!(names(forced.clone()).await, ["add", "sub"], "{format:?}");
        let single = merged(forced, json!({"parallel_tool_calls": false}));
        assert_eq!(names(single).await, ["add"]);
        let named = json!({"type": "function", "function": {"name": "add"}});
        assert_eq!(names(json!({"tool_choice": named, "max_tokens": 400})).await, ["add"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_arguments_of_strict_functions_satisfy_their_schema() {
    let wrong = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"two\"}}\n</tool_call>";
    let server = Server::answering(&format!("Let me see.\n{wrong}"), |_| {}).await;
    let tools = |strict: bool| json!({"tools": [tool("add", strict)], "max_tokens": 400});
    let lenient = choice(&server, tools(false)).await;
    assert_eq!(calls(&lenient), [("add".to_owned(), json!({"a": "two"}))]);
    let strict = choice(&server, tools(true)).await;
    assert_eq!(strict["message"]["content"], "Let me see.");
    assert_eq!(strict["finish_reason"], "tool_calls");
    let [(name, arguments)] = &calls(&strict)[..] else { panic!("{strict}") };
    assert_eq!(name, "add");
    assert!(jsonschema::is_valid(&parameters(), arguments), "{arguments}");
    let (interaction, sample) = recorded(&server, &strict).await;
    assert!(interaction.grammar.as_ref().is_some_and(CallGrammar::made));
    // The text was free.
    let forced = TokenSpan::mask(&sample.forced, sample.ids.len());
    assert!(!forced[0] && forced.contains(&true), "{forced:?}");
    // The stored message is divided as the client's.
    let path = format!("/v1/chat/completions/{}", strict["id"].as_str().unwrap());
    let stored = server.client.get(server.url(&path)).send().await.unwrap();
    let stored: Value = stored.json().await.unwrap();
    assert_eq!(calls(&stored["choices"][0]), calls(&strict));
    // Another grammar permits no call, so its arguments need no schema.
    let format = json!({"response_format": {"type": "json_object"}});
    let object = choice(&server, merged(tools(true), format)).await;
    assert!(object["message"]["content"].as_str().unwrap().starts_with('{'));
    assert!(calls(&object).is_empty());
    assert_eq!(recorded(&server, &object).await.0.grammar, Some(GrammarSpec::JsonObject));
    let (status, answer) = server.chat(&ask(merged(tools(true), json!({"min_tokens": 1})))).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("min_tokens")));
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_with_strict_functions_may_be_text() {
    for format in [ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::Phi] {
        let text = "import functools, or (a < b) { }";
        let server = Server::answering(text, |setup| setup.server.tool_format = format).await;
        let choice = choice(&server, json!({"tools": [tool("add", true)]})).await;
        assert_eq!(choice["message"]["content"], text, "{format:?}");
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_may_precede_a_forced_call() {
    let call =
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": true}}\n</tool_call>";
    for (open, variables) in [("<think>\n", json!({})), ("", json!({"open": true}))] {
        let text = format!("{open}Shall I write <tool_call>?\n</think>\n\n{call}");
        let script: Arc<str> = text.as_str().into();
        let server = Server::with_template(TEMPLATE, |s| {
            s.fake.script = Arc::new(move |_, _| script.to_string());
        })
        .await;
        for forced in [true, false] {
            let body = json!({"tools": [tool("add", true)], "max_tokens": 400,
                "tool_choice": if forced { "required" } else { "auto" },
                "chat_template_kwargs": variables});
            let choice = choice(&server, body).await;
            assert_eq!(choice["message"]["reasoning_content"], "Shall I write <tool_call>?");
            assert_eq!(choice["message"]["content"], Value::Null, "{choice}");
            assert_eq!(calls(&choice), [("add".to_owned(), json!({"a": 1, "b": true}))]);
            let (_, sample) = recorded(&server, &choice).await;
            assert_eq!(sample.text, text);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_that_cannot_be_enforced_are_refused_or_replaced() {
    let server = Server::answering("free text", |_| {}).await;
    let unsupported = json!({"type": "object", "properties": {"a": {"not": {}}}});
    let body = |strict: bool, more: Value| {
        let tools = [tool("add", false), function("f", strict, unsupported.clone())];
        let body = json!({"tools": tools, "tool_choice": "required", "max_tokens": 100});
        ask(merged(body, more))
    };
    // Its place in the list of functions does not depend on those that are allowed.
    let named = json!({"type": "function", "function": {"name": "f"}});
    let allowed =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}});
    for choice in [json!("required"), json!("auto"), named, allowed] {
        let (status, answer) = server.chat(&body(true, json!({"tool_choice": choice}))).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("tools")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        let expected =
            "tools: function.parameters of \"f\": #/properties/a/not: not is not supported";
        assert!(message.starts_with(expected), "{message}");
    }
    assert_eq!(server.chat(&body(false, json!({}))).await.0, 200);
    for more in [json!({"response_format": {"type": "json_object"}}), json!({"min_tokens": 1})] {
        let (status, answer) = server.chat(&body(false, more)).await;
        assert_eq!(status, 400, "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_that_are_too_large_together_have_any_object_as_arguments() {
    let server = Server::answering("free text", |s| s.fake.context = 2_000_000).await;
    let tools = |strict: bool| {
        let large = |letter: &str| {
            let constant = json!({"const": letter.repeat(100 << 10)});
            function(letter, strict, json!({"type": "object", "properties": {"a": constant}}))
        };
        json!({"tools": [large("a"), large("b"), large("c")], "tool_choice": "required"})
    };
    let (status, answer) = server.chat(&ask(tools(true))).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tool_choice")), "{answer}");
    let body = merged(tools(false), json!({"max_tokens": 400}));
    let choice = choice(&server, body).await;
    assert!(calls(&choice).iter().all(|(_, arguments)| arguments.is_object()), "{choice}");
}
