//! Constrained answers, and vLLM's sampling parameters.

use serde_json::{Value, json};

use hone_core::types::GrammarSpec;
use hone_engine::testing::random_schema;

use crate::server::{Server, ask, id_of, ok};
use crate::streaming::chunks;

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

fn format(schema: &Value) -> Value {
    let schema = json!({"name": "answer", "strict": true, "schema": schema});
    json!({"type": "json_schema", "json_schema": schema})
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_follows_its_schema_and_is_recorded_with_its_grammar() {
    let server = Server::with(|s| s.fake.slots = 4).await;
    for seed in 0..20 {
        let schema = random_schema(seed);
        let body = ask(json!({
            "response_format": format(&schema), "seed": seed, "max_tokens": 480,
            "logprobs": true, "top_logprobs": 20,
        }));
        let answer = ok(server.chat(&body).await);
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "stop" {
            let value: Value = serde_json::from_str(text(&answer)).unwrap();
            assert!(jsonschema::is_valid(&schema, &value), "{}: {schema}", text(&answer));
        }
        // The alternatives are all permitted tokens, if there are at most 20.
        for token in choice["logprobs"]["content"].as_array().unwrap() {
            let top = token["top_logprobs"].as_array().unwrap();
            let sum: f64 = top.iter().map(|t| t["logprob"].as_f64().unwrap().exp()).sum();
            assert!(sum < 1.0 + 1e-4 && (top.len() == 20 || sum > 1.0 - 1e-4), "{token}");
        }
        let interaction = server.interaction(id_of(&answer)).await;
        let Some(GrammarSpec::JsonSchema(recorded)) = interaction.grammar else {
            panic!("{:?}", interaction.grammar)
        };
        assert_eq!(serde_json::from_str::<Value>(&recorded).unwrap(), schema);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_tokens_are_recorded_with_the_mass_of_the_grammar() {
    let server = Server::new().await;
    let body = ask(json!({"guided_choice": ["left", "right"], "return_token_ids": true}));
    let answer = ok(server.chat(&body).await);
    assert!(["left", "right"].contains(&text(&answer)));
    let sample = server.sample(id_of(&answer)).await;
    let token_ids: Vec<u32> =
        serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap();
    assert_eq!(token_ids, sample.ids);
    let prompt: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
    assert_eq!(prompt, server.engine.requests()[0].prompt_ids);
    // The first token decides; the others follow from it.
    let [span] = &sample.forced[..] else { panic!("{:?}", sample.forced) };
    assert_eq!((span.start, span.end as usize), (1, sample.ids.len()));
    assert_eq!(sample.kept.len(), sample.ids.len());
    assert!(sample.kept.iter().all(|mass| *mass > 0.0 && *mass < 1.0), "{:?}", sample.kept);
    assert_eq!(sample.untrainable, None);
    assert!(server.metric("hone_engine_mask_duration_seconds_count").await.unwrap() >= 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_cannot_be_enforced_is_refused_with_its_place() {
    let server = Server::new().await;
    let cases = [
        (
            json!({"response_format": format(&json!({"items": {"uniqueItems": true}}))}),
            "response_format.json_schema.schema",
            "#/items/uniqueItems: uniqueItems is not supported",
        ),
        (json!({"guided_json": "{"}), "guided_json", "the schema is not JSON"),
        (json!({"guided_regex": "("}), "guided_regex", "guided_regex: "),
        (json!({"guided_choice": []}), "guided_choice", "a choice has 1 to 1000 texts"),
        (json!({"guided_grammar": "start: x"}), "guided_grammar", "guided_grammar: "),
        (
            json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
            "guided_regex",
            "guided_regex and response_format both constrain the text",
        ),
        (json!({"guided_regex": "a", "min_tokens": 1}), "min_tokens", "absent if the text"),
        (json!({"guided_regex": "a", "ignore_eos": true}), "ignore_eos", "absent if the text"),
    ];
    let cases = cases.map(|(more, param, part)| (ask(more), 400, param, part));
    server.refuses("/v1/chat/completions", cases).await;
    assert!(server.engine.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_without_an_end_fails_clearly() {
    let server = Server::new().await;
    // After any letter no token is permitted.
    let grammar = "start: /[a-z]/ never\nnever: /[^\\x00-\\x{10FFFF}]/";
    let (status, answer) = server.chat(&ask(json!({"guided_grammar": grammar}))).await;
    assert_eq!(status, 400, "{answer}");
    let code = answer["error"]["code"].as_str().unwrap();
    assert!(["grammar_failed", "invalid_value"].contains(&code), "{answer}");
    // Other requests are answered, and no engine counts as broken.
    assert_eq!(server.chat(&ask(json!({}))).await.0, 200);
    assert_eq!(server.metrics.engine_failures.get(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn vllms_parameters_reach_the_engine_and_the_ledger() {
    let server = Server::new().await;
    let answer = ok(server
        .chat(&ask(json!({
            "min_tokens": 12, "max_tokens": 30, "stop_token_ids": [70, 71],
            "repetition_penalty": 1.25, "include_stop_str_in_output": true,
            "skip_special_tokens": true, "spaces_between_special_tokens": true,
        })))
        .await);
    let sample = server.sample(id_of(&answer)).await;
    let params = &sample.params;
    assert_eq!((params.min_tokens, params.stop_token_ids.clone()), (12, vec![70, 71]));
    assert_eq!((params.repetition_penalty, params.include_stop), (1.25, true));
    assert_eq!(sample.untrainable.as_deref(), Some("penalty"));
    assert!(sample.ids.len() > 12 || answer["choices"][0]["finish_reason"] == "length");
    assert!(answer.get("prompt_token_ids").is_none());

    let (status, answer) = server.chat(&ask(json!({"ignore_eos": true, "max_tokens": 25}))).await;
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("length")));
    let sample = server.sample(id_of(&answer)).await;
    assert_eq!((sample.ids.len(), sample.untrainable.clone()), (25, None));
    assert!(sample.kept.iter().all(|mass| *mass < 1.0) && sample.forced.is_empty());

    let (_, answer) =
        server.chat(&ask(json!({"stop": "is", "include_stop_str_in_output": true}))).await;
    assert_eq!(text(&answer), "The answer is");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_have_the_token_ids_of_each_event() {
    let server = Server::new().await;
    let body = ask(json!({"stream": true, "return_token_ids": true, "guided_regex": "é{3}!"}));
    let response = server.send_chat(&body).await;
    assert_eq!(response.status(), 200);
    let events = response.text().await.unwrap();
    let chunks = chunks(&events);
    let prompt = &server.engine.requests()[0].prompt_ids;
    assert_eq!(chunks[0]["prompt_token_ids"], json!(prompt));
    assert!(chunks[1..].iter().all(|chunk| chunk.get("prompt_token_ids").is_none()));
    let (mut ids, mut text) = (Vec::new(), String::new());
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        ids.extend(
            choice["token_ids"].as_array().into_iter().flatten().map(|id| id.as_u64().unwrap()),
        );
    }
    assert_eq!(text, "ééé!");
    let answer = json!({"id": chunks[0]["id"]});
    let sample = server.sample(id_of(&answer)).await;
    assert_eq!(ids, sample.ids.iter().map(|id| u64::from(*id)).collect::<Vec<_>>());
}
