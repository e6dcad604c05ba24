//! `/tokenize` and `/detokenize`.

use futures::future::join_all;
use insta::assert_snapshot;
use serde_json::json;

use hone_engine::Engine;

use crate::server::{Server, ask, error, ok};

#[tokio::test(flavor = "multi_thread")]
async fn a_text_is_tokenized_and_back() {
    let server = Server::new().await;
    let text = "<|im_start|>user\nHé?";
    let ids = server.engine.codec().encode(text).unwrap();
    let answer = ok(server.post("/tokenize", &json!({"prompt": text})).await);
    let expected =
        json!({"count": ids.len(), "max_model_len": 512, "tokens": ids, "token_strs": null});
    assert_eq!(answer, expected);
    let body = json!({"model": "fake", "prompt": "a é", "return_token_strs": true,
                      "add_special_tokens": false});
    let (_, answer) = server.post("/tokenize", &body).await;
    let spelled: String =
        answer["token_strs"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(spelled, "aĠÃ©");
    let (status, answer) = server.post("/detokenize", &json!({"tokens": ids})).await;
    assert_eq!((status, answer), (200, json!({"prompt": text})));
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_tokenized_as_a_chat_request_is() {
    let server = Server::new().await;
    let chat = ask(json!({}));
    server.chat(&chat).await;
    let prompt = &server.engine.requests()[0].prompt_ids;
    let body = json!({"messages": chat["messages"]});
    let (_, answer) = server.post("/tokenize", &body).await;
    assert_eq!(answer["tokens"], json!(prompt));
    let body = json!({"messages": chat["messages"], "add_generation_prompt": false});
    let (_, answer) = server.post("/tokenize", &body).await;
    let (_, text) = server.post("/detokenize", &json!({"tokens": answer["tokens"]})).await;
    assert_eq!(text["prompt"], "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n");
    // A long text is tokenized on another thread.
    let long = "word ".repeat(5000);
    let (_, answer) = server.post("/tokenize", &json!({"prompt": long})).await;
    assert_eq!(answer["count"], answer["tokens"].as_array().unwrap().len());
    // Nothing is sampled or recorded.
    assert_eq!(server.engine.requests().len(), 1);
    server.store.commit(Vec::new()).await.unwrap();
    assert_eq!(server.store.stats().unwrap().interactions, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_length_of_texts_is_bounded() {
    let server = Server::new().await;
    let most = 64 << 10;
    let case = (json!({"tokens": vec![1; most + 1]}), 400, "tokens", ": it may have 65536");
    server.refuses("/detokenize", [case]).await;
    // More long texts at once than places.
    let body = json!({"prompt": "ab ".repeat(most / 3), "return_token_strs": true});
    let answers = join_all((0..24).map(|_| server.post("/tokenize", &body))).await;
    for (status, answer) in answers {
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["token_strs"].as_array().unwrap().len(), answer["count"]);
    }
    let body = json!({"tokens": vec![40; most]});
    ok(server.post("/detokenize", &body).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_refused() {
    let server = Server::new().await;
    let messages = json!([{"role": "user", "content": "x"}]);
    let cases = [
        ("/tokenize", json!({})),
        ("/tokenize", json!({"prompt": 5})),
        ("/tokenize", json!({"prompt": "x", "messages": messages})),
        ("/tokenize", json!({"prompt": "x", "add_generation_prompt": true})),
        ("/tokenize", json!({"prompt": "x", "model": "other"})),
        ("/tokenize", json!({"prompt": "x", "text": "y"})),
        ("/tokenize", json!({"messages": messages, "add_special_tokens": true})),
        ("/tokenize", json!({"messages": []})),
        ("/detokenize", json!({})),
        ("/detokenize", json!({"tokens": "1"})),
        ("/detokenize", json!({"tokens": [1, -1]})),
        ("/detokenize", json!({"tokens": [1, 2.5]})),
        ("/detokenize", json!({"tokens": [280]})),
    ];
    let mut lines = Vec::new();
    for (path, body) in cases {
        let (status, answer) = server.post(path, &body).await;
        assert_eq!(status, if body["model"] == "other" { 404 } else { 400 }, "{answer}");
        lines.push(error(&answer));
    }
    assert_snapshot!(lines.join("\n"), @r#"
    prompt is missing: it must be a text; or messages must be given | prompt | invalid_value
    prompt is 5: it must be a string | prompt | invalid_value
    messages is a list: it must be absent beside prompt | messages | invalid_value
    add_generation_prompt is true: it must be absent beside prompt | add_generation_prompt | invalid_value
    model is "other": it must be "default" or "fake" | model | model_not_found
    text is not a field: the fields are model, prompt, messages, add_generation_prompt, add_special_tokens, return_token_strs, tools, chat_template_kwargs | text | unsupported_parameter
    add_special_tokens is true: it must be false beside messages: the chat template writes the special tokens | add_special_tokens | invalid_value
    messages is a list: it must be a list of at least one message | messages | invalid_value
    tokens is missing: it must be a list of ids | tokens | invalid_value
    tokens is "1": it must be a list | tokens | invalid_value
    tokens[1] is -1: it must be a token id below 280 | tokens[1] | invalid_value
    tokens[1] is 2.5: it must be a token id below 280 | tokens[1] | invalid_value
    tokens[0] is 280: it must be a token id below 280 | tokens[0] | invalid_value
    "#);
    let (status, answer) = server.post("/detokenize", &json!({"tokens": []})).await;
    assert_eq!((status, answer), (200, json!({"prompt": ""})));
    assert_eq!(server.get("/tokenize").await.0, 405);
}
