//! The answer to feedback says whether it will be trained on, and why not.

use serde_json::{Value, json};

use hone_core::testing::policy;
use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion};
use hone_engine::Publisher;
use hone_store::Op;

use crate::server::{Server, ask, merged, ok};

const ROUTE: &str = r#"
    [[route]]
    name = "users"
    metadata = { kind = "question" }
    reward = [
        { name = "thumbs", kind = "feedback" },
        { name = "remark", kind = "feedback", type = "comment" },
        { name = "vote", kind = "feedback", aggregate = "majority" },
    ]
"#;

async fn server(enabled: bool) -> Server {
    let routes = hone::config::parse(ROUTE).unwrap().routes;
    let server = Server::with(|s| {
        s.routes = routes;
        s.learning.enabled = enabled;
    });
    server.await
}

/// The id of a completion of a request with these fields.
async fn completion(server: &Server, more: Value) -> String {
    let body = merged(ask(json!({"metadata": {"kind": "question"}})), more);
    let answer = ok(server.chat(&body).await);
    answer["id"].as_str().unwrap().to_owned()
}

/// Rates a completion. Returns `reason`, which is null if the rating will be trained on.
async fn rate(server: &Server, id: &str, more: Value) -> Value {
    let body = merged(json!({"completion_id": id, "name": "thumbs", "value": 1}), more);
    let answer = ok(server.post("/v1/feedback", &body).await);
    assert_eq!(answer["trained"], answer["reason"].is_null(), "{answer}");
    answer["reason"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rating_that_cannot_be_used_is_answered_with_the_reason() {
    let server = server(true).await;
    for (request, feedback, reason) in [
        (json!({}), json!({}), Value::Null),
        (json!({"top_p": 0.9, "stop": " is"}), json!({}), Value::Null),
        (json!({"temperature": 0}), json!({}), json!("greedy")),
        (json!({"presence_penalty": 1}), json!({}), json!("penalty")),
        (json!({"logit_bias": {"7": 3}}), json!({}), json!("logit_bias")),
        (json!({"metadata": {}}), json!({}), json!("no_route")),
        (json!({}), json!({"name": "smiles"}), json!("unknown_part")),
        (json!({}), json!({"name": "remark", "value": null, "comment": "x"}), json!("comment")),
        (json!({}), json!({"name": "vote"}), Value::Null),
    ] {
        let id = completion(&server, request.clone()).await;
        assert_eq!(rate(&server, &id, feedback.clone()).await, reason, "{request} {feedback}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_training_no_rating_is_trained_on() {
    let server = server(false).await;
    let id = completion(&server, json!({})).await;
    assert_eq!(rate(&server, &id, json!({})).await, json!("disabled"));
    let session = json!({"metadata": {"kind": "question", "session_id": "s"}});
    completion(&server, session).await;
    let body = json!({"session_id": "s", "name": "thumbs", "value": 1});
    let (_, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!((&answer["trained"], &answer["reason"]), (&json!(false), &json!("disabled")));
}

#[tokio::test(flavor = "multi_thread")]
async fn old_and_undone_versions_are_not_trained_on() {
    let server = server(true).await;
    let activate = async |version| {
        server.engine.stage(PolicyVersion(version), None).await.unwrap();
        server.engine.activate().await.unwrap();
        completion(&server, json!({})).await
    };
    let oldest = completion(&server, json!({})).await;
    let records = [policy(1, 0), policy(2, 1), policy(3, 2)].map(|row| Op::Policy(Box::new(row)));
    server.store.commit(records.into()).await.unwrap();
    let mut made = vec![oldest];
    for version in 1..=3 {
        made.push(activate(version).await);
    }
    // The limit is two versions.
    let limits = [json!("stale"), Value::Null, Value::Null, Value::Null];
    for (id, reason) in made.iter().zip(limits) {
        assert_eq!(rate(&server, id, json!({})).await, reason);
    }
    activate(1).await;
    let undone = [Value::Null, Value::Null, json!("abandoned"), json!("abandoned")];
    for (id, reason) in made.iter().zip(undone) {
        assert_eq!(rate(&server, id, json!({})).await, reason);
    }
    // A canary is not the active version, but may become it.
    let canary = PolicyRecord { state: PolicyState::Canary, ..policy(4, 1) };
    server.store.commit(vec![Op::Policy(Box::new(canary))]).await.unwrap();
    let by_canary = activate(4).await;
    activate(1).await;
    assert_eq!(rate(&server, &by_canary, json!({})).await, Value::Null);
}
