//! `/v1/completions`.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use insta::assert_snapshot;
use serde_json::{Value, json};

use hone_core::types::{InteractionId, Role};
use hone_engine::Engine;
use hone_engine::testing::FakeEngine;

use crate::server::{Server, eventually, merged, ok};

const PATH: &str = "/v1/completions";

fn body(more: Value) -> Value {
    merged(json!({"model": "default", "prompt": "2 + 3", "seed": 5}), more)
}

async fn complete(server: &Server, more: Value) -> Value {
    ok(server.post(PATH, &body(more)).await)
}

fn id(text: &Value) -> InteractionId {
    InteractionId::from_completion_id(text.as_str().unwrap()).unwrap()
}

fn texts(answer: &Value) -> Vec<&str> {
    answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_has_openais_shape() {
    let server = Server::new().await;
    let response = server.send(PATH, &body(json!({}))).await;
    assert_eq!(response.headers()["x-hone-policy-version"], "0");
    let mut answer: Value = response.json().await.unwrap();
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    answer["id"] = json!("ID");
    answer["created"] = json!(0);
    let prompt = server.engine.requests()[0].prompt_ids.len();
    let expected = json!({
        "id": "ID", "object": "text_completion", "created": 0, "model": "default",
        "system_fingerprint": "hone-v0",
        "choices": [{"index": 0, "text": "The answer is 5.", "logprobs": null,
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8,
                  "prompt_tokens_details": {"cached_tokens": 0}},
    });
    assert_eq!(answer, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_is_recorded_and_learned_from() {
    let server = Server::new().await;
    let text = "<|im_start|>2 + 3";
    let answer = complete(&server, json!({"prompt": text, "metadata": {"answer": "5"}})).await;
    let interaction = server.interaction(id(&answer["id"])).await;
    // The markup of a prompt that the client writes as a whole is markup.
    assert_eq!(interaction.prompt_ids, server.engine.codec().encode(text).unwrap());
    assert_eq!(interaction.prompt_ids[0], 1);
    let [message] = &interaction.messages[..] else { panic!("one message") };
    assert_eq!((message.role, message.content.as_str()), (Role::User, text));
    assert!(interaction.is_text());
    assert_eq!(interaction.params.max_tokens, 16);
    let submitted = server.rollout.submitted();
    assert_eq!((*submitted[0].0).clone(), interaction);
    assert_eq!(submitted[0].1[0].text, "The answer is 5.");
    let feedback = json!({"completion_id": answer["id"], "name": "thumbs", "value": 1});
    let reply = ok(server.post("/v1/feedback", &feedback).await);
    assert_eq!((&reply["completion_id"], &reply["trained"]), (&answer["id"], &json!(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_prompts_have_their_own_records() {
    let server = Server::with(|setup| {
        setup.fake.script = Arc::new(|request, _| format!("{}", request.prompt_ids.len()));
    })
    .await;
    let ids = [[5, 6, 7], [8, 9, 10]];
    for (prompt, lengths) in
        [(json!(["a", "bb", "ccc"]), ["1", "2", "3"].as_slice()), (json!(ids), &["3", "3"])]
    {
        let answer = complete(&server, json!({"prompt": prompt, "n": 2})).await;
        let expected: Vec<&str> = lengths.iter().flat_map(|length| [*length; 2]).collect();
        assert_eq!(texts(&answer), expected);
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices[0]["completion_id"], answer["id"]);
        server.store.commit(Vec::new()).await.unwrap();
        for (at, choice) in choices.iter().enumerate() {
            assert_eq!(choice["index"], at);
            let own = server.store.samples_of(id(&choice["completion_id"])).unwrap();
            assert_eq!(own.len(), 2);
            assert!(own.iter().all(|sample| sample.text == lengths[at / 2]));
            let feedback = json!({"completion_id": choice["completion_id"], "choice": at % 2,
                                  "name": "thumbs", "value": 1});
            assert_eq!(server.post("/v1/feedback", &feedback).await.0, 200);
        }
        let prompts = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let lengths = lengths.iter().map(|length| length.parse::<u64>().unwrap());
        assert_eq!(prompts, lengths.sum::<u64>());
    }
    assert_eq!(server.rollout.submitted().len(), 5);
    let seeds: std::collections::BTreeSet<u64> =
        server.engine.requests().iter().take(6).map(|request| request.params.seed).collect();
    assert_eq!(seeds.len(), 6, "each choice has its own seed");
    // A list of ids is one prompt, whose text is recorded.
    let ids = server.engine.codec().encode("2 + 3").unwrap();
    let answer = complete(&server, json!({"prompt": ids, "echo": true})).await;
    assert_eq!(texts(&answer), [format!("2 + 3{}", ids.len())]);
    assert_eq!(answer["choices"][0].get("completion_id"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_have_the_older_shape() {
    let server = Server::with(|setup| setup.fake.script = Arc::new(|_, _| "é ok".to_owned())).await;
    let answer = complete(&server, json!({"logprobs": 1})).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(&tokens[..2], ["bytes:\\xc3", "bytes:\\xa9"]);
    assert_eq!(tokens[2..].concat(), " ok");
    let offsets: Vec<u64> = serde_json::from_value(logprobs["text_offset"].clone()).unwrap();
    let mut expected = vec![0, 1];
    let mut at = 1;
    for token in &tokens[2..] {
        expected.push(at);
        at += token.chars().count() as u64;
    }
    assert_eq!(offsets, expected);
    for (at, token) in tokens.iter().enumerate() {
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        assert_eq!(top[*token], logprobs["token_logprobs"][at]);
    }
    let answer = complete(&server, json!({"logprobs": 0})).await;
    assert_eq!(answer["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_have_log_probabilities() {
    let server = Server::new().await;
    let ids = server.engine.codec().encode("2 + 3").unwrap();
    let more = json!({"echo": true, "logprobs": 1, "prompt_logprobs": 2, "max_tokens": 0});
    let answer = complete(&server, more).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("2 + 3"), &json!("length")));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let logprobs = &choice["logprobs"];
    let tokens: Vec<&str> = logprobs["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token.as_str().unwrap())
        .collect();
    assert_eq!((tokens.concat().as_str(), tokens.len()), ("2 + 3", ids.len()));
    for (place, id) in ids.iter().enumerate() {
        let own = &choice["prompt_logprobs"][place];
        if place == 0 {
            assert!(logprobs["token_logprobs"][0].is_null() && own.is_null());
            continue;
        }
        let found = &logprobs["token_logprobs"][place];
        assert_eq!(found.as_f64().unwrap() as f32, FakeEngine::logprob(*id));
        assert_eq!(logprobs["top_logprobs"][place].as_object().unwrap().len(), 1);
        let entry = json!({"logprob": found, "rank": 1, "decoded_token": tokens[place]});
        assert_eq!((&own[id.to_string()], own.as_object().unwrap().len()), (&entry, 2));
    }
    // Nothing was sampled, so there is nothing to learn from.
    assert!(server.rollout.submitted().is_empty());

    // Clients drop the last token, which may be the stop token.
    let more = json!({"echo": true, "logprobs": 0, "max_tokens": 60});
    let answer = complete(&server, more).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    let sampled = answer["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    let lists = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
    for list in lists.map(|list| choice["logprobs"][list].as_array().unwrap()) {
        assert_eq!(list.len(), ids.len() + sampled);
    }
    let (status, _) =
        server.post(PATH, &body(json!({"max_tokens": 0, "stream": true, "echo": true}))).await;
    assert_eq!(status, 400);
}

/// The whole stream, with ids and times replaced.
async fn stream(server: &Server, more: Value) -> String {
    let mut body = body(more);
    body["stream"] = json!(true);
    let response = server.send(PATH, &body).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let id = regex::Regex::new("cmpl-[0-9a-f]{32}").unwrap();
    let created = regex::Regex::new(r#""created":\d+"#).unwrap();
    let text = response.text().await.unwrap();
    created.replace_all(&id.replace_all(&text, "ID"), r#""created":0"#).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_text() {
    let server = Server::new().await;
    let more = json!({"max_tokens": 2, "echo": true, "stream_options": {"include_usage": true}});
    let counts = regex::Regex::new(r#"(prompt|total)_tokens":\d+"#).unwrap();
    let text = stream(&server, more).await;
    assert_snapshot!(counts.replace_all(&text, r#"${1}_tokens":0"#), @r#"
    data: {"id":"ID","object":"text_completion","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"text":"2 + 3","logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"ID","object":"text_completion","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"text":"Th","logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"ID","object":"text_completion","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"text":"e","logprobs":null,"finish_reason":null}],"usage":null}

    data: {"id":"ID","object":"text_completion","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}

    data: {"id":"ID","object":"text_completion","created":0,"model":"default","system_fingerprint":"hone-v0","choices":[],"usage":{"prompt_tokens":0,"completion_tokens":2,"total_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}}

    data: [DONE]
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_records_what_each_prompt_has() {
    let server = Server::with(|setup| {
        setup.fake.delay = Duration::from_millis(20);
        setup.fake.script = Arc::new(|_, _| "and so on ".repeat(30));
    })
    .await;
    let streamed = body(json!({"stream": true, "prompt": ["a", "b"], "max_tokens": 100}));
    let mut bytes = server.send(PATH, &streamed).await.bytes_stream();
    let mut seen = String::new();
    while !(seen.contains("\"index\":0") && seen.contains("\"index\":1")) {
        seen.push_str(std::str::from_utf8(&bytes.next().await.unwrap().unwrap()).unwrap());
    }
    drop(bytes);
    eventually("it is counted", || server.metrics.http_disconnects.get() == 1).await;
    eventually("the slots are free", || server.engine.load().live_running == 0).await;
    let stats = server.stats().await;
    assert_eq!((stats.interactions, stats.samples), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_refused() {
    let server = Server::new().await;
    let cases = [
        json!({"prompt": null}),
        json!({"prompt": ""}),
        json!({"prompt": ["a", 5]}),
        json!({"prompt": [5, "a"]}),
        json!({"prompt": [280]}),
        json!({"prompt": [[1], "a"]}),
        json!({"prompt": [[1], [-1]]}),
        json!({"prompt": [[]]}),
        json!({"prompt": vec!["a"; 17], "n": 8}),
        json!({"best_of": 2}),
        json!({"suffix": "x"}),
        json!({"logprobs": 21}),
        json!({"prompt_logprobs": 21}),
        json!({"stream_options": {"include_usage": true}}),
        json!({"messages": []}),
    ];
    assert_snapshot!(server.refusals(PATH, cases.map(body)).await, @r#"
    prompt is missing: it must be a text, a list of texts, a list of token ids or a list of such lists | prompt | invalid_value
    prompt is empty: it must have at least one token | prompt | invalid_value
    prompt[1] is 5: it must be a text | prompt[1] | invalid_value
    prompt[1] is "a": it must be a token id below 280 | prompt[1] | invalid_value
    prompt[0] is 280: it must be a token id below 280 | prompt[0] | invalid_value
    prompt[1] is "a": it must be a list of token ids, as the first one | prompt[1] | invalid_value
    prompt[1][0] is -1: it must be a token id below 280 | prompt[1][0] | invalid_value
    prompt is empty: it must have at least one token | prompt | invalid_value
    prompt has 17 prompts: it may have 16 if n is 8, for 128 choices | prompt | invalid_value
    best_of is 2: only n choices are sampled, so it must be 1 | best_of | unsupported_parameter
    suffix is not supported: leave it out | suffix | unsupported_parameter
    logprobs is 21: it must be a whole number from 0 to 20 | logprobs | invalid_value
    prompt_logprobs is 21: it must be a whole number from 0 to 20 | prompt_logprobs | invalid_value
    stream_options is an object: it must be absent unless stream is true | stream_options | invalid_value
    messages is not a known field | messages | unsupported_parameter
    "#);
    let (status, _) = server.post(PATH, &body(json!({"model": "other"}))).await;
    assert_eq!(status, 404);
    let long = body(json!({"prompt": "word ".repeat(600)}));
    let (status, answer) = server.post(PATH, &long).await;
    let error = &answer["error"];
    assert_eq!((status, &error["param"]), (400, &json!("prompt")));
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(server.engine.requests().is_empty());
    let accepted = json!({"best_of": 2, "n": 2, "suffix": "", "user": "u", "logit_bias": {},
                          "presence_penalty": 0, "frequency_penalty": 0, "top_p": 1, "top_k": -1});
    complete(&server, accepted).await;
}
