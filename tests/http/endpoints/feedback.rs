//! Lists of feedback: posted at once, and what a key has posted.

use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::server::{Server, ask, error, ok};

const PATH: &str = "/v1/feedback";

#[tokio::test(flavor = "multi_thread")]
async fn each_piece_of_a_list_is_answered_as_if_it_were_alone() {
    let server = Server::new().await;
    let (first, second) = (server.completion().await, server.completion().await);
    let list = json!([
        {"completion_id": first, "name": "thumbs", "value": 1, "idempotency_key": "a"},
        {"completion_id": "chatcmpl-00000000000000000000000000000000", "name": "thumbs", "value": 1},
        {"completion_id": second, "name": "thumbs", "value": "x"},
        {"chosen": first, "rejected": second},
        {"completion_id": first, "correction": "Five."},
        {"completion_id": first, "name": "thumbs", "value": 1, "idempotency_key": "a"},
        5,
    ]);
    let (status, answer) = server.post(PATH, &json!({"feedback": list})).await;
    assert_eq!((status, &answer["object"]), (200, &json!("list")), "{answer}");
    let data = answer["data"].as_array().unwrap();
    let codes: Vec<u64> = data.iter().map(|item| item["status_code"].as_u64().unwrap()).collect();
    assert_eq!(codes, [200, 404, 400, 200, 200, 200, 400]);
    let statuses: Vec<&Value> = data.iter().map(|item| &item["status"]).collect();
    let null = Value::Null;
    let [recorded, duplicate] = [json!("recorded"), json!("duplicate")];
    assert_eq!(statuses[1..5], [&null, &null, &recorded, &recorded]);
    assert_eq!(statuses[6], &null);
    // The pieces are handled at the same time, so either one with the key `a` may be the first.
    let same = [statuses[0], statuses[5]];
    assert!(same == [&recorded, &duplicate] || same == [&duplicate, &recorded], "{same:?}");
    assert_eq!((&data[0]["completion_id"], &data[3]["chosen"]), (&json!(first), &json!(first)));
    assert_eq!(data[1]["error"]["code"], "completion_not_found");
    assert_eq!(
        error(&data[6]),
        "feedback[6] is 5: it must be an object | feedback[6] | invalid_value"
    );
    // Each is counted as if it were posted alone.
    let metric = async |outcome: &str| {
        server.metric(&format!("hone_http_feedback_total{{outcome=\"{outcome}\"}}")).await
    };
    assert_eq!((metric("recorded").await, metric("duplicate").await), (Some(3.0), Some(1.0)));
    assert_eq!((metric("invalid").await, metric("unknown").await), (Some(1.0), Some(1.0)));
    // A bare list is the same.
    let piece = json!({"completion_id": second, "name": "thumbs", "value": 1});
    let (status, answer) = server.post(PATH, &json!([piece])).await;
    assert_eq!((status, &answer["data"][0]["status"]), (200, &recorded));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_is_committed_at_once() {
    let server = Server::new().await;
    let mut pieces = Vec::new();
    for _ in 0..40 {
        let id = server.completion().await;
        pieces.push(json!({"completion_id": id, "name": "thumbs", "value": 1}));
    }
    server.store.commit(Vec::new()).await.unwrap();
    let commits = || server.metrics.store_commit_duration.get_sample_count();
    let before = commits();
    let answer = ok(server.post(PATH, &json!(pieces)).await);
    let data = answer["data"].as_array().unwrap();
    assert!(data.len() == 40 && data.iter().all(|item| item["status"] == "recorded"));
    assert!(commits() - before <= 4, "{} commits", commits() - before);
    assert_eq!(server.store.stats().unwrap().feedback, 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_lists_are_refused() {
    let server = Server::new().await;
    let many = vec![json!({}); 1001];
    let cases = [
        json!([]),
        json!({"feedback": []}),
        json!({"feedback": {}}),
        json!({"feedback": [{}], "name": "thumbs"}),
        json!(many),
        json!("thumbs"),
    ];
    assert_snapshot!(server.refusals(PATH, cases).await, @r#"
    feedback has 0 entries: it must have from 1 to 1000 | feedback | invalid_value
    feedback has 0 entries: it must have from 1 to 1000 | feedback | invalid_value
    feedback is an object: it must be a list | feedback | invalid_value
    name is not a field: the fields are feedback | name | unsupported_parameter
    feedback has 1001 entries: it must have from 1 to 1000 | feedback | invalid_value
    the body must be a JSON object or a list of such objects | - | invalid_body
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_lists_what_it_has_posted_on_a_completion() {
    let server =
        Server::with(|s| s.server.client_keys = vec!["alice".to_owned(), "bob".to_owned()]).await;
    let chat = ask(json!({"n": 2}));
    let (_, answer) = server.post_as("alice", "/v1/chat/completions", &chat).await;
    let id = answer["id"].as_str().unwrap();
    let posts = [
        ("alice", json!({"completion_id": id, "name": "thumbs", "value": 0})),
        ("alice", json!({"completion_id": id, "name": "thumbs", "value": 1, "comment": "better"})),
        ("alice", json!({"completion_id": id, "choice": 1, "name": "stars", "value": 4})),
        ("alice", json!({"completion_id": id, "correction": "Five.", "comment": "short"})),
        ("bob", json!({"completion_id": id, "name": "thumbs", "value": 0.5})),
    ];
    for (key, body) in &posts {
        ok(server.post_as(key, PATH, body).await);
    }
    let list = format!("{PATH}?completion_id={id}");
    let (status, answer) = server.get_as("alice", &list).await;
    assert_eq!((status, &answer["object"]), (200, &json!("list")), "{answer}");
    let found: Vec<Value> = answer["data"].as_array().unwrap().clone();
    assert!(found.iter().all(|item| {
        item["object"] == "feedback"
            && item["completion_id"] == id
            && item["created"].as_u64().unwrap() > 1_700_000_000
            && item["id"].is_string()
    }));
    let mut shown: Vec<Value> = found
        .iter()
        .map(|item| {
            json!([
                item["choice"],
                item["name"],
                item["value"],
                item["comment"],
                item["correction"]
            ])
        })
        .collect();
    shown.sort_by_key(Value::to_string);
    let expected = [
        json!([0, null, null, "short", "Five."]),
        json!([0, "thumbs", 1.0, "better", null]),
        json!([1, "stars", 4.0, null, null]),
    ];
    assert_eq!(shown, {
        let mut expected = expected.to_vec();
        expected.sort_by_key(Value::to_string);
        expected
    });
    let (_, answer) = server.get_as("bob", &list).await;
    assert_eq!(answer["data"].as_array().unwrap().len(), 1);
    assert_eq!(answer["data"][0]["value"], 0.5);
    // Unstored, unknown and missing ids.
    let (_, unstored) =
        server.post_as("alice", "/v1/chat/completions", &ask(json!({"store": false}))).await;
    let unstored = unstored["id"].as_str().unwrap();
    for (path, status, code) in [
        (format!("{PATH}?completion_id={unstored}"), 404, "completion_not_stored"),
        (format!("{PATH}?completion_id=chatcmpl-{}", "0".repeat(32)), 404, "completion_not_found"),
        (PATH.to_owned(), 400, "invalid_value"),
        (format!("{PATH}?completion_id=x"), 400, "invalid_value"),
        (format!("{list}&name=thumbs"), 400, "unsupported_parameter"),
    ] {
        let (found, answer) = server.get_as("alice", &path).await;
        assert_eq!((found, &answer["error"]["code"]), (status, &json!(code)), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn comments_without_a_value_are_listed() {
    let route = "[[route]]\nname = \"users\"\n\
        [[route.reward]]\nname = \"remark\"\nkind = \"feedback\"\ntype = \"comment\"\n";
    let routes = hone::config::parse(route).unwrap().routes;
    let server = Server::with(|s| s.routes = routes).await;
    let id = server.completion().await;
    let body = json!({"completion_id": id, "name": "remark", "comment": "too long"});
    assert_eq!(server.post(PATH, &body).await.0, 200);
    let (_, answer) = server.get(&format!("{PATH}?completion_id={}", id)).await;
    let [item] = &answer["data"].as_array().unwrap()[..] else { panic!("{answer}") };
    assert_eq!((&item["name"], &item["comment"]), (&json!("remark"), &json!("too long")));
    assert_eq!(item["value"], Value::Null);
}
