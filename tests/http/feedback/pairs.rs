//! Preferences: two completions of one prompt, of which the client chose one.

use serde_json::{Value, json};

use hone_core::types::InteractionId;

use crate::server::{Server, ask, merged, ok};

const ROUTES: &str = r#"
    [[route]]
    name = "stars"
    metadata = { part = "stars" }
    reward = [
        { name = "stars", kind = "feedback", range = [1, 5] },
        { name = "remark", kind = "feedback", type = "comment" },
        { name = "said", kind = "regex", pattern = "a" },
    ]
    [[route]]
    name = "two"
    metadata = { part = "two" }
    reward = [
        { name = "thumbs", kind = "feedback", type = "boolean" },
        { name = "score", kind = "feedback" },
    ]
"#;

async fn server() -> Server {
    let routes = hone::config::parse(ROUTES).unwrap().routes;
    Server::with(|s| s.routes = routes).await
}

/// The id of a completion with two choices on a route.
async fn completion(server: &Server, part: &str, more: Value) -> String {
    let body = merged(ask(json!({"metadata": {"part": part}, "n": 2})), more);
    let answer = ok(server.chat(&body).await);
    answer["id"].as_str().unwrap().to_owned()
}

fn value(server: &Server, id: &str, choice: u32, part: &str) -> Option<f64> {
    let id = InteractionId::from_completion_id(id).unwrap();
    let samples = server.store.samples_of(id).unwrap();
    let sample = samples.iter().find(|sample| sample.choice == choice).unwrap();
    let rewards = server.store.rewards_of(sample.id).unwrap();
    rewards.iter().find(|reward| reward.name == part).and_then(|reward| reward.value)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preference_rates_both_completions() {
    let server = server().await;
    let (first, second) = (
        completion(&server, "stars", json!({})).await,
        completion(&server, "stars", json!({})).await,
    );
    let body = json!({
        "chosen": second, "rejected": first, "rejected_choice": 1, "idempotency_key": "once",
    });
    let (status, answer) = server.post("/v1/feedback", &body).await;
    let mut expected = json!({
        "object": "feedback", "status": "recorded", "chosen": second, "rejected": first,
        "chosen_choice": 0, "rejected_choice": 1, "name": "stars", "trained": true, "reason": null,
    });
    assert_eq!((status, &answer), (200, &expected));
    assert_eq!(value(&server, &second, 0, "stars"), Some(5.0));
    assert_eq!(value(&server, &first, 1, "stars"), Some(1.0));
    assert_eq!(server.store.ungrouped_feedback(u64::MAX, 9).unwrap().len(), 2);
    // The same post again changes nothing.
    let (_, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!(answer["status"], "duplicate");
    let swapped = json!({
        "chosen": first, "chosen_choice": 1, "rejected": second, "idempotency_key": "once",
    });
    assert_eq!(server.post("/v1/feedback", &swapped).await.0, 422);
    assert_eq!(value(&server, &first, 1, "stars"), Some(1.0));
    assert_eq!(server.store.stats().unwrap().feedback, 2);
    assert_eq!(server.metrics.feedback_received.get(), 2);
    // Two choices of one completion, a part by name, and a boolean part.
    let both = completion(&server, "two", json!({})).await;
    let body = json!({
        "chosen": both, "rejected": both, "rejected_choice": 1, "name": "thumbs", "comment": "x",
    });
    let (status, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!((status, &answer["trained"]), (200, &json!(true)), "{answer}");
    let values = [0, 1].map(|choice| value(&server, &both, choice, "thumbs"));
    assert_eq!(values, [Some(1.0), Some(0.0)]);
    // One of the two cannot be trained on.
    let greedy = completion(&server, "stars", json!({"temperature": 0})).await;
    expected["reason"] = json!("greedy");
    let body = json!({"chosen": first, "rejected": greedy});
    let (_, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!((&answer["trained"], &answer["reason"]), (&json!(false), &expected["reason"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_that_cannot_be_compared_are_refused() {
    let server = server().await;
    let first = completion(&server, "stars", json!({})).await;
    let second = completion(&server, "stars", json!({})).await;
    let two = completion(&server, "two", json!({})).await;
    let question = json!({"messages": [{"role": "user", "content": "What is 3 + 3?"}]});
    let other = completion(&server, "stars", question).await;
    let stopped = completion(&server, "stars", json!({"stop": ["\n"]})).await;
    let unknown = InteractionId::new().completion_id();
    let pair = |fields: Value| merged(json!({"chosen": first, "rejected": second}), fields);
    let cases = [
        (
            json!({"rejected": null}),
            400,
            "rejected",
            "rejected is missing: it must be a completion",
        ),
        (json!({"chosen": "x"}), 400, "chosen", "chosen is \"x\": it must be a completion's id"),
        (json!({"chosen": unknown}), 404, "chosen", "there is no such completion"),
        (json!({"rejected_choice": 2}), 400, "rejected_choice", "has no such choice"),
        (json!({"rejected": first}), 400, "rejected", "they must be different completions"),
        (json!({"rejected": other}), 400, "rejected", "their prompts must be equal"),
        (json!({"rejected": stopped}), 400, "rejected", "stop, stop_token_ids, min_tokens and"),
        (json!({"rejected": two}), 400, "rejected", "the same route and API key"),
        (json!({"name": "smiles"}), 400, "name", "the route \"stars\" has stars"),
        (json!({"name": "said"}), 400, "name", "the route \"stars\" has stars"),
        (json!({"value": 1}), 400, "value", "value is not a field: the fields are chosen"),
        (
            json!({"chosen": two, "rejected": two, "rejected_choice": 1}),
            400,
            "name",
            "name is missing: it must be a feedback part with values; the route \"two\" has thumbs, score",
        ),
    ];
    let cases = cases.map(|(fields, status, field, part)| (pair(fields), status, field, part));
    server.refuses("/v1/feedback", cases).await;
    let (_, answer) = server.post("/v1/feedback", &pair(json!({"rejected": other}))).await;
    let text = answer["error"]["message"].as_str().unwrap();
    assert!(text.contains(&first) && text.contains(&other), "it names both: {text}");
    assert_eq!(server.store.stats().unwrap().feedback, 0);
}
