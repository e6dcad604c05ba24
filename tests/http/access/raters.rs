//! Who may rate a completion, and whom a rating is by.

use serde_json::{Value, json};

use hone::config::KeyScope;
use hone_core::types::{InteractionId, SampleId, rater_id};

use crate::server::{Server, ask, key, merged, ok};

const MAJORITY: &str = "[[route]]\nname = \"users\"\n[[route.reward]]\nname = \"thumbs\"\n\
    kind = \"feedback\"\naggregate = \"majority\"\n";

async fn server() -> Server {
    Server::with(|s| {
        s.routes = hone::config::parse(MAJORITY).unwrap().routes;
        s.server.keys = vec![
            key("app", &[KeyScope::Chat]),
            key("other", &[KeyScope::Chat]),
            key("judge", &[KeyScope::Feedback]),
        ];
    })
    .await
}

/// A completion for the key `app`.
async fn asked(server: &Server, more: Value) -> String {
    let answer = ok(server.post_as("app", "/v1/chat/completions", &ask(more)).await);
    answer["id"].as_str().unwrap().to_owned()
}

async fn rate(server: &Server, key: &str, id: &str, more: Value) -> (u16, Value) {
    let body = merged(json!({"completion_id": id, "name": "thumbs", "value": 1}), more);
    server.post_as(key, "/v1/feedback", &body).await
}

fn sample(server: &Server, id: &str) -> SampleId {
    let id = InteractionId::from_completion_id(id).unwrap();
    server.store.samples_of(id).unwrap()[0].id
}

fn raters(server: &Server, id: &str) -> Vec<String> {
    let ratings = server.store.ratings_of(sample(server, id), "thumbs").unwrap();
    ratings.into_iter().map(|rating| rating.key_id.unwrap()).collect()
}

fn value(server: &Server, id: &str) -> Option<f64> {
    let rewards = server.store.rewards_of(sample(server, id)).unwrap();
    rewards.into_iter().find(|reward| reward.name == "thumbs").and_then(|reward| reward.value)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_asking_key_or_one_with_the_scope_rates() {
    let server = server().await;
    let id = asked(&server, json!({})).await;
    let correction = json!({"completion_id": id, "correction": "Five."});
    let second = asked(&server, json!({"seed": 6})).await;
    let pair = json!({"chosen": id, "rejected": second});
    let rating = json!({"completion_id": id, "name": "thumbs", "value": 1});
    for body in [&rating, &correction, &pair] {
        let (status, answer) = server.post_as("other", "/v1/feedback", body).await;
        assert_eq!((status, &answer["error"]["code"]), (403, &json!("missing_scope")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("\"other\" lacks the scope feedback"), "{message}");
    }
    assert_eq!(server.store.stats().unwrap().feedback, 0);
    for key in ["app", "judge"] {
        for body in [&rating, &correction, &pair] {
            let (status, answer) = server.post_as(key, "/v1/feedback", body).await;
            assert_eq!(status, 200, "{key}: {answer}");
        }
    }
    // A session belongs to the key that asked in it.
    asked(&server, json!({"metadata": {"session_id": "s-1"}})).await;
    let session = json!({"session_id": "s-1", "name": "thumbs", "value": 1});
    assert_eq!(server.post_as("other", "/v1/feedback", &session).await.0, 404);
    assert_eq!(server.post_as("app", "/v1/feedback", &session).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn end_users_of_one_key_are_raters_of_their_own() {
    let server = server().await;
    let id = asked(&server, json!({})).await;
    for (user, value) in [("ann", 1), ("bob", 0), ("cid", 0)] {
        ok(rate(&server, "app", &id, json!({"end_user": user, "value": value})).await);
    }
    assert_eq!((raters(&server, &id).len(), value(&server, &id)), (3, Some(0.0)));
    // A later rating of one of them replaces that one's.
    for user in ["bob", "cid"] {
        rate(&server, "app", &id, json!({"end_user": user})).await;
    }
    assert_eq!((raters(&server, &id).len(), value(&server, &id)), (3, Some(1.0)));
    // The ledger has no name of an end user.
    let key_id = raters(&server, &id)[0].split('.').next().unwrap().to_owned();
    let mut expected =
        ["ann", "bob", "cid"].map(|user| rater_id(Some(&key_id), Some(user)).unwrap());
    expected.sort();
    assert_eq!(raters(&server, &id), expected);
    let (status, answer) = rate(&server, "app", &id, json!({"end_user": ""})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("end_user")));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_end_user_the_user_of_the_request_rates() {
    let server = server().await;
    let id = asked(&server, json!({"user": "ann"})).await;
    server.store.commit(Vec::new()).await.unwrap();
    let key_id = {
        let id = InteractionId::from_completion_id(&id).unwrap();
        let interaction = server.store.interaction(id).unwrap().unwrap();
        let key_id = interaction.api_key().unwrap().to_owned();
        assert_eq!(interaction.key_id, rater_id(Some(&key_id), Some("ann")));
        key_id
    };
    rate(&server, "app", &id, json!({})).await;
    rate(&server, "app", &id, json!({"end_user": "ann"})).await;
    assert_eq!(raters(&server, &id), [rater_id(Some(&key_id), Some("ann")).unwrap()]);
    // Another key does not rate for that user.
    rate(&server, "judge", &id, json!({})).await;
    assert_eq!(raters(&server, &id).len(), 2);
    // A conversation is one of the key, whoever its users are.
    for user in ["ann", "bob"] {
        asked(&server, json!({"user": user, "metadata": {"session_id": "s-1"}})).await;
    }
    let session = json!({"session_id": "s-1", "name": "thumbs", "value": 1});
    let (status, answer) = server.post_as("app", "/v1/feedback", &session).await;
    assert_eq!((status, &answer["turns"]), (200, &json!(2)), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_user_or_the_whole_key_is_quarantined() {
    let server = Server::with(|s| s.server.client_keys = vec!["app".to_owned()]).await;
    let id = asked(&server, json!({})).await;
    let reason = async |user: &str| {
        let answer = ok(rate(&server, "app", &id, json!({"end_user": user})).await);
        answer["reason"].clone()
    };
    assert_eq!(reason("ann").await, Value::Null);
    let ann = raters(&server, &id).remove(0);
    let flag = |id: &str| format!("/admin/feedback/quarantine/{id}");
    let (status, answer) = server.post(&flag(&ann), &json!({"reason": "spam"})).await;
    assert_eq!((status, &answer["key_id"]), (200, &json!(ann)), "{answer}");
    assert_eq!(reason("ann").await, json!("quarantined"));
    assert_eq!(reason("bob").await, Value::Null);
    let key_id = ann.split('.').next().unwrap();
    assert_eq!(server.post(&flag(key_id), &json!({"reason": "spam"})).await.0, 200);
    assert_eq!(reason("bob").await, json!("quarantined"));
    for wrong in ["2bd806c97f0e.", "2bd806c97f0e.x", "2bd806c97f0e.9f86d081884c.9f86d081884c"] {
        assert_eq!(server.post(&flag(wrong), &json!({"reason": "x"})).await.0, 400, "{wrong}");
    }
}
