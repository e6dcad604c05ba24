//! `POST /v1/feedback`.

mod corrections;
mod pairs;
mod prospects;

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use hone::config::KeyScope;
use hone_core::types::{InteractionId, PolicyVersion, RewardSource};
use hone_store::{Op, QuarantinedKey};

use crate::server::{Server, ask, id_of, key, merged, ok};

#[tokio::test(flavor = "multi_thread")]
async fn feedback_right_after_a_completion_is_recorded() {
    let server = Server::new().await;
    for _ in 0..50 {
        let id = server.completion().await;
        let body = json!({"completion_id": id, "name": "thumbs", "value": 0.5, "comment": "meh"});
        let answer = ok(server.post("/v1/feedback", &body).await);
        assert_eq!(answer["status"], "recorded");
    }
    assert_eq!(server.store.stats().unwrap().feedback, 50);
    let recorded = "hone_http_feedback_total{outcome=\"recorded\"}";
    assert_eq!(server.metric(recorded).await, Some(50.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_idempotency_key_is_a_duplicate() {
    let server = Server::new().await;
    let id = server.completion().await;
    let body = json!({"completion_id": id, "choice": 0, "name": "thumbs", "value": true,
                      "comment": "right", "idempotency_key": "a-1"});
    let (_, answer) = server.post("/v1/feedback", &body).await;
    let interaction = InteractionId::from_completion_id(&id).unwrap();
    let [sample] = &server.store.samples_of(interaction).unwrap()[..] else { panic!() };
    let expected = json!({
        "object": "feedback", "id": format!("{}:thumbs", sample.id), "status": "recorded",
        "completion_id": id, "choice": 0, "name": "thumbs", "policy_version": 0, "weight": 1.0,
        "trained": true, "reason": null,
    });
    assert_eq!(answer, expected);
    let [reward] = &server.store.rewards_of(sample.id).unwrap()[..] else { panic!() };
    assert_eq!(reward.value, Some(1.0));
    assert_eq!(reward.source, RewardSource::Feedback);
    assert_eq!(reward.comment.as_deref(), Some("right"));
    // The same post again changes nothing, and another one with its key is refused.
    let (status, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!((status, &answer["status"]), (200, &json!("duplicate")));
    let other_id = server.completion().await;
    for (name, changed) in [
        ("value", json!(0)),
        ("name", json!("stars")),
        ("comment", json!("wrong")),
        ("end_user", json!("bob")),
        ("completion_id", json!(other_id)),
    ] {
        let mut other = body.clone();
        other[name] = changed;
        let (status, answer) = server.post("/v1/feedback", &other).await;
        assert_eq!((status, &answer["error"]["param"]), (422, &json!("idempotency_key")), "{name}");
        assert_eq!(answer["error"]["code"], "idempotency_key_reused");
    }
    assert_eq!(server.store.rewards_of(sample.id).unwrap()[0].value, Some(1.0));
    assert_eq!(server.store.stats().unwrap().feedback, 1);
    // A part that the route does not have is recorded without a weight.
    let other = json!({"completion_id": id, "name": "stars", "value": 4});
    let (_, answer) = server.post("/v1/feedback", &other).await;
    assert_eq!((&answer["status"], &answer["weight"]), (&json!("recorded"), &Value::Null));
    assert_eq!((&answer["trained"], &answer["reason"]), (&json!(false), &json!("unknown_part")));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_feedback_is_refused() {
    let server = Server::new().await;
    let id = server.completion().await;
    let good = json!({"completion_id": id, "name": "thumbs", "value": 1});
    let unknown = InteractionId::new().completion_id();
    let cases = [
        ("completion_id", json!(unknown), "there is no such completion"),
        ("choice", json!(1), "choice is 1: the completion has no such choice"),
        ("completion_id", json!("chatcmpl-xyz"), "completion_id is \"chatcmpl-xyz\""),
        ("completion_id", json!(7), "completion_id is 7: it must be a string"),
        ("completion_id", Value::Null, "completion_id is missing"),
        ("name", Value::Null, "name is missing"),
        ("name", json!(""), "name is \"\""),
        ("name", json!("x".repeat(65)), "it must be at most 64 characters long"),
        ("value", json!("good"), "value is \"good\": \"thumbs\" takes a number from 0 to 1"),
        ("value", Value::Null, "value is absent: \"thumbs\" takes a number from 0 to 1"),
        ("value", json!([1]), "value is [1]"),
        ("choice", json!(-1), "choice is -1: it must be a whole number from 0 to"),
        ("choice", json!(0.5), "choice is 0.5"),
        ("comment", json!(5), "comment is 5: it must be a string"),
        ("idempotency_key", json!("k".repeat(256)), "it must be at most 255 characters long"),
        ("idempotencykey", json!("k"), "idempotencykey is not a field: the fields are"),
    ];
    let cases = cases.map(|(field, value, part)| {
        let status = if value == unknown { 404 } else { 400 };
        (merged(good.clone(), json!({field: value})), status, field, part)
    });
    server.refuses("/v1/feedback", cases).await;
    assert_eq!(server.store.stats().unwrap().feedback, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_cannot_score_a_graders_part() {
    let route = "[[route]]\nname = \"sums\"\n\
        [[route.reward]]\nname = \"answer\"\nkind = \"numeric_match\"\n\
        [[route.reward]]\nname = \"thumbs\"\nkind = \"feedback\"\n";
    let routes = hone::config::parse(route).unwrap().routes;
    let server = Server::with(|s| s.routes = routes).await;
    let id = server.completion().await;
    let body = |name: &str| json!({"completion_id": id, "name": name, "value": 1});
    let (status, answer) = server.post("/v1/feedback", &body("answer")).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("name")), "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("\"answer\"") && message.contains("\"sums\""), "{message}");
    assert_eq!(server.store.stats().unwrap().feedback, 0);
    assert_eq!(server.post("/v1/feedback", &body("thumbs")).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_must_have_the_type_of_its_part() {
    let route = "[[route]]\nname = \"users\"\n\
        [[route.reward]]\nname = \"stars\"\nkind = \"feedback\"\nrange = [1, 5]\n\
        [[route.reward]]\nname = \"solved\"\nkind = \"feedback\"\ntype = \"boolean\"\n\
        [[route.reward]]\nname = \"remark\"\nkind = \"feedback\"\ntype = \"comment\"\n";
    let routes = hone::config::parse(route).unwrap().routes;
    let server = Server::with(|s| s.routes = routes).await;
    let id = server.completion().await;
    let refused = [
        ("stars", json!(6), "value", "value is 6: \"stars\" takes a number from 1 to 5"),
        ("solved", json!(2), "value", "value is 2: \"solved\" takes true or false, or 1 or 0"),
        ("remark", json!(1), "value", "value is 1: \"remark\" takes a comment and no value"),
        ("remark", Value::Null, "comment", "comment is absent: \"remark\" takes a comment"),
        ("other", json!("x"), "value", "value is \"x\": it must be a finite number or a boolean"),
    ];
    for (name, value, field, message) in refused {
        let body = json!({"completion_id": id, "name": name, "value": value});
        let (status, answer) = server.post("/v1/feedback", &body).await;
        let expected = if value.is_number() { 422 } else { 400 };
        assert_eq!((status, &answer["error"]["param"]), (expected, &json!(field)), "{answer}");
        assert_eq!(answer["error"]["message"], message);
    }
    assert_eq!(server.store.stats().unwrap().feedback, 0);
    let invalid = "hone_http_feedback_total{outcome=\"invalid\"}";
    assert_eq!(server.metric(invalid).await, Some(5.0));
    let remark = json!({"completion_id": id, "name": "remark", "comment": "too long"});
    let (status, answer) = server.post("/v1/feedback", &remark).await;
    assert_eq!((status, &answer["status"]), (200, &json!("recorded")), "{answer}");
    // It is recorded, but the trainer does not use it.
    assert_eq!(server.store.ungrouped_feedback(u64::MAX, 9).unwrap(), []);
    for (name, value) in [("stars", json!(5)), ("solved", json!(1))] {
        let body = json!({"completion_id": id, "name": name, "value": value});
        assert_eq!(server.post("/v1/feedback", &body).await.0, 200);
    }
    let waiting = server.store.ungrouped_feedback(u64::MAX, 9).unwrap();
    let names: Vec<&str> = waiting.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names, ["stars", "solved"]);
    let rewards = server.store.rewards_of(waiting[0].0).unwrap();
    let values: Vec<_> = rewards.iter().map(|r| (r.name.as_str(), r.value)).collect();
    assert_eq!(values, [("remark", None), ("solved", Some(1.0)), ("stars", Some(5.0))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_gets_keys_ends_and_scaled_ratings() {
    let route = r#"
        [[route]]
        name = "chat"
        [[route.reward]]
        name = "stars"
        kind = "feedback"
        range = [1, 5]
        [[route.reward]]
        name = "complaint"
        kind = "feedback"
        type = "boolean"
        weight = -1.0
        [[route.reward]]
        name = "free"
        kind = "feedback"
    "#;
    let routes = hone::config::parse(route).unwrap().routes;
    let server = Server::with(|s| s.routes = routes).await;
    let session = json!({"metadata": {"session_id": "s-1"}, "user": "u-1"});
    for body in [session, json!({"user": "u-1"}), json!({})] {
        assert_eq!(server.chat(&ask(body)).await.0, 200);
    }
    let keys = server.policies.assigned.lock().unwrap().clone();
    assert_eq!(keys[..2], ["s-1", "u-1"]);
    assert_ne!(keys[2], keys[1], "a request without session and user is on its own");
    let ends = vec![(PolicyVersion::BASE, false); 3];
    assert_eq!(*server.policies.answers.lock().unwrap(), ends);

    let id = server.completion().await;
    for (name, value) in [("stars", json!(4)), ("complaint", json!(true)), ("free", json!(-1))] {
        let body = json!({"completion_id": id, "name": name, "value": value});
        assert_eq!(server.post("/v1/feedback", &body).await.0, 200);
    }
    let ratings = server.policies.ratings.lock().unwrap().clone();
    let found: Vec<_> = ratings.iter().map(|r| (r.part.as_str(), r.value)).collect();
    assert_eq!(found, [("stars", 0.75), ("complaint", 0.0), ("free", 0.0)]);
}

/// The default route, without any configuration.
#[tokio::test(flavor = "multi_thread")]
async fn the_default_routes_thumbs_are_evidence_of_a_canary() {
    let server = Server::with(|s| s.routes = hone::config::parse("").unwrap().routes).await;
    for value in [json!(1), json!(0), json!(true), json!(false)] {
        let body =
            json!({"completion_id": server.completion().await, "name": "thumbs", "value": value});
        ok(server.post("/v1/feedback", &body).await);
    }
    let ratings = server.policies.ratings.lock().unwrap().clone();
    let found: Vec<_> = ratings.iter().map(|r| (r.value, r.key.clone(), r.keys)).collect();
    assert_eq!(found, [1.0, 0.0, 1.0, 0.0].map(|value| (value, None, 0)));
    // Without a canary no rating is looked up.
    server.policies.is_quiet.store(true, Ordering::SeqCst);
    let body = json!({"completion_id": server.completion().await, "name": "thumbs", "value": 1});
    ok(server.post("/v1/feedback", &body).await);
    assert_eq!(server.policies.ratings.lock().unwrap().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn evidence_names_the_key_whatever_its_end_user_and_a_quarantined_key_gives_none() {
    let keys = "[server]\nclient_keys = [\"a\", \"b\"]\nadmin_keys = [\"root\"]\n\
        [[route]]\nname = \"chat\"\n[[route.reward]]\nname = \"thumbs\"\nkind = \"feedback\"\n\
        type = \"boolean\"\nmax_key_share = 0.2";
    let config = hone::config::parse(keys).unwrap();
    let server = Server::with(|s| {
        s.routes = config.routes;
        s.server.client_keys = config.server.client_keys;
        s.server.admin_keys = config.server.admin_keys;
    })
    .await;
    let rate = async |key: &str, user: &str| {
        let asked: Value = server.chat_as(key, &ask(json!({}))).await.json().await.unwrap();
        let body = json!({"completion_id": asked["id"], "name": "thumbs", "value": true, "end_user": user});
        let request = server.client.post(server.url("/v1/feedback")).bearer_auth(key).json(&body);
        assert_eq!(request.send().await.unwrap().status(), 200);
    };
    for (key, user) in [("a", "one"), ("a", "two"), ("b", "one")] {
        rate(key, user).await;
    }
    let ratings = server.policies.ratings.lock().unwrap().clone();
    assert!(ratings.iter().all(|r| (r.keys, r.max_key_share) == (2, 0.2)), "{ratings:?}");
    let [first, second, other] = &ratings[..] else { panic!("{ratings:?}") };
    assert!(first.key.is_some() && first.key == second.key && first.key != other.key);
    let key_id = first.key.clone().unwrap();
    let row = QuarantinedKey { key_id, reason: "{}".to_owned(), since: 1 };
    server.store.commit(vec![Op::Quarantine(row)]).await.unwrap();
    rate("a", "three").await;
    rate("b", "three").await;
    assert_eq!(server.policies.ratings.lock().unwrap().len(), 4);
}

async fn turn(server: &Server, session: &str, more: Value) -> InteractionId {
    let body = merged(ask(json!({"metadata": {"session_id": session}})), more);
    let answer = ok(server.chat(&body).await);
    id_of(&answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_credits_each_of_its_turns() {
    let server = Server::new().await;
    let first = turn(&server, "s-1", json!({})).await;
    let second = turn(&server, "s-1", json!({})).await;
    turn(&server, "s-2", json!({})).await;
    // The conversation continues with neither choice.
    let forked = turn(&server, "s-1", json!({"n": 2})).await;
    let body = json!({"session_id": "s-1", "name": "thumbs", "value": true,
                      "idempotency_key": "once", "comment": "solved"});
    let (status, answer) = server.post("/v1/feedback", &body).await;
    let expected = json!({"object": "feedback", "status": "recorded", "session_id": "s-1",
                          "name": "thumbs", "turns": 2, "trained": true, "reason": null});
    assert_eq!((status, &answer), (200, &expected));
    for id in [first, second] {
        let [sample] = &server.store.samples_of(id).unwrap()[..] else { panic!() };
        let [reward] = &server.store.rewards_of(sample.id).unwrap()[..] else { panic!() };
        assert_eq!((reward.name.as_str(), reward.value), ("thumbs", Some(1.0)));
        assert_eq!(reward.comment.as_deref(), Some("solved"));
    }
    for sample in server.store.samples_of(forked).unwrap() {
        assert_eq!(server.store.rewards_of(sample.id).unwrap(), []);
    }
    assert_eq!(server.store.ungrouped_feedback(u64::MAX, 9).unwrap().len(), 2);
    // The same idempotency key is a duplicate, even after a further turn.
    turn(&server, "s-1", json!({})).await;
    let (_, again) = server.post("/v1/feedback", &body).await;
    assert_eq!((&again["status"], &again["turns"]), (&json!("duplicate"), &json!(2)));
    let mut changed = body.clone();
    changed["value"] = json!(false);
    assert_eq!(server.post("/v1/feedback", &changed).await.0, 422);
    assert_eq!(server.store.stats().unwrap().feedback, 2);
    // A new post credits every turn, including the last one.
    let new = json!({"session_id": "s-1", "name": "thumbs", "value": 0});
    let (_, answer) = server.post("/v1/feedback", &new).await;
    assert_eq!((&answer["status"], &answer["turns"]), (&json!("recorded"), &json!(3)));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_choices_the_continued_one_is_credited() {
    let server = Server::with(|s| s.fake.context = 8192).await;
    // A grammar whose texts differ with the seed.
    let body = ask(json!({
        "n": 3, "metadata": {"session_id": "s-1"}, "max_tokens": 60, "logit_bias": {"0": -100},
        "guided_regex": "( is| an| answer){8,12}[.]",
    }));
    let answer = ok(server.chat(&body).await);
    let first = id_of(&answer);
    let mut messages = body["messages"].as_array().unwrap().clone();
    messages.push(answer["choices"][1]["message"].clone());
    messages.push(json!({"role": "user", "content": "And then?"}));
    let second = turn(&server, "s-1", json!({"messages": messages, "max_tokens": 12})).await;
    let body = json!({"session_id": "s-1", "name": "thumbs", "value": 1});
    let (status, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!((status, &answer["turns"]), (200, &json!(2)), "{answer}");
    for (id, credited) in [(first, 1), (second, 0)] {
        for sample in server.store.samples_of(id).unwrap() {
            let rewards = server.store.rewards_of(sample.id).unwrap();
            assert_eq!(rewards.len(), usize::from(sample.choice == credited), "{id:?}");
        }
    }
    // An edited choice is none with which the conversation continued.
    let body = ask(json!({"n": 2, "metadata": {"session_id": "s-2"}, "max_tokens": 12}));
    assert_eq!(server.chat(&body).await.0, 200);
    let mut messages = body["messages"].as_array().unwrap().clone();
    messages.push(json!({"role": "assistant", "content": "Ho."}));
    messages.push(json!({"role": "user", "content": "And then?"}));
    turn(&server, "s-2", json!({"messages": messages})).await;
    let body = json!({"session_id": "s-2", "name": "thumbs", "value": 1});
    let (_, answer) = server.post("/v1/feedback", &body).await;
    assert_eq!(answer["turns"], json!(1), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_sessions_are_refused() {
    let server = Server::new().await;
    let id = turn(&server, "s-1", json!({})).await.completion_id();
    turn(&server, "forked", json!({"n": 2})).await;
    let cases = [
        (
            json!({"session_id": "s-9"}),
            404,
            "session_id",
            "this key made no request in this session",
        ),
        (json!({"session_id": ""}), 400, "session_id", "it must be the metadata.session_id"),
        (json!({"session_id": "s-1", "completion_id": id}), 400, "session_id", "absent beside"),
        (json!({"session_id": "s-1", "choice": 0}), 400, "choice", "absent beside session_id"),
        (json!({}), 400, "completion_id", "completion_id is missing"),
        (json!({"session_id": "forked"}), 400, "session_id", "no turn has exactly one finished"),
    ];
    let rating = json!({"name": "thumbs", "value": 1});
    let cases = cases
        .map(|(body, status, field, part)| (merged(body, rating.clone()), status, field, part));
    server.refuses("/v1/feedback", cases).await;
    let wrong = json!({"session_id": "s-1", "name": "thumbs", "value": "good"});
    assert_eq!(server.post("/v1/feedback", &wrong).await.0, 400);
    assert_eq!(server.store.stats().unwrap().feedback, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rating_of_another_servers_completion_is_recorded_in_a_fleet() {
    let server = Server::with(|setup| {
        setup.in_fleet = true;
        setup.server.keys = vec![key("w", &[KeyScope::Chat]), key("j", &[KeyScope::Feedback])];
    })
    .await;
    let elsewhere = InteractionId::of_route("default").completion_id();
    let body = json!({"completion_id": elsewhere, "name": "thumbs", "value": 1});
    for key in ["w", "j"] {
        let answer = ok(server.post_as(key, "/v1/feedback", &body).await);
        let expected = json!({
            "object": "feedback", "id": format!("{elsewhere}-0:thumbs"), "status": "recorded",
            "completion_id": elsewhere, "choice": 0, "name": "thumbs", "policy_version": null,
            "weight": 1.0, "trained": true, "reason": null,
        });
        assert_eq!(answer, expected);
    }
    assert_eq!(server.store.outbox_state().unwrap().unwrap().last, 2);
    // The route is checked as if the completion were here.
    let wrong = merged(body.clone(), json!({"value": 7}));
    let (status, answer) = server.post_as("j", "/v1/feedback", &wrong).await;
    assert_eq!((status, &answer["error"]["param"]), (422, &json!("value")));
    // No route has this id, and of others only ratings can be forwarded.
    let unknown = merged(
        body.clone(),
        json!({"completion_id": InteractionId::of_route("other").completion_id()}),
    );
    let corrected = merged(body.clone(), json!({"correction": "5"}));
    for body in [unknown, corrected] {
        let (status, answer) = server.post_as("j", "/v1/feedback", &body).await;
        assert_eq!((status, &answer["error"]["param"]), (404, &json!("completion_id")), "{answer}");
    }
}
