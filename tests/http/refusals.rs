//! Refused requests and their errors.

use insta::assert_snapshot;
use reqwest::{Method, header};
use serde_json::{Map, Value, json};

use crate::server::{Server, ask, error, read};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn values_out_of_range_are_refused() {
    let server = Server::new().await;
    let long_key: Map<String, Value> = [("k".repeat(65), json!("v"))].into_iter().collect();
    let pairs: Map<String, Value> = (0..17).map(|i| (i.to_string(), json!("v"))).collect();
    let cases = [
        json!({"temperature": 2.5}),
        json!({"top_p": 1.5}),
        json!({"min_p": -1}),
        json!({"top_k": -2}),
        json!({"presence_penalty": 3}),
        json!({"frequency_penalty": -3}),
        json!({"n": 9}),
        json!({"max_tokens": 0}),
        json!({"max_completion_tokens": -5}),
        json!({"max_tokens": 5, "max_completion_tokens": 6}),
        json!({"seed": 1.5}),
        json!({"stop": ""}),
        json!({"stop": ["a", "b", "c", "d", "e"]}),
        json!({"stop": ["a", 5]}),
        json!({"logprobs": true, "top_logprobs": 21}),
        json!({"top_logprobs": 2}),
        json!({"logit_bias": {"x": 1}}),
        json!({"logit_bias": {"99999": 1}}),
        json!({"logit_bias": {"5": 101}}),
        json!({"metadata": {"answer": 5}}),
        json!({"metadata": {"answer": "v".repeat(513)}}),
        json!({"metadata": long_key}),
        json!({"metadata": pairs}),
        json!({"stream": "yes"}),
        json!({"stream_options": {"include_usage": true}}),
        json!({"stream": true, "stream_options": {"include_usage": 1}}),
        json!({"min_tokens": 5, "max_tokens": 4}),
        json!({"ignore_eos": 1}),
        json!({"stop_token_ids": 5}),
        json!({"stop_token_ids": [280]}),
        json!({"repetition_penalty": 0}),
        json!({"model": null}),
    ];
    assert_snapshot!(server.refusals(CHAT, cases.map(ask)).await, @r#"
    temperature is 2.5: it must be a number from 0 to 2 | temperature | invalid_value
    top_p is 1.5: it must be a number from 0 to 1 | top_p | invalid_value
    min_p is -1: it must be a number from 0 to 1 | min_p | invalid_value
    top_k is -2: it must be a whole number from -1 to 4294967295 | top_k | invalid_value
    presence_penalty is 3: it must be a number from -2 to 2 | presence_penalty | invalid_value
    frequency_penalty is -3: it must be a number from -2 to 2 | frequency_penalty | invalid_value
    n is 9: it must be a whole number from 1 to 8 | n | invalid_value
    max_tokens is 0: it must be a whole number from 1 to 4294967295 | max_tokens | invalid_value
    max_completion_tokens is -5: it must be a whole number from 1 to 4294967295 | max_completion_tokens | invalid_value
    max_tokens is 5: it must be absent, or equal to max_completion_tokens (6) | max_tokens | invalid_value
    seed is 1.5: it must be a whole number of 64 bits | seed | invalid_value
    stop is "": it must be a string or a list of up to 4 strings of 1 to 256 characters | stop | invalid_value
    stop is a list: it must be a string or a list of up to 4 strings of 1 to 256 characters | stop | invalid_value
    stop is a list: it must be a string or a list of up to 4 strings of 1 to 256 characters | stop | invalid_value
    top_logprobs is 21: it must be a whole number from 0 to 20 | top_logprobs | invalid_value
    top_logprobs is 2: it must be absent unless logprobs is true | top_logprobs | invalid_value
    logit_bias has the key "x": it must be an id below 280 | logit_bias | invalid_value
    logit_bias has the key "99999": it must be an id below 280 | logit_bias | invalid_value
    logit_bias.5 is 101: it must be a number from -100 to 100 | logit_bias.5 | invalid_value
    metadata.answer is 5: it must be a string of at most 512 characters | metadata.answer | invalid_value
    metadata.answer is "vvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvv…: it must be a string of at most 512 characters | metadata.answer | invalid_value
    metadata has the key "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk": it may have 64 characters | metadata | invalid_value
    metadata has 17 pairs: it may have 16 | metadata | invalid_value
    stream is "yes": it must be true or false | stream | invalid_value
    stream_options is an object: it must be absent unless stream is true | stream_options | invalid_value
    stream_options.include_usage is 1: it must be true or false | stream_options.include_usage | invalid_value
    min_tokens is 5: it must be a whole number from 0 to 4 | min_tokens | invalid_value
    ignore_eos is 1: it must be true or false | ignore_eos | invalid_value
    stop_token_ids is 5: it must be a list of up to 64 ids below 280 | stop_token_ids | invalid_value
    stop_token_ids is a list: it must be a list of up to 64 ids below 280 | stop_token_ids | invalid_value
    repetition_penalty is 0: it must be a number above 0 and at most 100 | repetition_penalty | invalid_value
    model is missing: it must be a model's name | model | invalid_value
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_messages_are_refused() {
    let server = Server::new().await;
    let messages = |value: Value| json!({"messages": value});
    let content = |value: Value| json!({"messages": [{"role": "user", "content": value}]});
    let call = |value: Value| json!({"messages": [{"role": "assistant", "tool_calls": [value]}]});
    let image = json!([{"type": "image_url", "image_url": {"url": "http://x"}}]);
    let cases = [
        messages(Value::Null),
        messages(json!([])),
        messages(json!("hi")),
        messages(json!(["hi"])),
        messages(json!([{"content": "hi"}])),
        messages(json!([{"role": "robot", "content": "hi"}])),
        messages(json!([{"role": "user"}])),
        content(json!(5)),
        content(json!([])),
        content(json!(["hi"])),
        content(json!([{"type": "text"}])),
        content(json!([{"text": "hi"}])),
        content(image),
        messages(json!([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}])),
        messages(json!([{"role": "assistant", "content": "", "function_call": {"name": "x"}}])),
        messages(json!([{"role": "assistant"}])),
        messages(json!([{"role": "user", "content": "", "tool_calls": [{"id": "x"}]}])),
        messages(json!([{"role": "tool", "content": "3"}])),
        call(json!({"id": "x", "type": "custom"})),
        call(json!({"id": "x", "function": {"name": "f"}})),
        call(json!({"id": "x", "function": {"name": "f", "arguments": {}}})),
        call(json!({"function": {"name": "f", "arguments": "{}"}})),
    ];
    assert_snapshot!(server.refusals(CHAT, cases.map(ask)).await, @r#"
    messages is missing: it must be a list of at least one message | messages | invalid_value
    messages is a list: it must be a list of at least one message | messages | invalid_value
    messages is "hi": it must be a list | messages | invalid_value
    messages[0] is "hi": it must be an object | messages[0] | invalid_value
    messages[0].role is missing: it must be "system", "developer", "user", "assistant" or "tool" | messages[0].role | invalid_value
    messages[0].role is "robot": it must be "system", "developer", "user", "assistant" or "tool" | messages[0].role | invalid_value
    messages[0].content is missing: it must be a string or a list of text parts | messages[0].content | invalid_value
    messages[0].content is 5: it must be a string or a list of text parts | messages[0].content | invalid_value
    messages[0].content is a list: it must be a string or a list of text parts | messages[0].content | invalid_value
    messages[0].content[0] is "hi": it must be an object | messages[0].content[0] | invalid_value
    messages[0].content[0].text is missing: it must be a string | messages[0].content[0].text | invalid_value
    messages[0].content[0].type is missing: it must be "text" | messages[0].content[0].type | invalid_value
    messages[0].content[0].type is "image_url": it must be "text": nothing else is supported | messages[0].content[0].type | invalid_value
    messages[0].tool_calls[0].function is missing: it must be an object | messages[0].tool_calls[0].function | invalid_value
    messages[0].function_call is not supported | messages[0].function_call | unsupported_parameter
    messages[0].content is missing: it must be a string or a list of text parts | messages[0].content | invalid_value
    messages[0].tool_calls is a list: it must be absent unless role is "assistant" | messages[0].tool_calls | invalid_value
    messages[0].tool_call_id is missing: it must be the id of the call that was answered | messages[0].tool_call_id | invalid_value
    messages[0].tool_calls[0].type is "custom": it must be "function": nothing else is supported | messages[0].tool_calls[0].type | invalid_value
    messages[0].tool_calls[0].function.arguments is missing: it must be a string | messages[0].tool_calls[0].function.arguments | invalid_value
    messages[0].tool_calls[0].function.arguments is an object: it must be a string | messages[0].tool_calls[0].function.arguments | invalid_value
    messages[0].tool_calls[0].id is missing: it must be a string | messages[0].tool_calls[0].id | invalid_value
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_fields_are_refused() {
    let server = Server::new().await;
    let cases = [
        json!({"functions": [{"name": "f"}]}),
        json!({"response_format": {"type": "grammar"}}),
        json!({"response_format": "json"}),
        json!({"audio": {"voice": "alloy"}}),
        json!({"modalities": ["text", "audio"]}),
        json!({"best_of": 3}),
        json!({"skip_special_tokens": false}),
        json!({"guided_whitespace_pattern": " "}),
        json!({"temprature": 1}),
    ];
    assert_snapshot!(server.refusals(CHAT, cases.map(ask)).await, @r#"
    functions is not supported: leave it out | functions | unsupported_parameter
    response_format.type is "grammar": it must be "text", "json_object" or "json_schema" | response_format.type | invalid_value
    response_format is "json": it must be an object | response_format | invalid_value
    audio is not supported: leave it out | audio | unsupported_parameter
    modalities is ["text","audio"]: only the default is supported | modalities | unsupported_parameter
    best_of is 3: only the default is supported | best_of | unsupported_parameter
    skip_special_tokens is false: only the default is supported | skip_special_tokens | unsupported_parameter
    guided_whitespace_pattern is not supported: leave it out | guided_whitespace_pattern | unsupported_parameter
    temprature is not a known field | temprature | unsupported_parameter
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_tools_are_refused() {
    let server = Server::new().await;
    let function = |value: Value| json!({"type": "function", "function": value});
    let tools = |value: Value| json!({"tools": [value]});
    let choice =
        |value: Value| json!({"tools": [function(json!({"name": "f"}))], "tool_choice": value});
    let allowed = |value: Value| choice(json!({"type": "allowed_tools", "allowed_tools": value}));
    let f = function(json!({"name": "f"}));
    let cases = [
        json!({"tools": "f"}),
        tools(json!("f")),
        tools(json!({"name": "f"})),
        tools(json!({"type": "web_search"})),
        tools(json!({"type": "custom", "custom": {"name": "f"}})),
        tools(json!({"type": "function"})),
        tools(function(json!({}))),
        tools(function(json!({"name": "two words"}))),
        tools(function(json!({"name": "f", "description": 5}))),
        tools(function(json!({"name": "f", "parameters": "{}"}))),
        tools(function(
            json!({"name": "f", "parameters": {"maximum": 18_446_744_073_709_551_616.0}}),
        )),
        tools(function(json!({"name": "f", "strict": "yes"}))),
        tools(function(json!({"name": "f", "returns": {}}))),
        json!({"tools": [f, f]}),
        json!({"tools": vec![f.clone(); 129]}),
        json!({"parallel_tool_calls": "no"}),
        json!({"tool_choice": "required"}),
        choice(json!("any")),
        choice(json!(5)),
        choice(json!({"type": "custom"})),
        choice(json!({"type": "function", "function": {"name": "g"}})),
        allowed(json!({"mode": "auto", "tools": []})),
        allowed(json!({"mode": "auto", "tools": [function(json!({"name": "g"}))]})),
        allowed(json!({"mode": "any", "tools": [f]})),
        json!({"reasoning_effort": "most"}),
        json!({"chat_template_kwargs": ["x"]}),
        json!({"chat_template_kwargs": {"messages": []}}),
    ];
    assert_snapshot!(server.refusals(CHAT, cases.map(ask)).await, @r#"
    tools is "f": it must be a list | tools | invalid_value
    tools[0] is "f": it must be an object | tools[0] | invalid_value
    tools[0].type is missing: it must be "function" | tools[0].type | invalid_value
    tools[0].type is "web_search": only "function" is supported | tools[0].type | unsupported_parameter
    tools[0].type is "custom": only "function" is supported | tools[0].type | unsupported_parameter
    tools[0].function is missing: it must be an object | tools[0].function | invalid_value
    tools[0].function.name is missing: it must be 1 to 64 letters (a to z, A to Z), digits, underscores and hyphens | tools[0].function.name | invalid_value
    tools[0].function.name is "two words": it must be 1 to 64 letters (a to z, A to Z), digits, underscores and hyphens | tools[0].function.name | invalid_value
    tools[0].function.description is 5: it must be a string | tools[0].function.description | invalid_value
    tools[0].function.parameters is "{}": it must be an object | tools[0].function.parameters | invalid_value
    tools[0].function.parameters has the number 1.8446744073709552e19: numbers may have at most 64 bits | tools[0].function.parameters | invalid_value
    tools[0].function.strict is "yes": it must be true or false | tools[0].function.strict | invalid_value
    tools[0].function.returns is not a known field | tools[0].function.returns | unsupported_parameter
    tools[1].function.name is "f": each function must have its own | tools[1].function.name | invalid_value
    tools has 129 functions: it may have 128 | tools | invalid_value
    parallel_tool_calls is "no": it must be true or false | parallel_tool_calls | invalid_value
    tool_choice is "required": it must be absent, "none" or "auto" without tools | tool_choice | invalid_value
    tool_choice is "any": it must be "none", "auto", "required", {"type": "function", …} or {"type": "allowed_tools", …} | tool_choice | invalid_value
    tool_choice is 5: it must be "none", "auto", "required", {"type": "function", …} or {"type": "allowed_tools", …} | tool_choice | invalid_value
    tool_choice.type is "custom": it must be "function" or "allowed_tools" | tool_choice.type | invalid_value
    tool_choice.function.name is "g": it must be the name of a function in tools | tool_choice.function.name | invalid_value
    tool_choice.allowed_tools.tools is a list: it must be a list of at least one function | tool_choice.allowed_tools.tools | invalid_value
    tool_choice.allowed_tools.tools[0].function.name is "g": it must be the name of a function in tools | tool_choice.allowed_tools.tools[0].function.name | invalid_value
    tool_choice.allowed_tools.mode is "any": it must be "auto" or "required" | tool_choice.allowed_tools.mode | invalid_value
    reasoning_effort is "most": it must be one of "none", "minimal", "low", "medium", "high", "xhigh", "max" | reasoning_effort | invalid_value
    chat_template_kwargs is a list: it must be an object | chat_template_kwargs | invalid_value
    chat_template_kwargs.messages is not a variable that a request can set | chat_template_kwargs.messages | unsupported_parameter
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_web_server_have_openais_shape() {
    let server = Server::with(|s| s.server.max_body_bytes = 2048).await;
    let post = |body: String, kind: Option<&'static str>| {
        let mut request = server.client.post(server.url(CHAT)).body(body);
        if let Some(kind) = kind {
            request = request.header(header::CONTENT_TYPE, kind);
        }
        async move { read(request.send().await.unwrap()).await }
    };
    let json_type = Some("application/json; charset=utf-8");
    let mut lines = Vec::new();
    let mut add =
        |(status, answer): (u16, Value)| lines.push(format!("{status} {}", error(&answer)));
    add(post("{\"model\": ".to_owned(), json_type).await);
    add(post(String::new(), json_type).await);
    add(post("[1]".to_owned(), json_type).await);
    add(post("{\"seed\": 1e999}".to_owned(), json_type).await);
    add(post("[".repeat(1000), json_type).await);
    add(post(format!("{{\"tools\": {}{}}}", "[".repeat(100), "]".repeat(100)), json_type).await);
    add(post("{}".to_owned(), None).await);
    add(post("{}".to_owned(), Some("text/plain")).await);
    add(post(" ".repeat(3000), json_type).await);
    add(server.get("/nowhere").await);
    add(server.get("/v1/nowhere").await);
    add(server.get("/v1/completions").await);
    add(server.post("/v1/models", &json!({})).await);
    add(server.post("/livez", &json!({})).await);
    assert_snapshot!(lines.join("\n"), @r#"
    400 the body is not valid JSON: EOF while parsing a value at line 1 column 10 | - | invalid_body
    400 the body is not valid JSON: EOF while parsing a value at line 1 column 0 | - | invalid_body
    400 the body must be a JSON object | - | invalid_body
    400 the body is not valid JSON: number out of range at line 1 column 14 | - | invalid_body
    400 the body is not valid JSON: recursion limit exceeded at line 1 column 128 | - | invalid_body
    400 the body has more than 100 levels of objects and lists | - | invalid_body
    415 content-type is "": it must be application/json | - | unsupported_media_type
    415 content-type is "text/plain": it must be application/json | - | unsupported_media_type
    413 the body is larger than server.max_body_bytes, or the 256 KiB of a grader, allows | - | body_too_large
    404 there is no GET /nowhere | - | not_found
    404 there is no GET /v1/nowhere | - | not_found
    405 GET is not allowed on /v1/completions | - | method_not_allowed
    405 POST is not allowed on /v1/models | - | method_not_allowed
    405 POST is not allowed on /livez | - | method_not_allowed
    "#);
    let response =
        server.client.request(Method::DELETE, server.url("/v1/models")).send().await.unwrap();
    assert_eq!(response.headers()[header::ALLOW], "GET,HEAD");
    let packed =
        server.client.post(server.url(CHAT)).header(header::CONTENT_TYPE, "application/json");
    let packed = packed.header(header::CONTENT_ENCODING, "gzip").body("{}").send().await.unwrap();
    let (status, answer) = read(packed).await;
    assert_eq!(
        (status, error(&answer).as_str()),
        (
            415,
            "content-encoding is \"gzip\": a body must not be compressed | - | unsupported_media_type"
        )
    );
}
