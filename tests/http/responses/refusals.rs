//! What is refused, with the name of the field.

use insta::assert_snapshot;
use serde_json::json;

use super::{PATH, body};
use crate::endpoints::error;
use crate::server::Server;

#[tokio::test(flavor = "multi_thread")]
async fn malformed_and_unsupported_fields_are_refused() {
    let server = Server::new().await;
    let part = |part: serde_json::Value| json!({"input": [{"role": "user", "content": [part]}]});
    let item = |item: serde_json::Value| json!({"input": [item]});
    let format = |format: serde_json::Value| json!({"text": {"format": format}});
    let mut lines = Vec::new();
    for more in [
        json!({"model": null}),
        json!({"input": null}),
        json!({"input": []}),
        json!({"input": 5}),
        part(json!({"type": "input_image", "image_url": "https://x/y"})),
        part(json!({"type": "input_audio", "input_audio": {}})),
        part(json!({"type": "input_file", "file_id": "f"})),
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
        json!({"conversation": "c"}),
        json!({"max_tool_calls": 3}),
        json!({"prompt": {"id": "p"}}),
        json!({"context_management": [{"type": "compaction"}]}),
        json!({"max_tokens": 5}),
        json!({"max_output_tokens": 0}),
        json!({"temperature": 3}),
        json!({"top_logprobs": 21}),
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
    ] {
        let (status, answer) = server.post(PATH, &body(more.clone())).await;
        assert_eq!(status, 400, "{more}: {answer}");
        lines.push(error(&answer));
    }
    assert_snapshot!(lines.join("\n"), @r#""#);
    let (status, answer) = server.post(PATH, &body(json!({"model": "x"}))).await;
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(server.store.stats().unwrap().interactions, 0);
    let limited = Server::with(|setup| setup.server.max_tokens = 300).await;
    let (_, answer) = limited.post(PATH, &body(json!({"max_output_tokens": 301}))).await;
    assert_eq!(answer["error"]["param"], "max_output_tokens");
}
