//! What is refused, with the name of the field.

use insta::assert_snapshot;
use serde_json::json;

use super::{PATH, body};
use crate::server::Server;

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
