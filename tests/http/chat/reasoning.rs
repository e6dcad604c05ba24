//! Reasoning in chat completions, and variables of the chat template.

use std::sync::Arc;

use serde_json::{Value, json};

use hone_engine::Engine;

use crate::server::{Server, ask, id_of, ok};
use crate::streaming::chunks;

/// A template that opens the reasoning unless `enable_thinking` is false.
const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}\n{% endfor %}\
    {{ reasoning_effort }}:\n{% if enable_thinking is defined and not enable_thinking %}\
    <think>\n\n</think>\n\n{% elif opened %}<think>\n{% endif %}";

async fn server(text: &'static str) -> Server {
    Server::with_template(TEMPLATE, |s| s.fake.script = Arc::new(move |_, _| text.to_owned())).await
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_separate_from_the_content() {
    let text = "<think>\nTwo and\nthree.\n</think>\n\nFive.\n";
    let server = server(text).await;
    let answer = ok(server.chat(&ask(json!({}))).await);
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": "Five.\n", "refusal": null,
               "reasoning_content": "Two and\nthree."})
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let reasoned = answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64();
    let total = answer["usage"]["completion_tokens"].as_u64().unwrap();
    let tags =
        server.engine.codec().encode("<think>\nTwo and\nthree.\n</think>").unwrap().len() as u64;
    assert!(reasoned.unwrap().abs_diff(tags) <= 1 && reasoned.unwrap() < total, "{answer}");
    server.store.commit(Vec::new()).await.unwrap();
    let id = id_of(&answer);
    assert_eq!(server.store.samples_of(id).unwrap()[0].text, text);

    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let stream = server.send_chat(&ask(more)).await.text().await.unwrap();
    let events = chunks(&stream);
    let joined = |field: &str| -> String {
        events.iter().filter_map(|e| e["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!(joined("reasoning_content"), "Two and\nthree.");
    assert_eq!(joined("content"), "Five.\n");
    assert_eq!(events.last().unwrap()["usage"], answer["usage"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_begins_inside_the_reasoning_if_the_prompt_opens_it() {
    let server = server("Hm.\n</think>\n\nFive.").await;
    let ask_with = |variables: Value| ask(json!({"chat_template_kwargs": variables}));
    let message = async |body: Value| server.chat(&body).await.1["choices"][0]["message"].clone();
    let opened = message(ask_with(json!({"opened": true}))).await;
    assert_eq!(
        (&opened["reasoning_content"], &opened["content"]),
        (&json!("Hm."), &json!("Five."))
    );
    for variables in [json!({}), json!({"opened": true, "enable_thinking": false})] {
        let closed = message(ask_with(variables)).await;
        assert_eq!(closed["content"], "Hm.\n</think>\n\nFive.");
        assert!(closed.get("reasoning_content").is_none());
    }
    // Cut off inside the reasoning.
    let mut body = ask_with(json!({"opened": true}));
    body["max_tokens"] = json!(2);
    let cut = message(body).await;
    assert_eq!(cut["content"], "");
    assert!(cut["reasoning_content"].as_str().unwrap().starts_with('H'));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_template_gets_the_requests_variables() {
    let server = server("Five.").await;
    let body = ask(json!({"reasoning_effort": "high", "chat_template_kwargs": {"opened": true}}));
    assert_eq!(server.chat(&body).await.0, 200);
    let prompt = server.engine.codec().decode(&server.engine.requests()[0].prompt_ids).unwrap();
    assert_eq!(prompt, "What is 2 + 3?\nhigh:\n<think>\n");
    let (interaction, _) = server.rollout.submitted().remove(0);
    let expected = json!({"opened": true, "reasoning_effort": "high"});
    assert_eq!(Value::Object(interaction.chat.template_variables.clone()), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constrained_answer_has_no_reasoning() {
    let text = "{\"a\": \"<think>\"}";
    let server = server(text).await;
    let body = ask(json!({"response_format": {"type": "json_object"},
        "chat_template_kwargs": {"opened": true}}));
    let answer = ok(server.chat(&body).await);
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], text);
    assert!(message.get("reasoning_content").is_none());
}
