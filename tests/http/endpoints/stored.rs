//! Recorded chat completions.

use insta::assert_snapshot;
use reqwest::Method;
use serde_json::{Value, json};

use hone_core::types::InteractionId;

use crate::server::{Server, ask, error, ok};

const PATH: &str = "/v1/chat/completions";

async fn server() -> Server {
    Server::with(|setup| setup.server.client_keys = vec!["alice".to_owned(), "bob".to_owned()])
        .await
}

/// A completion for a key; its id.
async fn chat(server: &Server, key: &str, more: Value) -> String {
    let answer = ok(server.post_as(key, PATH, &ask(more)).await);
    answer["id"].as_str().unwrap().to_owned()
}

fn ids(list: &Value) -> Vec<&str> {
    list["data"].as_array().unwrap().iter().map(|entry| entry["id"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_choice_is_read_directly_after_the_answer() {
    let server = server().await;
    for _ in 0..50 {
        let id = chat(&server, "alice", json!({"n": 6, "max_tokens": 8})).await;
        let (_, stored) = server.get_as("alice", &format!("{PATH}/{id}")).await;
        assert_eq!(stored["choices"].as_array().unwrap().len(), 6, "{stored}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_is_read_as_it_was_answered() {
    let server = server().await;
    let metadata = json!({"answer": "5"});
    let body = ask(json!({"n": 2, "metadata": metadata, "max_tokens": 30, "temperature": 0.5}));
    let (_, mut expected) = server.post_as("alice", PATH, &body).await;
    let more = json!({
        "metadata": metadata, "temperature": 0.5, "top_p": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "seed": 5, "max_completion_tokens": 30,
    });
    expected.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    // How many tokens were cached is not recorded.
    expected["usage"].as_object_mut().unwrap().remove("prompt_tokens_details");
    let path = format!("{PATH}/{}", expected["id"].as_str().unwrap());
    assert_eq!(server.get_as("alice", &path).await, (200, expected.clone()));

    let (status, list) = server.get_as("alice", &format!("{path}/messages")).await;
    let id = format!("{}-0", expected["id"].as_str().unwrap());
    let message = json!({"id": id, "role": "user", "content": "What is 2 + 3?"});
    let page = json!({"object": "list", "data": [message], "first_id": id, "last_id": id,
                      "has_more": false});
    assert_eq!((status, list), (200, page));
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_listed_in_pages() {
    let server = server().await;
    let mut own = Vec::new();
    for number in 0..5 {
        let kind = if number % 2 == 0 { "even" } else { "odd" };
        let model = if number < 3 { "default" } else { "fake" };
        let more = json!({"metadata": {"kind": kind}, "model": model});
        own.push(chat(&server, "alice", more).await);
        chat(&server, "bob", json!({})).await;
    }
    chat(&server, "alice", json!({"store": false})).await;
    let list = async |query: &str| server.get_as("alice", &format!("{PATH}{query}")).await.1;
    let all = list("").await;
    assert_eq!(ids(&all), own);
    assert_eq!((&all["object"], &all["has_more"]), (&json!("list"), &json!(false)));
    assert_eq!((&all["first_id"], &all["last_id"]), (&json!(own[0]), &json!(own[4])));
    assert_eq!(all["data"][0]["choices"][0]["message"]["content"], "The answer is 5.");

    let mut after = String::new();
    let mut found = Vec::new();
    loop {
        let page = list(&format!("?limit=2&order=desc{after}")).await;
        found.extend(ids(&page).into_iter().map(str::to_owned));
        if page["has_more"] == false {
            break;
        }
        assert_eq!(ids(&page).len(), 2);
        after = format!("&after={}", page["last_id"].as_str().unwrap());
    }
    found.reverse();
    assert_eq!(found, own);
    let odd = list("?metadata[kind]=odd").await;
    assert_eq!(ids(&odd), [own[1].as_str(), &own[3]]);
    let both = list("?metadata%5Bkind%5D=even&model=fake&limit=1").await;
    assert_eq!((ids(&both), &both["has_more"]), (vec![own[4].as_str()], &json!(false)));
    let none = list("?metadata[kind]=prime").await;
    assert_eq!((ids(&none).len(), &none["last_id"]), (0, &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_listed_in_pages() {
    let server = server().await;
    let messages = json!([
        {"role": "system", "content": "a"}, {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"},
    ]);
    let id = chat(&server, "alice", json!({"messages": messages})).await;
    let list =
        async |query: &str| server.get_as("alice", &format!("{PATH}/{id}/messages{query}")).await;
    let texts = |page: &Value| -> String {
        page["data"].as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap()).collect()
    };
    let (_, page) = list("?limit=3").await;
    assert_eq!((texts(&page).as_str(), &page["has_more"]), ("abc", &json!(true)));
    let last = page["last_id"].as_str().unwrap();
    let (_, page) = list(&format!("?after={last}")).await;
    assert_eq!((texts(&page).as_str(), &page["has_more"]), ("d", &json!(false)));
    let (_, page) = list(&format!("?after={last}&order=desc")).await;
    assert_eq!(texts(&page), "ba");
    let (status, answer) = list("?after=x").await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("after")));
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_is_replaced() {
    let server = server().await;
    let id = chat(&server, "alice", json!({"metadata": {"session_id": "a", "x": "1"}})).await;
    let path = format!("{PATH}/{id}");
    let body = json!({"metadata": {"session_id": "b"}});
    let (status, answer) = server.post_as("alice", &path, &body).await;
    assert_eq!((status, &answer["metadata"]), (200, &body["metadata"]), "{answer}");
    assert_eq!(server.get_as("alice", &path).await.1, answer);
    // Feedback on the conversation follows.
    for (session, expected) in [("a", 404), ("b", 200)] {
        let feedback = json!({"session_id": session, "name": "thumbs", "value": 1});
        let path = "/v1/feedback";
        let (status, answer) = server.post_as("alice", path, &feedback).await;
        assert_eq!(status, expected, "{answer}");
    }
    let mut lines = Vec::new();
    for body in [json!({}), json!({"metadata": {"x": 1}}), json!({"metadata": {}, "model": "x"})] {
        let (status, answer) = server.post_as("alice", &path, &body).await;
        assert_eq!(status, 400);
        lines.push(error(&answer));
    }
    assert_snapshot!(lines.join("\n"), @r#"
    metadata is missing: it must be an object of strings | metadata | invalid_value
    metadata.x is 1: it must be a string of at most 512 characters | metadata.x | invalid_value
    model is not a field: the fields are metadata | model | unsupported_parameter
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_erases_its_completions_and_an_operator_those_of_any_key() {
    let server = Server::with(|setup| {
        setup.server.client_keys = vec!["alice".to_owned()];
        setup.server.admin_keys = vec!["root".to_owned()];
    })
    .await;
    for (eraser, prefix) in [("alice", PATH), ("root", "/admin/completions")] {
        let id = chat(&server, "alice", json!({"n": 2, "user": "ann"})).await;
        let feedback = json!({"completion_id": id, "name": "thumbs", "value": 1});
        ok(server.post_as("alice", "/v1/feedback", &feedback).await);
        let (own, erased) = (format!("{PATH}/{id}"), format!("{prefix}/{id}"));
        if eraser == "root" {
            assert_eq!(server.as_key("alice", Method::DELETE, &erased, None).await.0, 403);
        }
        let answer = ok(server.as_key(eraser, Method::DELETE, &erased, None).await);
        let expected = json!({"object": "chat.completion.deleted", "id": id, "deleted": true});
        assert_eq!(answer, expected, "{eraser}");
        let stats = server.store.stats().unwrap();
        let counts = (stats.interactions, stats.samples, stats.feedback, stats.rewards);
        assert_eq!(counts, (0, 0, 0, 0), "{eraser}");
        for (key, method, path, body) in [
            ("alice", Method::GET, own.clone(), None),
            ("alice", Method::GET, format!("{own}/messages"), None),
            ("alice", Method::POST, "/v1/feedback".to_owned(), Some(&feedback)),
            (eraser, Method::DELETE, erased, None),
            (eraser, Method::DELETE, format!("{prefix}/chatcmpl-x"), None),
        ] {
            let (status, answer) = server.as_key(key, method, &path, body).await;
            let code = &answer["error"]["code"];
            assert_eq!((status, code), (404, &json!("completion_not_found")), "{path}: {answer}");
        }
        assert!(ids(&server.get_as("alice", PATH).await.1).is_empty());
    }
    // Text completions are erased in the same way, and are no chat completions.
    let body = json!({"model": "default", "prompt": "2 + 3"});
    let (_, text) = server.post_as("alice", "/v1/completions", &body).await;
    let own = format!("{PATH}/{}", text["id"].as_str().unwrap());
    assert_eq!(server.get_as("alice", &own).await.0, 404);
    let answer = ok(server.as_key("alice", Method::DELETE, &own, None).await);
    assert_eq!(answer["id"], text["id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_asking_key_sees_a_completion() {
    let server = server().await;
    let id = chat(&server, "alice", json!({})).await;
    let unstored = chat(&server, "alice", json!({"store": false})).await;
    let metadata = json!({"metadata": {"x": "1"}});
    let unknown = InteractionId::new().completion_id();
    for (key, id, code) in [
        ("bob", id.as_str(), "completion_not_found"),
        ("alice", unknown.as_str(), "completion_not_found"),
        ("alice", "chatcmpl-x", "completion_not_found"),
        ("alice", unstored.as_str(), "completion_not_stored"),
    ] {
        let path = format!("{PATH}/{id}");
        let messages = format!("{path}/messages");
        for (method, path, body) in [
            (Method::GET, &path, None),
            (Method::GET, &messages, None),
            (Method::POST, &path, Some(&metadata)),
            (Method::DELETE, &path, None),
        ] {
            let (status, answer) = server.as_key(key, method, path, body).await;
            assert_eq!((status, &answer["error"]["code"]), (404, &json!(code)), "{key} {path}");
        }
    }
    assert_eq!(server.get_as("alice", &format!("{PATH}/{id}")).await.1["metadata"], json!({}));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_queries_are_refused() {
    let server = server().await;
    let mut lines = Vec::new();
    for query in
        ["limit=0", "limit=101", "limit=x", "order=up", "after=x", "before=x", "metadata=x"]
    {
        let (status, answer) = server.get_as("alice", &format!("{PATH}?{query}")).await;
        assert_eq!(status, 400, "{answer}");
        lines.push(error(&answer));
    }
    assert_snapshot!(lines.join("\n"), @r#"
    limit is "0": it must be from 1 to 100 | limit | invalid_value
    limit is "101": it must be from 1 to 100 | limit | invalid_value
    limit is "x": it must be from 1 to 100 | limit | invalid_value
    order is "up": it must be one of "asc", "desc" | order | invalid_value
    after is "x": it must be a completion's id | after | invalid_value
    before is not a field: the fields are after, limit, order, model, metadata[KEY] | before | unsupported_parameter
    metadata is not a field: the fields are after, limit, order, model, metadata[KEY] | metadata | unsupported_parameter
    "#);
}
