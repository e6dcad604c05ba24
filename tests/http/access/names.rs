//! The ids of requests and the traces of which they are parts.

use serde_json::json;

use crate::server::{Server, ask};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test(flavor = "multi_thread")]
async fn every_response_has_the_id_of_its_request() {
    let server = Server::with(|s| s.server.client_keys = vec!["app".to_owned()]).await;
    let chat = "/v1/chat/completions";
    let mut new = Vec::new();
    for (path, key, body, status) in [
        (chat, "app", json!({}), 200),
        (chat, "app", json!({"stream": true}), 200),
        (chat, "app", json!({"n": 0}), 400),
        (chat, "other", json!({}), 401),
        ("/v1/nowhere", "app", json!({}), 404),
        ("/livez", "app", json!({}), 405),
    ] {
        let send =
            || server.client.post(server.url(path)).bearer_auth(key).json(&ask(body.clone()));
        let named = send().header("x-request-id", "my-id.7").header("traceparent", TRACE);
        let response = named.send().await.unwrap();
        assert_eq!(response.status(), status, "{path}");
        assert_eq!(response.headers()["x-request-id"], "my-id.7", "{path}");
        assert_eq!(response.headers()["traceparent"], TRACE, "{path}");
        let response = send().header("x-request-id", "not an id").send().await.unwrap();
        assert!(!response.headers().contains_key("traceparent"));
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(id.starts_with("req-") && !new.contains(&id), "{path}: {id}");
        new.push(id);
    }
}
