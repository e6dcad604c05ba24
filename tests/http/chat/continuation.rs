//! Conversations that go on from recorded tokens.

use std::sync::Arc;

use serde_json::{Value, json};

use hone::config::KeyScope;
use hone_core::types::{Continuation, TokenId};
use hone_engine::Engine;

use crate::server::{Server, Setup, ask, id_of, key, merged, ok};

async fn server(change: impl FnOnce(&mut Setup)) -> Server {
    Server::with(|s| {
        s.fake.context = 8192;
        change(s);
    })
    .await
}

/// A request for the next message of a conversation. A grammar lets the sampler draw tokens that no tokenizer
/// would choose for the text; `<|im_end|>` alone ends it.
fn next(messages: &[Value], more: Value) -> Value {
    merged(
        ask(json!({
            "messages": messages, "guided_regex": "( is| an| answer){8,12}[.]", "return_token_ids": true,
            "max_tokens": 60, "logit_bias": {"0": -100},
        })),
        more,
    )
}

fn user(content: &str) -> Value {
    json!({"role": "user", "content": content})
}

fn ids(list: &Value) -> Vec<TokenId> {
    serde_json::from_value(list.clone()).unwrap()
}

/// The tokens of a completion with those of its prompt.
fn whole(answer: &Value) -> Vec<TokenId> {
    [ids(&answer["prompt_token_ids"]), ids(&answer["choices"][0]["token_ids"])].concat()
}

