//! `POST /v1/feedback` with the text that a completion should have been.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use hone_core::types::{Group, GroupState, InteractionId, Sample, SampleOrigin};
use hone_engine::Engine;
use hone_store::{Op, QuarantinedKey};

use crate::server::{Server, ask, id_of, ok};

/// The corrections of a completion with their groups, oldest first.
fn corrections(server: &Server, id: &str) -> Vec<(Sample, Group)> {
    let id = InteractionId::from_completion_id(id).unwrap();
    let mut samples = server.store.samples_of(id).unwrap();
    samples.retain(|sample| sample.origin == SampleOrigin::Correction);
    let mut groups = server.store.groups_of(id).unwrap();
    groups.retain(Group::is_correction);
    samples.into_iter().zip(groups).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correction_becomes_an_answer_to_the_recorded_prompt() {
    let server = Server::new().await;
    let id = server.completion().await;
    let body = json!({"completion_id": id, "correction": "It is 5.", "idempotency_key": "c-1"});
    let answer = ok(server.post("/v1/feedback", &body).await);
    let expected = json!({
        "object": "feedback", "status": "recorded", "completion_id": id, "choice": 0,
        "policy_version": 0, "weight": 0.5, "trained": true, "reason": null, "rating": null,
    });
    assert_eq!(answer, expected);
    let [(sample, group)] = &corrections(&server, &id)[..] else { panic!() };
    let codec = server.engine.codec();
    assert_eq!(sample.text, "It is 5.");
    assert_eq!(codec.decode(&sample.ids).unwrap(), "It is 5.");
    assert!(codec.stop_ids().contains(sample.ids.last().unwrap()), "it ends like an answer");
    assert_eq!(group.state, GroupState::Ready);
    // The same idempotency key again changes nothing.
    let (status, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!((status, &answer["status"]), (200, &json!("duplicate")));
    let changed = json!({"completion_id": id, "correction": "No.", "idempotency_key": "c-1"});
    assert_eq!(server.post("/v1/feedback", &changed).await.0, 422);
    assert_eq!(corrections(&server, &id).len(), 1);
    assert_eq!(server.metric("hone_feedback_corrections_received_total").await, Some(1.0));
    assert_eq!(server.metric("hone_feedback_received_total").await, Some(0.0), "no rating");
    // Another text replaces the one that waits.
    let other = json!({"completion_id": id, "correction": "Five."});
    let (_, answer) = server.post("/v1/feedback", &other).await;
    assert_eq!(answer["status"], "recorded");
    let states: Vec<GroupState> =
        corrections(&server, &id).into_iter().map(|(_, group)| group.state).collect();
    assert_eq!(states, [GroupState::Dropped("replaced".to_owned()), GroupState::Ready]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rating_can_be_posted_with_a_correction() {
    let server = Server::new().await;
    let id = server.completion().await;
    let body = json!({"completion_id": id, "correction": "It is 5.", "name": "thumbs", "value": 0,
                      "comment": "wrong", "idempotency_key": "c-1"});
    let answer = ok(server.post("/v1/feedback", &body).await);
    let rating = json!({"name": "thumbs", "weight": 1.0, "trained": true, "reason": null});
    assert_eq!((&answer["trained"], &answer["rating"]), (&json!(true), &rating));
    let interaction = InteractionId::from_completion_id(&id).unwrap();
    let samples = server.store.samples_of(interaction).unwrap();
    let served = samples.iter().find(|s| s.origin == SampleOrigin::Served).unwrap();
    let [reward] = &server.store.rewards_of(served.id).unwrap()[..] else { panic!() };
    assert_eq!((reward.value, reward.comment.as_deref()), (Some(0.0), Some("wrong")));
    server.post("/v1/feedback", &body).await;
    assert_eq!(server.store.stats().unwrap().feedback, 2, "one rating and one correction");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correction_that_cannot_be_used_is_answered_with_the_reason() {
    let reason = async |server: &Server, text: &str| -> Value {
        let id = server.completion().await;
        let body = json!({"completion_id": id, "correction": text});
        let answer = ok(server.post("/v1/feedback", &body).await);
        assert_eq!(answer["trained"], answer["reason"].is_null(), "{answer}");
        assert_eq!(corrections(server, &id)[0].0.text, text, "it is recorded");
        answer["reason"].clone()
    };
    let server = Server::new().await;
    assert_eq!(reason(&server, "The answer is 5.").await, json!("unchanged"));
    assert_eq!(reason(&server, "Five.").await, Value::Null);
    server.trainer.longest_sample.store(30, Ordering::SeqCst);
    assert_eq!(reason(&server, &"Five. ".repeat(30)).await, json!("too_long"));
    let unchanged = "hone_train_corrections_total{outcome=\"unchanged\"}";
    assert_eq!(server.metric(unchanged).await, Some(1.0));
    assert_eq!(server.metric("hone_feedback_waiting_corrections").await, Some(1.0));

    let without_weight = Server::with(|s| s.learning.correction_weight = 0.0).await;
    assert_eq!(reason(&without_weight, "Five.").await, json!("correction_weight"));
    assert_eq!(without_weight.store.ready_groups(9).unwrap(), []);
    let disabled = Server::with(|s| s.learning.enabled = false).await;
    assert_eq!(reason(&disabled, "Five.").await, json!("disabled"));
    assert_eq!(disabled.store.ready_groups(9).unwrap().len(), 1, "it waits");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quarantined_keys_correction_is_not_trained_on() {
    let server = Server::with(|s| s.server.client_keys = vec!["secret".to_owned()]).await;
    let asked = server.post_as("secret", "/v1/chat/completions", &ask(json!({}))).await.1;
    let id = id_of(&asked);
    server.store.flush().await.unwrap();
    let key_id = server.store.interaction(id).unwrap().unwrap().key_id.unwrap();
    let row = QuarantinedKey { key_id, reason: "{}".to_owned(), since: 1 };
    server.store.commit(vec![Op::Quarantine(row)]).await.unwrap();
    let body = json!({"completion_id": asked["id"], "correction": "Five."});
    let answer = server.post_as("secret", "/v1/feedback", &body).await.1;
    assert_eq!((&answer["trained"], &answer["reason"]), (&json!(false), &json!("quarantined")));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_corrections_are_refused() {
    let server = Server::new().await;
    let id = server.completion().await;
    let cases = [
        (
            json!({"completion_id": id, "correction": ""}),
            400,
            "correction",
            "correction is \"\": it must be the text that the answer should have been, not blank",
        ),
        (json!({"completion_id": id, "correction": " \n"}), 400, "correction", "not blank"),
        (json!({"completion_id": id, "correction": 5}), 400, "correction", "correction is 5"),
        (
            json!({"completion_id": id, "correction": "a<|im_end|>b"}),
            400,
            "correction",
            "it must be text without special tokens",
        ),
        (
            json!({"session_id": "s", "correction": "a"}),
            400,
            "correction",
            "it must be absent beside session_id",
        ),
        (json!({"correction": "a"}), 400, "completion_id", "completion_id is missing"),
        (
            json!({"completion_id": id, "choice": 3, "correction": "a"}),
            400,
            "choice",
            "choice is 3: the completion has no such choice",
        ),
        (
            json!({"completion_id": InteractionId::new().completion_id(), "correction": "a"}),
            404,
            "completion_id",
            "there is no such completion",
        ),
        (
            json!({"completion_id": id, "correction": "a", "value": 1}),
            400,
            "name",
            "name is missing: it must be the name of a reward part",
        ),
        (
            json!({"completion_id": id, "correction": "a", "name": "thumbs"}),
            400,
            "value",
            "value is absent",
        ),
        (
            json!({"completion_id": id}),
            400,
            "name",
            "name is missing: it must be the name of a reward part, or correction must be given",
        ),
        (
            json!({"chosen": id, "rejected": id, "correction": "a"}),
            400,
            "correction",
            "correction is not a field",
        ),
    ];
    server.refuses("/v1/feedback", cases).await;
    assert_eq!(server.store.stats().unwrap().feedback, 0);
}
