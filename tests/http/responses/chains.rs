//! Responses that continue earlier ones.

use serde_json::{Value, json};

use hone_core::types::Role;

use super::{PATH, body, recorded, respond};
use crate::server::{Server, key};

#[tokio::test(flavor = "multi_thread")]
async fn a_response_continues_the_conversation_without_its_instructions() {
    let server = Server::new().await;
    let first = respond(&server, json!({"instructions": "Add.", "max_output_tokens": 2})).await;
    let next = |id: &Value, input: &str| json!({"previous_response_id": id, "input": input});
    let second = respond(&server, next(&first["id"], "And?")).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    assert_eq!(second["instructions"], json!(null));
    let mut third = next(&second["id"], "Sure?");
    third["instructions"] = json!("Be brief.");
    let third = respond(&server, third).await;
    let expected = [
        (Role::System, "Be brief."),
        (Role::User, "What is 2 + 3?"),
        (Role::Assistant, "The"),
        (Role::User, "And?"),
        (Role::Assistant, "The answer is 5."),
        (Role::User, "Sure?"),
    ];
    let messages = recorded(&server, &third).await;
    assert!(messages.iter().map(|(role, text)| (*role, text.as_str())).eq(expected));
    let messages = recorded(&server, &second).await;
    assert!(messages.iter().map(|(role, text)| (*role, text.as_str())).eq(expected[1..4].to_vec()));
    // A conversation may fork.
    let fork = respond(&server, next(&first["id"], "Why?")).await;
    assert_eq!(recorded(&server, &fork).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_own_response_that_was_kept_can_be_continued() {
    let scopes = &[hone::config::KeyScope::Chat];
    let server = Server::with(|setup| {
        setup.server.keys = vec![key("alice", scopes), key("bob", scopes)];
    })
    .await;
    let (_, kept) = server.post_as("alice", PATH, &body(json!({}))).await;
    let (_, unkept) = server.post_as("alice", PATH, &body(json!({"store": false}))).await;
    assert_eq!((&kept["store"], &unkept["store"]), (&json!(true), &json!(false)));
    let chat = json!({"model": "default", "messages": [{"role": "user", "content": "?"}]});
    let chat: Value = server.chat_as("alice", &chat).await.json().await.unwrap();
    let unknown = json!("resp_0190a2b3c4d57e6f8091a2b3c4d5e6f7");
    let item = unkept["output"][0]["id"].clone();
    for (key, id, part) in [
        ("alice", &unkept["id"], "nothing of this response was kept"),
        ("bob", &kept["id"], "no such completion"),
        ("alice", &unknown, "no such completion"),
        ("alice", &json!("x"), "no such completion"),
        ("alice", &chat["id"], "no such completion"),
    ] {
        let (status, answer) =
            server.post_as(key, PATH, &body(json!({"previous_response_id": id}))).await;
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (400, &json!("previous_response_id")), "{answer}");
        assert_eq!(error["code"], "previous_response_not_found");
        assert!(error["message"].as_str().unwrap().contains(part), "{answer}");
    }
    // The same for single items.
    let own = &kept["output"][0]["id"];
    let reference = |id: &Value| {
        json!({"input": [{"type": "item_reference", "id": id},
                                                   {"role": "user", "content": "And?"}]})
    };
    assert_eq!(server.post_as("alice", PATH, &body(reference(own))).await.0, 200);
    for (key, id, code) in [
        ("bob", own, "completion_not_found"),
        ("alice", &item, "completion_not_stored"),
        ("alice", &unknown, "completion_not_found"),
    ] {
        let (status, answer) = server.post_as(key, PATH, &body(reference(id))).await;
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (404, &json!("input[0].id")), "{answer}");
        assert_eq!(error["code"], code);
    }
    // An unstored response may continue a stored one.
    let more = json!({"previous_response_id": kept["id"], "store": false});
    assert_eq!(server.post_as("alice", PATH, &body(more)).await.0, 200);
}