/// How often an outcome was counted.
fn count(server: &Server, outcome: &str) -> u64 {
    server.metrics.http_continued_prompts.with_label_values(&[outcome]).get()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_turn_begins_with_the_tokens_of_the_turns_before() {
    let server = server(|_| {}).await;
    let mut messages = vec![user("Hi")];
    let mut before = Vec::new();
    let mut encoded_otherwise = false;
    let mut first = None;
    for turn in 0..4 {
        let answer = ok(server.chat(&next(&messages, json!({"seed": turn}))).await);
        let prompt = ids(&answer["prompt_token_ids"]);
        assert!(prompt.starts_with(&before), "turn {turn}");
        // The text is that of the same conversation without a record.
        let tokenized = json!({"messages": messages});
        let tokens = ids(&server.post("/tokenize", &tokenized).await.1["tokens"]);
        let codec = server.engine.codec();
        assert_eq!(codec.decode_all(&prompt), codec.decode_all(&tokens));
        encoded_otherwise |= prompt != tokens;
        let row = server.interaction(id_of(&answer)).await;
        let first = *first.get_or_insert(row.id);
        match &row.continues {
            None => assert_eq!(turn, 0),
            Some(from) => {
                assert_eq!((from.conversation, from.choice, from.edited), (first, 0, false));
                assert_eq!(from.prefix_tokens as usize, before.len());
            }
        }
        before = whole(&answer);
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(user("And then?"));
    }
    assert!(encoded_otherwise, "the sampled tokens are those that the tokenizer chooses");
    assert_eq!((count(&server, "exact"), count(&server, "unknown")), (3, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_token_that_the_template_does_not_write_is_replaced() {
    let server = server(|_| {}).await;
    let more = json!({"logit_bias": {"2": -100}});
    let (_, answer) = server.chat(&next(&[user("Hi")], more.clone())).await;
    let (last, kept) =
        whole(&answer).split_last().map(|(last, kept)| (*last, kept.to_vec())).unwrap();
    assert_eq!(last, 0, "{answer}");
    let messages = [user("Hi"), answer["choices"][0]["message"].clone(), user("More.")];
    let (_, answer) = server.chat(&next(&messages, more)).await;
    let prompt = ids(&answer["prompt_token_ids"]);
    assert!(prompt.starts_with(&[&kept[..], &[2]].concat()));
    let from = server.interaction(id_of(&answer)).await.continues.unwrap();
    assert_eq!(from.prefix_tokens as usize, kept.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_answer_is_recorded_as_edited() {
    let server = server(|_| {}).await;
    let session = json!({"metadata": {"session_id": "s"}});
    let mut messages = vec![user("Hi")];
    let (_, answer) = server.chat(&next(&messages, session.clone())).await;
    let first = id_of(&answer);
    messages.push(answer["choices"][0]["message"].clone());
    messages.push(user("More."));
    let (_, second) = server.chat(&next(&messages, session.clone())).await;

    // The first answer, in the same session, and without a session.
    let edited = [user("Hi"), json!({"role": "assistant", "content": "Ho."}), user("More.")];
    let (_, answer) = server.chat(&next(&edited, session.clone())).await;
    let expected = Continuation {
        conversation: first,
        interaction: first,
        choice: 0,
        prefix_tokens: 0,
        edited: true,
    };
    assert_eq!(server.interaction(id_of(&answer)).await.continues, Some(expected));
    let (_, answer) = server.chat(&next(&edited, json!({}))).await;
    assert_eq!(
        server.interaction(id_of(&answer)).await.continues,
        None,
        "it may be another conversation"
    );
    assert_eq!((count(&server, "edited"), count(&server, "unknown")), (1, 1));

    // The second answer: the beginning is known, and keeps its tokens.
    let mut edited = messages.clone();
    edited.extend([json!({"role": "assistant", "content": "Ho."}), user("More.")]);
    let (_, answer) = server.chat(&next(&edited, json!({}))).await;
    let from = server.interaction(id_of(&answer)).await.continues.unwrap();
    assert_eq!((from.interaction, from.edited), (first, true));
    let kept = ids(&answer["prompt_token_ids"]);
    assert!(kept[..].starts_with(&ids(&second["prompt_token_ids"])[..from.prefix_tokens as usize]));
    assert!(from.prefix_tokens > 0);
    assert_eq!((count(&server, "edited"), count(&server, "exact")), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_kept_is_not_found() {
    let server = server(|s| {
        s.server.keys = vec![key("alice", &[KeyScope::Chat]), key("bob", &[KeyScope::Chat])];
    })
    .await;
    let chat = async |key: &str, messages: &[Value], more: Value| -> Value {
        let response = server.chat_as(key, &next(messages, more)).await;
        assert_eq!(response.status(), 200);
        response.json().await.unwrap()
    };
    let follow =
        |answer: &Value| vec![user("Hi"), answer["choices"][0]["message"].clone(), user("More.")];
    let answer = chat("alice", &[user("Hi")], json!({"store": false})).await;
    chat("alice", &follow(&answer), json!({})).await;
    assert_eq!(count(&server, "unknown"), 1);
    let answer = chat("alice", &[user("Hi")], json!({"seed": 3})).await;
    chat("bob", &follow(&answer), json!({})).await;
    assert_eq!((count(&server, "unknown"), count(&server, "exact")), (2, 0));
    // A request that is not kept goes on from one that was.
    chat("alice", &follow(&answer), json!({"store": false})).await;
    assert_eq!(count(&server, "exact"), 1);
    let path = format!("/v1/chat/completions/{}", answer["id"].as_str().unwrap());
    let erased = server.client.delete(server.url(&path)).bearer_auth("alice").send().await.unwrap();
    assert_eq!(erased.status(), 200);
    chat("alice", &follow(&answer), json!({})).await;
    assert_eq!((count(&server, "unknown"), count(&server, "exact")), (3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_keep_the_tokens_that_the_model_wrote() {
    let call = "<tool_call>\n{\"name\":\"add\", \"arguments\":{\"a\":2}}\n</tool_call>";
    let server = server(|s| s.fake.script = Arc::new(move |_, _| call.to_owned())).await;
    let tools = json!([{"type": "function", "function": {
        "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    }}]);
    let more = json!({"guided_regex": null, "logit_bias": null, "tools": tools});
    let mut messages = vec![user("Hi")];
    let (_, answer) = server.chat(&next(&messages, more.clone())).await;
    let mut message = answer["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].clone();
    assert!(id.is_string(), "{answer}");
    // Clients may write the arguments with other white space.
    message["tool_calls"][0]["function"]["arguments"] = json!("{ \"a\" : 2 }");
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": id, "content": "2"}));
    let (_, second) = server.chat(&next(&messages, more.clone())).await;
    assert!(ids(&second["prompt_token_ids"]).starts_with(&whole(&answer)));
    assert_eq!(count(&server, "exact"), 1);
    // Without the functions, the prompt is another one.
    let (_, third) =
        server.chat(&next(&messages, json!({"guided_regex": null, "logit_bias": null}))).await;
    assert!(!ids(&third["prompt_token_ids"]).starts_with(&ids(&answer["prompt_token_ids"])));
    assert_eq!(count(&server, "options"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_hides_reasoning_has_other_text() {
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let script = |s: &mut Setup| {
        s.fake.script = Arc::new(|_, _| "<think>a</think>b".to_owned());
    };
    let server = Server::with_template(template, script).await;
    let more = json!({"guided_regex": null, "logit_bias": null});
    let (_, answer) = server.chat(&next(&[user("Hi")], more.clone())).await;
    assert_eq!(answer["choices"][0]["message"]["reasoning_content"], "a");
    let messages = [user("Hi"), json!({"role": "assistant", "content": "b"}), user("More.")];
    let (_, answer) = server.chat(&next(&messages, more)).await;
    let from = server.interaction(id_of(&answer)).await.continues.unwrap();
    assert_eq!((from.prefix_tokens, from.edited), (0, false));
    assert_eq!(count(&server, "text"), 1);
}
