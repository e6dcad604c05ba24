//! Requests of which nothing is kept.

use serde_json::{Value, json};

use hone_core::types::InteractionId;

use crate::server::{Server, Setup, ask, id_of, ok};

const GRADED: &str = "[[route]]\nname = \"secret\"\nmetadata = { task = \"secret\" }\nstore = false\n\
    [[route]]\nname = \"sums\"\n\
    [[route.reward]]\nname = \"answer\"\nkind = \"numeric_match\"\n\
    [[route.reward]]\nname = \"thumbs\"\nkind = \"feedback\"\n";

/// A server whose prompts are all kept for exams, if they are kept.
async fn graded(change: impl FnOnce(&mut Setup)) -> Server {
    let routes = hone::config::parse(GRADED).unwrap().routes;
    Server::with(|setup| {
        setup.routes = routes;
        setup.holdout_share = 1.0;
        change(setup);
    })
    .await
}

/// The number of interactions and samples in the ledger.
async fn recorded(server: &Server) -> (u64, u64) {
    let stats = server.stats().await;
    (stats.interactions, stats.samples)
}

/// The completion's id in a response or a stream.
fn id_in(text: &str) -> String {
    let at = text.find("chatcmpl-").unwrap();
    text[at..].chars().take("chatcmpl-".len() + 32).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_an_unstored_request_is_kept() {
    let server = graded(|_| {}).await;
    for more in
        [json!({}), json!({"n": 3}), json!({"stream": true}), json!({"stream": true, "n": 2})]
    {
        let mut body = ask(more);
        body["store"] = json!(false);
        body["metadata"] = json!({"answer": "5", "session_id": "s"});
        let response = server.send_chat(&body).await;
        assert_eq!(response.status(), 200);
        let id = id_in(&response.text().await.unwrap());
        assert!(InteractionId::from_completion_id(&id).unwrap().is_unstored());
        assert_eq!(recorded(&server).await, (0, 0));
    }
    assert!(server.rollout.submitted().is_empty());
    assert!(server.store.held_out("sums", 10).unwrap().is_empty());
    assert!(server.store.turns_of(None, "s", 10).unwrap().is_empty());
    // Counts remain.
    assert_eq!(server.policies.answers.lock().unwrap().len(), 7);
    assert!(server.metrics.http_completion_tokens.get() > 0);

    // The same request is kept otherwise.
    let answer = ok(server.chat(&ask(json!({"metadata": {"answer": "5"}}))).await);
    let id = id_of(&answer);
    assert!(!id.is_unstored());
    assert_eq!(recorded(&server).await, (1, 1));
    assert_eq!(server.store.held_out("sums", 10).unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_on_an_unstored_completion_is_refused_with_the_reason() {
    let server = Server::new().await;
    let (_, answer) = server.chat(&ask(json!({"store": false}))).await;
    let id = answer["id"].as_str().unwrap();
    let (_, kept) = server.chat(&ask(json!({}))).await;
    let cases = [
        ("completion_id", json!({"completion_id": id, "name": "thumbs", "value": 1})),
        ("completion_id", json!({"completion_id": id, "correction": "Five."})),
        ("chosen", json!({"chosen": id, "rejected": kept["id"]})),
        ("rejected", json!({"chosen": kept["id"], "rejected": id})),
    ];
    for (field, body) in cases {
        let (status, answer) = server.post("/v1/feedback", &body).await;
        assert_eq!(status, 404, "{answer}");
        let error = &answer["error"];
        assert_eq!(
            (&error["param"], &error["code"]),
            (&json!(field), &json!("completion_not_stored"))
        );
        let expected = format!(
            "{field} is {id:?}: nothing of this completion was kept (\"store\" is false for its \
             request, its route or its key)"
        );
        assert_eq!(error["message"], expected);
    }
    assert_eq!(server.store.stats().unwrap().feedback, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_may_keep_nothing() {
    let keys = "[[server.keys]]\nname = \"a\"\nkey = \"alice\"\nscopes = [\"chat\"]\nstore = false\n\
        [[server.keys]]\nname = \"b\"\nkey = \"bob\"\nscopes = [\"chat\"]\n";
    let keys = hone::config::parse(keys).unwrap().server.keys;
    let server = graded(|setup| setup.server.keys = keys).await;
    for (key, kept) in [("alice", 0), ("bob", 1)] {
        let request = server.client.post(server.url("/v1/chat/completions"));
        let request = request.bearer_auth(key).json(&ask(json!({"store": true})));
        assert_eq!(request.send().await.unwrap().status(), 200);
        assert_eq!(recorded(&server).await.0, kept);
    }
}

/// The cases are `(server.store, fields of the request, whether it is kept)`.
#[tokio::test(flavor = "multi_thread")]
async fn request_server_and_route_decide_what_is_kept() {
    let secret = json!({"task": "secret"});
    let cases = [
        (true, json!({}), true),
        (true, json!({"store": null}), true),
        (true, json!({"store": false}), false),
        (true, json!({"metadata": secret}), false),
        (true, json!({"metadata": secret, "store": true}), false),
        (false, json!({}), false),
        (false, json!({"store": true}), true),
        (false, json!({"store": true, "metadata": secret}), false),
    ];
    for default in [true, false] {
        let server = graded(|setup| setup.server.store = default).await;
        let mut kept = 0;
        for (_, fields, expected) in cases.iter().filter(|case| case.0 == default) {
            ok(server.chat(&ask(fields.clone())).await);
            kept += u64::from(*expected);
            assert_eq!(recorded(&server).await.0, kept, "{default} {fields}");
        }
        let (status, answer) = server.chat(&ask(json!({"store": "no"}))).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("store")));
        assert_eq!(
            answer["error"]["message"],
            Value::from("store is \"no\": it must be true or false")
        );
    }
}
