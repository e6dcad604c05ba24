//! Responses in the ledger.

use insta::assert_snapshot;
use reqwest::Method;
use serde_json::{Value, json};

use super::{PATH, masked, respond};
use crate::server::{Server, key, ok};

#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_read_as_its_client_got_it() {
    let server = Server::new().await;
    let more = json!({
        "instructions": "Add.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9,
        "tools": [{"type": "function", "name": "now"}], "parallel_tool_calls": false,
        "reasoning": {"effort": "low"}, "max_output_tokens": 50,
    });
    let mut created = respond(&server, more).await;
    let path = format!("{PATH}/{}", created["id"].as_str().unwrap());
    let mut kept = ok(server.get(&format!("{path}?stream=false&include[]=x")).await);
    for response in [&mut created, &mut kept] {
        assert!(response["completed_at"].take().is_u64());
    }
    assert_eq!(kept, created);
    for query in ["stream=true", "starting_after=3", "limit=3"] {
        let (status, answer) = server.get(&format!("{path}?{query}")).await;
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("unsupported_parameter")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_input_is_a_list_of_items() {
    let server = Server::new().await;
    let input = json!([
        {"role": "user", "content": "2 + 3?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]);
    let answer = respond(&server, json!({"instructions": "Add.", "input": input})).await;
    let path = format!("{PATH}/{}/input_items", answer["id"].as_str().unwrap());
    let list = ok(server.get(&format!("{path}?order=asc")).await);
    let lines: Vec<String> =
        list["data"].as_array().unwrap().iter().map(|item| masked(&item.to_string())).collect();
    assert_snapshot!(lines.join("\n"), @r#"
    {"type":"message","id":"msg_ID","role":"user","status":"completed","content":[{"type":"input_text","text":"2 + 3?"}]}
    {"type":"reasoning","id":"rs_ID","summary":[],"content":[{"type":"reasoning_text","text":"Hm."}],"encrypted_content":null,"status":"completed"}
    {"type":"function_call","id":"fc_ID","call_id":"c","name":"add","arguments":"{}","status":"completed"}
    {"type":"function_call_output","id":"fco_ID","call_id":"c","output":"5","status":"completed"}
    "#);
    let items = list["data"].as_array().unwrap();
    assert_eq!((&list["object"], &list["has_more"]), (&json!("list"), &json!(false)));
    assert_eq!((&list["first_id"], &list["last_id"]), (&items[0]["id"], &items[3]["id"]));
    // The newest item is the first one by default.
    let page = server.get(&format!("{path}?limit=2")).await.1;
    assert_eq!((&page["data"][0], &page["has_more"]), (&items[3], &json!(true)));
    let after = page["last_id"].as_str().unwrap();
    let rest = server.get(&format!("{path}?after={after}")).await.1;
    assert_eq!(rest["data"], json!([items[1], items[0]]));
    assert_eq!(server.get(&format!("{path}?after=x")).await.0, 400);
    // With an earlier response the list has its messages, too.
    let more = json!({"previous_response_id": answer["id"]});
    let next = respond(&server, more).await;
    let path = format!("{PATH}/{}/input_items", next["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.1["data"].as_array().unwrap().len(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_erased_and_only_its_key_sees_it() {
    let scopes = &[hone::config::KeyScope::Chat];
    let server = Server::with(|setup| {
        setup.server.keys = vec![key("alice", scopes), key("bob", scopes)];
    })
    .await;
    let create = async |more: Value| {
        let answer = ok(server.post_as("alice", PATH, &super::body(more)).await);
        answer["id"].as_str().unwrap().to_owned()
    };
    let (own, unstored) = (create(json!({})).await, create(json!({"store": false})).await);
    for (key, id, code) in [
        ("bob", &own, "completion_not_found"),
        ("alice", &unstored, "completion_not_stored"),
        ("alice", &"resp_x".to_owned(), "completion_not_found"),
    ] {
        let path = format!("{PATH}/{id}");
        for (method, path) in [
            (Method::GET, path.clone()),
            (Method::GET, format!("{path}/input_items")),
            (Method::DELETE, path),
        ] {
            let (status, answer) = server.as_key(key, method, &path, None).await;
            assert_eq!((status, &answer["error"]["code"]), (404, &json!(code)), "{path}");
        }
    }
    let path = format!("{PATH}/{own}");
    assert_eq!(server.as_key("alice", Method::GET, &path, None).await.0, 200);
    let (status, answer) = server.as_key("alice", Method::DELETE, &path, None).await;
    assert_eq!((status, answer), (200, json!({"id": own, "object": "response", "deleted": true})));
    assert_eq!(server.as_key("alice", Method::GET, &path, None).await.0, 404);
    assert_eq!(server.as_key("alice", Method::DELETE, &path, None).await.0, 404);
    let stats = server.store.stats().unwrap();
    assert_eq!((stats.interactions, stats.samples), (0, 0));
}
